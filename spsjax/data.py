"""Text corpora: files, a split that never changes, and packed examples."""

import hashlib
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from spsjax.errors import InputError
from spsjax.tokenizer import Tokenizer
from spsjax.types import PyTree

# Tests repeat themselves, and the two big folders are tables that a program wrote.
_NOT_PROSE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def stdlib() -> dict[str, str]:
    """The running interpreter's standard library: path in the library -> text, tests left out."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _NOT_PROSE & set(name.parts):
            texts[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    return texts


def is_held_out(name: str) -> bool:
    """One file in 20, chosen by the hash of its name alone, so that no run trains on it."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def split(texts: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(training texts, held-out texts)."""
    held_out = {name: text for name, text in texts.items() if is_held_out(name)}
    return {name: text for name, text in texts.items() if name not in held_out}, held_out


def pack(texts: Iterable[str], tokenizer: Tokenizer, length: int) -> np.ndarray:
    """[N, length + 1] int32 windows over the texts one after another, each begun and ended.

    Neighbouring windows share one token, so that every token is a label once. The last, partial
    window is dropped.
    """
    if length < 1:
        raise InputError(f"length: expected at least 1, found {length}")
    if tokenizer.eos_id is None:
        raise InputError("tokenizer: expected one with an end-of-sequence id, found none")
    stream = []
    for text in texts:
        stream += tokenizer.encode(text)
        stream.append(tokenizer.eos_id)
    count = (len(stream) - 1) // length
    tokens = np.asarray(stream, np.int32)
    starts = np.arange(count)[:, None] * length
    return tokens[starts + np.arange(length + 1)]


def stdlib_examples(tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out examples of the standard library, each [N, length + 1] int32."""
    training, held_out = split(stdlib())
    return pack(training.values(), tokenizer, length), pack(held_out.values(), tokenizer, length)


def count(examples: PyTree) -> int:
    """How many examples there are: the length of the first axis, of one array or of several."""
    return len(jax.tree.leaves(examples)[0])


def take(examples: PyTree, rows: slice | np.ndarray) -> PyTree:
    """Those rows of each array."""
    return jax.tree.map(lambda array: array[rows], examples)


def batches(examples: PyTree, batch: int, seed: int, start: int = 0) -> Iterator[PyTree]:
    """`batch` examples for ever, each epoch in an order of its own; `start` batches skipped."""
    total = count(examples)
    per_epoch = total // batch
    if not per_epoch:
        raise InputError(f"batch: expected at most {total} examples, found {batch}")
    epoch, offset = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(total)
        for index in range(offset, per_epoch):
            yield take(examples, order[index * batch : (index + 1) * batch])
        epoch, offset = epoch + 1, 0
