"""Tests of layering: a room imports only from lower floors, and has no import cycle inside."""

import functools
import graphlib

import pytest
from helpers.import_graph import FLOORS, MODULES, PLUG_INS, ROOMS, floor, imports, source_of


@functools.cache
def imports_of(module: str) -> set[str]:
    return imports(source_of(module))


def violations(module: str, imported: set[str]) -> list[str]:
    """Returns the imports of a module that are neither from a lower floor nor from its own room."""
    room = module.partition(".")[0]
    bad = []
    for other in sorted(imported):
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
    assert not violations(module, imports_of(module))


@pytest.mark.parametrize("room", ROOMS)
def test_room_has_no_import_cycle(room):
    inside = [module for module in MODULES if module.partition(".")[0] == room]
    graph = {module: imports_of(module) & {*inside} - {module} for module in inside}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_decode_imports_no_concrete_drafter_or_verifier():
    concrete = {
        module
        for module in MODULES
        if module.startswith(("drafters.", "verifiers.")) and not module.endswith(".base")
    }
    assert not imports_of("decode") & concrete


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("sampling", "from spsjax import decode", ["decode"]),
        ("drafters.ngram", "from spsjax.drafters import none", ["drafters.none"]),
        ("models.caches.dense", "def f():\n    import spsjax.decode", ["decode"]),
        ("decode", "from spsjax.drafters.base import Drafter", []),
    ],
)
def test_violations_finds_forbidden_imports(module, source, expected):
    assert violations(module, imports(source)) == expected
