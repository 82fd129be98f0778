"""Tests of the tokenizer files of model folders."""

import json
import os
import pathlib

import pytest
import tokenizers
from helpers.bad_input import one_line
from helpers.tokenizer_examples import CODE, SETTINGS, byte_level, save_with

from spsjax import tokenization


def test_tokenizer_json_gives_ids_of_the_library(bpe):
    library = tokenizers.Tokenizer.from_str(bpe.files["tokenizer.json"].decode())
    assert bpe.encode(CODE[0]) == library.encode(CODE[0]).ids
    assert (bpe.bos_id, bpe.eos_id, bpe.vocab_size) == (0, 1, 300)


def test_truncation_and_padding_of_file_are_ignored(bpe, tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    again = tokenization.load(save_with(bpe, tmp_path, truncation=truncation, padding=padding))
    assert again.encode(CODE[0]) == bpe.encode(CODE[0])


def test_add_bos_token_of_settings_is_followed(bpe, tmp_path):
    folder = save_with(bpe, tmp_path, post_processor=None)
    assert tokenization.load(folder).encode("def") == bpe.encode("def")[1:]
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | {"add_bos_token": True}))
    assert tokenization.load(folder).encode("def") == bpe.encode("def")


def test_gpt2_two_files_equal_tokenizer_json(tmp_path):
    """GPT-2's end of text is not in any settings, and `merges.txt` begins with a comment."""
    one = byte_level(tmp_path / "one")
    raw = json.loads((one / "tokenizer.json").read_text())
    vocab = {piece: id for piece, id in raw["model"]["vocab"].items() if id > 1}
    vocab |= {"<|endoftext|>": 1}
    merges = [" ".join(pair) for pair in raw["model"]["merges"]]
    two = tmp_path / "two"
    two.mkdir()
    (two / "vocab.json").write_text(json.dumps(vocab))
    (two / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    loaded = tokenization.load(two)
    assert loaded.encode(CODE[1]) == tokenization.load(one).encode(CODE[1])[1:]
    assert loaded.encode("x<|endoftext|>")[-1] == loaded.eos_id == loaded.bos_id == 1
    loaded.save(tmp_path / "one")
    assert tokenization.load(tmp_path / "one") == loaded
    assert not (tmp_path / "one" / "tokenizer.json").exists()
    (two / "config.json").write_text('{"model_type": "qwen2"}')
    with one_line("tokenizer.json", "qwen2"):
        tokenization.load(two)
    (two / "config.json").unlink()
    (two / "merges.txt").write_bytes("\r\n".join(merges).encode())
    assert tokenization.load(two).encode("def")
    (two / "merges.txt").write_text("\n".join(merges[:-3]))
    with one_line("merges.txt", "vocab.json"):
        tokenization.load(two)
    (two / "merges.txt").unlink()
    with one_line("merges.txt"):
        tokenization.load(two)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        *(("tokenizer.json", text, "tokenizer") for text in ("", "[]", '{"model": {}}', "\udcff")),
        *(("tokenizer_config.json", text, "JSON") for text in ("{", "[]", "\udcff")),
    ],
)
def test_damaged_file_is_refused(bpe, tmp_path, name, text, part):
    save_with(bpe, tmp_path)
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with one_line(name, part):
        tokenization.load(tmp_path)


def test_folder_without_tokenizer_is_refused(tmp_path):
    assert not tokenization.exists(tmp_path)
    with one_line("tokenizer.json", "tokenizer.model", "vocab.json"):
        tokenization.load(tmp_path)


def test_tokenizers_with_other_control_tokens_are_equal(bpe, tmp_path):
    raw = json.loads(bpe.files["tokenizer.json"])
    extra = {"id": 300, "content": "<|more|>", "normalized": False}
    extra |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    for name, special in (("more", True), ("other", False)):
        (tmp_path / name).mkdir()
        tokens = [*raw["added_tokens"], extra | {"special": special}]
        again = tokenization.load(save_with(bpe, tmp_path / name, added_tokens=tokens))
        assert again.vocab_size == 301
        assert (again == bpe) == special


def test_tokens_of_settings_alone_are_refused(sp, tmp_path):
    """Older fine-tuned models have their markers there, which would be read as text."""
    for name, settings in (
        ("added_tokens.json", {"<|im_end|>": 320}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"320": {"content": "<|im_end|>"}}}),
    ):
        sp.save(tmp_path)
        (tmp_path / name).write_text(json.dumps(settings))
        with one_line("320", name, "save_pretrained"):
            tokenization.load(tmp_path)
        (tmp_path / name).write_text(json.dumps({}))
    other = {"added_tokens_decoder": {"300": {"content": "<|im_start|>"}}}  # a piece here
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(other))
    with one_line("300", "<|im_start|>", "save_pretrained"):
        tokenization.load(tmp_path)
    known = {"added_tokens_decoder": {"1": {"content": "<s>"}, "2": {"content": "</s>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    assert tokenization.load(tmp_path) == sp


@pytest.mark.parametrize("name", ["add_bos_token", "add_prefix_space"])
def test_flag_of_settings_that_is_a_text_is_refused(bpe, sp, tmp_path, name):
    """A text such as "no" would count as true. A null is a missing flag."""
    for folder, original in ((tmp_path / "bpe", bpe), (tmp_path / "sp", sp)):
        folder.mkdir()
        original.save(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({name: "no"}))
        with one_line(f"tokenizer_config.json: {name}: expected true or false, found 'no'"):
            tokenization.load(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({name: None}))
        assert tokenization.load(folder) == original


def test_eos_that_file_adds_is_cut_off(bpe, tmp_path):
    """The model continues the text."""
    save_with(bpe, tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $0 </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    for text in ("def f", ""):
        assert tokenization.load(tmp_path).encode(text) == bpe.encode(text)


def test_add_prefix_space_of_settings_is_followed(bpe, sp, tmp_path):
    save_with(bpe, tmp_path)
    settings = json.dumps(SETTINGS | {"add_prefix_space": True})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    loaded = tokenization.load(tmp_path)
    assert loaded.encode("def") == bpe.encode(" def") != bpe.encode("def")
    (tmp_path / "pieces").mkdir()
    sp.save(tmp_path / "pieces")
    (tmp_path / "pieces" / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert tokenization.load(tmp_path / "pieces").encode("def") == sp.encode("def")[1:]
    (tmp_path / "pieces" / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with one_line("add_prefix_space", "true"):
        tokenization.load(tmp_path / "pieces")


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json"])
def test_published_gpt2_files_give_published_ids(kind):
    """The ids of this sentence stand in published examples."""
    folder = pathlib.Path(os.environ.get("SPSJAX_DATA", "")) / "tokenizers" / "gpt2"
    if not (folder / kind).is_file():
        pytest.skip(f"needs $SPSJAX_DATA/tokenizers/gpt2/{kind}")
    loaded = tokenization.load(folder / kind)
    assert loaded.encode("Not all heroes wear capes.") == [3673, 477, 10281, 5806, 1451, 274, 13]
    assert loaded.vocab_size == 50257 and loaded.eos_id == 50256
    text = CODE[0] + "naïve 東京 🦊🏽"
    assert loaded.decode(loaded.encode(text)) == text
