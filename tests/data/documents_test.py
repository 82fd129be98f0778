"""Tests of reading documents, and of their split into training and held-out sets."""

import gzip

import pytest

from spsjax import InputError
from spsjax.data import documents
from spsjax.data.documents import Sources


def read(*train, **options):
    return list(documents.read(Sources(tuple(map(str, train)), **options), "train"))


def split(sources):
    """Returns the names of the documents of each split."""
    splits = {"train": [], "held_out": [], "copy": []}
    for name, document in documents.Split(sources):
        splits[name].append(document.name)
    return splits


def write_modules(folder, **more):
    texts = {f"module_{index}.py": f"text {index}" for index in range(60)} | more
    for name, text in texts.items():
        (folder / name).write_text(text)


HELD_OUT = [f"module_{index}.py" for index in (3, 21, 31, 53, 56)]


def test_held_out_names_never_change():
    names = ["abc.py", "argparse.py", "codecs.py", "email/header.py", "heapq.py", "json/decoder.py"]
    names += ["os.py", "typing.py", *(f"module_{index}.py" for index in range(60))]
    held_out = [name for name in names if documents.is_held_out(name)]
    assert held_out == ["codecs.py", "email/header.py", *HELD_OUT]


def test_stdlib_source_excludes_its_tests():
    texts = documents.stdlib()
    assert "argparse.py" in texts and "json/decoder.py" in texts
    assert "def heappush" in texts["heapq.py"]
    assert not any("test" in name.split("/") for name in texts)
    assert list(texts) == sorted(texts, key=lambda name: name.split("/"))


def test_sources_read_folders_files_patterns_and_gzip(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / ".git").mkdir()
    (tmp_path / "a" / ".git" / "config").write_text("hidden")
    (tmp_path / "a" / "one.txt").write_text("one\r\nline", newline="")
    (tmp_path / "a" / "empty.txt").write_text("")
    (tmp_path / "a" / "b" / "two.txt.gz").write_bytes(gzip.compress("\ufeffzwei \u00fc".encode()))
    texts = {"b/two.txt.gz": "zwei \u00fc", "one.txt": "one\nline"}
    for source in (tmp_path / "a", tmp_path / "a" / "**" / "*.txt*"):
        assert {document.name: document.text for document in read(source)} == texts
    assert [document.name for document in read(tmp_path / "a" / "one.txt")] == ["one.txt"]


def test_excluded_names_are_left_out_of_every_source(tmp_path):
    for name in ("a.txt", "lib/tests/b.txt", "lib/c_test.txt", "lib/d.txt"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    folder = str(tmp_path / "texts")
    patterns = "*/tests/*", "*_test.txt"
    for source in (folder, f"{folder}/**/*.txt"):
        kept = [document.name for document in read(source, exclude=patterns)]
        assert kept == ["a.txt", "lib/d.txt"]
        listings = {documents.listing(Sources((source,), exclude=some)) for some in ((), patterns)}
        assert len(listings) == 2
    with pytest.raises(InputError, match="excludes"):
        documents.listing(Sources((folder,), exclude=("*",)))


def test_split_does_not_depend_on_where_the_folder_is(tmp_path):
    for name in ("here", "there/deep"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for index in range(40):
            (folder / f"{index}.txt").write_text(f"text {index}")
    sources = "here", "there/deep", "there/deep/*"
    here, there, pattern = (split(Sources((f"{tmp_path}/{source}",))) for source in sources)
    assert here == there == pattern and 0 < len(here["held_out"]) < 10


def test_jsonl_lines_and_pieces_between_separators_are_documents(tmp_path):
    path, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    path.write_text('{"body": "one"}\n{"body": "two\\u2028three", "id": 3}\n\n')
    expected = [("a.jsonl:1", "one"), ("a.jsonl:2", "two\u2028three")]
    assert [(document.name, document.text) for document in read(path, field="body")] == expected
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read(packed, field="body")) == 2
    path = tmp_path / "a.txt"
    path.write_text("one<end>two<end>\n<end>three")
    texts = [document.text for document in read(path, separator="<end>")]
    assert texts == ["one", "two", "three"]


def test_copy_of_a_held_out_text_is_not_trained_on(tmp_path):
    """A held-out text counts once, also if two sources have it."""
    write_modules(tmp_path)
    twice = split(Sources((str(tmp_path), str(tmp_path / "*.py"))))
    assert len(twice["held_out"]) == len(twice["copy"]) == 5
    (tmp_path / "copy.py").write_text("text 21")
    splits = split(Sources((str(tmp_path),)))
    assert sorted(splits["held_out"]) == sorted(HELD_OUT)
    assert splits["copy"] == ["copy.py"] and len(splits["train"]) == 55
    assert not {*splits["train"]} & {*HELD_OUT, "copy.py"}


def test_held_out_sources_replace_the_hash(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    (tmp_path / "again.txt").write_text("text c")
    train = tuple(str(tmp_path / f"{name}.txt") for name in ("a", "b", "again"))
    splits = split(Sources(train, (str(tmp_path / "c.txt"),)))
    assert splits == {"train": ["a.txt", "b.txt"], "copy": ["again.txt"], "held_out": ["c.txt"]}


def test_small_corpus_still_holds_out_one_document(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(f"text {index}")
    splits = split(Sources((str(tmp_path),)))
    assert [len(splits[name]) for name in ("train", "held_out", "copy")] == [2, 1, 0]


# Without a time stamp: the bytes are part of a test's id, the same in every process.
PACKED = gzip.compress(b"xyz" * 33, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"id": 1, "body": "x"}\n', "a.jsonl:1: expected a field 'text', found id, b"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a.jsonl:2: expected text to be a string, f"),
        ("a.jsonl", b'\n["text"]\n', r"a.jsonl:2: expected a JSON object, found \['text'\]$"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl:1: expected text in valid Unicode, found "),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: expected a JSON object, found "),
        ("a.txt", b"abc\xff", r"a.txt: expected text in UTF-8, found an invalid byte at 3$"),
        ("a.txt.gz", b"no gzip", r"a.txt.gz: expected a text file, found Not a gzipped file"),
        ("a.txt.gz", PACKED[:12] + b"?" * 20, "expected a text file, found"),
    ],
)
def test_unreadable_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("sources", [(".", "a.txt"), ("*.txt", "?.txt"), ("a.txt", "link")])
def test_file_in_two_sources_is_refused(tmp_path, monkeypatch, sources):
    """It would be trained on twice. One file may be in both splits: copies are left out."""
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    if "link" in sources:
        (tmp_path / "link").symlink_to("a.txt")
    for options in ({"train": sources}, {"train": ("a.txt",), "held_out": sources}):
        message = r": expected each file in one source, found .*(a\.txt|link)"
        with pytest.raises(InputError, match=message):
            documents.listing(Sources(**options))
    documents.listing(Sources(("a.txt",), ("a.txt",)))


def test_missing_and_invalid_sources_are_named(tmp_path):
    for source in (tmp_path / "nothing", tmp_path / "*.txt", tmp_path):
        with pytest.raises(InputError, match=r": expected a file, a folder with files, or a patte"):
            read(source)
    for train in ("stdlib", (3,), None):
        with pytest.raises(InputError, match=r"^train: expected "):
            Sources(train)
