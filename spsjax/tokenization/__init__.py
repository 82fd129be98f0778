"""Tokenizers of model folders, and training of new tokenizers.

The tokenizer of a folder is the first of these that exists: `tokenizer.json` (read by the
`tokenizers` library), `tokenizer.model` (SentencePiece), or GPT-2's `vocab.json` and `merges.txt`.
"""

import pathlib

from spsjax.errors import InputError
from spsjax.tokenization.base import KINDS, NAMES, Tokenizer
from spsjax.tokenization.huggingface import HuggingFace
from spsjax.tokenization.sentencepiece import SentencePiece, train

__all__ = ["NAMES", "Tokenizer", "exists", "load", "train"]


def exists(folder: pathlib.Path) -> bool:
    """Returns whether the folder has a tokenizer."""
    return any((folder / kind[0]).exists() for kind in KINDS)


def load(path: str | pathlib.Path) -> Tokenizer:
    """Loads a tokenizer from a folder or from one file.

    Raises InputError if there is no tokenizer, or if its files cannot be read.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        for kind in KINDS:
            if (path / kind[0]).exists():
                return (SentencePiece if kind == KINDS[1] else HuggingFace)(path, kind)
        names = ", ".join(kind[0] for kind in KINDS)
        raise InputError(f"{path}: expected a tokenizer ({names}), found none")
    for kind in KINDS:
        if path.suffix == ".json" and path.name == kind[0]:
            return HuggingFace(path.parent, kind)
    return SentencePiece(path.parent, (path.name,))
