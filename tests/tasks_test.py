"""Tasks: what is asked, what is taken for the answer, and what it is worth."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import time

import pytest
from bad_input import one_line

from spsjax.data import documents
from spsjax.evaluation.tasks import base, human_eval, sandbox, spec_bench, stdlib, xsum

DATA = pathlib.Path(os.environ.get("SPSJAX_DATA", ""))


def real(*parts):
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs $SPSJAX_DATA/{'/'.join(parts)}")
    return path


def rows(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


# Files.


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["empty"]),
        (b"{", ["line 1", "JSON"]),
        (b'{"a": "x"}\n[]\n', ["line 2", "a", "none"]),
        (b'{"a": "x"}\n{"a": 3}\n', ["line 2", "a: expected str, found int"]),
        (b'{"a": "x"}\n{"b": 3}\n', ["line 2", "found none"]),
        (b'{"a": "\xff"}\n', ["JSON"]),
        (b"\n\n", ["empty"]),
    ],
)
def test_a_file_that_is_not_as_it_should_be(tmp_path, content, parts):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with one_line("rows.jsonl", *parts):
        list(base.read_rows(path, {"a": str}))


def test_a_file_that_is_not_there_or_cut_off(tmp_path):
    with one_line("nosuch.jsonl"):
        list(base.read_rows(tmp_path / "nosuch.jsonl", {}))
    path = tmp_path / "rows.jsonl.gz"
    rows(path, *({"a": str(number)} for number in range(1000)))
    whole = path.read_bytes()
    for raw in (whole[:-20], whole[:30] + b"\xff" * 30 + whole[60:]):
        path.write_bytes(raw)
        with one_line("rows.jsonl.gz"):
            list(base.read_rows(path, {"a": str}))


# XSum.


@pytest.fixture
def summaries(tmp_path):
    shot = {"document": "Rain fell.\nIt was wet.", "summary": "It rained."}
    row = {"document": "A dog bit a man in the park on Monday.", "summary": "A dog bit a man."}
    paths = rows(tmp_path / "xsum.jsonl", row, row), rows(tmp_path / "shots.jsonl", shot)
    return xsum.Task(*paths, words=5)


def test_xsum_s_prompt_solves_one_example_first(summaries):
    first, second = summaries.examples()
    assert first.turns == (
        "Article: Rain fell. It was wet.\nSummary in one sentence: It rained.\n\n"
        "Article: A dog bit a man\nSummary in one sentence:",
    )
    assert first.name != second.name


def test_xsum_s_answer_is_a_line_and_scored_by_its_bigrams(summaries):
    example = next(summaries.examples())
    assert summaries.answer(example, " A dog.\n\nArticle: more") == "A dog."
    assert summaries.scores(example, ["A dog bit a man."]) == {"ROUGE-2": 1.0}
    # "a dog", "dog bit", "bit a", "a man" against "a dog", "dog ran": 1 / 2 and 1 / 4.
    assert summaries.scores(example, ["a dog ran"])["ROUGE-2"] == pytest.approx(1 / 3)
    assert summaries.scores(example, ["", "A dog bit a man."])["ROUGE-2"] == 0.5


@pytest.mark.parametrize(
    ("system", "published"),
    [
        ("lead", 1.60),
        ("ext-oracle", 8.81),
        ("ptgen", 9.21),
        ("convs2s", 11.07),
        ("topic-convs2s", 11.54),
    ],
)
def test_rouge_is_that_of_the_published_scores(system, published):
    """ROUGE-1.5.5's, of the outputs of Narayan et al.'s systems."""
    path = real("xsum", "xsum-model-predictions.tar.gz")
    with tarfile.open(path) as files:
        gold, out = (
            files.extractfile(f"xsum-model-predictions/{name}.txt").read().decode().splitlines()
            for name in ("gold-test-sentences", f"{system}-test-output")
        )
    scores = [xsum.rouge_2(*pair) for pair in zip(gold, out, strict=True)]
    assert 100 * sum(scores) / len(scores) == pytest.approx(published, abs=0.1)


# HumanEval.

SUM = {
    "task_id": "T/0",
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


@pytest.fixture
def functions(tmp_path):
    return human_eval.Task(rows(tmp_path / "h.jsonl.gz", SUM))


def test_human_eval_runs_what_was_written(functions):
    (example,) = functions.examples()
    right, wrong = "    return a + b\n", "    return a - b\n"
    texts = [f"{right}\ndef more():\n    pass\n", wrong, right, wrong]
    answers = [functions.answer(example, text) for text in texts]
    assert answers[0].rstrip() == right.rstrip()
    assert functions.scores(example, answers) == {"pass@1": 0.5}


@pytest.mark.parametrize("stop", ["class A:", "def more():", "# more", "if x:", "print(x)"])
def test_human_eval_s_answer_ends_with_its_function(functions, stop):
    (example,) = functions.examples()
    body = "    if a:\n        # a comment\n        print(a)\n    return a + b"
    assert functions.answer(example, f"{body}\n{stop}\n    x = 1") == body


@pytest.mark.parametrize("ks", [(), (0,), ("1",)])
def test_pass_at_what(ks):
    with one_line("ks"):
        human_eval.Task("h.jsonl.gz", ks=ks)


def test_pass_at_k_is_the_chance_of_one_right_among_k():
    assert human_eval.pass_at(1, 10, 3) == pytest.approx(0.3)
    assert human_eval.pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert human_eval.pass_at(3, 4, 2) == 1 and human_eval.pass_at(5, 9, 0) == 0


@pytest.mark.parametrize("mutated", [False, True])
def test_canonical_solutions_pass_and_mutated_ones_do_not(mutated):
    task = human_eval.Task(str(real("human_eval", "HumanEval.jsonl.gz")))
    for example in list(task.examples())[::8]:
        solution = example.reference["canonical_solution"]
        if mutated:
            solution = f"    return {example.reference['entry_point']!r}\n"
        assert task.scores(example, [solution]) == {"pass@1": float(not mutated)}, example.name


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "more than"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import sys; sys.exit(0)", "exit code 0"),
        ("raise SystemExit", "exit code 0"),
        ("print('x' * 10**6)\nassert False, 'no'", "no"),
        ("open('/etc/spsjax', 'w')", "not allowed"),
        ("import os; os.open('/tmp/spsjax', os.O_CREAT | os.O_WRONLY)", "not allowed"),
        ("import os; os.remove('/etc/hostname')", "not allowed"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "not allowed"),
        ("import subprocess; subprocess.run(['true'])", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("import os; os.fork()", "not allowed"),
        ("open('big', 'wb').write(b'x' * 10**7)", "File too large"),
        ("def f(", "SyntaxError"),
        ("x = '\\ud800'\nraise ValueError(x)", "ValueError"),
        ("f = lambda: f()\nf()", "Recursion"),
        ("import os; os.write(1, b'passed')\nassert 0", "AssertionError"),
        ("import os; os.rename('/etc/hostname', 'x')", "not allowed"),
        ("import os; os.remove('hostname', dir_fd=os.open('/etc', os.O_RDONLY))", "not allowed"),
        ("import os; os.mkfifo('x')", "not allowed"),
        ("import sqlite3; sqlite3.connect('/tmp/spsjax.db')", "not allowed"),
        (
            "from multiprocessing import util; util.spawnv_passfds(b'/bin/true', [], [])",
            "not allow",
        ),
        ("import sys\nwhile True: sys.stderr.write('x' * 10**6)", "xxx"),
        ("import sys\nassert hasattr(sys.modules['__main__'], 'word')", "AssertionError"),
        ("", None),
        ("import numpy; assert numpy.ones(3).sum() == 3", None),
        (
            "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n"
            "    os.rename(open(folder + '/x', 'w').name, folder + '/y')",
            None,
        ),
        ("import math, re, collections; assert math.pi > 3", None),
        ("open('x', 'w').write('fine'); assert open('x').read() == 'fine'", None),
        ("assert input is not None; import sys; assert sys.stdin.read() == ''", None),
    ],
)
def test_a_program_is_kept_within_its_limits(program, reason):
    start = time.perf_counter()
    outcome = sandbox.run(program, sandbox.Limits(seconds=2.0, megabytes=512))
    assert time.perf_counter() - start < 20
    assert outcome.passed == (reason is None)
    assert (reason or "") in outcome.reason, outcome.reason


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_program_whose_parent_was_killed_ends(tmp_path):
    mark = tmp_path / "alive"
    program = "import time\nwhile True: time.sleep(0.05)"
    parent = f"""
import pathlib, subprocess
from spsjax.tasks import sandbox
real = subprocess.Popen
def started(*args, **options):
    child = real(*args, **options)
    pathlib.Path({str(mark)!r}).write_text(str(child.pid))
    return child
subprocess.Popen = started
sandbox.run({program!r}, sandbox.Limits(seconds=1.0))
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    while not mark.exists() or not mark.read_text():
        time.sleep(0.02)
    process.kill()
    process.wait()
    child = pathlib.Path("/proc") / mark.read_text()
    for _ in range(100):
        if not child.exists() or "(zombie)" in (child / "status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child goes on")


# Spec-Bench.


def test_spec_bench_has_six_groups(tmp_path):
    path = rows(
        tmp_path / "q.jsonl",
        {"question_id": 1, "category": "writing", "turns": ["Hi", "Again"]},
        {"question_id": 2, "category": "qa", "turns": ["Who?"]},
    )
    first, second = spec_bench.Task(path).examples()
    assert (first.group, first.turns) == ("multi-turn conversation", ("Hi", "Again"))
    assert (second.group, second.name) == ("qa", "2")
    bad = rows(tmp_path / "bad.jsonl", {"question_id": 1, "category": "qa", "turns": [""]})
    with one_line("bad.jsonl, line 1", "turns"):
        list(spec_bench.Task(bad).examples())


def test_spec_bench_as_it_is():
    path = real("spec_bench", "question.jsonl")
    examples = list(spec_bench.Task(str(path)).examples())
    assert len(examples) == 480 == 6 * 80 and len({each.group for each in examples}) == 6


# The standard library.

CODE = '''import os


class Reader:
    @property
    def size(self, more=(1,
                         2)):
        """How large
        it is."""
        if more:
            return 1

        return os.path.getsize(
            self.path)

    def short(self): return 1


def plain(x,
          y):
    z = x
    z += y
    return z
'''


@pytest.fixture
def completions(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "other.py").write_text("def f(:\n")
    sources = documents.Sources((str(tmp_path),), (str(tmp_path),))
    return stdlib.Task(sources, lines=5, count=0)


def test_a_completion_begins_after_a_docstring(completions):
    size, plain = sorted(completions.examples(), key=lambda example: -len(example.turns[0]))
    assert size.turns[0].endswith('it is."""\n') and size.turns[0].count("\n") == 5
    assert plain.turns[0].endswith("def plain(x,\n          y):\n")
    assert size.reference["body"] == "".join(CODE.splitlines(keepends=True)[9:14])
    for example in (size, plain):
        body = example.reference["body"]
        assert completions.scores(example, [body]) == {
            "parses": 1, "next line": 1, "similarity": 1,
        }  # fmt: skip
        assert completions.answer(example, f"{body}\n\nx = 1\n").rstrip() == body.rstrip()


def test_what_does_not_parse_or_is_nothing(completions):
    plain = next(each for each in completions.examples() if "plain" in each.name)
    scores = completions.scores(plain, ["    z = (x\n"])
    assert scores["parses"] == 0 == scores["next line"] and 0 < scores["similarity"] < 1
    for example in completions.examples():  # a docstring alone would parse
        for text in ("\n", "no body\n"):
            answer = completions.answer(example, text)
            assert completions.scores(example, [answer])["parses"] == 0
    assert completions.scores(plain, ["    z = x\n"])["next line"] == 1


def test_held_out_files_alone_are_asked_for():
    examples = list(stdlib.Task(count=20).examples())
    assert len(examples) == 20 == len({each.name for each in examples})
    assert all(documents.is_held_out(each.name.rpartition(":")[0]) for each in examples)
    for example in examples:
        assert stdlib.judge(example, example.reference["body"])["parses"] == 1, example.name


@pytest.mark.parametrize("changes", [{"lines": 0}, {"count": -1}, {"least": "3"}])
def test_an_option_that_cannot_be(changes):
    with one_line(*changes):
        stdlib.Task(**changes)
