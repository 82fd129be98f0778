"""A journal has each record once, whenever its process was killed."""

import json
import os
import signal
import subprocess
import sys

import pytest
from bad_input import one_line

from spsjax.evaluation.journal import Journal

CONFIG, KEY = {"K": 4, "what": ["a"]}, ("name", "sample")


def record(name, sample=0, **more):
    return {"name": name, "sample": sample, **more}


def test_what_was_added_is_there_again(tmp_path):
    path = tmp_path / "new" / "journal.jsonl"
    journal = Journal(path, CONFIG, KEY)
    journal.add(record("é", text="a\nb"))
    journal.add(record("é", 1))
    again = Journal(path, {"what": ("a",), "K": 4}, KEY)
    assert again.records == [record("é", text="a\nb"), record("é", 1)]
    assert ("é", 1) in again and ["é", 0] in again and ("é", 2) not in again
    with pytest.raises(ValueError, match="there already"):
        again.add(record("é", 1))


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_last_line_that_was_cut_off_is_forgotten(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, CONFIG, KEY)
    for name in "ab":
        journal.add(record(name, text="some text"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, CONFIG, KEY)
    assert again.records == [record("a", text="some text")]
    again.add(record("b"))
    assert [each["name"] for each in Journal(path, CONFIG, KEY).records] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"{", ["line 2"]),
        (b"[]", ["line 2"]),
        (b'{"name": "x"}', ["line 2", "sample"]),
        (b'{"name": "x", "sample": 0}\n{"name": "x", "sample": 0}', ["line 3", "second"]),
        (b"\xff", ["journal.jsonl"]),
    ],
)
def test_a_line_that_is_no_record(tmp_path, line, parts):
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    with open(path, "ab") as file:
        file.write(line + b"\n")
    with one_line("journal.jsonl", *parts):
        Journal(path, CONFIG, KEY)


def test_another_config_or_no_file(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    with one_line("journal.jsonl", "K 5", "of 4"):
        Journal(path, CONFIG | {"K": 5}, KEY)
    (tmp_path / "folder").mkdir()
    with one_line("folder"):
        Journal(tmp_path / "folder", CONFIG, KEY)
    for line in ("{}", '{"config": 3}', '{"config": null}', "[]"):
        path.write_text(f"{line}\n")
        with one_line("line 1"):
            Journal(path, CONFIG, KEY)


@pytest.mark.parametrize("text", ["a", "a\nb", '{"document": "x"}\n{"document": "y"}'])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path, text):
    path = tmp_path / "xsum.jsonl"
    path.write_text(text)
    with one_line("xsum.jsonl", "journal"):
        Journal(path, CONFIG | {"K": 5}, KEY)
    assert path.read_text() == text


def test_a_first_line_that_was_cut_off_is_written_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    assert not Journal(path, CONFIG, KEY).records and path.read_bytes() == whole


WRITER = """
import sys
from spsjax.evaluation.journal import Journal
journal = Journal(sys.argv[1], {"K": 4, "what": ["a"]}, ("name", "sample"))
for sample in range(200):
    if ("x", sample) not in journal:
        journal.add({"name": "x", "sample": sample, "text": "y" * 5000})
        print(sample, flush=True)
"""


def test_killed_again_and_again_it_ends_with_each_record_once(tmp_path):
    path = tmp_path / "journal.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    for _ in range(4):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ))
        for _ in range(25):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    samples = [json.loads(line)["sample"] for line in path.read_text().splitlines()[1:]]
    assert samples == list(range(200))


def test_another_config_is_shown_where_it_differs(tmp_path):
    plan = dict.fromkeys("abcdefgh", 0)
    Journal(tmp_path / "journal.jsonl", {"plan": plan}, KEY)
    with one_line("expected plan {'h': 3}, found a journal of {'h': 0}"):
        Journal(tmp_path / "journal.jsonl", {"plan": plan | {"h": 3}}, KEY)
