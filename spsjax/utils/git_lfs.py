"""Pointers of Git LFS, which a clone without it has in the place of large files."""

import pathlib

from spsjax.errors import InputError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def check(path: pathlib.Path, content: bytes) -> None:
    """Raises InputError if a file's content, or its beginning, is that of a pointer."""
    if content.startswith(_BEGINNING):
        raise InputError(
            f"{path}: expected the file, found a Git LFS pointer to it. "
            "Fetch the files of its repository with: git lfs install && git lfs pull"
        )
