"""Interface of tokenizers, and their files in a model folder."""

import abc
import functools
import hashlib
import json
import operator
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import chat_template
from spsjax.utils import atomic_files, git_lfs

# Tokenizer files, in order of preference.
KINDS = ("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")
_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
# Optional files that change or extend a tokenizer.
_OPTIONAL = _SETTINGS, "special_tokens_map.json", "added_tokens.json", _TEMPLATE
NAMES = tuple(name for kind in KINDS for name in kind) + _OPTIONAL


class Tokenizer(abc.ABC):  # noqa: PLW1641 (equal by content, never a key)
    """Base class of tokenizers. `spsjax.tokenization` loads and trains them.

    Attributes:
        path: path of the first tokenizer file.
        files: contents of the tokenizer's files, by file name.
        vocab_size: highest token id plus one.
        bos_id: beginning-of-sequence id; None: there is none.
        eos_id: end-of-sequence id; None: there is none.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        names: Sequence[str],
        files: Mapping[str, bytes] | None = None,
    ):
        """Creates a tokenizer.

        Args:
            folder: folder of the files; with `files`, the file that has them, for messages.
            names: names of the tokenizer's files, without optional ones.
            files: contents of the files, by name; None: they are read.
        """
        self.path, self._names = folder / names[0], names
        self.files = _read(folder, names) if files is None else dict(files)
        self._settings = self._object("special_tokens_map.json") | self._object(_SETTINGS)
        self.vocab_size = 0
        self.bos_id: int | None = None
        self.eos_id: int | None = None

    @abc.abstractmethod
    def encode(self, text: str, whole: bool = True) -> list[int]:
        """Returns the token ids of a text, without an end-of-sequence id.

        Args:
            text: text to encode.
            whole: whether to add the ids that the tokenizer puts before a text.

        Raises:
            InputError: the text is not a string of valid Unicode.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids.

        Control ids (beginning and end of a sequence) have no text.

        Raises:
            InputError: the ids are not integers in [0, vocab_size).
        """

    @functools.cached_property
    @abc.abstractmethod
    def pieces(self) -> dict[int, str]:
        """Piece of text of each id, without control ids."""

    def __eq__(self, other) -> bool:
        """Returns whether each id has the same text in both. Control ids may differ."""
        return isinstance(other, Tokenizer) and self.pieces == other.pieces

    @property
    def sha256(self) -> str:
        """SHA-256 hash of the tokenizer files."""
        return hashlib.sha256(b"".join(self.files[name] for name in self._names)).hexdigest()

    def save(self, folder: pathlib.Path) -> None:
        """Writes the tokenizer to a folder and removes the files of any other tokenizer."""
        for name in NAMES:
            if name not in self.files:
                (folder / name).unlink(missing_ok=True)
        for name, raw in self.files.items():
            atomic_files.write(folder / name, raw)

    def chat(self, messages: Sequence[Mapping], /, **variables) -> list[int]:
        """Returns the token ids of a conversation, up to the beginning of the answer.

        Args:
            messages: conversation, as `[{"role": "user", "content": "Hello"}]`. A content may also
                be a list of parts of type "text", as clients of OpenAI's API send it.
            variables: further variables of the chat template, as `enable_thinking=False`.

        Raises:
            InputError: the folder has no chat template, or the template refuses the messages or
                fails.
        """
        (rendered,) = self.render([{**variables, "messages": messages}])
        if isinstance(rendered, InputError):
            raise rendered
        return self.encode(rendered.text, whole=False)

    def render(
        self, conversations: Sequence[Mapping[str, object]]
    ) -> list[chat_template.Rendered | InputError]:
        """Returns the texts of conversations by the chat template, as `chat_template.render_all`.

        Raises InputError if the folder has no chat template. What is wrong with one conversation is
        returned in its place.
        """
        template = self._template()
        if template is None:
            raise InputError(f"{self.path.parent}: expected a chat template, found none")
        names = [name for name in self._settings if name.endswith("_token")]
        more = self._settings.get("extra_special_tokens")
        tokens = more if isinstance(more, dict) else {}
        tokens = tokens | {name: self._special(name) for name in names}
        return chat_template.render_all(template, conversations, tokens, self.path.parent)

    def control_text(self, id: int) -> str | None:
        """Returns the text that always becomes a single id, such as an end of a turn.

        None for ids of pieces, which their text may or may not become.
        """
        if not 0 <= id < self.vocab_size or id in self.pieces:
            return None
        return self._text_of(id) or None

    @property
    def has_template(self) -> bool:
        """Whether the folder has a chat template."""
        return self._template() is not None

    def _template(self) -> str | None:
        if _TEMPLATE in self.files:
            return self.files[_TEMPLATE].decode("utf-8", "replace")
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = [entry for entry in template if isinstance(entry, dict)]
            template = next((x.get("template") for x in named if x.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def _object(self, name: str) -> dict:
        """Returns the JSON object in a file, or an empty one if the file is missing."""
        try:
            value = json.loads(self.files.get(name, b"{}").decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            path = self.path.with_name(name)
            raise InputError(f"{path}: expected JSON, found {one_line(error)}") from None
        if not isinstance(value, dict):
            path = self.path.with_name(name)
            raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
        return value

    def _check_complete(self) -> None:
        """Raises InputError if the settings have tokens that the tokenizer files do not have.

        Older fine-tuned models add tokens in this way, which this package would encode as plain
        text.
        """
        added = self._object("added_tokens.json")
        listed = self._settings.get("added_tokens_decoder")
        tokens = []
        if isinstance(listed, dict):
            for id, token in listed.items():
                text = token.get("content") if isinstance(token, dict) else token
                tokens.append((_SETTINGS, str(id), text))
        tokens += [("added_tokens.json", str(id), text) for text, id in added.items()]
        for name, id, text in tokens:
            known = id.isdecimal() and len(id) < 10 and int(id) < self.vocab_size
            if not known or _spaced(self._text_of(int(id))) != _spaced(text):
                raise InputError(
                    f"{self.path}: expected all tokens, found {id} ({short_repr(text)}) only in "
                    f"{name}. Make one tokenizer.json of both files with transformers: "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )

    @abc.abstractmethod
    def _text_of(self, id: int) -> str | None:
        """Returns the piece of an id, control ids included, as the tokenizer files spell it."""

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Returns token ids as a list; raises InputError unless the tokenizer has all of them."""
        try:
            ids = [operator.index(id) for id in ids]
        except TypeError:
            raise InputError(f"ids: expected integers, found {short_repr(ids)}") from None
        for id in ids:
            if not 0 <= id < self.vocab_size:
                raise InputError(f"ids: expected token ids in [0, {self.vocab_size}), found {id}")
        return ids

    def _flag(self, name: str) -> bool | None:
        """Returns a setting that is true, false or null; None if it is missing."""
        value = self._settings.get(name)
        if value is not None and not isinstance(value, bool):
            path = self.path.with_name(_SETTINGS)
            raise InputError(f"{path}: {name}: expected true or false, found {short_repr(value)}")
        return value

    def _special(self, name: str) -> str | None:
        """Returns the text of a special token such as `bos_token`, if the settings have it."""
        token = self._settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None


def difference(one: Tokenizer | None, other: Tokenizer | None) -> str | None:
    """Returns a difference between two tokenizers, for messages; None: drafting is possible.

    Each id of the smaller vocabulary, except control ids, must have the same text in both. The
    larger vocabulary may have more tokens. If a tokenizer is None, no difference is known.
    """
    if one is None or other is None or one is other:
        return None
    key = id(one), id(other)
    if key not in _COMPARED:
        while len(_COMPARED) >= _MOST_COMPARED:
            _COMPARED.pop(next(iter(_COMPARED)))  # the oldest
        # The entry refers to both tokenizers, so that no later object can get their `id`s.
        _COMPARED[key] = one, other, _difference(one, other)
    return _COMPARED[key][2]


_COMPARED: dict[tuple[int, int], tuple] = {}
_MOST_COMPARED = 16


def _difference(one: Tokenizer, other: Tokenizer) -> str | None:
    for token in range(min(one.vocab_size, other.vocab_size)):
        texts = one.pieces.get(token), other.pieces.get(token)
        if texts[0] != texts[1]:
            quoted = ("no text" if text is None else short_repr(text) for text in texts)
            return f"id {token}: {' and '.join(quoted)}"
    return None


def incremental_text(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], ends: Collection[int] = ()
) -> str:
    """Returns the text that `tokens` add to the text of `prompt`, without a last id in `ends`.

    Some tokenizers decode tokens differently without the tokens before them, so both are decoded
    together and the prompt's text is removed. Ids beyond the tokenizer's vocabulary have no text,
    because the vocabulary of a model may be padded.
    """
    if len(tokens) and tokens[-1] in ends:
        tokens = tokens[:-1]
    prompt, tokens = ([id for id in ids if id < tokenizer.vocab_size] for ids in (prompt, tokens))
    before = tokenizer.decode(prompt)
    both = tokenizer.decode([*prompt, *tokens])
    # The prompt may end within a character (decoded as U+FFFD) that the new tokens complete.
    for start in (before, before.rstrip("\ufffd")):
        if both.startswith(start):
            return both[len(start) :]
    return tokenizer.decode(tokens)


def _spaced(text) -> str | None:
    """Returns a piece with SentencePiece's mark for a space replaced by a space."""
    return text.replace("\u2581", " ") if isinstance(text, str) else None


def _read(folder: pathlib.Path, names: Sequence[str]) -> dict[str, bytes]:
    """Reads the files of a tokenizer and those optional ones that exist."""
    optional = [name for name in _OPTIONAL if os.path.lexists(folder / name)]
    return {name: read(folder / name) for name in (*names, *optional)}


def read(path: pathlib.Path) -> bytes:
    """Reads a tokenizer file; raises InputError if that fails."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a tokenizer file, found {one_line(error)}") from None
    git_lfs.check(path, content)
    return content


def check_text(text) -> None:
    """Raises InputError unless `text` is a string without lone surrogates.

    Lone surrogates have no encoding in UTF-8.
    """
    if not isinstance(text, str):
        raise InputError(f"text: expected a string, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected valid Unicode, found {error}") from None
