"""What a tokenizer is, whichever library reads it, and what lies beside it in a folder."""

import abc
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import chat_template
from spsjax.utils import atomic_files

# The files that define a tokenizer, by which of them is looked for first.
KINDS = ("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")
_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_BESIDE = _SETTINGS, "special_tokens_map.json", "added_tokens.json", _TEMPLATE
NAMES = tuple(name for kind in KINDS for name in kind) + _BESIDE


class Tokenizer(abc.ABC):
    """A tokenizer of some kind; `spsjax.tokenization` loads and trains them.

    Attributes:
        path: of its first file.
        files: what a folder must hold to have it again, by name.
        vocab_size: one more than its highest id.
        bos_id, eos_id: that begin and end a text, if it has such.
    """

    def __init__(self, folder: pathlib.Path, names: Sequence[str]):
        self.path, self._names = folder / names[0], names
        self.files = {name: read(folder / name) for name in names}
        for name in _BESIDE:
            if os.path.lexists(folder / name):
                self.files[name] = read(folder / name)
        self._settings = self._object("special_tokens_map.json") | self._object(_SETTINGS)
        self.vocab_size = 0
        self.bos_id: int | None = None
        self.eos_id: int | None = None

    @abc.abstractmethod
    def encode(self, text: str, whole: bool = True) -> list[int]:
        """Token ids of a text, with what begins one if it is `whole`; its end is left open.

        Raises InputError if it is not valid Unicode.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids.

        Control ids (begin, end) leave nothing behind, nor do ids beyond the tokenizer's: a model's
        vocabulary is sometimes padded.
        """

    @functools.cached_property
    @abc.abstractmethod
    def pieces(self) -> dict[int, str]:
        """What each id stands for, control ids apart."""

    def __eq__(self, other) -> bool:
        """Two tokenizers are one if each id stands for the same text; control ids may differ."""
        return isinstance(other, Tokenizer) and self.pieces == other.pieces

    @property
    def sha256(self) -> str:
        """The hash of the files that define it."""
        return hashlib.sha256(b"".join(self.files[name] for name in self._names)).hexdigest()

    def save(self, folder: pathlib.Path) -> None:
        """Writes it to a folder, in which no other tokenizer's files are left."""
        for name in NAMES:
            if name not in self.files:
                (folder / name).unlink(missing_ok=True)
        for name, raw in self.files.items():
            atomic_files.write(folder / name, raw)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins, by the folder's template.

        Args:
            messages: as `[{"role": "user", "content": "Hello"}]`.

        Raises InputError where there is no template, or it refuses the messages.
        """
        template = self._template()
        if template is None:
            raise InputError(f"{self.path.parent}: expected a chat template, found none")
        names = [name for name in self._settings if name.endswith("_token")]
        more = self._settings.get("extra_special_tokens")
        tokens = more if isinstance(more, dict) else {}
        tokens = tokens | {name: self._special(name) for name in names}
        return self.encode(chat_template.render(template, messages, tokens), whole=False)

    @property
    def has_template(self) -> bool:
        """Whether `chat` can be used."""
        return self._template() is not None

    def _template(self) -> str | None:
        if _TEMPLATE in self.files:
            return self.files[_TEMPLATE].decode("utf-8", "replace")
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # of several, by name
            named = [each for each in template if isinstance(each, dict)]
            template = next((x.get("template") for x in named if x.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def _object(self, name: str) -> dict:
        """The JSON object in a file; an empty one where there is no such file."""
        try:
            found = json.loads(self.files.get(name, b"{}").decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            path = self.path.with_name(name)
            raise InputError(f"{path}: expected JSON, found {one_line(error)}") from None
        if not isinstance(found, dict):
            path = self.path.with_name(name)
            raise InputError(f"{path}: expected a JSON object, found {type(found).__name__}")
        return found

    def _check_complete(self) -> None:
        """Raises InputError where there are tokens that only the settings have.

        So it is in older fine-tuned models. `transformers` makes one file of it.
        """
        known = self._object("added_tokens.json")
        listed = self._settings.get("added_tokens_decoder")
        tokens = []
        if isinstance(listed, dict):
            for id, token in listed.items():
                text = token.get("content") if isinstance(token, dict) else token
                tokens.append((_SETTINGS, str(id), text))
        tokens += [("added_tokens.json", str(id), text) for text, id in known.items()]
        for name, id, text in tokens:
            here = id.isdecimal() and len(id) < 10 and int(id) < self.vocab_size
            # A space is written as it is, or as pieces have it.
            if not here or _spaced(self._text_of(int(id))) != _spaced(text):
                raise InputError(
                    f"{self.path}: expected all tokens, found {id} ({short_repr(text)}) in {name} "
                    "alone; to make tokenizer.json of both: AutoTokenizer.from_pretrained(folder)"
                    ".save_pretrained(folder), of transformers"
                )

    @abc.abstractmethod
    def _text_of(self, id: int) -> str | None:
        """How the tokenizer itself spells an id."""

    def _special(self, name: str) -> str | None:
        """The text of a token such as `bos_token`, where the settings have it."""
        found = self._settings.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None


def _spaced(text) -> str | None:
    return text.replace("\u2581", " ") if isinstance(text, str) else None


def read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a tokenizer's file, found {one_line(error)}") from None


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected valid Unicode, found {error}") from None
