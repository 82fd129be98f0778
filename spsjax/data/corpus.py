"""Tokenized corpora on disk: token files of the training and held-out split, and a manifest."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib

import numpy as np

from spsjax import tokenization
from spsjax.data import pipeline
from spsjax.data.documents import Sources, Split, listing
from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import Tokenizer
from spsjax.utils import atomic_files
from spsjax.utils.progress import Bar

# More text does not improve a vocabulary, and makes its training slow.
_TOKENIZER_CHARACTERS = 200_000_000
# SentencePiece ignores texts longer than a mebibyte, so that long documents are cut up.
_CHUNK = 1 << 18
_SPLITS = "train", "held_out"


def prepare(
    folder: pathlib.Path,
    sources: Sources,
    length: int,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    replace: bool = False,
) -> tuple[pipeline.TokenWindows, pipeline.TokenWindows, Tokenizer]:
    """Returns both splits of a corpus, and tokenizes it first if the folder does not hold it.

    Documents follow each other, each between the tokenizer's begin and end ids. The folder receives
    `train.bin`, `held_out.bin`, the tokenizer and at last `manifest.json`: per file, the hash of
    its text and the number of its documents and tokens in each split.

    Args:
        folder: folder of the corpus.
        sources: documents.
        length: tokens per example.
        tokenizer: tokenizer; None trains one on the training split.
        vocab_size: vocabulary size of a tokenizer to train.
        replace: whether to replace another corpus in the folder, or one whose files have changed.

    Returns:
        Training examples, held-out examples, and the tokenizer.

    Raises:
        InputError: a split has too few tokens for one example, or the folder holds another corpus.
    """
    path = folder / "manifest.json"
    recipe = {
        "sources": json.loads(json.dumps(dataclasses.asdict(sources))),
        "tokenizer": f"trained, {vocab_size} tokens" if tokenizer is None else tokenizer.sha256,
    }
    manifest = _read_manifest(path) if path.exists() else None
    if manifest and replace:  # it may be of other options, or of files that have changed
        same = manifest["recipe"] == recipe and manifest.get("listing") == listing(sources)
        manifest = manifest if same else None
    if manifest is None:
        path.unlink(missing_ok=True)
        _build(folder, sources, length, tokenizer, vocab_size, recipe)
        manifest = _read_manifest(path)
    for key, value in recipe.items():
        if manifest["recipe"].get(key) != value:
            raise InputError(
                f"{path}: expected {key} {short_repr(value)}, "
                f"found {short_repr(manifest['recipe'].get(key))}"
            )
    tokenizer = tokenization.load(folder)
    if tokenizer.sha256 != manifest["tokenizer_sha256"]:
        raise InputError(f"{tokenizer.path}: expected the tokenizer of {path}, found another one")
    train, held_out = (_open_split(path, manifest, split, length) for split in _SPLITS)
    return train, held_out, tokenizer


def _read_manifest(path: pathlib.Path) -> dict:
    """Returns the manifest at a path; raises InputError if it is damaged."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        complete = isinstance(manifest["tokenizer_sha256"], str)
        for split in _SPLITS:
            complete &= type(manifest["splits"][split]["tokens"]) is int
            complete &= isinstance(manifest["splits"][split]["sha256"], str)
        if not (complete and isinstance(manifest["recipe"], dict) and np.dtype(manifest["dtype"])):
            raise ValueError("other values")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a manifest, found {one_line(error)}") from None
    return manifest


def _open_split(
    manifest_path: pathlib.Path, manifest: dict, split: str, length: int
) -> pipeline.TokenWindows:
    """Returns the examples of a split; raises InputError if its file is not the manifest's."""
    path, entry = manifest_path.with_name(f"{split}.bin"), manifest["splits"][split]
    dtype = np.dtype(manifest["dtype"])
    size = path.stat().st_size if path.exists() else 0
    if size != entry["tokens"] * dtype.itemsize:
        raise InputError(
            f"{path}: expected {entry['tokens']} tokens of {dtype}, found {size} bytes"
        )
    if atomic_files.sha256(path) != entry["sha256"]:
        raise InputError(f"{path}: expected the tokens of {manifest_path}, found others")
    tokens = np.memmap(path, dtype, "r") if size else []  # an empty file cannot be mapped
    return pipeline.TokenWindows(tokens, length, split)


def _build(
    folder: pathlib.Path,
    sources: Sources,
    length: int,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    recipe: dict,
) -> None:
    """Writes the files of a corpus; the manifest, written last, shows that they are complete."""
    files = listing(sources)  # read first: files that change meanwhile make the corpus stale
    documents = Split(sources)
    counts, characters = _count(documents, sources)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        tokenizer = _train_tokenizer(folder, documents, characters, vocab_size)
    tokenizer.save(folder)
    if tokenizer.eos_id is None:
        raise InputError("tokenizer: expected one with an end-of-sequence id, found none")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    tokens, entries = _write_tokens(
        folder, documents, sum(counts.values()), tokenizer, dtype, length
    )
    splits = {
        split: {
            "documents": counts[split],
            "tokens": tokens[split],
            "sha256": atomic_files.sha256(folder / f"{split}.bin"),
        }
        for split in _SPLITS
    }
    manifest = {
        "recipe": recipe,
        "listing": files,
        "dtype": dtype,
        "splits": splits,
        "files": entries,
        "tokenizer_sha256": tokenizer.sha256,
    }
    atomic_files.write(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _count(documents: Split, sources: Sources) -> tuple[dict[str, int], int]:
    """Returns the number of documents per split, and of characters to train on.

    Raises InputError if a split has no documents.
    """
    counts, characters = {"train": 0, "held_out": 0, "copy": 0}, 0
    for split, document in documents:
        counts[split] += 1
        characters += len(document.text) if split == "train" else 0
    if not (counts["train"] and counts["held_out"]):
        if sum(counts.values()) > 1:
            hint = "Documents with one name are in one split: give `held_out`, or more files"
        else:
            hint = "Give `separator` to cut files into documents, or `held_out`"
        raise InputError(
            f"{', '.join(sources.train)}: expected documents to train on and to hold out, "
            f"found {counts['train']} and {counts['held_out']}. {hint}"
        )
    return counts, characters


def _train_tokenizer(
    folder: pathlib.Path, documents: Split, characters: int, vocab_size: int | None
) -> Tokenizer:
    """Trains a tokenizer on the training split, or on every n-th document of a large one."""
    every = -(-characters // _TOKENIZER_CHARACTERS)
    texts = (document.text for split, document in documents if split == "train")
    chunks = (
        text[start : start + _CHUNK]
        for index, text in enumerate(texts)
        if index % every == 0
        for start in range(0, len(text), _CHUNK)
    )
    return tokenization.train(chunks, folder / "tokenizer.model", vocab_size)


def _write_tokens(
    folder: pathlib.Path,
    documents: Split,
    total: int,
    tokenizer: Tokenizer,
    dtype: str,
    length: int,
) -> tuple[dict[str, int], dict[str, dict]]:
    """Writes the token file of each split.

    Returns the number of tokens per split, and the manifest's entry per file of the sources. Raises
    InputError, and leaves no file, if a split has too few tokens for one example.
    """
    tokens, entries = dict.fromkeys(_SPLITS, 0), {}
    with contextlib.ExitStack() as stack:
        outputs = {}
        for split in _SPLITS:
            partial = stack.enter_context(atomic_files.atomic_write(folder / f"{split}.bin"))
            outputs[split] = stack.enter_context(open(partial, "wb"))
        for split, document in Bar(documents, "tokenizing", total, unit="doc", delay=2):
            entry = entries.setdefault(document.file, {"text_sha256": hashlib.sha256()})
            entry["text_sha256"].update(document.text.encode())
            if split == "copy":
                entry["copies"] = entry.get("copies", 0) + 1
                continue
            ids = np.asarray([*tokenizer.encode(document.text), tokenizer.eos_id], dtype)
            outputs[split].write(ids.tobytes())
            tokens[split] += len(ids)
            entry[f"{split}_tokens"] = entry.get(f"{split}_tokens", 0) + len(ids)
        for split in _SPLITS:
            pipeline.check_token_count(split, tokens[split], length)
    for entry in entries.values():
        entry["text_sha256"] = entry["text_sha256"].hexdigest()
    return tokens, entries
