"""Small tokenizers and a chat template for tests."""

import json

import tokenizers

from spsjax import tokenization

CODE = [
    'def f(x):\n    """Twice x."""\n    if x:\n        return 2 * x\n    return 0\n' * 5,
    "import os\n\n\nclass Reader:\n\tpass  # tabs here\n" * 5,
]
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
{% if add_generation_prompt %}<|answer|>{% endif %}"""
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "chat_template": TEMPLATE,
}


def sentence_piece(folder):
    """A SentencePiece tokenizer of 320 pieces that is trained on a little code."""
    return tokenization.train(CODE, folder / "tokenizer.model", 320)


def byte_level(folder):
    """Writes a byte-level BPE, as GPT-2, Llama 3 and Qwen have it, and returns its folder.

    It adds <s> before a text.
    """
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CODE, trainer)
    adds_bos = tokenizers.processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 0)])
    model.post_processor = adds_bos
    folder.mkdir(parents=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return folder


def byte_fallback(folder):
    """A BPE as Llama 2 has it: characters, and bytes for unknown characters."""
    names = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abx"]
    vocab = {name: id for id, name in enumerate(names)}
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    decoders = tokenizers.decoders
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    model.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    return tokenization.load(folder)


def save_with(tokenizer, folder, **changes):
    """Saves a tokenizer to a folder and changes keys of its `tokenizer.json`."""
    tokenizer.save(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw | changes))
    return folder
