"""Byte strings of tokens, by which the vocabularies of two tokenizers are compared.

Tokenizers write their pieces in three alphabets. Byte-level BPE has a printable character for each
byte ("Ġ" is a space). SentencePiece and its kin write a space as U+2581, and may have pieces of
one byte ("<0x0A>"). Tokens that were added to a vocabulary are plain text in both.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from spsjax.errors import InputError
from spsjax.tokenization.base import Tokenizer
from spsjax.tokenization.huggingface import HuggingFace
from spsjax.tokenization.sentencepiece import SentencePiece

_SPACE = "\u2581"
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # of byte fallback


@dataclasses.dataclass(frozen=True)
class Strings:
    """Byte strings of a vocabulary.

    Attributes:
        of: byte string of each id that has a text; control ids are missing.
        ids: id of each byte string. Of several ids with one string it is the first that is not a
            piece of byte fallback, because that is the one that texts are encoded to.
    """

    of: Mapping[int, bytes]
    ids: Mapping[bytes, int]


def strings(tokenizer: Tokenizer, size: int) -> Strings:
    """Returns the byte strings of a tokenizer's ids below `size`, the vocabulary of its model.

    Raises InputError for a tokenizer whose pieces do not say which bytes they are (WordPiece).
    """
    if isinstance(tokenizer, SentencePiece):
        pieces, fallback = _of_sentencepiece(tokenizer)
    elif isinstance(tokenizer, HuggingFace):
        pieces, fallback = _of_huggingface(tokenizer)
    else:
        raise _unknown(tokenizer, type(tokenizer).__name__)
    pieces = {id: text for id, text in pieces.items() if id < size}
    ids: dict[bytes, int] = {}
    for id in sorted(pieces, key=lambda id: (id in fallback, id)):
        ids.setdefault(pieces[id], id)
    return Strings(pieces, ids)


def _unknown(tokenizer: Tokenizer, kind: str) -> InputError:
    return InputError(
        f"{getattr(tokenizer, 'path', 'tokenizer')}: expected a byte-level BPE, SentencePiece or a "
        f"tokenizer with its marks for spaces, found {kind}, whose pieces do not say their bytes"
    )


def _of_sentencepiece(tokenizer: SentencePiece) -> tuple[dict[int, bytes], set[int]]:
    """Returns the bytes of each id, and the ids of byte fallback."""
    fallback = {id for id in tokenizer.pieces if tokenizer.is_byte(id)}
    return dict(_spelled(tokenizer.pieces, fallback)), fallback


def _of_huggingface(tokenizer: HuggingFace) -> tuple[dict[int, bytes], set[int]]:
    decoders = {*_kinds(tokenizer.decoder_json())}
    added = tokenizer.added_texts()
    plain = {id: text for id, text in tokenizer.pieces.items() if id not in added}
    texts = {id: text.encode() for id, text in added.items() if id in tokenizer.pieces}
    if "ByteLevel" in decoders:
        alphabet = byte_alphabet()
        return {
            id: bytes(alphabet[char] for char in text)
            for id, text in plain.items()
            if all(char in alphabet for char in text)
        } | texts, set()
    if not decoders & {"Metaspace", "Replace", "ByteFallback"}:
        raise _unknown(tokenizer, " and ".join(sorted(decoders)) or "no decoder")
    fallback = set()
    if "ByteFallback" in decoders:
        fallback = {id for id, text in plain.items() if BYTE_PIECE.fullmatch(text)}
    return dict(_spelled(plain, fallback)) | texts, fallback


def _spelled(pieces: Mapping[int, str], fallback: set[int]) -> Iterator[tuple[int, bytes]]:
    """Yields the bytes of pieces in which U+2581 is a space."""
    for id, text in pieces.items():
        if id in fallback:
            yield id, bytes([int(text[3:5], 16)])
        elif text:
            yield id, text.replace(_SPACE, " ").encode()


def _kinds(decoder: object) -> Iterator[str]:
    """Yields the types of a decoder of the `tokenizers` library, and of those in a sequence."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _kinds(inner)


@functools.cache
@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE (Radford et al. 2019).

    Printable bytes are the characters of Latin-1; the other bytes have those from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def pieces_of(tokenizer: Tokenizer, own: Strings, text: bytes) -> list[int]:
    """Returns ids whose strings together are `text`; bytes without an id are left out.

    They are what the tokenizer makes of the text alone, if that has the same bytes. Else they are
    the longest matches from the left: for a part of a character, or where the tokenizer puts a
    space before each text.
    """
    for candidate in _readings(text):
        ids = tokenizer.encode(candidate, whole=False)
        if b"".join(own.of.get(id, b"") for id in ids) == text:
            return [id for id in ids if id in own.of]
    return longest_matches(own, text)


def _readings(text: bytes) -> Iterator[str]:
    """Yields texts that a tokenizer may turn into these bytes."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        return
    yield decoded
    if decoded.startswith(" "):  # of which the tokenizer may add one
        yield decoded[1:]


def longest_matches(own: Strings, text: bytes) -> list[int]:
    """Returns the ids of the longest matches from the left; bytes without an id are left out."""
    ids, start = [], 0
    while start < len(text):
        ends = range(len(text), start, -1)
        end = next((end for end in ends if text[start:end] in own.ids), None)
        if end is not None:
            ids.append(own.ids[text[start:end]])
        start = start + 1 if end is None else end
    return ids
