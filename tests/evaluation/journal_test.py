"""Journals and JSON-lines files: each record once, whenever the process was killed."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.bad_input import one_line

from spsjax.evaluation.journal import Journal, Records
from spsjax.utils import jsonl

CONFIG, KEY = {"K": 4, "what": ["a"]}, ("name", "sample")


def record(name, sample=0, **more):
    return {"name": name, "sample": sample, **more}


def test_journal_opened_again_has_its_records(tmp_path):
    """A journal that is opened again has the records that were added, each key once."""
    path = tmp_path / "new" / "journal.jsonl"
    journal = Journal(path, CONFIG, KEY)
    journal.add(record("é", text="a\nb"))
    journal.add(record("é", 1))
    again = Journal(path, {"what": ("a",), "K": 4}, KEY)
    assert again.records == [record("é", text="a\nb"), record("é", 1)]
    assert ("é", 1) in again and ["é", 0] in again and ("é", 2) not in again
    with pytest.raises(ValueError, match="a second record"):
        again.add(record("é", 1))


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_journal_with_torn_last_line_drops_it(tmp_path, cut):
    """A last line that was cut off is dropped, and its record can be added again."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, CONFIG, KEY)
    for name in "ab":
        journal.add(record(name, text="some text"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, CONFIG, KEY)
    assert again.records == [record("a", text="some text")]
    again.add(record("b"))
    assert [kept["name"] for kept in Journal(path, CONFIG, KEY).records] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"{", ["line 2"]),
        (b"[]", ["line 2"]),
        (b'{"name": "x"}', ["line 2", "sample"]),
        (b'{"name": "x", "sample": 0}\n{"name": "x", "sample": 0}', ["line 3", "second"]),
        (b"\xff", ["line 2"]),
    ],
)
def test_journal_with_malformed_line_is_refused(tmp_path, line, parts):
    """A line that is not a record, or repeats a key, is an error that names the line."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    with open(path, "ab") as file:
        file.write(line + b"\n")
    with one_line("journal.jsonl", *parts):
        Journal(path, CONFIG, KEY)


def test_journal_of_another_config_is_refused(tmp_path):
    """A file with another config, a folder and a malformed first line are errors."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    with one_line("journal.jsonl", "K 5", "with 4"):
        Journal(path, CONFIG | {"K": 5}, KEY)
    (tmp_path / "folder").mkdir()
    with one_line("folder"):
        Journal(tmp_path / "folder", CONFIG, KEY)
    for line in ("{}", '{"config": 3}', '{"config": null}', "[]"):
        path.write_text(f"{line}\n")
        with one_line("line 1"):
            Journal(path, CONFIG, KEY)


@pytest.mark.parametrize("value", [3, None])
@pytest.mark.parametrize("nested", [False, True])
def test_journal_with_a_field_more_or_less_is_refused(tmp_path, nested, value):
    """A field that only one of two configs has makes them different, whatever its value."""
    smaller, larger = CONFIG, CONFIG | {"more": value}
    if nested:
        smaller, larger = {"plan": smaller}, {"plan": larger}
    for number, (config, other) in enumerate([(smaller, larger), (larger, smaller)]):
        path = tmp_path / f"{number}.jsonl"
        Journal(path, config, KEY)
        content = path.read_bytes()
        with one_line(f"{number}.jsonl", "more"):
            Journal(path, other, KEY)
        assert path.read_bytes() == content
        assert not Journal(path, config, KEY).records


@pytest.mark.parametrize("text", ["a", "a\nb", '{"document": "x"}\n{"document": "y"}'])
def test_journal_leaves_another_file_unchanged(tmp_path, text):
    """A file that is not a journal is refused and keeps its content."""
    path = tmp_path / "xsum.jsonl"
    path.write_text(text)
    with one_line("xsum.jsonl", "journal"):
        Journal(path, CONFIG | {"K": 5}, KEY)
    assert path.read_text() == text


def test_journal_with_torn_first_line_is_written_again(tmp_path):
    """A first line that was cut off is written again."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY)
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    assert not Journal(path, CONFIG, KEY).records and path.read_bytes() == whole


WRITER = """
import sys
from spsjax.evaluation.journal import Journal, Records
from spsjax.utils import jsonl
journal = Journal(sys.argv[1], {"K": 4, "what": ["a"]}, ("name", "sample"))
for sample in range(200):
    if ("x", sample) not in journal:
        journal.add({"name": "x", "sample": sample, "text": "y" * 5000})
        print(sample, flush=True)
"""


@pytest.mark.process
def test_journal_killed_repeatedly_has_each_record_once(tmp_path):
    """A writer that is killed again and again ends with each record once."""
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


def test_journal_of_another_config_shows_the_difference(tmp_path):
    """The message shows the fields that differ, not the whole config."""
    plan = dict.fromkeys("abcdefgh", 0)
    Journal(tmp_path / "journal.jsonl", {"plan": plan}, KEY)
    with one_line("expected plan {'h': 3}, found a journal with {'h': 0}", "Restore the value or"):
        Journal(tmp_path / "journal.jsonl", {"plan": plan | {"h": 3}}, KEY)


def test_journal_of_another_config_names_its_first_difference(tmp_path):
    """The first field in the order of the config is named, which is plainer than a hash."""
    config = {"kind": "table", "examples": "1a2b"}
    Journal(tmp_path / "journal.jsonl", config, KEY)
    with one_line("expected kind 'figure', found a journal with 'table'"):
        Journal(tmp_path / "journal.jsonl", {"kind": "figure", "examples": "3c4d"}, KEY)


def test_journal_that_only_reads_leaves_the_file_unchanged(tmp_path):
    """A process that does not write keeps its records in memory and ignores a torn last line."""
    path = tmp_path / "journal.jsonl"
    Journal(path, CONFIG, KEY).add(record("a"))
    content = path.read_bytes() + b'{"name": "b"'
    path.write_bytes(content)
    reader = Journal(path, CONFIG, KEY, writes=False)
    reader.add(record("b"))
    assert [kept["name"] for kept in reader.records] == ["a", "b"]
    assert path.read_bytes() == content


def test_journal_that_cannot_write_does_not_keep_the_record(tmp_path):
    """A record that did not reach the disk is not in the journal, so that it can be added again."""
    journal = Journal(tmp_path / "journal.jsonl", CONFIG, KEY)
    with pytest.raises(ValueError, match="JSON"):
        journal.add(record("a", value=float("nan")))
    assert ("a", 0) not in journal and not journal.records
    journal.add(record("a"))


def test_records_in_memory_refuse_a_second_one():
    """Records without a file have each key once, too."""
    records = Records(KEY)
    records.add(record("a"))
    assert ("a", 0) in records and records["a", 0] is records.records[0]
    with pytest.raises(ValueError, match="a second record"):
        records.add(record("a", text="more"))


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


def test_jsonl_read_of_malformed_line_names_it(tmp_path):
    """The message names the line, whether its JSON, its encoding or the archive is damaged."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n2\n{\n")
    with one_line("rows.jsonl, line 3"):
        list(jsonl.read(path))
    path.write_bytes(b"1\n\xff\n")
    with one_line("rows.jsonl, line 2"):
        list(jsonl.read(path))
    with one_line("nosuch.jsonl: expected"):
        list(jsonl.read(tmp_path / "nosuch.jsonl"))


def test_jsonl_append_after_drop_torn_line_adds_a_line(tmp_path):
    """What is appended after a repair is a line of its own."""
    path = tmp_path / "rows.jsonl"
    jsonl.append(path, {"a": 1})
    with open(path, "ab") as file:
        file.write(b'{"a"')
    jsonl.drop_torn_line(path)
    jsonl.append(path, {"a": 2})
    assert list(jsonl.read(path)) == [(1, {"a": 1}), (2, {"a": 2})]
