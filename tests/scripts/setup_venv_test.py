"""Which interpreter scripts/setup_venv.sh takes: no environment is made here."""

import pathlib
import subprocess

import pytest
from helpers.environment import ROOT

pytestmark = pytest.mark.process  # of bash

SCRIPT = ROOT / "scripts" / "setup_venv.sh"
INTERPRETER = """#!/bin/sh
case "$2" in
  *executable*) echo "{version} $0" ;;
  *print*) echo "{version}" ;;
esac
"""


def make_python(path: pathlib.Path, version: str) -> pathlib.Path:
    """Writes a program that answers the script's questions as this version of Python would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(INTERPRETER.format(version=version) if version else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)
    return path


def chosen(root: pathlib.Path, **variables) -> str:
    """Returns the path that `find_python` finds, or its message, in a repository at `root`."""
    (root / "scripts").mkdir()
    functions = SCRIPT.read_text().rpartition("\nsetup_venv ")[0]
    (root / "scripts" / "setup_venv.sh").write_text(functions)
    command = "set -euo pipefail; source scripts/setup_venv.sh; find_python; echo $PYTHON_PATH"
    path = f"{root}/bin:/usr/bin:/bin"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=root,
        env={"PATH": path} | variables,
        capture_output=True,
        text=True,
    )
    return (result.stdout or result.stderr).strip()


@pytest.fixture(autouse=True)
def newest_pythons(tmp_path):
    """Two interpreters, and one that pyenv offers under a name but cannot start."""
    make_python(tmp_path / "bin" / "python3.12", "3.12")
    make_python(tmp_path / "bin" / "python3.13", "3.13")
    make_python(tmp_path / "bin" / "python3.14", "")
    make_python(tmp_path / "bin" / "python3", "3.11")


def test_the_newest_interpreter_that_starts_is_taken(tmp_path):
    assert chosen(tmp_path) == f"{tmp_path}/bin/python3.13"


def test_pyenv_interpreters_count(tmp_path):
    newest = make_python(tmp_path / "versions" / "3.14.2" / "bin" / "python3.14", "3.14")
    pyenv = tmp_path / "bin" / "pyenv"
    pyenv.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    pyenv.chmod(0o755)
    assert chosen(tmp_path) == str(newest)


def test_an_existing_environment_keeps_its_interpreter(tmp_path):
    make_python(tmp_path / ".venv" / "bin" / "python", "3.11")
    assert chosen(tmp_path).endswith(".venv/bin/python")


def test_an_environment_whose_interpreter_is_gone_does_not_count(tmp_path):
    make_python(tmp_path / ".venv" / "bin" / "python", "")
    assert chosen(tmp_path) == f"{tmp_path}/bin/python3.13"


def test_variable_chooses_before_anything_else(tmp_path):
    make_python(tmp_path / ".venv" / "bin" / "python", "3.13")
    assert chosen(tmp_path, PYTHON="python3") == f"{tmp_path}/bin/python3"


def test_unknown_interpreter_is_one_line(tmp_path):
    expected = "PYTHON: expected a Python interpreter, found 'python9'"
    assert chosen(tmp_path, PYTHON="python9") == expected


def test_python3_is_taken_where_no_newer_one_starts(tmp_path):
    for version in ("3.12", "3.13"):
        (tmp_path / "bin" / f"python{version}").unlink()
    for name in ("python3.12", "python3.13"):
        if pathlib.Path("/usr/bin", name).exists():
            pytest.skip(f"{name} is in /usr/bin")
    assert chosen(tmp_path) == f"{tmp_path}/bin/python3"
