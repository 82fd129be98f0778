"""What is encoded is what is decoded: code is white space, so none of it may be lost."""

import random

import pytest
from bad_input import one_line

from spsjax import generation, tokenizer

CODE = [
    'def f(x):\n    """Twice x."""\n    if x:\n        return 2 * x\n    return 0\n' * 5,
    "import os\n\n\nclass Reader:\n\tpass  # tabs here\n" * 5,
]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer trained on a little code."""
    return tokenizer.train(CODE, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 320)


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
        "<s></s><unk><0x0A>",
    ],
)
def test_decoding_gives_back_the_text(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


def test_decoding_gives_back_random_text(pieces):
    rng = random.Random(0)
    alphabet = " \t\n\r(){}:=_#'\"abcxyz019éß東🦊"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        assert pieces.decode(pieces.encode(text)) == text


def test_a_text_begins_with_the_begin_id_and_control_ids_leave_no_text(pieces):
    ids = pieces.encode("def f")
    assert ids[0] == pieces.bos_id and pieces.bos_id not in ids[1:]
    assert pieces.decode([*ids, pieces.eos_id]) == "def f"
    assert pieces.bos_id != pieces.eos_id


def test_indentation_is_one_piece(pieces):
    for run in (2, 4, 8, 12, 16):
        assert len(pieces.encode(" " * run + "x")) == len(pieces.encode("x")) + 1


def test_a_learned_piece_stands_for_several_characters(pieces):
    assert len(pieces.encode(CODE[0])) < len(CODE[0]) / 2
    assert pieces.vocab_size == 320


def test_ids_of_a_padded_vocabulary_leave_no_text(pieces):
    assert pieces.decode([*pieces.encode("def"), 320, 5000]) == "def"


def test_tokenizers_are_equal_if_their_pieces_are(pieces, tmp_path):
    assert tokenizer.Tokenizer(pieces.path) == pieces
    assert tokenizer.train(CODE, tmp_path / "again.model", 320) == pieces
    assert tokenizer.train(CODE, tmp_path / "smaller.model", 310) != pieces
    assert pieces != "a tokenizer"


def test_training_leaves_one_file(tmp_path):
    tokenizer.train(CODE, tmp_path / "new" / "tokenizer.model", 310)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["tokenizer.model"]


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_vocabulary_that_the_texts_cannot_fill(tmp_path, size):
    with one_line("vocab_size", str(size)):
        tokenizer.train(CODE, tmp_path / "tokenizer.model", size)
    assert not list(tmp_path.iterdir())


def test_a_continuation_is_what_new_tokens_add_to_the_text(pieces):
    for prompt, new in (("def f", "(x):\n    return"), ("  ", "\n  x"), ("東", "京 🦊")):
        before = pieces.encode(prompt)
        added = pieces.encode(new)[1:]
        assert generation.continuation(pieces, before, added) == new
