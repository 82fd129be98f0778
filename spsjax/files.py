"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator


@contextlib.contextmanager
def whole(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Where to write what becomes the file at `path` at the end, unless an error comes before.

    A link is followed, and a device or a pipe is written to, not replaced.
    """
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = stat.S_IMODE((path if path.exists() else partial).stat().st_mode)
        yield partial
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: str | pathlib.Path, data: str | bytes) -> None:
    """Writes a file whole; text is UTF-8."""
    with whole(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
