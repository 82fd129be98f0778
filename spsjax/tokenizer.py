"""Text to token ids and back, by what lies beside a checkpoint, or is trained here.

A folder's tokenizer is its `tokenizer.json`, which the `tokenizers` library reads; or its
`tokenizer.model`, which is SentencePiece's; or GPT-2's `vocab.json` and `merges.txt`.
"""

import abc
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import sentencepiece
import tokenizers

from spsjax import chat, files
from spsjax.errors import InputError, brief, one_line

_SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
_END = "<|endoftext|>"  # of GPT-2, whose own files do not say so
_SETTINGS = "tokenizer_config.json"
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece of one byte, of tokenizers that fall back to them
_TEMPLATE = "chat_template.jinja"
# The files that define a tokenizer, by which of them is looked for first.
_KINDS = ("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt")
_BESIDE = _SETTINGS, "special_tokens_map.json", "added_tokens.json", _TEMPLATE
NAMES = tuple(name for kind in _KINDS for name in kind) + _BESIDE


class Tokenizer(abc.ABC):
    """A tokenizer of some kind; `load` and `train` make one.

    Attributes:
        path: of its first file.
        files: what a folder must hold to have it again, by name.
        vocab_size: one more than its highest id.
        bos_id, eos_id: that begin and end a text, if it has such.
    """

    def __init__(self, folder: pathlib.Path, names: Sequence[str]):
        self.path, self._names = folder / names[0], names
        self.files = {name: _read(folder / name) for name in names}
        for name in _BESIDE:
            if os.path.lexists(folder / name):
                self.files[name] = _read(folder / name)
        self._settings = self._object("special_tokens_map.json") | self._object(_SETTINGS)
        self.vocab_size = 0
        self.bos_id: int | None = None
        self.eos_id: int | None = None

    @abc.abstractmethod
    def encode(self, text: str, whole: bool = True) -> list[int]:
        """Token ids of a text, with what begins and ends one if it is `whole`.

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
            files.write(folder / name, raw)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins, by the folder's template.

        Args:
            messages: as `[{"role": "user", "content": "Hello"}]`.

        Raises InputError where there is no template, or it refuses the messages.
        """
        if _TEMPLATE in self.files:
            template = self.files[_TEMPLATE].decode("utf-8", "replace")
        else:
            template = self._settings.get("chat_template")
        if isinstance(template, list):  # of several, by name
            named = [each for each in template if isinstance(each, dict)]
            template = next((x.get("template") for x in named if x.get("name") == "default"), None)
        if not isinstance(template, str):
            raise InputError(f"{self.path.parent}: expected a chat template, found none")
        names = [name for name in self._settings if name.endswith("_token")]
        more = self._settings.get("extra_special_tokens")
        tokens = more if isinstance(more, dict) else {}
        tokens = tokens | {name: self._special(name) for name in names}
        return self.encode(chat.render(template, messages, tokens), whole=False)

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
        ids = (
            {str(id): "tokenizer_config.json" for id in listed} if isinstance(listed, dict) else {}
        )
        ids |= {str(id): "added_tokens.json" for id in known.values()}
        for id, name in ids.items():
            if not id.isdecimal() or int(id) >= self.vocab_size:
                raise InputError(
                    f"{self.path}: expected all tokens, found {id} in {name} alone; to make "
                    "tokenizer.json of both: AutoTokenizer.from_pretrained(folder)"
                    ".save_pretrained(folder), of transformers"
                )

    def _special(self, name: str) -> str | None:
        """The text of a token such as `bos_token`, where the settings have it."""
        found = self._settings.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None


def exists(folder: pathlib.Path) -> bool:
    """Whether there is a tokenizer in the folder."""
    return any((folder / kind[0]).exists() for kind in _KINDS)


def load(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a folder, or in a file; raises InputError where there is none."""
    path = pathlib.Path(path)
    if path.is_dir():
        for kind in _KINDS:
            if (path / kind[0]).exists():
                return (_SentencePiece if kind == _KINDS[1] else _HuggingFace)(path, kind)
        first = ", ".join(kind[0] for kind in _KINDS)
        raise InputError(f"{path}: expected a tokenizer ({first}), found none")
    for kind in _KINDS:
        if path.suffix == ".json" and path.name == kind[0]:
            return _HuggingFace(path.parent, kind)
    return _SentencePiece(path.parent, (path.name,))


class _SentencePiece(Tokenizer):
    """A SentencePiece model. `encode` begins with the begin-of-sequence id, if there is one."""

    def __init__(self, folder: pathlib.Path, names: Sequence[str]):
        super().__init__(folder, names)
        model = self._model = sentencepiece.SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(self.files[names[0]])
        except RuntimeError:
            raise InputError(
                f"{self.path}: expected a SentencePiece model, found another or a damaged file"
            ) from None
        self.files["tokenizer.model"] = self.files.pop(names[0])  # as a folder has it
        self._names = ("tokenizer.model",)
        self.vocab_size = model.vocab_size()
        self.bos_id = model.bos_id() if model.bos_id() >= 0 else None
        self.eos_id = model.eos_id() if model.eos_id() >= 0 else None
        self._begins = self.bos_id is not None and self._settings.get("add_bos_token") is not False
        self._check_complete()

    @functools.cached_property
    def pieces(self):
        model = self._model
        ids = [id for id in range(self.vocab_size) if not model.is_control(id)]
        return {id: model.id_to_piece(id) for id in ids if not model.is_unknown(id)}

    def encode(self, text, whole=True):
        _check_unicode(text)
        if whole:
            ids = self._model.encode(text)
            return [self.bos_id, *ids] if self._begins else ids
        # A template writes begin and end as text, which the model itself never reads so.
        bounds = [id for id in (self.bos_id, self.eos_id) if id is not None]
        ends = {self._model.id_to_piece(id): id for id in bounds}
        parts = re.split("|".join(f"({re.escape(end)})" for end in ends), text) if ends else [text]
        encode = self._model.encode
        return [
            id for part in parts if part for id in ([ends[part]] if part in ends else encode(part))
        ]

    def decode(self, ids):
        return self._model.decode([int(id) for id in ids if id in self.pieces])


class _HuggingFace(Tokenizer):
    """One that the `tokenizers` library reads; what begins a text is as its own file says."""

    def __init__(self, folder: pathlib.Path, names: Sequence[str]):
        super().__init__(folder, names)
        try:
            if names == _KINDS[0]:
                model = tokenizers.Tokenizer.from_str(self.files[names[0]].decode())
            else:
                model = self._gpt2(folder)
        except (InputError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception, and where it panics more
            raise InputError(
                f"{self.path}: expected a tokenizer, found {one_line(error)}"
            ) from None
        model.no_truncation()  # some files have the settings of what they were trained for
        model.no_padding()
        self._model = model
        self.vocab_size = max(model.get_vocab().values(), default=-1) + 1
        if model.token_to_id(_END) is not None:
            self._settings = {"bos_token": _END, "eos_token": _END} | self._settings
        self.bos_id, self.eos_id = (
            None if token is None else model.token_to_id(token)
            for token in map(self._special, ("bos_token", "eos_token"))
        )
        self._prefix = []
        begins = self._settings.get("add_bos_token") and self.bos_id is not None
        self._bytes = {
            id: int(piece[3:5], 16)
            for piece, id in model.get_vocab().items()
            if model.decoder is not None and _BYTE.fullmatch(piece)
        }
        if names != _KINDS[0]:
            self._check_complete()
        if begins and not self.encode(""):  # older files leave it to the class that reads them
            self._prefix = [self.bos_id]

    def _gpt2(self, folder: pathlib.Path) -> tokenizers.Tokenizer:
        """Byte-level BPE (Radford et al. 2019); others have such files, but split otherwise."""
        known = self._settings.get("tokenizer_class", "GPT2Tokenizer")
        config = _read(folder / "config.json") if (folder / "config.json").exists() else b"{}"
        kind = json.loads(config).get("model_type", "gpt2")
        if not str(known).startswith("GPT2Tokenizer") or kind != "gpt2":
            raise InputError(
                f"{folder}: expected tokenizer.json or tokenizer.model, found only vocab.json, "
                f"which does for GPT-2 but not for {brief(known if kind == 'gpt2' else kind)}"
            )
        vocab = json.loads(self.files["vocab.json"])
        lines = self.files["merges.txt"].decode().replace("\r\n", "\n").split("\n")
        merges = [tuple(line.split(" ")) for line in lines if line and line[:8] != "#version"]
        made = {*map("".join, merges), _END}
        for piece in vocab:
            if len(piece) > 1 and piece not in made:
                raise InputError(
                    f"{folder / 'merges.txt'}: expected a merge for each piece of vocab.json, "
                    f"found none for {brief(piece)}"
                )
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        if _END in vocab:
            model.add_special_tokens([_END])
        return model

    @functools.cached_property
    def pieces(self):
        added = self._model.get_added_tokens_decoder()
        vocab = self._model.get_vocab().items()
        return {id: piece for piece, id in vocab if not (id in added and added[id].special)}

    def encode(self, text, whole=True):
        _check_unicode(text)
        ids = self._model.encode(text, add_special_tokens=whole).ids
        return self._prefix + ids if whole else ids

    def decode(self, ids):
        ids = [int(id) for id in ids if id < self.vocab_size]
        if self._bytes.keys().isdisjoint(ids):
            return self._model.decode(ids)
        # The library gives up a whole run of bytes where the last character of it is not complete.
        tokens = []
        for is_byte, run in itertools.groupby(ids, self._bytes.__contains__):
            if is_byte:
                tokens.append(bytes(self._bytes[id] for id in run).decode(errors="replace"))
            else:
                tokens += [self._model.id_to_token(id) for id in run if id in self.pieces]
        return self._model.decoder.decode(tokens)


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a tokenizer's file, found {one_line(error)}") from None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected valid Unicode, found {error}") from None


def train(texts: Iterable[str], path: str | pathlib.Path, vocab_size: int) -> Tokenizer:
    """Trains a byte-fallback BPE that keeps white space as it is, and writes it to `path`.

    Runs of 2, 4, 8, 12 and 16 spaces are pieces of their own, because indentation is what code
    is made of; nothing is normalised, so that decoding gives back the text that was encoded.
    Raises InputError if the texts are too few, or too varied, for `vocab_size` pieces.
    """
    path, model = pathlib.Path(path), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["\n", *(_SPACE * run for run in (2, 4, 8, 12, 16))],
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = one_line(error).rpartition("] ")[2]
        raise InputError(
            f"vocab_size: expected a size that fits the texts, found {vocab_size} ({reason})"
        ) from None
    files.write(path, model.getvalue())
    return load(path)
