"""One line for a package that is missing. Every script imports this module before any package."""

import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def explain(kind, error, traceback) -> None:
    """Prints an uncaught exception, as `sys.excepthook`; a missing package becomes one line."""
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, traceback)
        return
    text = f"error: {error.name}: expected an installed package, found none. {remedy()}"
    print(text, file=sys.stderr)


def remedy() -> str:
    """Returns the command that enters the environment, or the one that installs the package."""
    environment = _ROOT / ".venv"
    if environment.is_dir() and not pathlib.Path(sys.prefix).is_relative_to(environment):
        return f"Run: source {environment}/bin/activate"
    return f"Run: python -m pip install -e {_ROOT}"


sys.excepthook = explain
