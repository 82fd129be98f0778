"""Drafting methods, one module each, each with a `Drafter`. A name resolves to its module.

Those of `contrib` follow the same contract, and are tested in the full suite only.
"""

import importlib

_PACKAGES = __name__, f"{__name__}.contrib"


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    raise AttributeError(f"spsjax.drafters: expected a drafter's module, found {name!r}")
