"""Drafting methods: one module per method, with a class `Drafter`. A name resolves to its module.

Methods in `contrib` follow the same contract, and are tested in the full suite only.
"""

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Any

_PACKAGES = __name__, f"{__name__}.contrib"


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
    raise AttributeError(f"spsjax.drafters: expected a drafter's module, found {name!r}")


@functools.cache
def methods_with(attribute: str) -> dict[str, Any]:
    """Returns the drafters' modules that have an attribute, such as `LAYOUT`, by name."""
    packages = map(importlib.import_module, _PACKAGES)
    names = sorted(
        module.name for package in packages for module in pkgutil.iter_modules(package.__path__)
    )
    modules = {name: __getattr__(name) for name in names if name != "contrib"}
    return {name: module for name, module in modules.items() if hasattr(module, attribute)}
