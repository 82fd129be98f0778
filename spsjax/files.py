"""Files that are written whole or not at all."""

import pathlib


def write(path: str | pathlib.Path, data: str | bytes) -> None:
    """Writes a file beside its place and moves it there; text is UTF-8."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data.encode() if isinstance(data, str) else data)
    partial.replace(path)
