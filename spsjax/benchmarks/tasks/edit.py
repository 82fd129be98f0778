"""Editing: passages of the standard library with one typo, to be written again without it.

Nearly every token of an answer occurs in its prompt, as `drafters.copy` assumes. Texts to
train a target on: `write_training_texts`.
"""

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from spsjax.benchmarks.tasks import base
from spsjax.data import documents
from spsjax.errors import InputError, check_integer
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files

MARK = "\n# fixed:\n"  # between a passage and the same without its typo
_WORD = re.compile(r"[a-z_]{5,}")
_ANY_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Held-out passages with a typo, each followed by `MARK`."""

    # Sources of documents, of which the held-out ones are used (`documents.held_out`).
    sources: documents.Sources = documents.Sources(("stdlib",))
    characters: int = 500  # most characters of a passage
    count: int = 100  # number of examples, chosen by the hash of their names; 0 for all
    max_new_tokens: int = 256  # token budget per answer

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
    """Yields a name, a passage with a typo, and the passage itself, for a whole document.

    Passages are whole lines. The typo swaps two letters of a word of five letters or more. Its
    position depends on the name alone.
    """
    for start, passage in _passages(document.text, characters):
        name = f"{document.name}:{start}"
        broken = with_typo(passage, name) if len(passage) <= characters else None
        if broken is not None:
            yield name, broken, passage


def _passages(text: str, characters: int) -> Iterator[tuple[int, str]]:
    """Yields the number of the first line, and as many whole lines as fit, at least one."""
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
        index for index in range(word.start() + 1, word.end() - 1) if text[index] != text[index + 1]
    ]
    index = chance.choice(swaps)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]


def with_shuffled_words(text: str, name: str) -> str:
    """Returns a text with its words in another order, which depends on the name alone."""
    words = _ANY_WORD.findall(text)
    random.Random(name).shuffle(words)
    return _ANY_WORD.sub(lambda match: words.pop(), text)


def training_texts(characters: int = 500, shuffled: bool = False) -> Iterator[str]:
    """Yields texts to train a target on that corrects typos, from documents that are not held out.

    A text is a passage of the standard library with a typo, `MARK`, and the passage itself. With
    `shuffled`, every passage occurs a second time with its words in another order, which can only
    be copied, not guessed.
    """
    for split, document in documents.Split(documents.Sources(("stdlib",))):
        for name, broken, fixed in edits(document, characters) if split == "train" else ():
            yield broken + MARK + fixed
            if shuffled:
                other = with_shuffled_words(fixed, name)
                yield with_typo(other, name) + MARK + other


def write_training_texts(path: str, characters: int = 500, shuffled: bool = False) -> int:
    """Writes `training_texts` as JSON lines, and returns their number."""
    check_integer("characters", characters, 1)
    lines = [json.dumps({"text": text}) + "\n" for text in training_texts(characters, shuffled)]
    if not lines:
        raise InputError("characters: expected passages with words, found none")
    atomic_files.write(path, "".join(lines))
    return len(lines)
