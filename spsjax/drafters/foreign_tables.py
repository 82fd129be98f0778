"""Tables between the vocabularies of a target and of a draft model, made once on the host."""

import dataclasses
import functools

import numpy as np

from spsjax.drafters import base
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.tokenization import strings
from spsjax.tokenization.base import Tokenizer
from spsjax.tokenization.strings import Strings

# The most ids of a draft that one token of the target becomes; of longer texts the rest is left out
# (texts of control tokens, and characters that a draft spells in bytes).
MOST_IDS = 16
# The longest string in bytes that is matched; longer tokens are runs of white space and rulers.
MOST_BYTES = 32
END = 256  # in a string of bytes: the end of a sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A draft model and a target whose tokenizers differ.

    Attributes:
        draft, target: the models, each with a tokenizer.
    """

    draft: base.Target
    target: base.Target

    def __post_init__(self) -> None:
        _ = self.tokenizer_of_draft, self.tokenizer_of_target  # raise InputError if there is none

    @property
    def tokenizer_of_draft(self) -> Tokenizer:
        """The draft's tokenizer."""
        return _tokenizer("draft", self.draft)

    @property
    def tokenizer_of_target(self) -> Tokenizer:
        """The target's tokenizer."""
        return _tokenizer("target", self.target)

    @property
    def config(self) -> Config:
        """Shape of the draft model."""
        return self.draft.config

    @property
    def vocab_size(self) -> int:
        """V, size of the target's vocabulary."""
        return self.target.config.vocab_size

    @functools.cached_property
    def begin(self) -> tuple[int, ...]:
        """Ids that the draft's tokenizer puts before a text."""
        return tuple(self.tokenizer_of_draft.encode(""))

    @functools.cached_property
    def ends(self) -> tuple[int, int] | None:
        """End-of-sequence ids of target and draft; None: one of the models has none."""
        target, draft = self.tokenizer_of_target.eos_id, self.tokenizer_of_draft.eos_id
        if target is None or draft is None:
            return None
        inside = target < self.vocab_size and draft < self.config.vocab_size
        return (target, draft) if inside else None

    @functools.cached_property
    def of_target(self) -> Strings:
        """Byte strings of the target's tokens."""
        return strings.strings(self.tokenizer_of_target, self.vocab_size)

    @functools.cached_property
    def of_draft(self) -> Strings:
        """Byte strings of the draft's tokens."""
        return strings.strings(self.tokenizer_of_draft, self.config.vocab_size)

    @functools.cached_property
    def shared(self) -> dict[int, int]:
        """Id of the draft for each id of the target with the same string, in ascending order.

        Of several ids with one string, one is used. Control tokens of one text are equal, and so
        are the ends of a sequence.
        """
        own = self.of_draft.ids
        shared = {id: own[text] for text, id in self.of_target.ids.items() if text in own}
        controls = _controls(self.tokenizer_of_draft, self.of_draft, self.config.vocab_size)
        theirs = _controls(self.tokenizer_of_target, self.of_target, self.vocab_size)
        shared |= {id: controls[text] for text, id in theirs.items() if text in controls}
        start = self.tokenizer_of_target.bos_id
        if start in self.tokenizer_of_target.encode(""):
            shared.pop(start, None)  # `begin` has its place
        if self.ends is not None:
            shared[self.ends[0]] = self.ends[1]
        return dict(sorted(shared.items()))

    @property
    def share(self) -> float:
        """Share of the smaller vocabulary's strings that both have."""
        least = min(len(self.of_target.ids), len(self.of_draft.ids))
        return len(self.shared) / max(least, 1)

    @functools.cached_property
    def to_draft(self) -> np.ndarray:
        """The draft's ids of the text of each target token [V, L] int32, then -1.

        A token that both have is one id. Another text is what the draft's tokenizer makes of it
        alone. The target's beginning of a sequence has no text, unless it is shared.
        """
        pieces = [self._ids(id)[:MOST_IDS] for id in range(self.vocab_size)]
        table = np.full((len(pieces), max(map(len, pieces), default=1) or 1), -1, np.int32)
        for id, ids in enumerate(pieces):
            table[id, : len(ids)] = ids
        return table

    def _ids(self, id: int) -> list[int]:
        """Returns the draft's ids of the text of a target token."""
        if id in self.shared:
            return [self.shared[id]]
        if id == self.tokenizer_of_target.bos_id:
            return []
        text = self.of_target.of.get(id)
        if text is None:  # a control token, which is read as it is written
            text = (self.tokenizer_of_target.control_text(id) or "").encode()
        if text in self.of_draft.ids:  # the target has two ids of this string
            return [self.of_draft.ids[text]]
        return strings.pieces_of(self.tokenizer_of_draft, self.of_draft, text)


def _controls(tokenizer: Tokenizer, known: Strings, size: int) -> dict[str, int]:
    """Returns the ids below `size` of tokens that are no strings of bytes, by their texts."""
    others = (id for id in range(size) if id not in known.of)
    return {text: id for id in others if (text := tokenizer.control_text(id))}


def _tokenizer(name: str, model: base.Target) -> Tokenizer:
    """Returns the tokenizer of a model; raises InputError if it has none."""
    if model.tokenizer is None:
        raise InputError(
            f"{name}: expected a tokenizer beside the model, by which vocabularies are compared, "
            "found none"
        )
    return model.tokenizer


def padded(rows: list[list[int]], width: int) -> np.ndarray:
    """Returns rows of codes [N, width] int16, then -1."""
    table = np.full((len(rows), width), -1, np.int16)
    for row, entries in enumerate(rows):
        table[row, : len(entries)] = entries
    return table


def token_codes(pair: Pair) -> np.ndarray:
    """Returns the codes of each draft token [V of the draft, M] int16, then -1.

    A token without a string, or with one of more than MOST_BYTES, has none.
    """
    rows = [
        [*text] if len(text := pair.of_draft.of.get(id, b"")) <= MOST_BYTES else []
        for id in range(pair.config.vocab_size)
    ]
    if pair.ends is not None:
        rows[pair.ends[1]] = [END]
    return padded(rows, max(map(len, rows), default=1) or 1)


def target_strings(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Returns strings of codes [N, M] int16, shorter ones first, and the target's id of each [N].

    Each string is there once, and none has more than MOST_BYTES.
    """
    ids = pair.of_target.ids
    known = {tuple(text): id for text, id in ids.items() if len(text) <= MOST_BYTES}
    if pair.ends is not None:
        known = {text: id for text, id in known.items() if id != pair.ends[0]}
        known[(END,)] = pair.ends[0]
    ordered = sorted(known.items(), key=lambda entry: (len(entry[0]), entry[1]))
    rows = [[*text] for text, _ in ordered]
    width = max(map(len, rows), default=1) or 1
    return padded(rows, width), np.asarray([id for _, id in ordered], np.int32)
