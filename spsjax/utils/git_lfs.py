"""Detection of Git LFS pointers, which replace large files in a clone without Git LFS."""

import pathlib

from spsjax.errors import InputError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def check(path: pathlib.Path, content: bytes) -> None:
    """Raises InputError if the content of a file, or its beginning, is a pointer."""
    if content.startswith(_BEGINNING):
        raise InputError(
            f"{path}: expected the file, found a Git LFS pointer to it. "
            "Fetch the files of its repository with: git lfs install && git lfs pull"
        )
