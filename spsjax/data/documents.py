"""Documents from files of several kinds, and their stable split into training and held-out sets."""

import dataclasses
import fnmatch
import glob
import gzip
import hashlib
import itertools
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence

from spsjax.data import conversations, json_lines
from spsjax.data.conversations import Conversation
from spsjax.errors import InputError, one_line, short_repr

_HELD_OUT_EVERY = 20  # one document in 20 is held out
# Tests are repetitive. The last two folders hold generated tables.
_EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Document:
    """A text from a file."""

    file: str  # path of the file
    name: str  # name within the source. It does not depend on where the source is.
    text: str  # content
    conversation: Conversation | None = None  # the conversation that the text is of


@dataclasses.dataclass(frozen=True)
class Sources:
    """Locations of documents.

    Attributes:
        train: sources of the documents to train on. "stdlib" names the running interpreter's
            standard library without its tests. Other sources are files, folders (all files below,
            except hidden ones) and patterns such as `books/*.txt`. Files are UTF-8 and may be
            compressed (`.gz`). A `.jsonl` file has one JSON object per line, which is a text or a
            conversation (`conversations.parse`); any other file is a document.
        held_out: sources of the documents to evaluate on; if empty, one document in 20 of `train`.
        field: key of the text in a JSON object. An object without it is a conversation.
        separator: string between the documents of one text file; if empty, a file is one document.
        exclude: patterns of names within a source whose files are left out, such as `*/tests/*`. A
            `*` matches any characters, "/" included.
        loss: tokens of conversations that are trained on and evaluated: "answers", those that the
            assistant writes, or "all".
    """

    train: tuple[str, ...] = ("stdlib",)
    held_out: tuple[str, ...] = ()
    field: str = "text"
    separator: str = ""
    exclude: tuple[str, ...] = ()
    loss: str = "answers"

    def __post_init__(self):
        for name in ("train", "held_out", "exclude"):
            paths = getattr(self, name)
            if not isinstance(paths, (tuple, list)) or not all(
                isinstance(path, str) for path in paths
            ):
                raise InputError(f"{name}: expected a tuple of strings, found {short_repr(paths)}")
            object.__setattr__(self, name, tuple(paths))
        for name in ("field", "separator"):
            if not isinstance(getattr(self, name), str):
                value = short_repr(getattr(self, name))
                raise InputError(f"{name}: expected a string, found {value}")
        if not all(path.strip() and "\0" not in path for path in self.train + self.held_out):
            raise InputError("train, held_out: expected paths, found an empty one or a zero byte")
        if self.loss not in ("answers", "all"):
            value = short_repr(self.loss)
            raise InputError(f"loss: expected 'answers' or 'all', found {value}")
        if not self.train:
            raise InputError("train: expected one source or more, found none")


def stdlib() -> dict[str, str]:
    """Returns the standard library without its tests, as path within the library -> text."""
    return {document.name: document.text for document in read(Sources(("stdlib",)), "train")}


def is_held_out(name: str) -> bool:
    """Returns whether a document is held out, by the hash of its name.

    The choice depends only on the name, so that no run trains on a held-out document.
    """
    return _name_hash(name) % _HELD_OUT_EVERY == 0


def held_out_names(sources: Sources) -> set[str]:
    """Returns the names of the held-out documents of `train`.

    If hashing selects none (a very small corpus), the document with the smallest hash is held out.
    """
    return _choose_held_out(sources)[0]


def _choose_held_out(sources: Sources) -> tuple[set[str], set[bytes]]:
    """Returns names and text digests of the documents of `train` that are held out."""
    names, digests = set(), set()
    # Digests by name, for the two names with the smallest hashes, until a document is held out. The
    # second name shows that a document remains to train on.
    candidates = {}
    for document in read(sources, "train"):
        name = document.name
        if is_held_out(name):
            names.add(name)
            digests.add(_text_digest(document))
        elif not names:
            candidates.setdefault(name, set()).add(_text_digest(document))
            if len(candidates) > 2:
                del candidates[max(candidates, key=_name_hash)]
    if names or len(candidates) < 2:
        return names, digests
    smallest = min(candidates, key=_name_hash)
    return {smallest}, candidates[smallest]


def read(sources: Sources, split: str) -> Iterator[Document]:
    """Reads the documents of the sources of one split, "train" or "held_out", in a fixed order.

    Raises InputError for a file that is missing or cannot be read. The message names file and line.
    """
    for source in getattr(sources, split):
        for name, path in _files(source, sources.exclude):
            file = f"stdlib/{name}" if source == "stdlib" else str(path)
            if json_lines.is_named(path):
                for number, record in json_lines.read(path):
                    names = file, f"{name}:{number}", f"{path}:{number}"
                    document = _of_record(record, sources.field, *names)
                    if document.text:
                        yield document
                continue
            text = _read_text(path, errors="replace" if source == "stdlib" else "strict")
            if sources.separator:
                for number, section in enumerate(text.split(sources.separator), 1):
                    if section.strip():
                        yield Document(file, f"{name}:{number}", section)
            elif text:
                yield Document(file, name, text)


def questions(source: str) -> Iterator[tuple[str, Conversation]]:
    """Reads the conversations in the JSON lines of a source, with or without answers.

    Yields names, within the source and with the number of the line, and conversations. Raises
    InputError for a file that is not of JSON lines, and for a line without a conversation.
    """
    for name, path in _files(source, ()):
        if not json_lines.is_named(path):
            raise InputError(f"{path}: expected a file .jsonl or .jsonl.gz, found another one")
        for number, record in json_lines.read(path):
            conversation = conversations.parse(record, f"{path}:{number}")
            if conversation is None:
                keys = "messages, conversations, prompt or turns"
                fields = ", ".join(record) or "none"
                raise InputError(f"{path}:{number}: expected a field {keys}, found {fields}")
            yield f"{name}:{number}", conversation


def held_out(sources: Sources) -> Iterator[Document]:
    """Reads the documents to evaluate on, including copies."""
    if sources.held_out:
        yield from read(sources, "held_out")
        return
    names = held_out_names(sources)
    yield from (document for document in read(sources, "train") if document.name in names)


def listing(sources: Sources) -> str:
    """Returns a hash of names, sizes and modification times, which changes if any file does.

    Raises InputError if two sources of a split have the same file: it would be read twice.
    """
    digest = hashlib.sha256()
    for split in ("train", "held_out"):
        source_of = {}
        for index, source in enumerate(getattr(sources, split)):
            for name, path in _files(source, sources.exclude):
                first = source_of.setdefault(os.path.realpath(path), index)
                if first != index:
                    others = short_repr(getattr(sources, split)[first])
                    raise InputError(
                        f"{split}: expected each file in one source, found {path} in {others} "
                        f"and in {short_repr(source)}"
                    )
                stat = path.stat()
                entry = split, source, name, stat.st_size, stat.st_mtime_ns
                digest.update(repr(entry).encode(errors="surrogateescape"))
    return digest.hexdigest()


class Split:
    """Iterates over all documents with their split: "train", "held_out" or "copy".

    No text is in two splits, whatever its name. A copy of a held-out document is excluded from
    training and counted once. Every iteration reads the sources again, and so does the constructor.
    """

    def __init__(self, sources: Sources):
        self._sources, self._held_out_names = sources, set()
        if sources.held_out:
            self._held_out = {_text_digest(document) for document in read(sources, "held_out")}
        else:
            self._held_out_names, self._held_out = _choose_held_out(sources)

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        counted = set()
        for split in ("train", "held_out"):
            for document in read(self._sources, split):
                digest = _text_digest(document)
                if digest not in self._held_out:
                    yield "train", document
                elif digest in counted or (
                    split == "train" and document.name not in self._held_out_names
                ):
                    yield "copy", document
                else:
                    counted.add(digest)
                    yield "held_out", document


def _name_hash(name: str) -> int:
    return int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest(), 16)


def _text_digest(document: Document) -> bytes:
    """Returns a hash of a text, or of a conversation's first question: no other answer is new."""
    conversation = document.conversation
    text = document.text if conversation is None else conversation.question
    return hashlib.sha256(text.encode()).digest()


def _files(source: str, exclude: Sequence[str]) -> Sequence[tuple[str, pathlib.Path]]:
    """Returns (name within the source, path) of every file of a source, sorted."""
    files = [
        (name, path)
        for name, path in _all_files(source)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    ]
    if not files:
        expected = "a file, a folder with files, or a pattern that some files match"
        left_out = f" but those that {' '.join(exclude)} excludes" if exclude else ""
        raise InputError(f"{source}: expected {expected}, found none{left_out}")
    return files


def _all_files(source: str) -> Sequence[tuple[str, pathlib.Path]]:
    """Returns (name within the source, path) of every file of a source, excluded ones included."""
    if source == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return [
            (name.as_posix(), root / name)
            for name in sorted(path.relative_to(root) for path in root.rglob("*.py"))
            if not _EXCLUDED_FOLDERS & set(name.parts)
        ]
    try:
        path = pathlib.Path(source).expanduser()
    except RuntimeError as error:  # no such user
        raise InputError(f"{source}: expected a path, found {one_line(error)}") from None
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        return _files_below(path)
    # Names are relative to the part of the pattern that has no wildcard.
    root = pathlib.Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    paths = map(pathlib.Path, sorted(glob.glob(str(path), recursive=True)))
    return [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]


def _files_below(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Returns the files below a folder, except hidden ones and those in hidden folders."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [
        (name.as_posix(), folder / name)
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    ]


def _read_text(path: pathlib.Path, errors: str) -> str:
    """Returns the text of a file, decompressed if need be; raises InputError if it is damaged."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig", errors=errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        position = f"an invalid byte at {error.start}"
        raise InputError(f"{path}: expected text in UTF-8, found {position}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: expected a text file, found {one_line(error)}") from None


def _of_record(record: dict, field: str, file: str, name: str, where: str) -> Document:
    """Returns the document in a JSON object; raises InputError that names the line."""
    if field not in record:
        conversation = conversations.parse(record, where)
        if conversation is None:
            fields = ", ".join(record) or "none"
            raise InputError(f"{where}: expected a field {short_repr(field)}, found {fields}")
        if not conversation.has_answers:
            raise InputError(
                f"{where}: expected a conversation with answers, found questions only. "
                "Write the answers first: generate.py --answers"
            )
        # All answers to one question are in one split, whatever the file.
        return Document(file, f"question {conversation.question}", conversation.text, conversation)
    if not isinstance(record[field], str):
        raise InputError(
            f"{where}: expected {field} to be a string, found {short_repr(record[field])}"
        )
    try:
        record[field].encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: expected {field} in valid Unicode, found {error}") from None
    return Document(file, name, record[field])
