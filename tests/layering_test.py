"""Tests of layering: a room imports only from lower floors, and has no import cycle inside."""

import ast
import graphlib
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "spsjax"
# The table: the rooms of each floor. A room is a file or a folder at the top of `spsjax/`.
FLOORS = (
    {"types", "errors"},
    {"utils", "tree", "draft_shapes", "pacing"},
    {"parallel"},
    {"sampling", "caches"},
    {"models", "verifiers", "tokenization", "growth"},
    {"drafters"},
    {"scoring", "loading"},
    {"decode"},
    {"request"},
    {"execution", "rounds"},
    {"generation", "engine", "data", "performance"},
    {"training", "evaluation", "serving"},
    {"cli"},
)
# The rooms whose modules import only what they share, never each other.
PLUG_INS = {
    "drafters": (
        "base",
        "features",
        "pairs",
        "states",
        "stopping",
        "learned_stopping",
        "waiting",
        "datastore",
    )
}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py" and "pretrained" not in path.parts
)
ROOMS = sorted({module.partition(".")[0] for module in MODULES})


def source_of(module: str) -> str:
    path = PACKAGE / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


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
                imported.add(next((c for c in candidates if c in MODULES), path[0]))
    return imported


def violations(module: str, source: str) -> list[str]:
    """Returns the imports of a module that are neither from a lower floor nor from its own room."""
    room = module.partition(".")[0]
    bad = []
    for other in sorted(imports(source)):
        if other.partition(".")[0] != room:
            allowed = floor(other) < floor(module)
        else:
            allowed = room not in PLUG_INS or other in {
                room,
                *(f"{room}.{name}" for name in PLUG_INS[room]),
            }
        if not allowed:
            bad.append(other)
    return bad


def test_every_room_is_in_the_table():
    assert set(ROOMS) <= set().union(*FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_lower_floors(module):
    assert not violations(module, source_of(module))


@pytest.mark.parametrize("room", ROOMS)
def test_room_has_no_import_cycle(room):
    inside = [module for module in MODULES if module.partition(".")[0] == room]
    graph = {module: imports(source_of(module)) & {*inside} - {module} for module in inside}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_decode_imports_no_concrete_drafter_or_verifier():
    concrete = {
        module
        for module in MODULES
        if module.startswith(("drafters.", "verifiers.")) and not module.endswith(".base")
    }
    assert not imports(source_of("decode")) & concrete


def test_violations_finds_forbidden_imports():
    assert violations("sampling", "from spsjax import decode") == ["decode"]
    assert violations("drafters.ngram", "from spsjax.drafters import none") == ["drafters.none"]
    assert violations("caches.dense", "def f():\n    import spsjax.decode") == ["decode"]
    assert violations("decode", "from spsjax.drafters.base import Drafter") == []
