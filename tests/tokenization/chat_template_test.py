"""Tests of chat templates."""

import json
import pathlib
import shutil
import sys

import pytest
import sentencepiece
from helpers.bad_input import one_line
from helpers.tokenizer_examples import CODE, SETTINGS, TEMPLATE, save_with

from spsjax import tokenization
from spsjax.tokenization import chat_template

HELLO = [{"role": "user", "content": "Hi"}]
FOLDER = pathlib.Path("FOLDER")


def test_chat_follows_template(bpe):
    text = "<|user|>Hi!", "\n<|answer|>"
    ids = bpe.chat([{"role": "user", "content": " Hi! "}])
    assert ids == [0, *bpe.encode(text[0])[1:], 1, *bpe.encode(text[1])[1:]]


def test_chat_template_is_read_from_list_or_file(bpe, tmp_path):
    """A template whose name cannot be hashed is skipped."""
    path = save_with(bpe, tmp_path) / "tokenizer_config.json"
    for name in ("tools", []):
        several = [{"name": name, "template": "x"}, {"name": "default", "template": TEMPLATE}]
        path.write_text(json.dumps(SETTINGS | {"chat_template": several}))
        assert tokenization.load(tmp_path).chat(HELLO) == bpe.chat(HELLO)
    path.write_text(json.dumps(SETTINGS | {"chat_template": None}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenization.load(tmp_path).chat(HELLO) == bpe.chat(HELLO)
    (tmp_path / "chat_template.jinja").write_text("{% break %}")
    with one_line(f"{tmp_path}: expected a chat template"):
        tokenization.load(tmp_path).chat(HELLO)
    (tmp_path / "chat_template.jinja").unlink()
    with one_line("chat template"):
        tokenization.load(tmp_path).chat(HELLO)


def test_chat_template_has_functions_of_transformers(bpe, tmp_path):
    save_with(bpe, tmp_path)
    template = (
        "{% generation %}{{ image_token }}{{ messages[0].content }}{% endgeneration %}"
        "{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}"
    )
    settings = {"chat_template": template, "extra_special_tokens": {"image_token": "[I]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = tokenization.load(tmp_path)
    ids = loaded.chat([{"role": "user", "content": "é<"}])
    assert loaded.decode(ids) == '[I]é<[{"role": "user", "content": "é<"}]20'


def test_sentencepiece_chat_encodes_bos_and_eos_as_ids(sp, tmp_path):
    sp.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    ids = tokenization.load(tmp_path).chat(HELLO)
    text = "<|user|>Hi", "\n<|answer|>"
    bos, eos = sp.bos_id, sp.eos_id
    assert ids == [bos, *sp.encode(text[0])[1:], eos, *sp.encode(text[1])[1:]]


def test_sentencepiece_chat_encodes_control_pieces_as_ids(tmp_path):
    """The tokenizer.model of a Mistral has control pieces of this kind."""
    controls = ["[INST]", "[/INST]"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320,
        model_type="bpe", byte_fallback=True, control_symbols=controls, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    opening, closing = map(model.piece_to_id, controls)
    decoder = {str(id): {"content": name} for id, name in zip((opening, closing), controls)}
    template = "{{ bos_token }}[INST] {{ messages[0].content }}[/INST]"
    settings = SETTINGS | {"chat_template": template, "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    sp = tokenization.load(tmp_path)
    bos, *words = sp.encode("return x")
    assert sp.chat([{"role": "user", "content": "return x"}]) == [bos, opening, *words, closing]


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ({"role": "robot", "content": "Hi"}, "no robots"),
        ("Hi", "messages[0]"),
        ({"content": "Hi"}, "messages[0]: expected a role"),
        ({"role": "user"}, "messages[0].content: expected a text or a list of text"),
        ({"role": "user", "content": [{"type": "audio"}]}, "content[0]: expected a part"),
    ],
)
def test_chat_refuses_bad_messages(bpe, message, part):
    with one_line("messages", part):
        bpe.chat([message])
    for messages in ([], "Hi"):
        with one_line("messages"):
            bpe.chat(messages)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ 'a' | center(2 * 10**9) | length }}", "more than 1 s or 1024 MiB"),
        ("{{ 'a' * 2 * 10**6 }}", "a text of more than 1,00"),
        ("{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2, "more than 1 s or 1024 MiB"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not bound the memory")
def test_chat_template_beyond_its_limits_is_refused(monkeypatch, template, part):
    """A template comes from a foreign folder. Its memory, time and length are bounded."""
    monkeypatch.setattr(chat_template, "_SECONDS", 1)
    with one_line("FOLDER: expected a chat template for the messages", part):
        chat_template.render(template, HELLO, {}, FOLDER)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1/0 }}", "FOLDER: expected a chat template for the messages, found division by zero"),
        ("{{ raise_exception('no\\x1b[2J\\ud800') }}", r"of FOLDER, found no\x1b[2J\ud800"),
        ("{{ raise_exception('x' * 9999) }}", "of FOLDER, found xxx"),
        ("{% for %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.clear() }}", "safe"),
    ],
)
def test_chat_template_error_names_the_fault(template, message):
    """A broken template is the fault of its folder. No control character reaches the terminal."""
    with one_line("messages", message):
        chat_template.render(template, HELLO, {}, FOLDER)


def test_chat_longer_than_the_limit_of_texts_is_rendered(monkeypatch):
    monkeypatch.setattr(chat_template, "_CHARACTERS", 1)
    assert chat_template.render("{{ messages[0].content }}", HELLO, {}, FOLDER) == "Hi"
    with one_line("messages: expected data for JSON, found", "not JSON serializable"):
        chat_template.render("", [HELLO[0] | {"more": object()}], {}, FOLDER)


def test_chat_template_child_imports_nothing_of_its_folder(monkeypatch, tmp_path):
    """A module of this package never shadows one of the standard library or of Jinja."""
    monkeypatch.setattr(chat_template, "_CHILD", shutil.copy(chat_template._CHILD, tmp_path))
    (tmp_path / "jinja2.py").write_text("raise ImportError('of the folder')")
    assert chat_template.render("Hello", HELLO, {}, FOLDER) == "Hello"
