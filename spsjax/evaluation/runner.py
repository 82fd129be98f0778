"""Samplers on the prompts of a task, in turn: what each wrote, and how long it took."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from spsjax import generation, request
from spsjax.errors import InputError, short_repr
from spsjax.evaluation.journal import Journal
from spsjax.evaluation.samplers import Sampler
from spsjax.evaluation.tasks.base import Example, Task
from spsjax.loading import Model
from spsjax.sampling import SamplingParams

# What tells one record from another; the first three are who wrote it.
WHO = "setting", "sampler", "num_speculative_tokens"
KEY = *WHO, "example", "turn", "sample"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is sampled.

    Attributes:
        settings: names of the task's; () for all.
        samples: of each example, setting and sampler.
        new_tokens: of each turn; 0: as the task has it.
        limit: examples; 0: all. Those that do not fit into the context are not counted.
        seed: of everything.
        timed: examples, evenly spread, at which the parts of a round are timed too.
    """

    settings: tuple[str, ...] = ()
    samples: int = 1
    new_tokens: int = 0
    limit: int = 0
    seed: int = 0
    timed: int = 100

    def __post_init__(self):
        for field in ("samples", "new_tokens", "limit", "seed", "timed"):
            value, least = getattr(self, field), int(field == "samples")
            if type(value) is not int or value < least:
                raise InputError(f"{field}: expected an integer >= {least}, found {value!r}")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The examples of a plan, and how many were passed over because they are too long."""

    examples: list[Example]
    too_long: int


def choose(task: Task, target: Model, samplers: Sequence[Sampler], plan: Plan) -> Chosen:
    """The examples that fit into every sampler's context.

    Raises InputError where none does, or the task has no such setting.
    """
    settings(task, plan)
    context = min(each.context for each in samplers)
    budget = new_tokens(task, plan)
    found: dict[str, Example] = {}
    too_long, shortest = 0, math.inf
    for example in task.examples():
        if plan.limit and len(found) == plan.limit:
            break
        if example.name in found:
            raise InputError(
                f"{type(task).__module__}: expected examples of different names, "
                f"found two of {short_repr(example.name)}"
            )
        length = len(ids_of(target, task, example.turns[:1], ()))
        if length + budget <= context:
            found[example.name] = example
        else:
            too_long, shortest = too_long + 1, min(shortest, length)
    if not found:
        raise InputError(
            f"{type(task).__module__}: max_new_tokens: expected at most {context - shortest}, "
            f"which the shortest prompt leaves of a context of {context}, found {budget}"
        )
    return Chosen(list(found.values()), too_long)


def fingerprint(task: Task, target: Model, examples: Sequence[Example]) -> str:
    """A hash of what is asked, as text and as tokens, and of what it is judged by."""
    digest = hashlib.sha256()
    for example in examples:
        ids = ids_of(target, task, example.turns[:1], ())
        digest.update(json.dumps([dataclasses.asdict(example), ids], default=str).encode())
    return digest.hexdigest()


def new_tokens(task: Task, plan: Plan) -> int:
    """New tokens of a turn."""
    found = plan.new_tokens or task.max_new_tokens
    if type(found) is not int or found < 1:
        raise InputError(f"max_new_tokens: expected an integer >= 1, found {found!r}")
    return found


def settings(task: Task, plan: Plan) -> dict[str, SamplingParams]:
    """The settings of a plan; raises InputError for one that the task does not have."""
    for name in plan.settings:
        if name not in task.settings:
            known = ", ".join(task.settings)
            raise InputError(f"settings: expected some of {known}, found {name!r}")
    return {name: task.settings[name] for name in plan.settings or task.settings}


def ids_of(target: Model, task: Task, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """The prompt: turns and the answers between them, by the chat template if there is one."""
    if target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer, found none")
    if task.chat and target.tokenizer.has_template:
        messages = []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return target.tokenizer.chat(messages)
    parts = [part for pair in zip(turns, [*answers, ""]) for part in pair if part]
    return request.token_ids(target, ["\n\n".join(parts)])[0]


def sample(
    journal: Journal,
    task: Task,
    examples: Sequence[Example],
    target: Model,
    samplers: Sequence[Sampler],
    plan: Plan,
    progress: Callable[[Sequence], Iterable] = iter,
) -> None:
    """Fills the journal with a record of every continuation that it does not have yet.

    Samplers take turns at each prompt, so that a machine that slows down slows all of them; the
    parts of a sampler's round are timed right after it. What is written depends on nothing but
    example, setting, sampler, number and the seed. A later turn that does not fit into the context
    is left out.
    """
    context = min(each.context for each in samplers)
    warm: set[Sampler] = set()
    timed = {example.name for example in spread(examples, plan.timed)}
    jobs = [
        (example, setting, params, each, number)
        for example in examples
        for setting, params in settings(task, plan).items()
        for number in range(plan.samples)
        for each in samplers
    ]
    for job in progress(jobs):
        example, setting, params, each, number = job
        who, answers = (setting, each.name, each.num_speculative_tokens), []
        for turn in range(len(example.turns)):
            key = *who, example.name, turn, number
            if key in journal:
                answers.append(journal[key]["text"])
                continue
            ids = ids_of(target, task, example.turns[: turn + 1], answers)
            budget = new_tokens(task, plan)
            if turn and len(ids) + budget > context:
                break
            call = functools.partial(
                each.call, ids, params, budget, _seed(plan.seed, *key), stop_at_eos=True
            )
            out = call()
            # The first run of a program takes longer than others, even when compiling is left out.
            if out.stats.compile_seconds if out.stats else each not in warm:
                out = call()
            warm.add(each)
            answers.append(generation.continuation(target.tokenizer, ids, out.tokens))
            record = {
                **dict(zip(KEY, key)),
                "group": example.group,
                "prompt_tokens": len(ids),
                "tokens": list(out.tokens),
                "text": answers[-1],
                "seconds": out.seconds,
            }
            if each.parts and example.name in timed:
                record["parts"] = dataclasses.asdict(each.parts(ids, params, budget))
            if out.stats:
                record |= {
                    "prompt_seconds": out.stats.prompt_seconds,
                    "target_calls": out.stats.target_calls,
                    "proposed": out.stats.proposed_tokens,
                    "accepted": out.stats.accepted_histogram,
                }
            journal.add(record)


def spread(items: Sequence, count: int) -> list:
    """So many of them, evenly spread; all where there are not as many."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _seed(*parts) -> int:
    """Of 32 bits; unlike for any two records, so that samplers are independent of each other."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def answers(
    task: Task, examples: Sequence[Example], records: Sequence[dict]
) -> Iterator[tuple[Example, tuple, list[str]]]:
    """Example, who (`WHO`), and the answers of its last turn, in the order of their numbers."""
    found: dict[tuple, dict[int, str]] = {}
    by_name = {example.name: example for example in examples}
    for record in records:
        example = by_name.get(record["example"])
        if example is None or record["turn"] != len(example.turns) - 1:
            continue
        text = task.answer(example, record["text"])
        found.setdefault((example.name, who(record)), {})[record["sample"]] = text
    for (name, each), texts in found.items():
        yield by_name[name], each, [texts[number] for number in sorted(texts)]


def who(record: dict) -> tuple[str, str, int]:
    """Setting, sampler and K of a record."""
    return tuple(record[name] for name in WHO)
