"""Tasks: prompts, answers and scores."""

import gzip
import json
import os
import pathlib
import tarfile

import pytest
from helpers.bad_input import one_line

from spsjax.data import documents
from spsjax.evaluation.tasks import base, human_eval, spec_bench, stdlib, xsum

DATA = pathlib.Path(os.environ.get("SPSJAX_DATA", ""))


def real(*parts):
    """Returns the path of a dataset, or skips the test if it is missing."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs $SPSJAX_DATA/{'/'.join(parts)}")
    return path


def rows(path, *objects):
    """Writes objects as JSON lines, and returns the path."""
    text = "".join(json.dumps(value) + "\n" for value in objects)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


# Files.


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["empty"]),
        (b'{"a": "x"}\n{', ["line 2", "JSON"]),
        (b'{"a": "x"}\n[]\n', ["line 2", "a", "none"]),
        (b'{"a": "x"}\n{"a": 3}\n', ["line 2", "a: expected str, found int"]),
        (b'{"a": "x"}\n{"b": 3}\n', ["line 2", "found none"]),
        (b'{"a": "\xff"}\n', ["JSON"]),
        (b"\n\n", ["empty"]),
    ],
)
def test_read_rows_of_malformed_line_names_it(tmp_path, content, parts):
    """A malformed line, a missing field and an empty file are errors."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with one_line("rows.jsonl", *parts):
        list(base.read_rows(path, {"a": str}))


def test_read_rows_of_missing_or_damaged_file_is_refused(tmp_path):
    """A missing file and a damaged archive are errors."""
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


def test_xsum_prompt_has_a_solved_example(summaries):
    """The prompt has one solved example before the article."""
    first, second = summaries.examples()
    assert first.turns == (
        "Article: Rain fell. It was wet.\nSummary in one sentence: It rained.\n\n"
        "Article: A dog bit a man\nSummary in one sentence:",
    )
    assert first.name != second.name


def test_xsum_answer_is_scored_by_its_bigrams(summaries):
    """The answer is the first line, and its score the F1 of bigrams."""
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
def test_rouge_2_matches_published_scores(system, published):
    """The scores of the systems of Narayan et al. are those of ROUGE-1.5.5."""
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


def test_human_eval_scores_by_execution(functions):
    """An answer passes if its function passes the tests."""
    (example,) = functions.examples()
    right, wrong = "    return a + b\n", "    return a - b\n"
    texts = [f"{right}\ndef more():\n    pass\n", wrong, right, wrong]
    answers = [functions.answer(example, text) for text in texts]
    assert answers[0].rstrip() == right.rstrip()
    assert functions.scores(example, answers) == {"pass@1": 0.5}


def test_human_eval_tests_may_use_names_of_the_prompt(tmp_path):
    """Tests call helpers of the prompt, and the answer's function by its name."""
    row = SUM | {"prompt": "def one():\n    return 1\n\n\n" + SUM["prompt"]}
    row["test"] = "def check(candidate):\n    assert candidate(one(), 2) == add(2, one()) == 3\n"
    task = human_eval.Task(rows(tmp_path / "h.jsonl.gz", row))
    (example,) = task.examples()
    assert task.scores(example, ["    return a + b\n"]) == {"pass@1": 1.0}
    assert task.scores(example, ["    return a - b\n"]) == {"pass@1": 0.0}


@pytest.mark.parametrize("stop", ["class A:", "def more():", "# more", "if x:", "print(x)"])
def test_human_eval_answer_ends_with_its_function(functions, stop):
    """Text after the function is not part of the answer."""
    (example,) = functions.examples()
    body = "    if a:\n        # a comment\n        print(a)\n    return a + b"
    assert functions.answer(example, f"{body}\n{stop}\n    x = 1") == body


@pytest.mark.parametrize("ks", [(), (0,), ("1",)])
def test_human_eval_with_wrong_ks_is_refused(ks):
    """The values of k are positive integers, at least one."""
    with one_line("ks"):
        human_eval.Task("h.jsonl.gz", ks=ks)


def test_pass_at_k_is_unbiased():
    """pass@k is the probability that one of k of the samples passes."""
    assert human_eval.pass_at(1, 10, 3) == pytest.approx(0.3)
    assert human_eval.pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert human_eval.pass_at(3, 4, 2) == 1 and human_eval.pass_at(5, 9, 0) == 0


@pytest.mark.parametrize("mutated", [False, True])
def test_human_eval_canonical_solutions_pass(mutated):
    """The canonical solutions pass, and mutated ones do not."""
    task = human_eval.Task(str(real("human_eval", "HumanEval.jsonl.gz")))
    for example in list(task.examples())[::8]:
        solution = example.reference["canonical_solution"]
        if mutated:
            solution = f"    return {example.reference['entry_point']!r}\n"
        assert task.scores(example, [solution]) == {"pass@1": float(not mutated)}, example.name


# Spec-Bench.


def test_spec_bench_groups_by_category(tmp_path):
    """Conversations form one group; other categories are groups of their own."""
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


def test_spec_bench_file_has_six_groups():
    """The published file has 480 examples in six groups."""
    path = real("spec_bench", "question.jsonl")
    examples = list(spec_bench.Task(str(path)).examples())
    assert len(examples) == 480 == 6 * 80 and len({example.group for example in examples}) == 6


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


def test_stdlib_prompt_ends_before_the_body(completions):
    """A prompt ends after the docstring, and the body is a perfect answer."""
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


def test_stdlib_scores_of_broken_answers_are_zero(completions):
    """An answer that does not parse, or that has no body, does not count as parsed."""
    plain = next(example for example in completions.examples() if "plain" in example.name)
    scores = completions.scores(plain, ["    z = (x\n"])
    assert scores["parses"] == 0 == scores["next line"] and 0 < scores["similarity"] < 1
    for example in completions.examples():  # a docstring alone would parse
        for text in ("\n", "no body\n"):
            answer = completions.answer(example, text)
            assert completions.scores(example, [answer])["parses"] == 0
    assert completions.scores(plain, ["    z = x\n"])["next line"] == 1


def test_stdlib_examples_are_held_out():
    """All examples are from held-out files, and their bodies parse."""
    examples = list(stdlib.Task(count=20).examples())
    assert len(examples) == 20 == len({example.name for example in examples})
    assert all(documents.is_held_out(example.name.rpartition(":")[0]) for example in examples)
    for example in examples:
        assert stdlib.judge(example, example.reference["body"])["parses"] == 1, example.name


@pytest.mark.parametrize("changes", [{"lines": 0}, {"count": -1}, {"least": "3"}])
def test_stdlib_with_wrong_option_is_refused(changes):
    """Options are integers with lower bounds."""
    with one_line(*changes):
        stdlib.Task(**changes)
