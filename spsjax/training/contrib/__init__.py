"""Trainings that are not `fit` of a task, one per module.

A module has `SECTION`, a key that only its configs have, and a function `train` with the arguments
of `spsjax.training.fit.train`, where the config is a dict.
"""

import importlib
import pkgutil
from types import ModuleType


def by_section() -> dict[str, ModuleType]:
    """Returns the modules by the key that only their configs have."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.SECTION: module for module in modules if hasattr(module, "SECTION")}
