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


@pytest.mark.parametrize(
    ("pythons", "variables", "expected"),
    [
        ({}, {}, "bin/python3.13"),  # the newest one that starts
        ({"versions/3.14.2/bin/python3.14": "3.14"}, {}, "versions/3.14.2/bin/python3.14"),
        ({".venv/bin/python": "3.11"}, {}, ".venv/bin/python"),
        ({".venv/bin/python": ""}, {}, "bin/python3.13"),  # its interpreter is gone
        ({".venv/bin/python": "3.13"}, {"PYTHON": "python3"}, "bin/python3"),
        ({"bin/python3.12": "", "bin/python3.13": ""}, {}, "bin/python3"),
        ({}, {"PYTHON": "python9"}, "PYTHON: expected a Python interpreter, found 'python9'"),
    ],
)
def test_interpreter_is_as_asked_or_that_of_the_environment_or_the_newest(
    tmp_path, pythons, variables, expected
):
    """One that pyenv offers under a name but cannot start does not count."""
    own = {"3.12": "3.12", "3.13": "3.13", "3.14": "", "3": "3.11"}
    own = {f"bin/python{name}": version for name, version in own.items()}
    for path, version in {**own, **pythons}.items():
        make_python(tmp_path / path, version)
    pyenv = tmp_path / "bin" / "pyenv"
    pyenv.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    pyenv.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    functions = SCRIPT.read_text().rpartition("\nsetup_venv ")[0]
    (tmp_path / "scripts" / "setup_venv.sh").write_text(functions)
    command = "set -euo pipefail; source scripts/setup_venv.sh; find_python; echo $PYTHON_PATH"
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=path | variables, capture_output=True, text=True
    )
    chosen = (result.stdout or result.stderr).strip()
    assert chosen.removeprefix("scripts/../").removeprefix(f"{tmp_path}/") == expected
