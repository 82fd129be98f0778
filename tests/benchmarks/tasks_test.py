"""Tasks: prompts, answers and scores."""

import gzip
import json
import os
import pathlib
import re
import tarfile

import pytest
from helpers.bad_input import one_line

from spsjax import InputError
from spsjax.benchmarks.tasks import base, edit, human_eval, spec_bench, stdlib, xsum
from spsjax.data import documents

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


def test_read_rows_of_malformed_line_names_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    for content, parts in (
        (b"\n\n", ["empty"]),
        (b'{"a": "x"}\n{', ["line 2", "JSON"]),
        (b'{"a": "x"}\n{"a": 3}\n', ["line 2", "a: expected str, found int"]),
        (b'{"a": "x"}\n[]\n', ["line 2", "a", "none"]),
        (b'{"a": "x"}\n{"a": "\xff"}\n', ["line 2", "JSON"]),
    ):
        path.write_bytes(content)
        with one_line("rows.jsonl", *parts):
            list(base.read_rows(path, {"a": str}))
    with one_line("nosuch.jsonl"):
        list(base.read_rows(tmp_path / "nosuch.jsonl", {}))


def test_read_rows_of_damaged_archive_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    rows(path, *({"a": str(number)} for number in range(1000)))
    whole = path.read_bytes()
    for raw in (whole[:-20], whole[:30] + b"\xff" * 30 + whole[60:]):
        path.write_bytes(raw)
        with one_line("rows.jsonl.gz"):
            list(base.read_rows(path, {"a": str}))


def test_xsum_prompt_has_an_example_and_bigrams_score_the_answer(tmp_path):
    shot = {"document": "Rain fell.\nIt was wet.", "summary": "It rained."}
    row = {"document": "A dog bit a man in the park on Monday.", "summary": "A dog bit a man."}
    paths = rows(tmp_path / "xsum.jsonl", row, row), rows(tmp_path / "shots.jsonl", shot)
    summaries = xsum.Task(*paths, words=5)
    example, second = summaries.examples()
    assert example.turns == (
        "Article: Rain fell. It was wet.\nSummary in one sentence: It rained.\n\n"
        "Article: A dog bit a man\nSummary in one sentence:",
    )
    assert example.name != second.name
    assert summaries.answer(example, " A dog.\n\nArticle: more") == "A dog."
    assert summaries.scores(example, ["A dog bit a man."]) == {"ROUGE-2": 1.0}
    # "a dog", "dog bit", "bit a", "a man" against "a dog", "dog ran": 1 / 2 and 1 / 4.
    assert summaries.scores(example, ["a dog ran"])["ROUGE-2"] == pytest.approx(1 / 3)
    assert summaries.scores(example, ["", "A dog bit a man."])["ROUGE-2"] == 0.5


PUBLISHED = {"lead": 1.60, "ext-oracle": 8.81, "ptgen": 9.21, "convs2s": 11.07}


@pytest.mark.parametrize(("system", "published"), PUBLISHED.items())
def test_rouge_2_matches_published_scores(system, published):
    path = real("xsum", "xsum-model-predictions.tar.gz")
    with tarfile.open(path) as files:
        gold, out = (
            files.extractfile(f"xsum-model-predictions/{name}.txt").read().decode().splitlines()
            for name in ("gold-test-sentences", f"{system}-test-output")
        )
    scores = [xsum.rouge_2(*pair) for pair in zip(gold, out, strict=True)]
    assert 100 * sum(scores) / len(scores) == pytest.approx(published, abs=0.1)


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
    (example,) = functions.examples()
    right, wrong = "    return a + b\n", "    return a - b\n"
    texts = [f"{right}\ndef more():\n    pass\n", wrong, right, wrong]
    answers = [functions.answer(example, text) for text in texts]
    assert answers[0].rstrip() == right.rstrip()
    assert functions.scores(example, answers) == {"pass@1": 0.5}


def test_human_eval_tests_may_use_names_of_the_prompt(tmp_path):
    row = SUM | {"prompt": "def one():\n    return 1\n\n\n" + SUM["prompt"]}
    row["test"] = "def check(candidate):\n    assert candidate(one(), 2) == add(2, one()) == 3\n"
    task = human_eval.Task(rows(tmp_path / "h.jsonl.gz", row))
    (example,) = task.examples()
    assert task.scores(example, ["    return a + b\n"]) == {"pass@1": 1.0}
    assert task.scores(example, ["    return a - b\n"]) == {"pass@1": 0.0}


@pytest.mark.parametrize("stop", ["class A:", "def more():", "# more", "if x:", "print(x)"])
def test_human_eval_answer_ends_with_its_function(functions, stop):
    (example,) = functions.examples()
    body = "    if a:\n        # a comment\n        print(a)\n    return a + b"
    assert functions.answer(example, f"{body}\n{stop}\n    x = 1") == body


def test_pass_at_k_is_unbiased():
    assert human_eval.pass_at(1, 10, 3) == pytest.approx(0.3)
    assert human_eval.pass_at(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert human_eval.pass_at(3, 4, 2) == 1 and human_eval.pass_at(5, 9, 0) == 0


@pytest.mark.parametrize("mutated", [False, True])
def test_human_eval_canonical_solutions_pass(mutated):
    task = human_eval.Task(str(real("human_eval", "HumanEval.jsonl.gz")))
    for example in list(task.examples())[::8]:
        solution = example.reference["canonical_solution"]
        if mutated:
            solution = f"    return {example.reference['entry_point']!r}\n"
        assert task.scores(example, [solution]) == {"pass@1": float(not mutated)}, example.name


def test_spec_bench_groups_by_category(tmp_path):
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
    path = real("spec_bench", "question.jsonl")
    examples = list(spec_bench.Task(str(path)).examples())
    assert len(examples) == 480 == 6 * 80 and len({example.group for example in examples}) == 6


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
    size, plain = sorted(completions.examples(), key=lambda example: -len(example.turns[0]))
    assert size.turns[0].endswith('it is."""\n') and size.turns[0].count("\n") == 5
    assert plain.turns[0].endswith("def plain(x,\n          y):\n")
    assert size.reference["body"] == "".join(CODE.splitlines(keepends=True)[9:14])
    for example in (size, plain):
        body = example.reference["body"]
        perfect = {"parses": 1, "next line": 1, "similarity": 1}
        assert completions.scores(example, [body]) == perfect
        assert completions.answer(example, f"{body}\n\nx = 1\n").rstrip() == body.rstrip()


def test_stdlib_scores_of_broken_answers_are_zero(completions):
    plain = next(example for example in completions.examples() if "plain" in example.name)
    scores = completions.scores(plain, ["    z = (x\n"])
    assert scores["parses"] == 0 == scores["next line"] and 0 < scores["similarity"] < 1
    for example in completions.examples():  # a docstring alone would parse
        for text in ("\n", "no body\n"):
            answer = completions.answer(example, text)
            assert completions.scores(example, [answer])["parses"] == 0
    assert completions.scores(plain, ["    z = x\n"])["next line"] == 1


def test_stdlib_examples_are_held_out():
    examples = list(stdlib.Task(count=20).examples())
    assert len(examples) == 20 == len({example.name for example in examples})
    assert all(documents.is_held_out(example.name.rpartition(":")[0]) for example in examples)
    for example in examples:
        assert stdlib.answer_scores(example, example.reference["body"])["parses"] == 1, example.name


@pytest.mark.parametrize(
    ("task", "options"),
    [(stdlib, {"lines": 0}), (stdlib, {"least": "3"}), (human_eval, {"ks": (), "path": "h"})],
)
def test_task_with_a_wrong_option_is_refused(task, options):
    with one_line(next(iter(options))):
        task.Task(**options)


TEXT = "".join(f"def number_{i}(argument):\n    return argument + {i}\n" for i in range(40))


def test_a_passage_has_one_typo_and_is_whole_lines():
    document = documents.Document("a.py", "a.py", TEXT)
    found = list(edit.edits(document, 120))
    assert "".join(fixed for _, _, fixed in found) == TEXT
    for name, broken, fixed in found:
        assert len(fixed) <= 120 and fixed.endswith("\n")
        first, second = [i for i, pair in enumerate(zip(broken, fixed)) if pair[0] != pair[1]]
        assert second == first + 1 and len(broken) == len(fixed)
        assert broken[first : first + 2] == fixed[first : first + 2][::-1]
        assert fixed[first - 1].isalpha() or fixed[first - 1] == "_"
        assert edit.with_typo(fixed, name) == broken  # and the same again
    assert edit.with_typo("a = 1\nbb = zzzzz\n", "name") is None  # no word is long enough


def test_shuffled_words_are_the_same_words_in_the_same_places():
    other = edit.with_shuffled_words(TEXT, "name")
    assert other != TEXT and other == edit.with_shuffled_words(TEXT, "name")
    words, gaps = re.compile(r"\w+"), re.compile(r"\W+")
    assert sorted(words.findall(other)) == sorted(words.findall(TEXT))
    assert gaps.findall(other) == gaps.findall(TEXT)


def test_examples_are_of_held_out_files_and_scored_by_the_whole_text(tmp_path):
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(TEXT, encoding="utf-8")
    sources = documents.Sources((str(tmp_path),))
    task = edit.Task(sources, characters=200, count=3)
    examples = list(task.examples())
    held_out = documents.held_out_names(sources)
    assert len(examples) == 3
    for example in examples:
        assert example.name.partition(":")[0] in held_out
        text = example.reference["text"]
        broken = example.turns[0].removesuffix(edit.MARK)
        assert task.scores(example, [text, f"{text.rstrip()}\n\n"]) == {"exact": 1.0}
        assert task.scores(example, [text, broken]) == {"exact": 0.5}
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "x.py").write_text("a = 1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"^sources: expected held-out files with words"):
        list(edit.Task(documents.Sources((str(tmp_path / "short"),))).examples())


@pytest.mark.slow
def test_training_texts_are_not_held_out(tmp_path):
    path = tmp_path / "edits.jsonl"
    edit.write_training_texts(path, 4000)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(texts) > 100
    written = {line for text in texts for line in text.partition(edit.MARK)[2].splitlines()}
    held_out = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    for text in held_out:
        lines = [line for line in text.splitlines() if len(line) > 60]
        assert not lines or sum(line in written for line in lines) < len(lines)
    both = list(edit.training_texts(4000, shuffled=True))
    assert both[::2] == texts and len(both) == 2 * len(texts)
    with pytest.raises(InputError, match=r"^characters"):
        edit.write_training_texts(path, 1)
