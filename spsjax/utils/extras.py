"""Optional packages, which the extras of this package install: `pip install 'spsjax[train]'`.

A room that needs an extra as a whole calls `require` in its `__init__`. Other modules import an
optional package in a block `with needed(extra):`. `tests/repository/packages_test.py` compares both
with setup.py.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

from spsjax.errors import InputError

NO_PLOT = "matplotlib is not installed. Run: pip install 'spsjax[plots]'"  # a reason, for notes


class MissingPackage(InputError, ModuleNotFoundError):
    """An optional package that is not installed. The message names the extra that installs it."""

    def __init__(self, extra: str, modules: Sequence[str]):
        package = "an installed package" if len(modules) == 1 else "installed packages"
        super().__init__(
            f"{', '.join(modules)}: expected {package}, found none. "
            f"Run: pip install 'spsjax[{extra}]'"
        )


def installed(module: str) -> bool:
    """Returns whether a module of another package is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain it
        return False


def require(extra: str, *modules: str) -> None:
    """Raises MissingPackage unless the modules, which an extra installs, are there."""
    missing = [module for module in modules if not installed(module)]
    if missing:
        raise MissingPackage(extra, missing)


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Imports what an extra installs: in the block, a missing package is a MissingPackage."""
    try:
        yield
    except MissingPackage:
        raise
    except ModuleNotFoundError as error:
        raise MissingPackage(extra, [error.name or "?"]) from None
