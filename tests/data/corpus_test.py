"""Tests of tokenized corpora: complete on disk, reproducible, and described by their manifest."""

import hashlib
import json

import numpy as np
import pytest

from spsjax import InputError, tokenization
from spsjax.data import corpus
from spsjax.data.documents import Sources

VOCAB_SIZE = 300


@pytest.fixture
def texts(tmp_path):
    """A folder of 30 texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"def function_{index}(x):\n    return x + {index}\n")
    return Sources((str(folder),))


def prepare(tmp_path, texts, length=8, vocab_size=VOCAB_SIZE, **options):
    return corpus.prepare(tmp_path / "data", texts, length, vocab_size=vocab_size, **options)


def test_tokens_are_labels_once_between_begin_and_end(tmp_path, texts):
    """Every token of a split is a label exactly once, and every text has a begin and an end id."""
    train, held_out, tokenizer = prepare(tmp_path, texts)
    for windows, split in ((train, "train"), (held_out, "held_out")):
        stream = np.fromfile(tmp_path / "data" / f"{split}.bin", np.uint16)
        assert windows[:][:, 1:].ravel().tolist() == stream[1 : 1 + 8 * len(windows)].tolist()
        assert 0 <= len(stream) - 1 - 8 * len(windows) < 8
        begin, end = (stream == tokenizer.bos_id).sum(), (stream == tokenizer.eos_id).sum()
        assert begin == end > 0
        ends = np.flatnonzero(stream == tokenizer.eos_id) + 1
        decoded = [tokenizer.decode(ids) for ids in np.split(stream, ends)]
        for text in decoded[:-1]:
            assert text.startswith("def function_") and text.endswith("\n")


def test_manifest_describes_every_file(tmp_path, texts):
    train, held_out, tokenizer = prepare(tmp_path, texts)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    splits = manifest["splits"]
    assert splits["train"]["tokens"] == len(train.tokens)
    assert splits["held_out"]["tokens"] == len(held_out.tokens)
    assert splits["train"]["documents"] + splits["held_out"]["documents"] == 30
    assert manifest["tokenizer_sha256"] == tokenizer.sha256
    assert len(manifest["files"]) == 30
    name = str(tmp_path / "texts" / "7.txt")
    text = (tmp_path / "texts" / "7.txt").read_bytes()
    assert manifest["files"][name]["text_sha256"] == hashlib.sha256(text).hexdigest()
    total = sum(entry.get("train_tokens", 0) for entry in manifest["files"].values())
    assert total == len(train.tokens)


def test_corpus_is_built_once_and_reproducible(tmp_path, texts):
    first = prepare(tmp_path, texts)
    (tmp_path / "texts" / "3.txt").unlink()  # does not change a corpus that is already tokenized
    second = prepare(tmp_path, texts)
    assert np.array_equal(first[0].tokens, second[0].tokens)
    elsewhere = prepare(tmp_path / "more", texts)
    sizes = [len(train.tokens) + len(held_out.tokens) for train, held_out, _ in (first, elsewhere)]
    assert sizes[1] < sizes[0]
    again = prepare(tmp_path / "again", texts)
    assert again[2].files == elsewhere[2].files
    assert np.array_equal(again[0].tokens, elsewhere[0].tokens)


def test_other_corpus_in_the_folder_is_refused_or_replaced(tmp_path, texts):
    prepare(tmp_path, texts)
    with pytest.raises(
        InputError, match=r"expected tokenizer 'trained, 310 .*, found 'trained, 300"
    ):
        prepare(tmp_path, texts, vocab_size=310)
    assert prepare(tmp_path, texts, vocab_size=310, replace=True)[2].vocab_size == 310


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin"])
def test_truncated_token_file_is_named(tmp_path, texts, name):
    prepare(tmp_path, texts)
    path = tmp_path / "data" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=f"^{path}: expected .* tokens of uint16, found .* bytes$"):
        prepare(tmp_path, texts)


def test_token_file_or_tokenizer_of_another_corpus_is_named(tmp_path, texts):
    _, _, tokenizer = prepare(tmp_path, texts)
    path = tmp_path / "data" / "train.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(InputError, match=rf"^{path}: expected the tokens of .*, found others$"):
        prepare(tmp_path, texts)
    prepare(tmp_path / "other", texts, vocab_size=310)
    tokenizer.path.write_bytes((tmp_path / "other" / "data" / "tokenizer.model").read_bytes())
    with pytest.raises(InputError, match=r": expected the tokenizer of .*, found another one$"):
        prepare(tmp_path, texts)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"splits": 3}'])
def test_damaged_manifest_is_named(tmp_path, texts, text):
    prepare(tmp_path, texts)
    path = tmp_path / "data" / "manifest.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"^{path}: expected a manifest, found "):
        prepare(tmp_path, texts)


def test_interrupted_build_leaves_no_corpus(tmp_path, texts, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenization.SentencePiece, "encode", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, texts)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"tokenizer.model"}
    monkeypatch.undo()
    prepare(tmp_path, texts)


def test_single_document_is_refused_with_a_hint(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"found 1 and 0. Give `separator` to cut files into doc"):
        prepare(tmp_path, Sources((str(tmp_path / "a.txt"),)))
    assert not (tmp_path / "data").exists()


def test_text_shorter_than_one_example_is_refused(tmp_path, texts):
    with pytest.raises(
        InputError, match=r"^held_out: expected at least 513 tokens, one example, f"
    ):
        prepare(tmp_path, texts, length=512)


def test_adding_text_after_a_refusal_succeeds(tmp_path, texts):
    with pytest.raises(InputError, match=r"^held_out: expected at least 101 tokens"):
        prepare(tmp_path, texts, length=100)
    for index in range(100, 200):
        (tmp_path / "texts" / f"{index}.txt").write_text(
            f"def more_{index}(x):\n    return {index}\n"
        )
    prepare(tmp_path, texts, length=100)


def test_tokenizer_is_trained_on_long_texts_too(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"{index} " + "wherever you go " * 100_000)  # 1.6 MB
    _, _, tokenizer = prepare(tmp_path, Sources((str(folder),)), vocab_size=300)
    assert len(tokenizer.encode("wherever you go")) < 10
