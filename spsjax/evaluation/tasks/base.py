"""What a task is: prompts, and what is made of the texts that continue them."""

import abc
import dataclasses
import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from spsjax.errors import InputError, one_line
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Example:
    """One thing to do.

    Attributes:
        name: unlike any other's of the task.
        turns: what is said to the model; all but the last have been answered by it before.
        reference: what the answer is judged by, as the task knows it.
        group: a part of the task that has figures of its own.
    """

    name: str
    turns: tuple[str, ...]
    reference: Mapping[str, object] = dataclasses.field(default_factory=dict)
    group: str = ""


class Task(abc.ABC):
    """A concrete task is a frozen dataclass whose fields say where its files are, and how much of
    them is used.

    Attributes:
        settings: how its source samples, by name.
        chat: whether a turn is a message, for models that have a chat template.
        code: whether texts are Python.
        max_new_tokens: of an answer; as its source has it if nothing else is said.
    """

    settings: ClassVar[Mapping[str, SamplingParams]]
    chat: ClassVar[bool] = False
    code: ClassVar[bool] = False
    max_new_tokens: int

    @abc.abstractmethod
    def examples(self) -> Iterator[Example]:
        """All of it, in a fixed order; raises InputError at a file that is not as it should be."""

    def answer(self, example: Example, text: str) -> str:
        """The part of what was generated that is the answer."""
        return text

    def scores(self, example: Example, answers: Sequence[str]) -> dict[str, float]:
        """Figures of several answers to one example; {} where the task has none."""
        return {}


def read_rows(path: str | pathlib.Path, kinds: Mapping[str, type]) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line of a JSON-lines file, `.gz` or not.

    Args:
        path: of the file.
        kinds: the fields that each object must have, and their types.

    Raises:
        InputError: names the file, the line and the field.
    """
    path = pathlib.Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    number, found = 0, False
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                for field, kind in kinds.items():
                    value = row.get(field) if isinstance(row, dict) else None
                    if not isinstance(value, kind):
                        other = "none" if value is None else type(value).__name__
                        raise InputError(
                            f"{path}, line {number}: {field}: expected {kind.__name__}, "
                            f"found {other}"
                        )
                found = True
                yield number, row
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        place = f"{path}, line {number + 1}" if number else f"{path}"
        raise InputError(f"{place}: expected JSON lines, found {one_line(error)}") from None
    if not found:
        raise InputError(f"{path}: expected JSON lines, found an empty file")


def before_any(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of these; all of it where there is none."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
