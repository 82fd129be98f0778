"""Spec-Bench: six kinds of requests (Xia et al. 2024, arXiv 2401.07851), timed and not scored."""

import dataclasses
from typing import ClassVar

from spsjax.benchmarks.tasks import base
from spsjax.errors import InputError, short_repr
from spsjax.sampling import SamplingParams

# The eight categories of MT-bench, which form one of the six groups.
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
    """Spec-Bench, with one group of examples per category."""

    path: str  # path of `question.jsonl`
    max_new_tokens: int = 1024  # token budget per answer

    settings: ClassVar = {"greedy": SamplingParams(temperature=0.0)}
    chat: ClassVar = True

    def examples(self):
        fields = {"question_id": int, "category": str, "turns": list}
        for number, row in base.read_rows(self.path, fields):
            turns = row["turns"]
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise InputError(
                    f"{self.path}, line {number}: turns: expected a list of texts, "
                    f"found {short_repr(turns)}"
                )
            category = row["category"]
            group = "multi-turn conversation" if category in _CONVERSATION else category
            yield base.Example(str(row["question_id"]), tuple(turns), group=group)
