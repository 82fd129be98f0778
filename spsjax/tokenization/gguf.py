"""Tokenizers in the metadata of GGUF files, as the files of a model folder.

`tokenizer.ggml.model` is "gpt2" for byte-level BPE, which becomes a `tokenizer.json`, or "llama"
for SentencePiece's BPE, which becomes a `tokenizer.model`. Byte-level BPE splits a text before its
merges, by the rules that `tokenizer.ggml.pre` names.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_proto
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization.base import KINDS, Tokenizer
from spsjax.tokenization.huggingface import HuggingFace
from spsjax.tokenization.sentencepiece import SentencePiece

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens
_SPACE = "\u2581"  # a space inside a piece of SentencePiece
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


@dataclasses.dataclass(frozen=True)
class _Rules:
    """Rules of a byte-level BPE that its vocabulary does not say.

    Attributes:
        patterns: regular expressions that split a text, one after another; the pieces are what they
            match and what lies between.
        whole: whether a piece that is a token is never split by the merges.
        nfc: whether texts are normalised to NFC.
        bos: whether a text begins with the beginning-of-sequence id, unless the file says it.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    nfc: bool = False
    bos: bool = False


# Regular expressions of llama.cpp (`llama-vocab.cpp`), which are those of the models' authors.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PLAIN = _Rules((_GPT2,))
_DIGITS = _Rules((r"\p{N}", _GPT2))
_LLAMA3 = _Rules((_CASED + r"\p{N}{1,3}" + _REST,), whole=True, bos=True)
_QWEN2 = _Rules((_CASED + r"\p{N}" + _REST,), nfc=True)
# Rules by `tokenizer.ggml.pre`.
_RULES = {
    "gpt-2": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Rules((_TEKKEN,), whole=True, bos=True),
    # What llama.cpp does for files that do not say more.
    "default": _Rules(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        )
    ),
}


def load(path: pathlib.Path, metadata: Mapping[str, object]) -> Tokenizer | None:
    """Returns the tokenizer in the metadata of a GGUF file, or None.

    Raises InputError if the tokenizer is of an unknown kind, or if a value is missing or damaged.
    """
    model = metadata.get(f"{_KEY}model")
    if model in (None, "none", "no_vocab"):
        return None
    vocab = _Vocab(path, metadata)
    if model == "gpt2":
        files = {"tokenizer.json": _byte_level(vocab), "tokenizer_config.json": _settings(vocab)}
        return HuggingFace(path, KINDS[0], files)
    if model == "llama":
        files = {
            "tokenizer.model": _sentencepiece(vocab),
            "tokenizer_config.json": _settings(vocab),
        }
        return SentencePiece(path, KINDS[1], files)
    raise vocab.error("model", '"gpt2" (byte-level BPE) or "llama" (SentencePiece)', model)


class _Vocab:
    """Values of a tokenizer in the metadata of a GGUF file.

    Attributes:
        path: path of the file.
        metadata: metadata of the file.
        tokens: text of each token, without padding at the end.
        types: type of each token.
        special: id of each special token, by its name in the metadata.
    """

    def __init__(self, path: pathlib.Path, metadata: Mapping[str, object]):
        self.path, self.metadata = path, metadata
        tokens = self.list("tokens", str)
        types = self.list("token_type", int, len(tokens), [_NORMAL] * len(tokens))
        size = len(tokens)
        # Rows of the embedding without a token, which a model folder has no token for.
        while size and types[size - 1] == _UNUSED and tokens[size - 1] == f"[PAD{size - 1}]":
            size -= 1
        self.tokens, self.types = tokens[:size], types[:size]
        self.special: dict[str, int] = {}
        for name in _SPECIAL:
            id = metadata.get(f"{_KEY}{name}_token_id")
            if id is not None and not (type(id) is int and 0 <= id < len(tokens)):
                raise self.error(f"{name}_token_id", f"an id of the {len(tokens)} tokens", id)
            if id is not None and id < size:
                self.special[name] = id

    def error(self, key: str, expected: str, value) -> InputError:
        """Returns an error about a value."""
        actual = "none" if value is None else short_repr(value)
        return InputError(f"{self.path}: {_KEY}{key}: expected {expected}, found {actual}")

    def list(self, key: str, kind: type, length: int | None = None, *default) -> list:
        """Returns a list; raises InputError if it is missing, of another type or length."""
        value = self.metadata.get(f"{_KEY}{key}")
        if value is None and default:
            return default[0]
        kinds = "texts" if kind is str else "numbers"
        # A list in a GGUF file has values of one type.
        if not isinstance(value, list) or not value or type(value[0]) is not kind:
            raise self.error(key, f"a list of {kinds}", value)
        if length is not None and len(value) != length:
            raise self.error(key, f"{length} {kinds}", len(value))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Returns a value that is true or false."""
        value = self.metadata.get(f"{_KEY}{key}", default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def rules(self) -> _Rules:
        """Returns the rules of a byte-level BPE; raises InputError if they are unknown."""
        name = self.metadata.get(f"{_KEY}pre")
        if not isinstance(name, str) or name not in _RULES:
            raise self.error("pre", f"one of {', '.join(_RULES)}", name)
        return _RULES[name]


def _settings(vocab: _Vocab) -> bytes:
    """Returns the content of `tokenizer_config.json`."""
    settings: dict[str, object] = {
        setting: vocab.tokens[vocab.special[name]] if name in vocab.special else None
        for name, setting in _SPECIAL.items()
    }
    settings["add_bos_token"] = _adds_bos(vocab)
    template = vocab.metadata.get(_TEMPLATE)
    if isinstance(template, str):
        settings["chat_template"] = template
    return json.dumps(settings, indent=2).encode()


def _adds_bos(vocab: _Vocab) -> bool:
    """Returns whether a text begins with the beginning-of-sequence id."""
    default = vocab.metadata[f"{_KEY}model"] == "llama" or vocab.rules().bos
    return vocab.flag("add_bos_token", default) and "bos" in vocab.special


def _byte_level(vocab: _Vocab) -> bytes:
    """Returns the content of `tokenizer.json` for a byte-level BPE."""
    rules = vocab.rules()
    ids = {text: id for id, text in enumerate(vocab.tokens)}
    if len(ids) < len(vocab.tokens):
        twice = next(text for id, text in enumerate(vocab.tokens) if ids[text] != id)
        raise vocab.error("tokens", "each text once", twice)
    pairs = [tuple(merge.split(" ")) for merge in vocab.list("merges", str)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise vocab.error("merges", "pairs of pieces with a space between", " ".join(wrong))
    try:
        model = tokenizers.models.BPE(vocab=ids, merges=pairs, ignore_merges=rules.whole)
        tokenizer = tokenizers.Tokenizer(model)
    except Exception as error:  # the library raises this type itself
        raise vocab.error("merges", "pairs of tokens that make a token", one_line(error)) from None
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    bytewise = pre_tokenizers.ByteLevel(
        add_prefix_space=vocab.flag("add_space_prefix", False), use_regex=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(text, normalized=False, special=type_ != _USER_DEFINED)
        for text, type_ in zip(vocab.tokens, vocab.types)
        if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    tokenizer.add_tokens(added)
    if _adds_bos(vocab):
        id = vocab.special["bos"]
        # Under a name of ours: the token's own text may have characters of the template's syntax.
        token = {"id": "bos", "ids": [id], "tokens": [vocab.tokens[id]]}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="bos $A", pair="bos $A bos:1 $B:1", special_tokens=[token]
        )
    return tokenizer.to_str().encode()


def _sentencepiece(vocab: _Vocab) -> bytes:
    """Returns the content of `tokenizer.model`, a SentencePiece BPE."""
    scores = vocab.list("scores", float, len(vocab.metadata[f"{_KEY}tokens"]))
    proto = sentencepiece_proto.ModelProto()
    unknown = vocab.special.get("unknown", 0)
    types = list(vocab.types)
    if unknown >= len(types):
        raise vocab.error("unknown_token_id", f"less than {len(types)}", unknown)
    types[unknown] = _UNKNOWN  # Gemma's is a control token in files, and the library needs one
    for text, score, type_ in zip(vocab.tokens, scores, types):
        # llama.cpp stores these as the text that they match.
        text = text.replace(" ", _SPACE) if type_ == _USER_DEFINED else text
        try:
            proto.pieces.add(piece=text, score=score, type=type_)
        except ValueError:
            raise vocab.error("token_type", "types from 1 to 6", type_) from None
    trainer = proto.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(vocab.tokens)
    trainer.byte_fallback = _BYTE in types
    trainer.unk_id, trainer.unk_piece = unknown, vocab.tokens[unknown]
    for name, prefix in {"bos": "bos", "eos": "eos", "padding": "pad"}.items():
        id = vocab.special.get(name, -1)
        setattr(trainer, f"{prefix}_id", id)
        # The library looks ids up by these texts, which have defaults.
        setattr(trainer, f"{prefix}_piece", "" if id < 0 else vocab.tokens[id])
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = vocab.flag("add_space_prefix", True)
    normalizer.remove_extra_whitespaces = vocab.flag("remove_extra_whitespaces", False)
    return proto.SerializeToString()
