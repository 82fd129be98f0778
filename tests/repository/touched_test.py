"""Tests of the choice of test files by what changed."""

from helpers import touched
from helpers.environment import ROOT

TESTS = ROOT / "tests"


def distances(monkeypatch, *changed):
    """Returns path below `tests` -> distance, if these files of the repository changed."""
    monkeypatch.setattr(touched, "changed_files", lambda commit: {ROOT / name for name in changed})
    found = touched.distances("", set(TESTS.rglob("*_test.py")))
    return {path.relative_to(TESTS).as_posix(): distance for path, distance in found.items()}


def test_changed_module_reaches_nearest_tests_first(monkeypatch):
    """The test of a module is one import away, the tests of what imports it are further."""
    found = distances(monkeypatch, "spsjax/verifiers/match.py")
    assert found["verifiers/match_test.py"] == 1
    assert found["decode/contract_test.py"] == 2  # through helpers/drafting.py
    assert found["decode/loop_test.py"] > 1
    assert "repository/layering_test.py" not in found


def test_changed_test_helper_script_and_config_reach_tests(monkeypatch):
    assert distances(monkeypatch, "tests/tree_test.py") == {"tree_test.py": 0}
    assert distances(monkeypatch, "tests/helpers/reference.py")["sampling_test.py"] == 1
    assert distances(monkeypatch, "scripts/setup_venv.sh")["scripts/setup_venv_test.py"] == 1
    assert distances(monkeypatch, "configs/models/llama.py")
    assert not distances(monkeypatch, "docs/pods.md")
