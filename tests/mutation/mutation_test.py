"""Tests of the tests: each of the faults of `mutants` makes a test of the gate fail.

Every mutant runs in a process of its own, which forks from one that has imported what is slow to
import (`helpers.mutation_server`). A killing test must fail because something that it asserts does
not hold. A program that cannot be traced any more would prove nothing.
"""

import json
import os
import subprocess
import sys

import mutants
import pytest
from helpers.environment import ROOT

SECONDS = 120  # after which a test is ended
MUTANTS = [
    mutant._replace(tests=[f"tests/{test}" for test in mutant.tests]) for mutant in mutants.MUTANTS
]
TESTS = sorted({test for mutant in MUTANTS for test in mutant.tests})


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def is_of(collected: str, test: str) -> bool:
    """Returns whether a collected test is a listed one, or one of its parameter sets."""
    return collected == test or collected.startswith(f"{test}[")


def test_mutants_fit_the_sources_and_have_names_of_their_own():
    """The text that a mutant changes is there, once."""
    counts = {mutant.fault: text_of(mutant.file).count(mutant.old) for mutant in MUTANTS}
    assert len(counts) == len(MUTANTS)
    assert {fault: count for fault, count in counts.items() if count != 1} == {}
    assert all(mutant.new != mutant.old and mutant.tests for mutant in MUTANTS)


def test_killing_tests_are_tests_of_the_gate(request):
    """A test that gets another name or other parameters gets them in the list of mutants, too."""
    config = request.config
    if config.args != config.getini("testpaths") or config.option.keyword:
        pytest.skip("looks at the tests of a whole run")
    collected = [item.nodeid.partition("@")[0] for item in request.session.items]
    assert [test for test in TESTS if not any(is_of(item, test) for item in collected)] == []


@pytest.fixture(scope="module")
def server():
    """A function that sends a request to a mutation server, and returns its result."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.mutation_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        encoding="utf-8",
    )

    def ask(*arguments, texts, seconds=SECONDS):
        request = {"arguments": arguments, "texts": texts, "seconds": seconds}
        print(json.dumps(request), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait(SECONDS)


@pytest.mark.slow
def test_killing_tests_pass_without_a_mutant(server):
    """The sources are replaced by themselves, so that replacing alone breaks nothing."""
    texts = {mutant.file: text_of(mutant.file) for mutant in MUTANTS}
    result = server(*TESTS, texts=texts, seconds=10 * SECONDS)
    assert result["status"] == 0 and result["unused"] == [], result["output"]
    print(f"{result['seconds']:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutant_is_killed(server, mutant):
    text = text_of(mutant.file).replace(mutant.old, mutant.new)
    for test in mutant.tests:
        result = server(test, texts={mutant.file: text})
        assert not result["ended"], f"{test}: not over after {SECONDS} s"
        assert result["status"] in (0, 1) and result["unused"] == [], result["output"]
        assert result["status"] == 1, f"{test}: passes, although {mutant.fault}"
        assert result["failed"][0]["is_assertion"], result["output"]
        print(f"{test}: {result['failed'][0]['error']} ({result['seconds']:.1f} s)")
