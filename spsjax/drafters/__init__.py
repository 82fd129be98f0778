"""Drafting methods, one module each, each with a `Drafter`. A name resolves to its module."""

import importlib


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(
            f"spsjax.drafters: expected a drafter's module, found {name!r}"
        ) from None
