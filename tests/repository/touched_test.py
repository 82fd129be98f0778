"""Tests of the choice of test files by what changed."""

import pytest
from helpers import touched
from helpers.environment import ROOT

TESTS = ROOT / "tests"
FILES = (
    *("verifiers/match_test.py", "decode/contract_test.py", "decode/loop_test.py"),
    *("tree_test.py", "sampling_test.py", "scripts/setup_venv_test.py"),
    *("cli/shipped_configs_test.py", "repository/layering_test.py"),
    *("repository/notebooks_test.py", "decode/recorded_tokens_test.py"),
    *("loading/pretrained_test.py", "serving/serve_test.py", "mutation/mutation_test.py"),
)


def distances(monkeypatch, *changed):
    monkeypatch.setattr(touched, "changed_files", lambda commit: {ROOT / name for name in changed})
    found = touched.distances("", {TESTS / name for name in FILES})
    return {path.relative_to(TESTS).as_posix(): distance for path, distance in found.items()}


def test_changed_module_reaches_nearest_tests_first(monkeypatch):
    found = distances(monkeypatch, "spsjax/verifiers/match.py")
    assert found["verifiers/match_test.py"] == 1
    assert found["decode/contract_test.py"] == 2  # through helpers/drafting.py
    assert found["decode/loop_test.py"] > 1
    assert "repository/layering_test.py" not in found


def test_changed_test_helper_script_and_config_reach_tests(monkeypatch):
    found = distances(monkeypatch, "tests/tree_test.py")
    assert found == {"tree_test.py": 0, "mutation/mutation_test.py": 2}
    assert distances(monkeypatch, "tests/helpers/reference.py")["sampling_test.py"] == 1
    assert distances(monkeypatch, "scripts/setup_venv.sh")["scripts/setup_venv_test.py"] == 1
    assert "cli/shipped_configs_test.py" in distances(monkeypatch, "configs/models/llama.py")
    assert not distances(monkeypatch, "docs/guides/pods.md")


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("notebooks/quickstart.ipynb", "repository/notebooks_test.py"),
        ("tests/golden/tokens.json", "decode/recorded_tokens_test.py"),
        ("spsjax/pretrained/pystdlib/target/tokenizer.model", "loading/pretrained_test.py"),
        ("spsjax/serving/page.html", "serving/serve_test.py"),
        ("tests/decode/keys_test.py", "mutation/mutation_test.py"),
    ],
)
def test_changed_file_of_another_kind_reaches_the_tests_that_read_it(monkeypatch, changed, test):
    assert (ROOT / changed).exists()
    assert test in distances(monkeypatch, changed)


def test_change_of_what_all_tests_share_reaches_all(monkeypatch):
    """They come after those that another change reaches."""
    found = distances(monkeypatch, "tests/conftest.py", "spsjax/verifiers/match.py")
    assert found.keys() == set(FILES)
    assert found["repository/layering_test.py"] == touched.FAR > found["decode/loop_test.py"]


def test_what_is_no_commit_is_refused():
    with pytest.raises(pytest.UsageError, match="--touched-since: expected a commit, found 'x y'"):
        touched.changed_files("x y")
