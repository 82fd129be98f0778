"""Documents: texts from files of several kinds, and a split of them that never changes."""

import dataclasses
import glob
import gzip
import hashlib
import itertools
import json
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence

from spsjax.errors import InputError, one_line, short_repr

# Tests repeat themselves, and the two big folders are tables that a program wrote.
_NOT_PROSE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of a file. Its name is relative to the source, whose place thus does not matter."""

    file: str
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the documents are.

    Attributes:
        train: "stdlib", the running interpreter's standard library without its tests; or files,
            folders (every file below, hidden ones left out) and patterns such as `books/*.txt`.
            Files are UTF-8, and may be compressed (`.gz`). One whose name ends in `.jsonl` has an
            object a line; any other is a document.
        held_out: the same, of documents to evaluate on. Empty: one document in 20 of `train`.
        field: of an object, the text.
        separator: what stands between the documents of one text file; empty: a file is one.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    field: str = "text"
    separator: str = ""

    def __post_init__(self):
        for name in ("train", "held_out"):
            paths = getattr(self, name)
            if not isinstance(paths, (tuple, list)) or not all(
                isinstance(path, str) for path in paths
            ):
                raise InputError(f"{name}: expected a tuple of texts, found {short_repr(paths)}")
            object.__setattr__(self, name, tuple(paths))
        for name in ("field", "separator"):
            if not isinstance(getattr(self, name), str):
                found = short_repr(getattr(self, name))
                raise InputError(f"{name}: expected a text, found {found}")
        if not all(path.strip() and "\0" not in path for path in self.train + self.held_out):
            raise InputError("train, held_out: expected paths, found an empty one or a zero byte")
        if not self.train:
            raise InputError("train: expected one source or more, found none")


def stdlib() -> dict[str, str]:
    """The running interpreter's standard library: path in the library -> text, tests left out."""
    return {document.name: document.text for document in read(Sources(("stdlib",)), "train")}


def is_held_out(name: str) -> bool:
    """One document in 20, chosen by the hash of its name alone, so that no run trains on it."""
    return _hash(name) % 20 == 0


def held_out_names(sources: Sources) -> set[str]:
    """Of a corpus so small that chance left none out, the one with the least hash is."""
    return _held_out(sources)[0]


def _held_out(sources: Sources) -> tuple[set[str], set[bytes]]:
    """Names of the documents of `train` that are held out, and digests of their texts."""
    names, digests = set(), set()
    alone = {}  # the names with the two least hashes, while none is held out
    for document in read(sources, "train"):
        name = document.name
        if is_held_out(name):
            names.add(name)
            digests.add(_digest(document))
        elif not names:
            alone.setdefault(name, set()).add(_digest(document))
            if len(alone) > 2:
                del alone[max(alone, key=_hash)]
    if names or len(alone) < 2:
        return names, digests
    least = min(alone, key=_hash)
    return {least}, alone[least]


def read(sources: Sources, part: str) -> Iterator[Document]:
    """The documents that the sources of "train" or "held_out" name, in a fixed order.

    Raises InputError for what is not there or cannot be read; the message names file and line.
    """
    for source in getattr(sources, part):
        for name, path in _files(source):
            text = _text(path, errors="replace" if source == "stdlib" else "strict")
            file = f"stdlib/{name}" if source == "stdlib" else str(path)
            if path.name.removesuffix(".gz").endswith(".jsonl"):
                for number, line in enumerate(text.split("\n"), 1):
                    if line.strip():
                        field = _field(line, sources.field, f"{path}:{number}")
                        if field:
                            yield Document(file, f"{name}:{number}", field)
            elif sources.separator:
                for number, each in enumerate(text.split(sources.separator), 1):
                    if each.strip():
                        yield Document(file, f"{name}:{number}", each)
            elif text:
                yield Document(file, name, text)


def held_out(sources: Sources) -> Iterator[Document]:
    """The documents to evaluate on, copies and all."""
    if sources.held_out:
        yield from read(sources, "held_out")
        return
    names = held_out_names(sources)
    yield from (document for document in read(sources, "train") if document.name in names)


def listing(sources: Sources) -> str:
    """A hash of the names, sizes and times of all files: it changes when one of them does."""
    digest = hashlib.sha256()
    for part in ("train", "held_out"):
        for source in getattr(sources, part):
            for name, path in _files(source):
                stat = path.stat()
                entry = part, source, name, stat.st_size, stat.st_mtime_ns
                digest.update(repr(entry).encode(errors="surrogateescape"))
    return digest.hexdigest()


class Split:
    """Every document with its part: "train", "held_out", or "copy" of a held-out one.

    No text is in two parts, whatever its name: a copy is trained on by nobody, and counted once.
    Each iteration reads the sources again, and so does the making of a split, once.
    """

    def __init__(self, sources: Sources):
        self._sources, self._names = sources, set()
        if sources.held_out:
            self._held = {_digest(document) for document in read(sources, "held_out")}
        else:
            self._names, self._held = _held_out(sources)

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        seen = set()
        for part in ("train", "held_out"):
            for document in read(self._sources, part):
                digest = _digest(document)
                if digest not in self._held:
                    yield "train", document
                elif digest in seen or (part == "train" and document.name not in self._names):
                    yield "copy", document
                else:
                    seen.add(digest)
                    yield "held_out", document


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest(), 16)


def _digest(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()


def _files(source: str) -> Sequence[tuple[str, pathlib.Path]]:
    """(name in the source, path) of each file of a source, sorted."""
    if source == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return [
            (name.as_posix(), root / name)
            for name in sorted(path.relative_to(root) for path in root.rglob("*.py"))
            if not _NOT_PROSE & set(name.parts)
        ]
    try:
        path = pathlib.Path(source).expanduser()
    except RuntimeError as error:  # no such user
        raise InputError(f"{source}: expected a path, found {one_line(error)}") from None
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = _below(path)
    else:
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        root = pathlib.Path(*fixed)
        paths = map(pathlib.Path, sorted(glob.glob(str(path), recursive=True)))
        found = [(each.relative_to(root).as_posix(), each) for each in paths if each.is_file()]
    if not found:
        expected = "a file, a folder with files, or a pattern that some files match"
        raise InputError(f"{source}: expected {expected}, found none")
    return found


def _below(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """The files below a folder, but for hidden ones and those in hidden folders."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [
        (name.as_posix(), folder / name)
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    ]


def _text(path: pathlib.Path, errors: str) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig", errors=errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        found = f"another byte at {error.start}"
        raise InputError(f"{path}: expected text in UTF-8, found {found}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: expected a text file, found {one_line(error)}") from None


def _field(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected a JSON object, found {one_line(error)}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {short_repr(record)}")
    if field not in record:
        found = ", ".join(record) or "none"
        raise InputError(f"{where}: expected a field {short_repr(field)}, found {found}")
    if not isinstance(record[field], str):
        raise InputError(
            f"{where}: expected {field} to be a text, found {short_repr(record[field])}"
        )
    try:
        record[field].encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: expected {field} in valid Unicode, found {error}") from None
    return record[field]
