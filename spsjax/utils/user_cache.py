"""The user's cache folder, which holds compiled programs and downloaded models."""

import os
import pathlib


def folder(name: str) -> pathlib.Path:
    """Returns `spsjax/NAME` in the user's cache folder; raises RuntimeError without a home.

    The cache folder is that of the XDG specification: `XDG_CACHE_HOME`, or else `~/.cache`.
    """
    own = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification of these folders says to ignore a relative path.
    own = own if own.is_absolute() else pathlib.Path.home() / ".cache"
    return own / "spsjax" / name
