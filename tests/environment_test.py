"""The scripts outside of their environment: one line with the command that enters it."""

import pathlib
import subprocess
import sys

import pytest

SCRIPTS = sorted((pathlib.Path(__file__).parent.parent / "scripts").glob("[!_]*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_without_packages_is_one_line(path):
    """Without any package (-S), a script says which is missing and what to run."""
    command = [sys.executable, "-S", path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env={})
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "expected an installed package, found none. Run: " in done.stderr


@pytest.mark.parametrize(
    ("folder", "prefix", "remedy"),
    [
        (".venv", "/usr", "source {root}/.venv/bin/activate"),
        (".venv", "{root}/.venv", "python -m pip install -e {root}"),
        ("other", "/usr", "python -m pip install -e {root}"),
    ],
)
def test_remedy_activates_or_installs(monkeypatch, tmp_path, folder, prefix, remedy):
    """An environment that is there is activated; into an active one the package is installed."""
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    import _environment

    (tmp_path / folder).mkdir()
    monkeypatch.setattr(_environment, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", prefix.format(root=tmp_path))
    assert _environment.remedy() == "Run: " + remedy.format(root=tmp_path)
