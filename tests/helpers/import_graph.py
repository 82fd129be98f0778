"""Rooms of the package, the floor of each, and the modules that a source text imports."""

import ast
import pathlib

from helpers.environment import ROOT

PACKAGE = ROOT / "spsjax"
# The table: the rooms of each floor. A room is a file or a folder at the top of `spsjax/`.
FLOORS = (
    {"types", "errors"},
    {"utils", "tree"},
    {"parallel"},
    {"sampling"},
    {"models", "verifiers", "tokenization"},
    {"drafters"},
    {"decode", "loading"},
    {"runtime"},
    {"generation", "data", "planning"},
    {"benchmarks", "serving"},
    {"training"},
    {"cli"},
)
# The rooms whose modules import only what they share, never each other.
PLUG_INS = {
    "drafters": (
        "base",
        "shapes",
        "choices",
        "sample",
        "features",
        "foreign",
        "foreign_tables",
        "pairs",
        "parallel",
        "pending",
        "stopping",
        "datastore",
        "folders",
        "pair_folders",
        "gemma4_folders",
        "mtp_folders",
        "eagle3_config",
        "blocks",
        "conditional_blocks",
        "block_folders",
        "block_layers",
        "speculators_folders",
        "vocabulary",
        "contrib.falcon_training",
        "contrib.lstm",
        "contrib.sequences",
    )
}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py" and "pretrained" not in path.parts
)
ROOMS = sorted({module.partition(".")[0] for module in MODULES})


def file_of(module: str) -> pathlib.Path:
    """Returns the file of a module, named without `spsjax.`; "" is the package itself."""
    path = PACKAGE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(module: str) -> str:
    return file_of(module).read_text(encoding="utf-8")


def floor(module: str) -> int:
    room = module.partition(".")[0]
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def imports(source: str) -> set[str]:
    """Returns the modules of spsjax that a source text imports, at any level."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *path = name.split(".")
            if package == "spsjax":
                candidates = [".".join(path[:size]) for size in range(len(path), 0, -1)]
                whole = path[0] if path and path[0] in ROOMS else ""
                imported.add(next((c for c in candidates if c in MODULES), whole))
    return imported
