"""HumanEval: functions from their docstrings (Chen et al. 2021, arXiv 2107.03374), by execution."""

import dataclasses
import math
from typing import ClassVar

from spsjax.benchmarks.tasks import base, sandbox
from spsjax.errors import InputError, short_repr
from spsjax.sampling import SamplingParams

# Strings that mark the end of the function in a completion (arXiv 2107.03374, section 2.3).
_STOPS = "\nclass", "\ndef", "\n#", "\nif", "\nprint"


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """As in Chen et al. 2023, table 1: 512 tokens at temperature 0.8 and nucleus 0.95."""

    path: str  # path of `HumanEval.jsonl.gz`
    ks: tuple[int, ...] = (1, 10, 100)  # values of k of the pass@k scores
    limits: sandbox.Limits = sandbox.Limits()  # limits of a program
    max_new_tokens: int = 512  # token budget per answer

    settings: ClassVar = {"nucleus": SamplingParams(temperature=0.8, top_p=0.95)}
    code: ClassVar = True

    def __post_init__(self):
        if not self.ks or not all(type(k) is int and k >= 1 for k in self.ks):
            raise InputError(f"ks: expected integers >= 1, found {short_repr(self.ks)}")

    def examples(self):
        fields = dict.fromkeys(("task_id", "prompt", "entry_point", "test"), str)
        for _, row in base.read_rows(self.path, fields):
            yield base.Example(row["task_id"], (row["prompt"],), row)

    def answer(self, example, text):
        return base.before_any(text, _STOPS)

    def scores(self, example, answers):
        prompt, tests = example.reference["prompt"], tests_of(example)
        passed = sum(sandbox.run(prompt + answer, tests, self.limits).passed for answer in answers)
        ks = [k for k in self.ks if k <= len(answers)]
        return {f"pass@{k}": pass_at(k, len(answers), passed) for k in ks}


def tests_of(example: base.Example) -> str:
    """Returns the tests of an answer, which run outside of the answer's process.

    Some tests call helper functions of the prompt. The answer's function replaces the function
    that the prompt only begins.
    """
    row = example.reference
    name = row["entry_point"]
    return f"{row['prompt']}\n{name} = remote({name!r})\n{row['test']}\ncheck({name})\n"


def pass_at(k: int, samples: int, passed: int) -> float:
    """Returns the unbiased estimate of pass@k from `samples` answers: equation 1 of the paper.

    1 - (1 - passed / samples)**k would be biased.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
