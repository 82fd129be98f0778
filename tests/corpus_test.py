"""What is trained on is on disk, whole, and says where it came from."""

import hashlib
import json

import numpy as np
import pytest

from spsjax import InputError, tokenization
from spsjax.data import corpus
from spsjax.data.documents import Sources

PIECES = 300


@pytest.fixture
def texts(tmp_path):
    """A folder of 30 texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"def function_{index}(x):\n    return x + {index}\n")
    return Sources((str(folder),))


def prepare(tmp_path, texts, length=8, vocab_size=PIECES, **options):
    return corpus.prepare(tmp_path / "data", texts, length, vocab_size=vocab_size, **options)


def test_every_token_of_a_part_is_a_label_once_and_texts_begin_and_end(tmp_path, texts):
    training, held_out, pieces = prepare(tmp_path, texts)
    for windows, part in ((training, "train"), (held_out, "held_out")):
        stream = np.fromfile(tmp_path / "data" / f"{part}.bin", np.uint16)
        assert windows[:][:, 1:].ravel().tolist() == stream[1 : 1 + 8 * len(windows)].tolist()
        assert 0 <= len(stream) - 1 - 8 * len(windows) < 8
        begin, end = (stream == pieces.bos_id).sum(), (stream == pieces.eos_id).sum()
        assert begin == end > 0
        decoded = [
            pieces.decode(each) for each in np.split(stream, np.flatnonzero(stream == 2) + 1)
        ]
        for text in decoded[:-1]:
            assert text.startswith("def function_") and text.endswith("\n")


def test_the_manifest_tells_of_every_file(tmp_path, texts):
    training, held_out, pieces = prepare(tmp_path, texts)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["parts"]["train"]["tokens"] == len(training.tokens)
    assert manifest["parts"]["held_out"]["tokens"] == len(held_out.tokens)
    assert (
        manifest["parts"]["train"]["documents"] + manifest["parts"]["held_out"]["documents"] == 30
    )
    assert manifest["tokenizer_sha256"] == pieces.sha256
    assert len(manifest["files"]) == 30
    name = str(tmp_path / "texts" / "7.txt")
    text = (tmp_path / "texts" / "7.txt").read_bytes()
    assert manifest["files"][name]["text_sha256"] == hashlib.sha256(text).hexdigest()
    total = sum(entry.get("train_tokens", 0) for entry in manifest["files"].values())
    assert total == len(training.tokens)


def test_it_is_made_once_and_is_the_same_anywhere(tmp_path, texts):
    first = prepare(tmp_path, texts)
    (tmp_path / "texts" / "3.txt").unlink()  # what was tokenized is what is trained on
    second = prepare(tmp_path, texts)
    assert np.array_equal(first[0].tokens, second[0].tokens)
    elsewhere = prepare(tmp_path / "more", texts)
    sizes = [sum(len(each.tokens) for each in made[:2]) for made in (first, elsewhere)]
    assert sizes[1] < sizes[0]
    again = prepare(tmp_path / "again", texts)
    assert again[2].files == elsewhere[2].files
    assert np.array_equal(again[0].tokens, elsewhere[0].tokens)


def test_another_corpus_in_the_folder_is_refused_or_made_anew(tmp_path, texts):
    prepare(tmp_path, texts)
    with pytest.raises(InputError, match=r"expected tokenizer 'of 310 pieces', found 'of 300 piec"):
        prepare(tmp_path, texts, vocab_size=310)
    assert prepare(tmp_path, texts, vocab_size=310, replace=True)[2].vocab_size == 310


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin"])
def test_token_files_that_were_cut_off_are_named(tmp_path, texts, name):
    prepare(tmp_path, texts)
    path = tmp_path / "data" / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=f"^{path}: expected .* tokens of uint16, found .* bytes$"):
        prepare(tmp_path, texts)


def test_tokens_and_a_tokenizer_that_are_not_the_manifest_s_are_named(tmp_path, texts):
    _, _, pieces = prepare(tmp_path, texts)
    path = tmp_path / "data" / "train.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(InputError, match=rf"^{path}: expected the tokens of .*, found others$"):
        prepare(tmp_path, texts)
    prepare(tmp_path / "other", texts, vocab_size=310)
    pieces.path.write_bytes((tmp_path / "other" / "data" / "tokenizer.model").read_bytes())
    with pytest.raises(InputError, match=r": expected the tokenizer of .*, found another one$"):
        prepare(tmp_path, texts)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"parts": 3}'])
def test_a_damaged_manifest_is_named(tmp_path, texts, text):
    prepare(tmp_path, texts)
    path = tmp_path / "data" / "manifest.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"^{path}: expected a manifest, found "):
        prepare(tmp_path, texts)


def test_a_stop_while_it_is_made_leaves_no_corpus(tmp_path, texts, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenization.SentencePiece, "encode", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, texts)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"tokenizer.model"}
    monkeypatch.undo()
    prepare(tmp_path, texts)


def test_a_single_document_is_told_about_the_separator(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"found 1 and 0; `separator` cuts files into documents$"):
        prepare(tmp_path, Sources((str(tmp_path / "a.txt"),)))
    assert not (tmp_path / "data").exists()


def test_too_little_text_for_one_example_is_refused(tmp_path, texts):
    with pytest.raises(
        InputError, match=r"^held_out: expected at least 513 tokens, one example, f"
    ):
        prepare(tmp_path, texts, length=512)


def test_more_text_helps_where_there_was_too_little(tmp_path, texts):
    with pytest.raises(InputError, match=r"^held_out: expected at least 101 tokens"):
        prepare(tmp_path, texts, length=100)
    for index in range(100, 200):
        (tmp_path / "texts" / f"{index}.txt").write_text(
            f"def more_{index}(x):\n    return {index}\n"
        )
    prepare(tmp_path, texts, length=100)


def test_long_texts_are_part_of_the_tokenizer_s_training(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"{index} " + "wherever you go " * 100_000)  # 1.6 MB
    _, _, pieces = prepare(tmp_path, Sources((str(folder),)), vocab_size=300)
    assert len(pieces.encode("wherever you go")) < 10
