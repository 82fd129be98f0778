"""Tokenizers of the `tokenizers` library: `tokenizer.json` and GPT-2's two files."""

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from spsjax.errors import InputError, one_line, short_repr
from spsjax.tokenization import base

# GPT-2's end of text. Its own files do not mark it as special.
_END = "<|endoftext|>"
# Piece of one byte, in tokenizers with byte fallback.
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class HuggingFace(base.Tokenizer):
    """Tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        folder: pathlib.Path,
        names: Sequence[str],
        files: Mapping[str, bytes] | None = None,
    ):
        super().__init__(folder, names, files)
        try:
            if names == base.KINDS[0]:
                model = tokenizers.Tokenizer.from_str(self.files[names[0]].decode())
            else:
                model = self._gpt2(folder)
        except (InputError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise InputError(
                f"{self.path}: expected a tokenizer, found {one_line(error)}"
            ) from None
        # Some files carry the truncation and padding of a training run.
        model.no_truncation()
        model.no_padding()
        self._model = model
        # The settings take precedence over the tokenizer file.
        spaced = self._flag("add_prefix_space")
        bytewise = isinstance(model.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel)
        if bytewise and spaced is not None:
            model.pre_tokenizer.add_prefix_space = spaced
        self.vocab_size = max(model.get_vocab().values(), default=-1) + 1
        if model.token_to_id(_END) is not None:
            self._settings = {"bos_token": _END, "eos_token": _END} | self._settings
        self.bos_id, self.eos_id = (
            None if token is None else model.token_to_id(token)
            for token in map(self._special, ("bos_token", "eos_token"))
        )
        self._prefix = []
        # Number of ids that the tokenizer adds after a text. They are removed, because the model
        # continues the text.
        added = model.encode("x").special_tokens_mask
        self._suffix = 0 if all(added) else added[::-1].index(0)
        adds_bos = self._flag("add_bos_token") and self.bos_id is not None
        self._bytes = {
            id: int(piece[3:5], 16)
            for piece, id in model.get_vocab().items()
            if model.decoder is not None and _BYTE.fullmatch(piece)
        }
        if names != base.KINDS[0]:
            self._check_complete()
        # In older folders, a class of `transformers` adds this id, and not the tokenizer file.
        if adds_bos and not self.encode(""):
            self._prefix = [self.bos_id]

    def _gpt2(self, folder: pathlib.Path) -> tokenizers.Tokenizer:
        """Returns GPT-2's byte-level BPE (Radford et al. 2019).

        Other models have files with these names, but split text differently before the merges.
        """
        name = self._settings.get("tokenizer_class", "GPT2Tokenizer")
        config = base.read(folder / "config.json") if (folder / "config.json").exists() else b"{}"
        kind = json.loads(config).get("model_type", "gpt2")
        if not str(name).startswith("GPT2Tokenizer") or kind != "gpt2":
            raise InputError(
                f"{folder}: expected tokenizer.json or tokenizer.model, found only vocab.json of "
                f"{short_repr(name if kind == 'gpt2' else kind)}. It is enough for GPT-2 alone."
            )
        vocab = json.loads(self.files["vocab.json"])
        lines = self.files["merges.txt"].decode().replace("\r\n", "\n").split("\n")
        merges: list[Any] = [
            tuple(line.split(" ")) for line in lines if line and line[:8] != "#version"
        ]
        # Without its merge a piece would never be produced, and text would be split differently.
        merged = {*map("".join, merges), _END}
        for piece in vocab:
            if len(piece) > 1 and piece not in merged:
                raise InputError(
                    f"{folder / 'merges.txt'}: expected a merge for each piece of vocab.json, "
                    f"found none for {short_repr(piece)}"
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
        base.check_text(text)
        ids = self._model.encode(text, add_special_tokens=whole).ids
        return self._prefix + ids[: len(ids) - self._suffix] if whole else ids

    def control_text(self, id):
        token = self._model.get_added_tokens_decoder().get(id)  # not all of them are special
        return None if token is None else token.content

    def added_texts(self) -> dict[int, str]:
        """Returns the texts of the tokens that were added to the vocabulary, control ids too."""
        return {id: token.content for id, token in self._model.get_added_tokens_decoder().items()}

    def decoder_json(self) -> dict | None:
        """Returns the decoder as `tokenizer.json` has it; None: there is none."""
        return json.loads(self._model.to_str())["decoder"]

    def _text_of(self, id):
        return self._model.id_to_token(id)

    def decode(self, ids):
        ids = self._checked(ids)
        if self._bytes.keys().isdisjoint(ids):
            return self._model.decode(ids)
        # If the last character of a run of bytes is incomplete, the library drops the whole run,
        # and text that was already streamed would change. So each run is decoded separately.
        tokens = []
        for is_byte, run in itertools.groupby(ids, self._bytes.__contains__):
            if is_byte:
                tokens.append(bytes(self._bytes[id] for id in run).decode(errors="replace"))
            else:
                tokens += [self._model.id_to_token(id) or "" for id in run if id in self.pieces]
        return self._model.decoder.decode(tokens)
