"""Tests of tokenizers: decoding restores the encoded text, all white space included."""

import random
import types

import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.tokenizer_examples import CODE, byte_fallback

from spsjax import generation, tokenization
from spsjax.tokenization.base import incremental_text


@pytest.fixture(params=["sp", "bpe"])
def tokenizer(request):
    """Each of the two tokenizers."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "text",
    [
        *CODE,
        *("", " ", "\n", "\t\tx\t", "  leading and trailing  ", "a" + " " * 37 + "b"),
        "one\r\ntwo\rthree\n\n\n",
        "naïve café, 東京, Ωμέγα, emoji 🦊🏽, combining e\u0301, wide \uff21\uff22, ligature ﬁ",
        "zero\u200bwidth, nbsp\u00a0, bell\x07",
        "<unk><0x0A>",
    ],
)
def test_decode_of_encode_restores_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decode_of_encode_restores_random_text(tokenizer):
    rng = random.Random(0)
    alphabet = " \t\n\r(){}:=_#'\"abcxyz019éß東🦊"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_adds_bos_and_decode_drops_control_ids(tokenizer):
    ids = tokenizer.encode("def f")
    assert ids[0] == tokenizer.bos_id and tokenizer.bos_id not in ids[1:]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "def f"
    assert tokenizer.bos_id != tokenizer.eos_id


def test_learned_pieces_have_several_characters(tokenizer, sp):
    assert len(tokenizer.encode(CODE[0])) < len(CODE[0]) / 2
    assert tokenizer.vocab_size == (320 if tokenizer.path.suffix == ".model" else 300)
    for run in (2, 4, 8, 12, 16):  # indentation is one piece
        assert len(sp.encode(" " * run + "x")) == len(sp.encode("x")) + 1


def test_incremental_text_drops_ids_of_padded_vocabulary(tokenizer):
    assert incremental_text(tokenizer, [5000], [*tokenizer.encode("def"), 320, 5000]) == "def"


def test_what_are_neither_token_ids_nor_a_text_is_refused(tokenizer):
    for ids in (None, "def", [1.0], [-1], [320]):
        with one_line("ids: expected"):
            tokenizer.decode(ids)
    for text in (3, b"def", ["def"]):
        with one_line("text: expected a string", type(text).__name__):
            tokenizer.encode(text)


def test_tokenizers_with_equal_pieces_are_equal(sp, tmp_path):
    assert tokenization.load(sp.path) == sp
    assert tokenization.train(CODE, tmp_path / "again.model", 320) == sp
    assert tokenization.train(CODE, tmp_path / "new" / "smaller.model", 310) != sp
    assert [path.name for path in tmp_path.glob("new/*")] == ["smaller.model"]  # and no other file
    assert sp != "a tokenizer"


@pytest.mark.parametrize("size", [5, 100_000])
def test_train_refuses_vocabulary_that_does_not_fit_texts(tmp_path, size):
    with one_line("vocab_size", str(size)):
        tokenization.train(CODE, tmp_path / "tokenizer.model", size)
    assert not list(tmp_path.iterdir())


def test_incremental_text_is_text_of_new_tokens(tokenizer):
    for prompt, new in (("def f", "(x):\n    return"), ("  ", "\n  x"), ("東", "京 🦊")):
        before = tokenizer.encode(prompt)
        added = tokenizer.encode(new)[1:]
        assert incremental_text(tokenizer, before, added) == new


def test_stream_sends_whole_characters(tokenizer):
    """A character may be split between rounds, and between the prompt and the new tokens."""
    text = "naïve 東京 🦊🏽 \ufffd e\u0301"
    ids = tokenizer.encode(text)
    model = types.SimpleNamespace(tokenizer=tokenizer)
    for prompt in range(1, len(ids)):
        for size in (1, 2, 3):
            blocks = [ids[start : start + size] for start in range(prompt, len(ids), size)]
            rounds = (generation.Round(np.asarray(block), 0, 0, 0) for block in blocks)
            sent = list(generation._texts(model, ids[:prompt], rounds))
            joined = incremental_text(tokenizer, ids[:prompt], ids[prompt:])
            assert "".join(sent) == joined and joined and text.endswith(joined)
            assert "".join(sent).count("\ufffd") <= 1  # the text's own


def test_byte_fallback_keeps_characters_before_incomplete_one(tmp_path):
    """The library drops all bytes of the run, which would change text that was already sent."""
    fallback = byte_fallback(tmp_path / "fallback")
    text = "ab 日本 x"
    ids = fallback.encode(text)
    assert fallback.decode(ids) == text and len(ids) == 6 + 6
    assert fallback.decode(ids[:-3]) == "ab 日\ufffd" and fallback.decode([0, *ids, 1]) == text
    model = types.SimpleNamespace(tokenizer=fallback)
    rng = random.Random(0)
    for _ in range(100):
        tokens = [ids[0], *rng.choices(ids[1:], k=12)]
        rounds = (generation.Round(np.asarray([token]), 0, 0, 0) for token in tokens[1:])
        sent = "".join(generation._texts(model, tokens[:1], rounds))
        assert sent == incremental_text(fallback, tokens[:1], tokens[1:])
