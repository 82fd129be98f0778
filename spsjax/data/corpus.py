"""A corpus ready to train on: token files of both parts of a split, and a manifest of them."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib

import numpy as np
from tqdm import tqdm

from spsjax import tokenization
from spsjax.data import pipeline
from spsjax.data.documents import Sources, Split, listing
from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import Tokenizer
from spsjax.utils import atomic_files

# More text than this makes a vocabulary no better, and its training slow.
_TOKENIZER_CHARACTERS = 200_000_000
# SentencePiece leaves out texts of more than a mebibyte.
_CHUNK = 1 << 18
_PARTS = "train", "held_out"


def prepare(
    folder: pathlib.Path,
    sources: Sources,
    length: int,
    pieces: Tokenizer | None = None,
    vocab_size: int | None = None,
    replace: bool = False,
) -> tuple[pipeline.Windows, pipeline.Windows, Tokenizer]:
    """Token files of both parts, made once and then found again.

    A document begins and ends with the tokenizer's ids for that, and the next one follows. The
    folder gets `train.bin`, `held_out.bin`, the tokenizer and at last `manifest.json`: of each
    file the hash of its text, and how many documents and tokens of it are in which part.

    Args:
        folder: where they are kept.
        sources: the documents.
        length: tokens of an example.
        pieces: the tokenizer; None: one of `vocab_size` pieces is trained on the training part.
        vocab_size: see there.
        replace: makes the corpus anew if the folder holds another, or the files have changed.

    Returns:
        Training examples, held-out examples, and the tokenizer.

    Raises:
        InputError: a part has too few tokens for one example, or the folder holds another corpus.
    """
    manifest = folder / "manifest.json"
    recipe = {
        "sources": json.loads(json.dumps(dataclasses.asdict(sources))),
        "tokenizer": f"of {vocab_size} pieces" if pieces is None else pieces.sha256,
    }
    if not manifest.exists() or (replace and _stale(manifest, recipe, sources)):
        manifest.unlink(missing_ok=True)
        _make(folder, sources, length, pieces, vocab_size, recipe)
    found = _manifest(manifest)
    for key, value in recipe.items():
        if found["recipe"].get(key) != value:
            raise InputError(
                f"{manifest}: expected {key} {short_repr(value)}, "
                f"found {short_repr(found['recipe'].get(key))}"
            )
    parts, dtype = found["parts"], np.dtype(found["dtype"])
    pieces = tokenization.load(folder)
    if pieces.sha256 != found["tokenizer_sha256"]:
        raise InputError(f"{pieces.path}: expected the tokenizer of {manifest}, found another one")
    windows = []
    for part in _PARTS:
        path = folder / f"{part}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size != parts[part]["tokens"] * dtype.itemsize:
            raise InputError(
                f"{path}: expected {parts[part]['tokens']} tokens of {dtype}, found {size} bytes"
            )
        if atomic_files.sha256(path) != parts[part]["sha256"]:
            raise InputError(f"{path}: expected the tokens of {manifest}, found others")
        windows.append(pipeline.Windows(np.memmap(path, dtype, "r") if size else [], length, part))
    return *windows, pieces


def _stale(manifest: pathlib.Path, recipe: dict, sources: Sources) -> bool:
    found = _manifest(manifest)
    return found["recipe"] != recipe or found.get("listing") != listing(sources)


def _manifest(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        complete = all(type(found["parts"][part]["tokens"]) is int for part in _PARTS)
        complete &= all(isinstance(found["parts"][part]["sha256"], str) for part in _PARTS)
        complete &= isinstance(found["tokenizer_sha256"], str)
        if not (complete and isinstance(found["recipe"], dict) and np.dtype(found["dtype"])):
            raise ValueError("other values")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a manifest, found {one_line(error)}") from None
    return found


def _make(folder, sources, length, pieces, vocab_size, recipe) -> None:
    """Writes the files of `prepare`; the manifest comes last: the others are whole then."""
    before = listing(sources)
    documents = Split(sources)
    counts = {"train": 0, "held_out": 0, "copy": 0}
    characters = 0
    for part, document in documents:
        counts[part] += 1
        characters += len(document.text) if part == "train" else 0
    for part in _PARTS:
        if not counts[part]:
            several = sum(counts.values()) > 1
            hint = "those of one name are in one part" if several else ""
            hint = f"; {hint or '`separator` cuts files into documents'}"
            raise InputError(
                f"{', '.join(sources.train)}: expected documents to train on and to hold out, "
                f"found {counts['train']} and {counts['held_out']}{hint}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if pieces is None:
        every = -(-characters // _TOKENIZER_CHARACTERS)
        train = (document.text for part, document in documents if part == "train")
        some = (
            text[start : start + _CHUNK]
            for index, text in enumerate(train)
            if index % every == 0
            for start in range(0, len(text), _CHUNK)
        )
        pieces = tokenization.train(some, folder / "tokenizer.model", vocab_size)
    pieces.save(folder)
    if pieces.eos_id is None:
        raise InputError("tokenizer: expected one with an end-of-sequence id, found none")
    dtype = "uint16" if pieces.vocab_size <= 1 << 16 else "uint32"
    listed, parts = {}, {part: {"documents": counts[part], "tokens": 0} for part in _PARTS}
    with contextlib.ExitStack() as stack:
        outputs = {}
        for part in _PARTS:
            partial = stack.enter_context(atomic_files.atomic_write(folder / f"{part}.bin"))
            outputs[part] = stack.enter_context(open(partial, "wb"))
        total = sum(counts.values())
        for part, document in tqdm(documents, "tokenizing", total, unit="doc", delay=2):
            entry = listed.setdefault(document.file, {"text_sha256": hashlib.sha256()})
            entry["text_sha256"].update(document.text.encode())
            if part == "copy":
                entry["copies"] = entry.get("copies", 0) + 1
                continue
            ids = np.asarray([*pieces.encode(document.text), pieces.eos_id], dtype)
            outputs[part].write(ids.tobytes())
            parts[part]["tokens"] += len(ids)
            entry[f"{part}_tokens"] = entry.get(f"{part}_tokens", 0) + len(ids)
        for part in _PARTS:
            pipeline.check_tokens(part, parts[part]["tokens"], length)
    for entry in listed.values():
        entry["text_sha256"] = entry["text_sha256"].hexdigest()
    for part in _PARTS:
        parts[part]["sha256"] = atomic_files.sha256(folder / f"{part}.bin")
    record = {"recipe": recipe, "listing": before, "dtype": dtype, "parts": parts, "files": listed}
    record["tokenizer_sha256"] = pieces.sha256
    atomic_files.write(folder / "manifest.json", json.dumps(record, indent=1) + "\n")
