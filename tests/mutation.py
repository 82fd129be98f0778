"""Mutation testing with hand-written faults. pytest does not collect this file.

    python tests/mutation.py [WORD ...]

A mutant is one small fault in one file, with the tests that must fail because of it
(`mutation_list`). Every mutant is applied alone, in a copy of the repository, and is *killed* if
its tests fail. The tests must pass without a mutant. With words, only mutants run whose file or
texts contain one of them. The exit status is 1 if a mutant survived.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import mutation_list

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 600  # after which a run of tests counts as failed: a mutant may loop forever


def passes(copy: pathlib.Path, tests: str) -> bool:
    """Returns whether tests pass in a copy of the repository.

    Raises RuntimeError if no test ran.
    """
    file, *options = tests.split(maxsplit=2)  # what follows -k may have spaces
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    try:
        done = subprocess.run(
            [*command, f"tests/{file}_test.py", *options],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=SECONDS,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):  # no test selected, or wrong options
        raise RuntimeError(f"{tests}: no test ran\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def survives(copy: pathlib.Path, mutant: mutation_list.Mutant) -> bool:
    """Returns whether the tests pass with the mutant, and takes it back."""
    path = copy / "spsjax" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise RuntimeError(
            f"{mutant.file}: expected {mutant.old!r} once, found it {text.count(mutant.old)} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return passes(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def main(words: list[str]) -> int:
    mutants = [
        mutant
        for mutant in mutation_list.MUTANTS
        if not words or any(word in " ".join(mutant) for word in words)
    ]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        for tests in sorted({mutant.tests for mutant in mutants}):
            if not passes(copy, tests):
                raise RuntimeError(f"{tests}: fails without a mutant")
        for mutant in mutants:
            survived = survives(copy, mutant)
            survivors += survived
            verdict = "SURVIVED" if survived else "killed"
            print(f"{verdict:8}  {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
