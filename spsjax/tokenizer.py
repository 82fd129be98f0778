"""Text to token ids and back: a SentencePiece model, trained here or found beside a checkpoint."""

import io
import pathlib
from collections.abc import Iterable

import sentencepiece

from spsjax import files
from spsjax.errors import InputError, one_line

_SPACE = "\u2581"  # how SentencePiece writes a space inside a piece


class Tokenizer:
    """A SentencePiece model. `encode` begins with the begin-of-sequence id, if there is one."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self.proto = self.path.read_bytes()
            self._model.LoadFromSerializedProto(self.proto)
        except OSError as error:
            raise InputError(
                f"{path}: expected a SentencePiece model, found {one_line(error)}"
            ) from None
        except RuntimeError:
            raise InputError(
                f"{path}: expected a SentencePiece model, found another or a damaged file"
            ) from None
        self.vocab_size = self._model.vocab_size()
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.eos_id = self._model.eos_id() if self._model.eos_id() >= 0 else None

    def __eq__(self, other) -> bool:
        """Two tokenizers are one if they give every id the same piece."""
        return isinstance(other, Tokenizer) and self.pieces() == other.pieces()

    def pieces(self) -> list[str]:
        """The piece of each id."""
        return [self._model.id_to_piece(index) for index in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; raises InputError if it is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"text: expected valid Unicode, found {error}") from None
        ids = self._model.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids.

        Control ids (begin, end) leave nothing behind, nor do ids beyond the tokenizer's: a model's
        vocabulary is sometimes padded.
        """
        return self._model.decode([int(index) for index in ids if index < self.vocab_size])


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
    return Tokenizer(path)
