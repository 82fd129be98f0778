"""Text to token ids and back, by what lies beside a checkpoint, or is trained here.

A folder's tokenizer is its `tokenizer.json`, which the `tokenizers` library reads; or its
`tokenizer.model`, which is SentencePiece's; or GPT-2's `vocab.json` and `merges.txt`.
"""

import pathlib

from spsjax.errors import InputError
from spsjax.tokenization.base import KINDS, NAMES, Tokenizer
from spsjax.tokenization.huggingface import HuggingFace
from spsjax.tokenization.sentencepiece import SentencePiece, train

__all__ = ["NAMES", "Tokenizer", "exists", "load", "train"]


def exists(folder: pathlib.Path) -> bool:
    """Whether there is a tokenizer in the folder."""
    return any((folder / kind[0]).exists() for kind in KINDS)


def load(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a folder, or in a file; raises InputError where there is none."""
    path = pathlib.Path(path)
    if path.is_dir():
        for kind in KINDS:
            if (path / kind[0]).exists():
                return (SentencePiece if kind == KINDS[1] else HuggingFace)(path, kind)
        first = ", ".join(kind[0] for kind in KINDS)
        raise InputError(f"{path}: expected a tokenizer ({first}), found none")
    for kind in KINDS:
        if path.suffix == ".json" and path.name == kind[0]:
            return HuggingFace(path.parent, kind)
    return SentencePiece(path.parent, (path.name,))
