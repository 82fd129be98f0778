"""Test files that a change touches, by the imports between modules, scripts and test helpers."""

import collections
import functools
import pathlib
import re
import subprocess

import pytest
from helpers import import_graph
from helpers.environment import ROOT

# A change of these may change the result of any test.
COMMON = "setup.py", "pyproject.toml", "tests/conftest.py", "tests/helpers/environment.py"
FAR = 100
DATA = "golden", "notebooks", "pretrained"  # folders of files that a module reads


def distances(commit: str, tests: set[pathlib.Path]) -> dict[pathlib.Path, int]:
    """Returns how many imports lie between each test file and a file that changed.

    0 is a test file that changed itself. Files that reach no change are left out; after a change
    of a file of COMMON they are FAR away.

    Args:
        commit: commit since which files changed; those that are not committed count, too, and new
            ones.
        tests: test files.
    """
    changed = changed_files(commit)
    result = dict.fromkeys(tests, FAR) if changed & {ROOT / name for name in COMMON} else {}
    for test in tests:
        seen, queue = {test}, collections.deque([(test, 0)])
        while queue:
            path, distance = queue.popleft()
            if path in changed:
                result[test] = distance
                break
            for other in files_of(path) - seen:
                seen.add(other)
                queue.append((other, distance + 1))
    return result


def changed_files(commit: str) -> set[pathlib.Path]:
    """Returns the files that changed since a commit; raises UsageError if git does not know it."""
    names = []
    for command in (
        ("diff", "--name-only", "--no-renames", commit, "--"),
        ("ls-files", "--others", "--exclude-standard"),
    ):
        result = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            found = (result.stderr.strip() or "no answer of git").splitlines()[0]
            raise pytest.UsageError(
                f"--touched-since: expected a commit, found {commit!r} ({found})"
            )
        names += result.stdout.splitlines()
    return {ROOT / name for name in names}


@functools.cache
def files_of(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """Returns the files of the repository that a Python file imports, runs or reads by name."""
    if path.suffix != ".py" or not path.exists():
        return frozenset()
    source = path.read_text(encoding="utf-8")
    files = {import_graph.file_of(module) for module in import_graph.imports(source)}
    for helper in re.findall(r"^from helpers(?:\.(\w+))? import (.*)$", source, re.MULTILINE):
        names = [helper[0]] if helper[0] else re.findall(r"\w+", helper[1])
        files |= {ROOT / "tests" / "helpers" / f"{name}.py" for name in names}
    # Tests of mutants depend on the files that they change, and on the tests that they run.
    named = {*re.findall(r'(?:"|^)([\w/]+\.py)(?:"|$)', source, re.M)} - {"__init__.py"}
    files |= {ROOT / "spsjax" / name for name in named}
    files |= {ROOT / "tests" / name for name in re.findall(r"([\w/]+_test\.py)::", source)}
    files |= {path.with_name(f"{name}.py") for name in re.findall(r"^import (\w+)$", source, re.M)}
    files |= {ROOT / "scripts" / name for name in re.findall(r'"(\w+\.(?:py|sh))"', source)}
    files |= set(ROOT.glob("configs/**/*.py")) if "get_config" in source else set()
    files |= {path.with_name(name) for name in re.findall(r'"(\w+\.html)"', source)}
    for folder in [name for name in DATA if f'"{name}"' in source]:
        places = ROOT, ROOT / "tests", path.parent.parent
        files |= {file for place in places for file in (place / folder).rglob("*")}
    return frozenset(file for file in files if file.exists())
