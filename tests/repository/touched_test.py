"""Tests of the choice of test files by what changed."""

import pytest
from helpers import touched
from helpers.environment import ROOT

TESTS = ROOT / "tests"
FILES = (
    *("verifiers/match_test.py", "decode/contract_test.py", "decode/loop_test.py"),
    *("tree_test.py", "sampling_test.py", "scripts/setup_venv_test.py"),
    *("cli/shipped_configs_test.py", "repository/layering_test.py"),
)


def distances(monkeypatch, *changed):
    """Returns the distances of FILES from these files of the repository, if they changed."""
    monkeypatch.setattr(touched, "changed_files", lambda commit: {ROOT / name for name in changed})
    found = touched.distances("", {TESTS / name for name in FILES})
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
    assert "cli/shipped_configs_test.py" in distances(monkeypatch, "configs/models/llama.py")
    assert not distances(monkeypatch, "docs/pods.md")


def test_change_of_what_all_tests_share_reaches_all(monkeypatch):
    """They come after those that another change reaches."""
    found = distances(monkeypatch, "tests/conftest.py", "spsjax/verifiers/match.py")
    assert found.keys() == set(FILES)
    assert found["repository/layering_test.py"] == touched.FAR > found["decode/loop_test.py"]


def test_what_is_no_commit_is_refused():
    with pytest.raises(pytest.UsageError, match="--touched-since: expected a commit, found 'x y'"):
        touched.changed_files("x y")
