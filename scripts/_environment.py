"""Error message for missing packages, in one line, and the folders of the shipped configs.

Every script imports this module first, so that the message covers all packages.
"""

import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
DRAFTERS, EXPERIMENTS, MODELS = (
    _ROOT / "configs" / name for name in ("drafters", "experiments", "models")
)


def explain(kind, error, traceback) -> None:
    """Prints an uncaught exception, for a missing package in one line; used as `sys.excepthook`."""
    if not issubclass(kind, ModuleNotFoundError):
        sys.__excepthook__(kind, error, traceback)
        return
    text = f"{error.name}: expected an installed package, found none. {remedy()}"
    if isinstance(error, ValueError):  # spsjax.utils.extras.MissingPackage, which names an extra
        text = str(error)
    print(f"error: {text}", file=sys.stderr)


def remedy() -> str:
    """Returns the command that activates the environment or installs the packages."""
    environments = [path for path in _ROOT.glob(".venv*") if (path / "bin" / "python").exists()]
    active = any(pathlib.Path(sys.prefix).is_relative_to(path) for path in environments)
    if environments and not active:
        newest = max(environments, key=lambda path: path.stat().st_mtime)
        return f"Run: source {newest}/bin/activate"
    return f"Run: python -m pip install -e {_ROOT}"


sys.excepthook = explain
