"""Tokenizers of the `sentencepiece` library, and their training."""

import functools
import io
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import sentencepiece

from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import base
from spsjax.utils import atomic_files

_SPACE = "\u2581"  # a space inside a piece


class SentencePiece(base.Tokenizer):
    """Tokenizer of the SentencePiece library.

    `encode` adds the beginning-of-sequence id, if there is one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        names: Sequence[str],
        files: Mapping[str, bytes] | None = None,
    ):
        super().__init__(folder, names, files)
        model = self._model = sentencepiece.SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(self.files[names[0]])
            self.vocab_size = model.vocab_size()
            self.pieces, self._controls  # noqa: B018 (only reading a piece decodes it)
        except (RuntimeError, UnicodeDecodeError):
            raise InputError(
                f"{self.path}: expected a SentencePiece model, found a file that "
                "is damaged or of another kind"
            ) from None
        self.files["tokenizer.model"] = self.files.pop(names[0])  # the name in a folder
        self._names = ("tokenizer.model",)
        self.bos_id = model.bos_id() if model.bos_id() >= 0 else None
        self.eos_id = model.eos_id() if model.eos_id() >= 0 else None
        self._adds_bos = self._flag("add_bos_token") is not False and self.bos_id is not None
        self._check_complete()
        spaced = self._flag("add_prefix_space")
        first = model.encode("a", out_type=str)[:1]
        if spaced is not None and first and spaced != first[0].startswith(_SPACE):
            raise InputError(
                f"{self.path.with_name('tokenizer_config.json')}: add_prefix_space: "
                f"expected {json.dumps(not spaced)} as in {self.path.name}, "
                f"found {json.dumps(spaced)}"
            )

    @functools.cached_property
    def pieces(self):
        model = self._model
        ids = [id for id in range(self.vocab_size) if not model.is_control(id)]
        return {id: model.id_to_piece(id) for id in ids if not model.is_unknown(id)}

    @functools.cached_property
    def _controls(self) -> dict[str, int]:
        """Ids of control pieces, by piece."""
        model = self._model
        ids = [id for id in range(self.vocab_size) if model.is_control(id)]
        return {model.id_to_piece(id): id for id in ids if model.id_to_piece(id)}

    @functools.cached_property
    def _names_of_controls(self) -> re.Pattern[str]:
        """Pattern of control pieces. Gemma has thousands of them."""
        names = sorted(map(re.escape, self._controls), key=len, reverse=True)
        return re.compile(f"({'|'.join(names)})")

    def is_byte(self, id: int) -> bool:
        """Returns whether an id is a piece of byte fallback."""
        return self._model.is_byte(id)

    def _text_of(self, id):
        return self._model.id_to_piece(id)

    def encode(self, text, whole=True):
        base.check_text(text)
        if whole:
            ids = self._model.encode(text)
            return [self.bos_id, *ids] if self._adds_bos else ids
        # A chat template writes control pieces as text, but the library never encodes text to
        # control ids. So the text is split at them. Longer names come first, because a name may be
        # a prefix of another.
        controls = self._controls
        segments = self._names_of_controls.split(text) if controls else [text]
        encode = self._model.encode
        return [
            id
            for segment in segments
            if segment
            for id in ([controls[segment]] if segment in controls else encode(segment))
        ]

    def decode(self, ids):
        return self._model.decode([id for id in self._checked(ids) if id in self.pieces])


def train(texts: Iterable[str], path: str | pathlib.Path, vocab_size: int) -> SentencePiece:
    """Trains a byte-fallback BPE that preserves white space, and writes it to `path`.

    Runs of 2, 4, 8, 12 and 16 spaces are pieces, which shortens indented code. Text is not
    normalised, so decoding restores the encoded text. The only exception is U+2581, which is
    decoded as a space.

    Args:
        texts: training texts.
        path: path of the new SentencePiece model.
        vocab_size: number of pieces.

    Returns:
        The trained tokenizer.

    Raises:
        InputError: the texts are too few or too varied for `vocab_size` pieces.
    """
    if type(vocab_size) is not int or not 0 < vocab_size < 1 << 31:
        raise InputError(f"vocab_size: expected an integer >= 1, found {short_repr(vocab_size)}")
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
    atomic_files.write(path, model.getvalue())
    return SentencePiece(path.parent, (path.name,))
