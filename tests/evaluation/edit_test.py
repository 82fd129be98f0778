"""The task `edit`: one typo per passage, held-out files only, and its score."""

import json
import re

import pytest
from helpers.command_line import fails_with_one_line, launch, run, succeeds

from spsjax import InputError
from spsjax.data import documents
from spsjax.evaluation.tasks import edit

TEXT = "".join(f"def number_{i}(argument):\n    return argument + {i}\n" for i in range(40))


def test_a_passage_has_one_typo_and_is_whole_lines():
    document = documents.Document("a.py", "a.py", TEXT)
    found = list(edit.edits(document, 120))
    assert "".join(fixed for _, _, fixed in found) == TEXT
    for name, broken, fixed in found:
        assert len(fixed) <= 120 and fixed.endswith("\n")
        changed = [i for i, pair in enumerate(zip(broken, fixed)) if pair[0] != pair[1]]
        first, second = changed
        assert second == first + 1 and len(broken) == len(fixed)
        assert broken[first : first + 2] == fixed[first : first + 2][::-1]
        assert fixed[first - 1].isalpha() or fixed[first - 1] == "_"
        assert edit.with_typo(fixed, name) == broken  # and the same again


def test_a_text_without_a_long_word_has_no_typo():
    assert edit.with_typo("a = 1\nbb = zzzzz\n", "name") is None


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


@pytest.mark.process
def test_make_edits_writes_training_texts_alone(tmp_path):
    path = tmp_path / "edits.jsonl"
    succeeds("make_edits.py", f"--output={path}", "--characters=4000", by=launch)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(texts) > 100
    written = {line for text in texts for line in text.partition(edit.MARK)[2].splitlines()}
    held_out = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    for text in held_out:
        lines = [line for line in text.splitlines() if len(line) > 60]
        assert not lines or sum(line in written for line in lines) < len(lines)
    succeeds("make_edits.py", f"--output={path}", "--characters=4000", "--shuffled")
    both = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert both[::2] == texts and len(both) == 2 * len(texts)
    fails_with_one_line(run("make_edits.py", f"--output={path}", "--characters=1"), "characters")
