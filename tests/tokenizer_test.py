"""What is encoded is what is decoded: code is white space, so none of it may be lost."""

import json
import os
import pathlib
import random
import types

import numpy as np
import pytest
import sentencepiece
import tokenizers
from bad_input import one_line

from spsjax import generation, tokenization

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


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece tokenizer trained on a little code."""
    return tokenization.train(CODE, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 320)


def byte_level(folder):
    """A folder with a byte-level `tokenizer.json` that begins a text with <s>."""
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
    begins = tokenizers.processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 0)])
    model.post_processor = begins
    folder.mkdir(parents=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """The same of the `tokenizers` library, byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    return tokenization.load(byte_level(tmp_path_factory.mktemp("tokenizer") / "fast"))


@pytest.fixture(params=["pieces", "fast"])
def any_kind(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "text",
    [
        *CODE,
        "",
        " ",
        "\n",
        "\t\tx\t",
        "  leading and trailing  ",
        "a" + " " * 37 + "b",
        "one\r\ntwo\rthree\n\n\n",
        "naïve café, 東京, Ωμέγα, emoji 🦊🏽, combining e\u0301, wide \uff21\uff22, ligature ﬁ",
        "zero\u200bwidth, nbsp\u00a0, bell\x07",
        "<unk><0x0A>",
    ],
)
def test_decoding_gives_back_the_text(any_kind, text):
    assert any_kind.decode(any_kind.encode(text)) == text


def test_a_control_piece_in_a_text_is_text_to_sentencepiece(pieces):
    text = "<s></s>"
    assert pieces.decode(pieces.encode(text)) == text


def test_decoding_gives_back_random_text(any_kind):
    pieces = any_kind
    rng = random.Random(0)
    alphabet = " \t\n\r(){}:=_#'\"abcxyz019éß東🦊"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        assert pieces.decode(pieces.encode(text)) == text


def test_a_text_begins_with_the_begin_id_and_control_ids_leave_no_text(any_kind):
    pieces = any_kind
    ids = pieces.encode("def f")
    assert ids[0] == pieces.bos_id and pieces.bos_id not in ids[1:]
    assert pieces.decode([*ids, pieces.eos_id]) == "def f"
    assert pieces.bos_id != pieces.eos_id


def test_indentation_is_one_piece(pieces):
    for run in (2, 4, 8, 12, 16):
        assert len(pieces.encode(" " * run + "x")) == len(pieces.encode("x")) + 1


def test_a_learned_piece_stands_for_several_characters(any_kind):
    pieces = any_kind
    assert len(pieces.encode(CODE[0])) < len(CODE[0]) / 2
    assert pieces.vocab_size == (320 if pieces.path.suffix == ".model" else 300)


def test_ids_of_a_padded_vocabulary_leave_no_text(any_kind):
    pieces = any_kind
    assert pieces.decode([*pieces.encode("def"), 320, 5000]) == "def"


def test_tokenizers_are_equal_if_their_pieces_are(pieces, tmp_path):
    assert tokenization.load(pieces.path) == pieces
    assert tokenization.train(CODE, tmp_path / "again.model", 320) == pieces
    assert tokenization.train(CODE, tmp_path / "smaller.model", 310) != pieces
    assert pieces != "a tokenizer"


def test_training_leaves_one_file(tmp_path):
    tokenization.train(CODE, tmp_path / "new" / "tokenizer.model", 310)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["tokenizer.model"]


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_vocabulary_that_the_texts_cannot_fill(tmp_path, size):
    with one_line("vocab_size", str(size)):
        tokenization.train(CODE, tmp_path / "tokenizer.model", size)
    assert not list(tmp_path.iterdir())


def test_a_continuation_is_what_new_tokens_add_to_the_text(any_kind):
    pieces = any_kind
    for prompt, new in (("def f", "(x):\n    return"), ("  ", "\n  x"), ("東", "京 🦊")):
        before = pieces.encode(prompt)
        added = pieces.encode(new)[1:]
        assert generation.continuation(pieces, before, added) == new


def test_a_stream_is_whole_characters(any_kind):
    """However the tokens of a character are spread over rounds, and over prompt and text."""
    text = "naïve 東京 🦊🏽 \ufffd e\u0301"
    ids = any_kind.encode(text)
    model = types.SimpleNamespace(tokenizer=any_kind)
    for prompt in range(1, len(ids)):
        for size in (1, 2, 3):
            blocks = [ids[start : start + size] for start in range(prompt, len(ids), size)]
            rounds = (generation.Round(np.asarray(block), 0, 0) for block in blocks)
            sent = list(generation._texts(model, ids[:prompt], rounds))
            joined = generation.continuation(any_kind, ids[:prompt], ids[prompt:])
            assert "".join(sent) == joined and joined and text.endswith(joined)
            assert "".join(sent).count("\ufffd") <= 1  # the text's own


# Files of the `tokenizers` library.


def copied(fast, folder, **changes):
    fast.save(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw | changes))
    return folder


def test_ids_and_ends_are_those_of_the_library(fast):
    library = tokenizers.Tokenizer.from_str(fast.files["tokenizer.json"].decode())
    assert fast.encode(CODE[0]) == library.encode(CODE[0]).ids
    assert (fast.bos_id, fast.eos_id, fast.vocab_size) == (0, 1, 300)


def test_a_file_s_truncation_and_padding_do_not_cut_texts(fast, tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    again = tokenization.load(copied(fast, tmp_path, truncation=truncation, padding=padding))
    assert again.encode(CODE[0]) == fast.encode(CODE[0])


def test_a_begin_that_only_the_settings_know(fast, tmp_path):
    folder = copied(fast, tmp_path, post_processor=None)
    assert tokenization.load(folder).encode("def") == fast.encode("def")[1:]
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | {"add_bos_token": True}))
    assert tokenization.load(folder).encode("def") == fast.encode("def")


def test_gpt2_s_two_files_are_its_one(tmp_path):
    """Its end of text has no settings; the merges begin with a line that is none."""
    one = byte_level(tmp_path / "one")
    raw = json.loads((one / "tokenizer.json").read_text())
    vocab = {piece: id for piece, id in raw["model"]["vocab"].items() if id > 1}
    vocab |= {"<|endoftext|>": 1}
    merges = [" ".join(pair) for pair in raw["model"]["merges"]]
    two = tmp_path / "two"
    two.mkdir()
    (two / "vocab.json").write_text(json.dumps(vocab))
    (two / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    found = tokenization.load(two)
    assert found.encode(CODE[1]) == tokenization.load(one).encode(CODE[1])[1:]
    assert found.encode("x<|endoftext|>")[-1] == found.eos_id == found.bos_id == 1
    found.save(tmp_path / "one")
    assert tokenization.load(tmp_path / "one") == found
    assert not (tmp_path / "one" / "tokenizer.json").exists()
    (two / "config.json").write_text('{"model_type": "qwen2"}')
    with one_line("tokenizer.json", "qwen2"):
        tokenization.load(two)
    (two / "merges.txt").unlink()
    with one_line("merges.txt"):
        tokenization.load(two)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}', "\udcff"])
def test_a_damaged_file(fast, tmp_path, text):
    copied(fast, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    with one_line("tokenizer.json", "tokenizer"):
        tokenization.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_damaged_settings(fast, tmp_path, text):
    copied(fast, tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with one_line("tokenizer_config.json", "JSON"):
        tokenization.load(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    assert not tokenization.exists(tmp_path)
    with one_line("tokenizer.json", "tokenizer.model", "vocab.json"):
        tokenization.load(tmp_path)


def test_tokenizers_may_differ_in_control_tokens_alone(fast, tmp_path):
    raw = json.loads(fast.files["tokenizer.json"])
    for name, special in (("more", True), ("other", False)):
        extra = {
            "id": 300, "content": "<|more|>", "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": special,
        }  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        copied(fast, folder, added_tokens=[*raw["added_tokens"], extra])
        again = tokenization.load(folder)
        assert again.vocab_size == 301
        assert (again == fast) == special


def test_merges_that_are_cut_off(tmp_path):
    raw = json.loads((byte_level(tmp_path / "one") / "tokenizer.json").read_text())
    vocab = {piece: id for piece, id in raw["model"]["vocab"].items() if id > 1}
    merges = [" ".join(pair) for pair in raw["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_bytes("\r\n".join(merges).encode())
    assert tokenization.load(tmp_path).encode("def")
    (tmp_path / "merges.txt").write_text("\n".join(merges[:-3]))
    with one_line("merges.txt", "vocab.json"):
        tokenization.load(tmp_path)


def test_tokens_that_only_the_settings_have(pieces, tmp_path):
    """Older fine-tuned models: their own marks would be read as text."""
    for name, settings in (
        ("added_tokens.json", {"<|im_end|>": 320}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"320": {"content": "<|im_end|>"}}}),
    ):
        pieces.save(tmp_path)
        (tmp_path / name).write_text(json.dumps(settings))
        with one_line("320", name, "save_pretrained"):
            tokenization.load(tmp_path)
        (tmp_path / name).write_text(json.dumps({}))
    other = {"added_tokens_decoder": {"300": {"content": "<|im_start|>"}}}  # some piece, here
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(other))
    with one_line("300", "<|im_start|>", "save_pretrained"):
        tokenization.load(tmp_path)
    known = {"added_tokens_decoder": {"1": {"content": "<s>"}, "2": {"content": "</s>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    assert tokenization.load(tmp_path) == pieces


def test_sentencepiece_begins_a_text_as_its_settings_say(pieces, tmp_path):
    pieces.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert tokenization.load(tmp_path).encode("def") == pieces.encode("def")[1:]


def test_the_end_that_a_file_puts_after_a_text_is_left_out(fast, tmp_path):
    """A model goes on from there."""
    copied(fast, tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $0 </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    for text in ("def f", ""):
        assert tokenization.load(tmp_path).encode(text) == fast.encode(text)


def test_a_space_before_a_text_is_as_the_settings_say(fast, pieces, tmp_path):
    copied(fast, tmp_path)
    settings = json.dumps(SETTINGS | {"add_prefix_space": True})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    found = tokenization.load(tmp_path)
    assert found.encode("def") == fast.encode(" def") != fast.encode("def")
    (tmp_path / "pieces").mkdir()
    pieces.save(tmp_path / "pieces")
    (tmp_path / "pieces" / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with one_line("add_prefix_space", "true"):
        tokenization.load(tmp_path / "pieces")


def byte_fallback(folder):
    """A `tokenizer.json` of Llama 2's kind: characters, and bytes for all that it does not know."""
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


def test_characters_before_one_that_is_cut_off_are_kept(tmp_path):
    """The library's own decoder gives up all bytes of the run: what was sent would change."""
    fallback = byte_fallback(tmp_path / "fallback")
    text = "ab 日本 x"
    ids = fallback.encode(text)
    assert fallback.decode(ids) == text and len(ids) == 6 + 6
    assert fallback.decode(ids[:-3]) == "ab 日\ufffd" and fallback.decode([0, *ids, 1]) == text
    model = types.SimpleNamespace(tokenizer=fallback)
    rng = random.Random(0)
    whole = ids[1:]
    for _ in range(100):
        tokens = [ids[0], *rng.choices(whole, k=12)]
        rounds = (generation.Round(np.asarray([token]), 0, 0) for token in tokens[1:])
        sent = "".join(generation._texts(model, tokens[:1], rounds))
        assert sent == generation.continuation(fallback, tokens[:1], tokens[1:])


# Conversations.


def test_a_conversation_is_as_its_template_says(fast):
    messages = [{"role": "user", "content": " Hi! "}]
    text = "<|user|>Hi!", "\n<|answer|>"
    assert fast.chat(messages) == [0, *fast.encode(text[0])[1:], 1, *fast.encode(text[1])[1:]]


def test_a_template_in_a_file_of_its_own_and_one_of_several(fast, tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    copied(fast, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    path.write_text(json.dumps(SETTINGS | {"chat_template": several}))
    assert tokenization.load(tmp_path).chat(messages) == fast.chat(messages)
    path.write_text(json.dumps(SETTINGS | {"chat_template": None}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenization.load(tmp_path).chat(messages) == fast.chat(messages)
    (tmp_path / "chat_template.jinja").unlink()
    with one_line("chat template"):
        tokenization.load(tmp_path).chat(messages)


def test_marks_of_answers_and_tokens_of_one_s_own(fast, tmp_path):
    copied(fast, tmp_path)
    template = (
        "{% generation %}{{ image_token }}{{ messages[0].content }}{% endgeneration %}"
        "{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}"
    )
    settings = {"chat_template": template, "extra_special_tokens": {"image_token": "[I]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = tokenization.load(tmp_path)
    ids = found.chat([{"role": "user", "content": "é<"}])
    assert found.decode(ids) == '[I]é<[{"role": "user", "content": "é<"}]20'


def test_a_template_without_a_name(fast, tmp_path):
    copied(fast, tmp_path)
    several = [{"name": [], "template": "x"}, {"name": "default", "template": TEMPLATE}]
    settings = json.dumps(SETTINGS | {"chat_template": several})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenization.load(tmp_path).chat(messages) == fast.chat(messages)


def test_begin_and_end_of_a_template_are_ids_to_sentencepiece(pieces, tmp_path):
    pieces.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    ids = tokenization.load(tmp_path).chat([{"role": "user", "content": "Hi"}])
    text = "<|user|>Hi", "\n<|answer|>"
    begin, end = pieces.bos_id, pieces.eos_id
    assert ids == [begin, *pieces.encode(text[0])[1:], end, *pieces.encode(text[1])[1:]]


def test_other_control_pieces_of_a_template_are_ids_too(tmp_path):
    """As the tokenizer.model of a Mistral has them."""
    controls = ["[INST]", "[/INST]"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320,
        model_type="bpe", byte_fallback=True, control_symbols=controls, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    begins, ends = map(model.piece_to_id, controls)
    template = "{{ bos_token }}[INST] {{ messages[0].content }}[/INST]"
    settings = SETTINGS | {
        "chat_template": template,
        "added_tokens_decoder": {
            str(id): {"content": name} for id, name in zip((begins, ends), controls)
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pieces = tokenization.load(tmp_path)
    begin, *words = pieces.encode("return x")
    assert pieces.chat([{"role": "user", "content": "return x"}]) == [begin, begins, *words, ends]


@pytest.mark.parametrize(
    "messages, template, part",
    [
        ([{"role": "robot", "content": "Hi"}], TEMPLATE, "no robots"),
        ([], TEMPLATE, "messages"),
        ("Hi", TEMPLATE, "'Hi'"),
        (["Hi"], TEMPLATE, "messages[0]"),
        ([{"role": "user"}], TEMPLATE, "role"),
        ([{"role": "user", "content": 3}], TEMPLATE, "content"),
        ([{"role": "user", "content": "Hi"}], "{% for %}", "messages"),
        ([{"role": "user", "content": "Hi"}], "{{ ''.__class__.__mro__ }}", "unsafe"),
        ([{"role": "user", "content": "Hi"}], "{{ messages.clear() }}", "safe"),
    ],
)
def test_a_template_that_refuses_or_does_what_it_must_not(fast, tmp_path, messages, template, part):
    copied(fast, tmp_path)
    settings = SETTINGS | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with one_line("messages", part):
        tokenization.load(tmp_path).chat(messages)


# Files as they are in the world.


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json"])
def test_gpt2_s_own_files(kind):
    """The ids are those that others have published."""
    folder = pathlib.Path(os.environ.get("SPSJAX_DATA", "")) / "tokenizers" / "gpt2"
    if not (folder / kind).is_file():
        pytest.skip(f"needs $SPSJAX_DATA/tokenizers/gpt2/{kind}")
    found = tokenization.load(folder / kind)
    assert found.encode("Not all heroes wear capes.") == [3673, 477, 10281, 5806, 1451, 274, 13]
    assert found.vocab_size == 50257 and found.eos_id == 50256
    text = CODE[0] + "naïve 東京 🦊🏽"
    assert found.decode(found.encode(text)) == text
