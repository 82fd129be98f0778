"""Spec-Bench: six kinds of requests (Xia et al. 2024, arXiv 2401.07851), timed and not scored."""

import dataclasses
from typing import ClassVar

from spsjax.errors import InputError
from spsjax.evaluation.tasks import base
from spsjax.sampling import SamplingParams

# MT-bench's eight categories are one of the six.
_CONVERSATION = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Mean tokens a call and speed-up of each category.

    Attributes:
        path: `question.jsonl`.
        max_new_tokens: of an answer.
    """

    path: str
    max_new_tokens: int = 1024

    settings: ClassVar = {"greedy": SamplingParams(temperature=0.0)}
    chat: ClassVar = True

    def examples(self):
        kinds = {"question_id": int, "category": str, "turns": list}
        for number, row in base.read_rows(self.path, kinds):
            turns = row["turns"]
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise InputError(f"{self.path}, line {number}: turns: expected texts, found others")
            category = row["category"]
            group = "multi-turn conversation" if category in _CONVERSATION else category
            yield base.Example(str(row["question_id"]), tuple(turns), group=group)
