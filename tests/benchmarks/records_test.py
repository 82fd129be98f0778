"""Journals and JSON-lines files: each record once, whenever the process was killed."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.bad_input import one_line

from spsjax.benchmarks.records import Journal, Records
from spsjax.utils import jsonl

CONFIG, KEY = {"K": 4, "what": ["a"]}, ("name", "sample")


def record(name, sample=0, **more):
    return {"name": name, "sample": sample, **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "journal.jsonl"


def test_journal_opened_again_has_its_records(path):
    """It has each key once, as records in memory do."""
    journal = Journal(path, CONFIG, KEY)
    journal.add(record("é", text="a\nb"))
    journal.add(record("é", 1))
    again = Journal(path, {"what": ("a",), "K": 4}, KEY)
    assert again.records == [record("é", text="a\nb"), record("é", 1)]
    assert ("é", 1) in again and ["é", 0] in again and ("é", 2) not in again
    memory = Records(KEY)
    memory.add(record("é", 1))
    assert memory["é", 1] is memory.records[0]
    for records in (again, memory):
        with pytest.raises(ValueError, match="a second record"):
            records.add(record("é", 1, text="more"))


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_journal_with_torn_last_line_drops_it(path, cut):
    """Its record can be added again. A process that only reads leaves the file as it is."""
    journal = Journal(path, CONFIG, KEY)
    for name in "ab":
        journal.add(record(name, text="some text"))
    torn = path.read_bytes()[:-cut]
    path.write_bytes(torn)
    reader = Journal(path, CONFIG, KEY, writes=False)
    reader.add(record("b"))
    assert [kept["name"] for kept in reader.records] == ["a", "b"] and path.read_bytes() == torn
    again = Journal(path, CONFIG, KEY)
    assert again.records == [record("a", text="some text")]
    again.add(record("b"))
    assert [kept["name"] for kept in Journal(path, CONFIG, KEY).records] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"[]", ["line 2"]),
        (b'{"name": "x"}', ["line 2", "sample"]),
        (b'{"name": "x", "sample": 0}\n{"name": "x", "sample": 0}', ["line 3", "second"]),
        (b"\xff", ["line 2"]),
    ],
)
def test_journal_with_malformed_line_is_refused(path, line, parts):
    Journal(path, CONFIG, KEY)
    with open(path, "ab") as file:
        file.write(line + b"\n")
    with one_line("journal.jsonl", *parts):
        Journal(path, CONFIG, KEY)


PLAN = dict.fromkeys("abcdefgh", 0)
WITH, WITHOUT = "expected a config with more", "found a journal without it"


@pytest.mark.parametrize(
    ("config", "other", "name", "parts"),
    [
        (CONFIG, CONFIG | {"K": 5}, "K", ("expected K 5, found a journal with 4. Restore the va",)),
        (
            {"kind": 1, "plan": PLAN}, {"kind": 1, "plan": PLAN | {"h": 3}},
            "plan", ("expected plan {'h': 3}, found a journal with {'h': 0}",),
        ),
        (CONFIG, CONFIG | {"more": None}, "more", (WITH, WITHOUT)),
        ({"plan": CONFIG}, {"plan": CONFIG | {"more": None}}, "more", ("found a journal with {}",)),
    ],
)  # fmt: skip
def test_journal_of_another_config_is_refused(tmp_path, config, other, name, parts):
    """The message shows what differs. A field that only one config has is a difference, too."""
    cases = ((config, other, parts), (other, config, ()))
    for number, (own, wrong, shown) in enumerate(cases):
        path = tmp_path / f"{number}.jsonl"
        Journal(path, own, KEY)
        content = path.read_bytes()
        with one_line(f"{number}.jsonl", name, *shown):
            Journal(path, wrong, KEY)
        assert path.read_bytes() == content and not Journal(path, own, KEY).records


def test_journal_leaves_another_file_unchanged(tmp_path):
    with one_line(str(tmp_path)):
        Journal(tmp_path, CONFIG, KEY)
    path = tmp_path / "xsum.jsonl"
    for text in ("a", '{"document": "x"}\n{"document": "y"}', "{}\n", '{"config": 3}\n', "[]\n"):
        path.write_text(text)
        with one_line("xsum.jsonl", "journal"):
            Journal(path, CONFIG, KEY)
        assert path.read_text() == text


def test_journal_with_torn_first_line_is_written_again(path):
    Journal(path, CONFIG, KEY)
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    assert not Journal(path, CONFIG, KEY).records and path.read_bytes() == whole


WRITER = """
import sys
from spsjax.benchmarks.records import Journal, Records
from spsjax.utils import jsonl
journal = Journal(sys.argv[1], {"K": 4, "what": ["a"]}, ("name", "sample"))
for sample in range(200):
    if ("x", sample) not in journal:
        journal.add({"name": "x", "sample": sample, "text": "y" * 5000})
        print(sample, flush=True)
"""


@pytest.mark.process
def test_journal_killed_repeatedly_has_each_record_once(tmp_path):
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


def test_journal_that_cannot_write_does_not_keep_the_record(path):
    """It can be added again."""
    journal = Journal(path, CONFIG, KEY)
    with pytest.raises(ValueError, match="JSON"):
        journal.add(record("a", value=float("nan")))
    assert ("a", 0) not in journal and not journal.records
    journal.add(record("a"))


def test_jsonl_read_yields_line_numbers(tmp_path):
    """Blank lines are skipped but counted; a byte order mark and `.gz` are understood."""
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n[2]\n3'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert list(jsonl.read(path)) == [(1, {"a": 1}), (3, [2]), (4, 3)]
    assert list(jsonl.read(path, allow_torn=True)) == [(1, {"a": 1}), (3, [2])]
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(content))
    assert list(jsonl.read(zipped)) == list(jsonl.read(path))
