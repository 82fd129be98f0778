"""Log-probabilities of the tokens of answers, in the forms of OpenAI's endpoints."""

import dataclasses
from collections.abc import Sequence

from spsjax.runtime.engine import Request
from spsjax.tokenization.base import Tokenizer, incremental_text
from spsjax.tokenization.strings import BYTE_PIECE, byte_alphabet

_PART = "\ufffd"  # what a part of a character is decoded to


@dataclasses.dataclass(frozen=True)
class Token:
    r"""A token and its log-probability at temperature 1.

    Attributes:
        text: text; that of a part of a character has the form "bytes:\xe2\x80".
        raw: bytes in UTF-8; None: unknown.
        logprob: natural logarithm of the probability.
    """

    text: str
    raw: Sequence[int] | None
    logprob: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """A token of an answer, where it begins, and the most probable tokens at its position."""

    token: Token
    top: list[Token]
    offset: int


class TokenTexts:
    """Texts and bytes of single tokens, as they are within a text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Some tokenizers drop a space at the beginning of a text, so that tokens follow another.
        self._before = tokenizer.encode("a", whole=False)
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids within a text."""
        return incremental_text(self._tokenizer, self._before, ids)

    def token(self, id: int, logprob: float) -> Token:
        """Returns a token with its text."""
        if id not in self._known:
            self._known[id] = self._text_and_bytes(id)
        return Token(*self._known[id], logprob)

    def _text_and_bytes(self, id: int) -> tuple[str, list[int] | None]:
        text = self._tokenizer.control_text(id) or self.decode([id])
        if _PART not in text:
            return text, [*text.encode()]
        raw = _bytes_of_part(self._tokenizer.pieces.get(id, ""))
        return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _bytes_of_part(piece: str) -> list[int] | None:
    """Returns the bytes of a piece of byte fallback or of byte-level BPE; None: it is neither."""
    if match := BYTE_PIECE.fullmatch(piece):
        return [int(match[1], 16)]
    alphabet = byte_alphabet()
    return [alphabet[char] for char in piece] if piece and alphabet.keys() >= {*piece} else None


class Entries:
    """Entries of one choice, which go with the text that is sent.

    A token goes with the text in which it begins. A token that ends the text has none, and neither
    has one whose text a stop has cut off.
    """

    def __init__(self, texts: TokenTexts, request: Request, top: int | None):
        """`top` is the number of most probable tokens per position; None: no entries at all."""
        self._texts, self._request, self._top = texts, request, top
        self._count = 0  # tokens that have an entry
        self._offset = 0  # of the next token
        self._begin, self._base = 0, 0  # the last token that began a character; its offset

    def until(self, length: int | None) -> list[Entry]:
        """Returns the entries of further tokens.

        `length` is that of the text in which they begin; None: the whole text.
        """
        if self._top is None:
            return []
        tokens = [*self._request.tokens]
        if tokens and tokens[-1] in self._request.ends:
            tokens.pop()
        entries = []
        known = self._request.logprobs if self._count < len(tokens) else None
        while self._count < len(tokens):
            self._advance(tokens)
            if length is not None and self._offset >= length:
                break
            index = self._count
            top = zip(known.top_ids[index, : self._top], known.top[index])
            own = self._texts.token(tokens[index], float(known.raw[index]))
            others = [self._texts.token(int(id), float(value)) for id, value in top]
            entries.append(Entry(own, others, self._offset))
            self._count += 1
        return entries

    def _advance(self, tokens: Sequence[int]) -> None:
        """Moves the offset to the next token, or to the character that this token continues."""
        text = self._texts.decode(tokens[self._begin : self._count])
        if text.endswith(_PART) and _PART in self._texts.decode([tokens[self._count]]):
            self._offset = self._base + len(text.rstrip(_PART))
        else:
            self._offset = self._base = self._base + len(text)
            self._begin = self._count


def of_completion(entries: Sequence[Entry]) -> dict:
    """Returns entries as completions have them. The token itself is among the most probable."""
    tops = []
    for entry in entries:
        probable: dict[str, float] = {}
        for token in [*entry.top, entry.token]:
            probable.setdefault(token.text, token.logprob)  # the most probable of equal texts
        tops.append(probable)
    return {
        "tokens": [entry.token.text for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def of_chat(entries: Sequence[Entry]) -> dict:
    """Returns entries as chats have them."""
    content = [
        _token(entry.token) | {"top_logprobs": [_token(token) for token in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(token: Token) -> dict:
    raw = None if token.raw is None else [*token.raw]
    return {"token": token.text, "logprob": token.logprob, "bytes": raw}
