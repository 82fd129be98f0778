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


def test_tokens_are_labels_once_and_the_manifest_describes_every_file(tmp_path, texts):
    """Every text has a begin and an end id."""
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
    assert np.array_equal(first[0].tokens, prepare(tmp_path, texts)[0].tokens)
    elsewhere, again = (prepare(tmp_path / name, texts) for name in ("more", "again"))
    sizes = [len(train.tokens) + len(held_out.tokens) for train, held_out, _ in (first, elsewhere)]
    assert sizes[1] < sizes[0]
    assert again[2].files == elsewhere[2].files
    assert np.array_equal(again[0].tokens, elsewhere[0].tokens)


def test_other_corpus_in_the_folder_is_refused_or_replaced(tmp_path, texts):
    prepare(tmp_path, texts)
    message = "expected tokenizer 'trained, 310 .*, found 'trained, 300"
    with pytest.raises(InputError, match=message):
        prepare(tmp_path, texts, vocab_size=310)
    assert prepare(tmp_path, texts, vocab_size=310, replace=True)[2].vocab_size == 310


def damaged_file_is_named(tmp_path, texts, name, content, message):
    path = tmp_path / "data" / name
    before = path.read_bytes()
    path.write_bytes(content(before))
    with pytest.raises(InputError, match=f"^{path}: expected {message}"):
        prepare(tmp_path, texts)
    path.write_bytes(before)


def test_damaged_files_and_those_of_another_corpus_are_named(tmp_path, texts):
    prepare(tmp_path, texts)
    prepare(tmp_path / "other", texts, vocab_size=310)
    other = (tmp_path / "other" / "data" / "tokenizer.model").read_bytes()
    for name in ("train.bin", "held_out.bin"):
        message = ".* tokens of uint16, found .* bytes$"
        damaged_file_is_named(tmp_path, texts, name, lambda raw: raw[:-2], message)
    message = "the tokens of .*, found others$"
    damaged_file_is_named(tmp_path, texts, "train.bin", lambda raw: b"\xff" * len(raw), message)
    message = "the tokenizer of .*, found another one$"
    damaged_file_is_named(tmp_path, texts, "tokenizer.model", lambda raw: other, message)
    for text in (b"", b"{}", b'{"splits": 3}'):
        content = lambda raw, text=text: text  # noqa: E731
        damaged_file_is_named(tmp_path, texts, "manifest.json", content, "a manifest, found ")


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


def test_adding_text_after_a_refusal_succeeds(tmp_path, texts):
    with pytest.raises(InputError, match=r"^held_out: expected at least 101 tokens, one example, "):
        prepare(tmp_path, texts, length=100)
    for index in range(100, 200):
        text = f"def more_{index}(x):\n    return {index}\n"
        (tmp_path / "texts" / f"{index}.txt").write_text(text)
    prepare(tmp_path, texts, length=100)


def test_tokenizer_is_trained_on_long_texts_too(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"{index} " + "wherever you go " * 100_000)  # 1.6 MB
    _, _, tokenizer = prepare(tmp_path, Sources((str(folder),)), vocab_size=300)
    assert len(tokenizer.encode("wherever you go")) < 10
