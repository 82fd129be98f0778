"""Measurements of scripts/benchmark.py and scripts/compare.py, one module per kind."""

import importlib
import pathlib
from collections.abc import Callable


def plot(name: str, *args, **options) -> Callable[[pathlib.Path], None]:
    """Returns a function that draws a plot into a file; only its call imports matplotlib.

    `name` is a module of `spsjax.cli` and its function, as "plots.speed". The other arguments are
    those of the function, without the file's path.
    """
    module, _, function = name.partition(".")

    def draw(path: pathlib.Path) -> None:
        getattr(importlib.import_module(f"spsjax.cli.{module}"), function)(*args, path, **options)

    return draw
