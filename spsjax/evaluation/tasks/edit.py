"""Editing: passages of the standard library with one typo, to be written again without it.

Nearly every token of an answer stands in its prompt, which is what `drafters.copy` is for.
"""

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from spsjax.data import documents
from spsjax.errors import InputError, check_integer
from spsjax.evaluation.tasks import base
from spsjax.sampling import SamplingParams

MARK = "\n# fixed:\n"  # between a passage and the same without its typo
_WORD = re.compile(r"[a-z_]{5,}")
_ANY_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Held-out passages with a typo, each followed by `MARK`.

    Attributes:
        sources: sources of documents, of which the held-out ones are used (`documents.held_out`).
        characters: most characters of a passage.
        count: number of examples, chosen by the hash of their names; 0 for all.
        max_new_tokens: token budget per answer.
    """

    sources: documents.Sources = documents.Sources(("stdlib",))
    characters: int = 500
    count: int = 100
    max_new_tokens: int = 256

    settings: ClassVar = {
        "greedy": SamplingParams(temperature=0.0),
        "nucleus": SamplingParams(temperature=0.8, top_p=0.95),
    }
    code: ClassVar = True

    def __post_init__(self):
        check_integer("count", self.count, 0)
        check_integer("characters", self.characters, 1)

    def examples(self):
        examples = [
            base.Example(name, (broken + MARK,), {"text": fixed})
            for document in documents.held_out(self.sources)
            for name, broken, fixed in edits(document, self.characters)
        ]
        if not examples:
            raise InputError("sources: expected held-out files with words, found none")
        examples.sort(key=lambda example: hashlib.sha256(example.name.encode()).hexdigest())
        yield from examples[: self.count or None]

    def scores(self, example, answers):
        """Returns the share of the answers that are the passage without its typo."""
        right = [answer.rstrip() == example.reference["text"].rstrip() for answer in answers]
        return {"exact": sum(right) / len(right)}


def edits(document: documents.Document, characters: int) -> Iterator[tuple[str, str, str]]:
    """Yields a name, a passage with a typo, and the passage itself, for the whole of a document.

    Passages are whole lines. The typo swaps two letters of a word of five letters or more. Where it
    stands depends on the name alone.
    """
    for start, passage in _passages(document.text, characters):
        name = f"{document.name}:{start}"
        broken = with_typo(passage, name) if len(passage) <= characters else None
        if broken is not None:
            yield name, broken, passage


def _passages(text: str, characters: int) -> Iterator[tuple[int, str]]:
    """Yields the number of the first line, and as many whole lines as fit; one line always does."""
    passage, start = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if passage and len(passage) + len(line) > characters:
            yield start, passage
            passage, start = "", number
        passage += line
    if passage:
        yield start, passage


def with_typo(text: str, name: str) -> str | None:
    """Returns a text with two letters of one word swapped; None if no word is long enough."""
    # Swapping equal letters would change nothing, and the first letter is left in its place.
    chance = random.Random(name)
    words = [match for match in _WORD.finditer(text) if len(set(match.group()[1:])) > 1]
    if not words:
        return None
    word = chance.choice(words)
    swaps = [
        place for place in range(word.start() + 1, word.end() - 1) if text[place] != text[place + 1]
    ]
    place = chance.choice(swaps)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def with_shuffled_words(text: str, name: str) -> str:
    """Returns a text with its words in another order, which depends on the name alone."""
    words = _ANY_WORD.findall(text)
    random.Random(name).shuffle(words)
    return _ANY_WORD.sub(lambda match: words.pop(), text)
