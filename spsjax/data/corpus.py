"""Tokenized corpora on disk: token files of the training and held-out split, and a manifest."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from spsjax import tokenization
from spsjax.data import pipeline
from spsjax.data.documents import Document, Sources, Split, listing
from spsjax.data.transcripts import Encoder
from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import Tokenizer
from spsjax.utils import atomic_files
from spsjax.utils.progress import Bar

# More text does not improve a vocabulary, and makes its training slow.
_TOKENIZER_CHARACTERS = 200_000_000
# SentencePiece ignores texts longer than a mebibyte, so that long documents are cut up.
_CHUNK = 1 << 18
_TOGETHER = 256  # conversations in memory at a time
_SPLITS = "train", "held_out"


def prepare(
    folder: pathlib.Path,
    sources: Sources,
    length: int,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    replace: bool = False,
    ends: Collection[int] = (),
) -> tuple[pipeline.TokenWindows, pipeline.TokenWindows, Tokenizer]:
    """Returns both splits of a corpus, and tokenizes it first if the folder does not hold it.

    Documents follow each other, each between the tokenizer's begin and end ids. Conversations are
    as the chat template writes them. The folder receives `train.bin`, `held_out.bin`, the tokenizer
    and at last `manifest.json`: per file, the hash of its text and the number of its documents and
    tokens in each split. If only the answers of conversations count, `train.mask` and
    `held_out.mask` have a byte per token: 1 if it counts, and 0 else.

    Args:
        folder: folder of the corpus.
        sources: documents.
        length: tokens per example.
        tokenizer: tokenizer; None trains one on the training split.
        vocab_size: vocabulary size of a tokenizer to train.
        replace: whether to replace another corpus in the folder, or one whose files have changed.
        ends: token ids that end an assistant's turn, besides the tokenizer's end id.

    Returns:
        Training examples, held-out examples, and the tokenizer.

    Raises:
        InputError: a split has too few tokens for one example, or the folder holds another corpus.
    """
    path = folder / "manifest.json"
    recipe = {
        "sources": _as_json(sources),
        "tokenizer": f"trained, {vocab_size} tokens" if tokenizer is None else tokenizer.sha256,
    }
    manifest = _read_manifest(path) if path.exists() else None
    if manifest and replace:  # it may be of other options, or of files that have changed
        same = manifest["recipe"] == recipe and manifest.get("listing") == listing(sources)
        manifest = manifest if same else None
    if manifest is None:
        path.unlink(missing_ok=True)
        _build(folder, sources, length, tokenizer, vocab_size, recipe, ends)
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


def _as_json(sources: Sources) -> dict:
    """Returns sources as a manifest has them: the default of `loss` is that of older manifests."""
    fields = json.loads(json.dumps(dataclasses.asdict(sources)))
    return {key: value for key, value in fields.items() if (key, value) != ("loss", "answers")}


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
    entry, count = manifest["splits"][split], manifest["splits"][split]["tokens"]

    def read(suffix: str, digest: str, dtype: np.dtype) -> np.ndarray:
        path = manifest_path.with_name(f"{split}.{suffix}")
        size = path.stat().st_size if path.exists() else 0
        if size != count * dtype.itemsize:
            raise InputError(f"{path}: expected {count} tokens of {dtype}, found {size} bytes")
        if atomic_files.sha256(path) != digest:
            raise InputError(f"{path}: expected the tokens of {manifest_path}, found others")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)

    tokens = read("bin", entry["sha256"], np.dtype(manifest["dtype"]))
    counts = None
    if "mask_sha256" in entry:
        counts = read("mask", entry["mask_sha256"], np.dtype(np.uint8))
    return pipeline.TokenWindows(tokens, length, split, counts)


def _build(
    folder: pathlib.Path,
    sources: Sources,
    length: int,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    recipe: dict,
    ends: Collection[int],
) -> None:
    """Writes the files of a corpus; the manifest, written last, shows that they are complete."""
    files = listing(sources)  # read first: files that change meanwhile make the corpus stale
    documents = Split(sources)
    counts, characters, masked = _count(documents, sources)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        tokenizer = _train_tokenizer(folder, documents, characters, vocab_size)
    tokenizer.save(folder)
    if tokenizer.eos_id is None:
        raise InputError("tokenizer: expected one with an end-of-sequence id, found none")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    progress = Bar(documents, "tokenizing", sum(counts.values()), unit="doc", delay=2)
    texts = _tokenized(progress, Encoder(tokenizer, ends))
    tokens, entries = _write_tokens(folder, texts, dtype, length, masked)
    splits = {
        split: {
            "documents": counts[split],
            "tokens": tokens[split],
            "sha256": atomic_files.sha256(folder / f"{split}.bin"),
        }
        for split in _SPLITS
    }
    for split in _SPLITS if masked else ():
        splits[split]["mask_sha256"] = atomic_files.sha256(folder / f"{split}.mask")
    manifest = {
        "recipe": recipe,
        "listing": files,
        "dtype": dtype,
        "splits": splits,
        "files": entries,
        "tokenizer_sha256": tokenizer.sha256,
    }
    atomic_files.write(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _count(documents: Split, sources: Sources) -> tuple[dict[str, int], int, bool]:
    """Returns the number of documents per split, and of characters to train on.

    The last value is whether some tokens do not count. Raises InputError if a split has no
    documents.
    """
    counts, characters, masked = {"train": 0, "held_out": 0, "copy": 0}, 0, False
    for split, document in documents:
        masked |= document.conversation is not None and sources.loss == "answers"
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
    return counts, characters, masked


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


def _tokenized(
    documents: Iterable[tuple[str, Document]], encoder: Encoder
) -> Iterator[tuple[str, Document, Sequence[int], Sequence[int]]]:
    """Yields each document with its split, its token ids and a mask of the tokens that count.

    Copies have no ids. Conversations that follow each other are tokenized together, because a
    process of their own renders them.
    """
    tokenizer = encoder.tokenizer
    for talks, group in itertools.groupby(documents, lambda entry: bool(entry[1].conversation)):
        if not talks:
            for split, document in group:
                ids = []
                if split != "copy":
                    ids = [*tokenizer.encode(document.text), tokenizer.eos_id]
                yield split, document, ids, bytes([1]) * len(ids)
            continue
        while entries := list(itertools.islice(group, _TOGETHER)):
            kept = [document.conversation for split, document in entries if split != "copy"]
            encoded = encoder.encode(kept)
            for split, document in entries:
                yield split, document, *(([], []) if split == "copy" else next(encoded))


def _write_tokens(
    folder: pathlib.Path,
    texts: Iterable[tuple[str, Document, Sequence[int], Sequence[int]]],
    dtype: str,
    length: int,
    masked: bool,
) -> tuple[dict[str, int], dict[str, dict]]:
    """Writes the token file of each split, and its mask if some tokens do not count.

    Returns the number of tokens per split, and the manifest's entry per file of the sources. Raises
    InputError, and leaves no file, if a split has too few tokens for one example.
    """
    tokens, entries = dict.fromkeys(_SPLITS, 0), {}
    suffixes = ("bin", "mask") if masked else ("bin",)
    with contextlib.ExitStack() as stack:
        outputs = {}
        for split, suffix in itertools.product(_SPLITS, suffixes):
            partial = stack.enter_context(atomic_files.atomic_write(folder / f"{split}.{suffix}"))
            outputs[split, suffix] = stack.enter_context(open(partial, "wb"))
        for split, document, ids, mask in texts:
            entry = entries.setdefault(document.file, {"text_sha256": hashlib.sha256()})
            entry["text_sha256"].update(document.text.encode())
            if split == "copy":
                entry["copies"] = entry.get("copies", 0) + 1
                continue
            outputs[split, "bin"].write(np.asarray(ids, dtype).tobytes())
            if masked:
                outputs[split, "mask"].write(bytes(mask))
            tokens[split] += len(ids)
            entry[f"{split}_tokens"] = entry.get(f"{split}_tokens", 0) + len(ids)
        for split in _SPLITS:
            pipeline.check_token_count(split, tokens[split], length)
    for entry in entries.values():
        entry["text_sha256"] = entry["text_sha256"].hexdigest()
    return tokens, entries
