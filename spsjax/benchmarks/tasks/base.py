"""Base class of the tasks: examples to prompt with, and scores of the answers."""

import abc
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from spsjax.errors import InputError
from spsjax.sampling import SamplingParams
from spsjax.utils import jsonl


@dataclasses.dataclass(frozen=True)
class Example:
    """Example of a task."""

    name: str  # name that is unique within the task
    turns: tuple[str, ...]  # messages to the model, which answers each before it sees the next
    # Data that the task scores an answer by.
    reference: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    group: str = ""  # name of the group whose figures are reported separately


class Task(abc.ABC):
    """Base class of a task: a frozen dataclass with the paths of its files and its options.

    Attributes:
        settings: sampling parameters of the task's source, by name.
        chat: whether a turn is a chat message, for models that have a chat template.
        code: whether texts are Python.
        max_new_tokens: token budget per answer, by default that of the task's source.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # every concrete class is one
    settings: ClassVar[Mapping[str, SamplingParams]]
    chat: ClassVar[bool] = False
    code: ClassVar[bool] = False
    max_new_tokens: int

    @abc.abstractmethod
    def examples(self) -> Iterator[Example]:
        """Yields all examples in a fixed order. Raises InputError for a malformed file."""

    def answer(self, example: Example, text: str) -> str:
        """Returns the part of a generated text that is the answer."""
        return text

    def scores(self, example: Example, answers: Sequence[str]) -> dict[str, float]:
        """Returns the scores of the answers to one example; {} for a task without scores."""
        return {}


def read_rows(path: str | pathlib.Path, fields: Mapping[str, type]) -> Iterator[tuple[int, dict]]:
    """Yields the line number and the object per line of a JSON-lines file, `.gz` or not.

    `fields` are names and types of the fields that every object must have. Raises InputError for
    another file, with the line and the field in the message.
    """
    empty = True
    for number, row in jsonl.read(path):
        for field, kind in fields.items():
            value = row.get(field) if isinstance(row, dict) else None
            if not isinstance(value, kind):
                actual = "none" if value is None else type(value).__name__
                raise InputError(
                    f"{path}, line {number}: {field}: expected {kind.__name__}, found {actual}"
                )
        empty = False
        yield number, row
    if empty:
        raise InputError(f"{path}: expected JSON lines, found an empty file")


def before_any(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first of the stop strings, or all of it if it has none."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
