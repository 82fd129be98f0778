"""Runs systems in turn on the same prompts and records what each wrote and how long it took."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from spsjax import request
from spsjax.errors import InputError, short_repr
from spsjax.evaluation.journal import Records
from spsjax.evaluation.samplers import Role, Sample, System
from spsjax.evaluation.tasks.base import Example, Task
from spsjax.loading import Model
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer
from spsjax.tokenization.base import incremental_text

# Fields that identify the system that wrote a record, and fields that identify a record.
SYSTEM_FIELDS = "setting", "system", "num_speculative_tokens"
RECORD_KEY = *SYSTEM_FIELDS, "example", "turn", "sample", "repetition"

Progress = Callable[[Sequence], Iterable]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Amount of sampling per task.

    Attributes:
        settings: names of the task's settings; () for all of them.
        samples: number of samples per example, setting and system.
        new_tokens: token budget per turn; 0 for the task's own.
        limit: number of examples; 0 for all. Examples that exceed the context do not count.
        seed: random seed of all samples.
        timed: number of examples, evenly spaced, at which the costs of a round are timed too.
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
class Prompt:
    """A prompt of one or more turns.

    Attributes:
        name: unique name.
        ids: function from the answers to the turns before to the next turn's token ids.
        turns: number of turns.
        group: name of the group whose figures are reported separately.
    """

    name: str
    ids: Callable[[Sequence[str]], list[int]]
    turns: int = 1
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts and settings that every system runs.

    Attributes:
        prompts: prompts.
        settings: sampling parameters by name.
        max_new_tokens: token budget per turn.
        samples: number of samples per prompt, setting and system, each with its own seed.
        repetitions: number of runs per sample, all with one seed: only their times differ.
        seed: random seed.
        stop_at_eos: whether a continuation ends at an end of sequence or fills its budget.
        tokenizer: tokenizer that gives a record its text; None for records without text.
        timed: names of the prompts at which the costs of a round are timed too.
    """

    prompts: Sequence[Prompt]
    settings: Mapping[str, SamplingParams]
    max_new_tokens: int
    samples: int = 1
    repetitions: int = 1
    seed: int = 0
    stop_at_eos: bool = True
    tokenizer: Tokenizer | None = None
    timed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class SelectedExamples:
    """Examples that fit into every context, and the number of those that do not."""

    examples: list[Example]
    too_long: int


def select_examples(
    task: Task, target: Model, systems: Sequence[System], plan: Plan
) -> SelectedExamples:
    """Selects the examples that fit into the context of every system.

    Raises InputError if there are none, if two have one name, or for an unknown setting.
    """
    plan_settings(task, plan)
    context = min(system.context for system in systems)
    budget = token_budget(task, plan)
    selected: dict[str, Example] = {}
    too_long, shortest = 0, math.inf
    for example in task.examples():
        if plan.limit and len(selected) == plan.limit:
            break
        if example.name in selected:
            raise InputError(
                f"{type(task).__module__}: expected examples of different names, "
                f"found two of {short_repr(example.name)}"
            )
        length = len(prompt_ids(target, task, example.turns[:1], ()))
        if length + budget <= context:
            selected[example.name] = example
        else:
            too_long, shortest = too_long + 1, min(shortest, length)
    if not selected:
        raise InputError(
            f"{type(task).__module__}: max_new_tokens: expected at most {context - shortest}, "
            f"which the shortest prompt leaves of a context of {context}, found {budget}"
        )
    return SelectedExamples(list(selected.values()), too_long)


def examples_fingerprint(task: Task, target: Model, examples: Sequence[Example]) -> str:
    """Returns a hash of the examples, of their references, and of the prompts' token ids."""
    digest = hashlib.sha256()
    for example in examples:
        ids = prompt_ids(target, task, example.turns[:1], ())
        digest.update(json.dumps([dataclasses.asdict(example), ids], default=str).encode())
    return digest.hexdigest()


def token_budget(task: Task, plan: Plan) -> int:
    """Returns the number of new tokens per turn."""
    budget = plan.new_tokens or task.max_new_tokens
    if type(budget) is not int or budget < 1:
        raise InputError(f"max_new_tokens: expected an integer >= 1, found {budget!r}")
    return budget


def plan_settings(task: Task, plan: Plan) -> dict[str, SamplingParams]:
    """Returns the settings of a plan. Raises InputError for one that the task does not have."""
    for name in plan.settings:
        if name not in task.settings:
            known = ", ".join(task.settings)
            raise InputError(f"settings: expected some of {known}, found {name!r}")
    return {name: task.settings[name] for name in plan.settings or task.settings}


def prompt_ids(
    target: Model, task: Task, turns: Sequence[str], answers: Sequence[str]
) -> list[int]:
    """Returns a prompt of turns and the answers between them, by the chat template if any."""
    if target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer, found none")
    if task.chat and target.tokenizer.has_template:
        messages = []
        for number, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return target.tokenizer.chat(messages)
    texts = [text for pair in zip(turns, [*answers, ""]) for text in pair if text]
    return request.token_ids(target, ["\n\n".join(texts)])[0]


def task_workload(task: Task, target: Model, examples: Sequence[Example], plan: Plan) -> Workload:
    """Returns the workload of a task's examples under a plan."""

    def prompt(example: Example) -> Prompt:
        def ids(answers):
            return prompt_ids(target, task, example.turns[: len(answers) + 1], answers)

        return Prompt(example.name, ids, len(example.turns), example.group)

    return Workload(
        prompts=[prompt(example) for example in examples],
        settings=plan_settings(task, plan),
        max_new_tokens=token_budget(task, plan),
        samples=plan.samples,
        seed=plan.seed,
        tokenizer=target.tokenizer,
        timed=frozenset(example.name for example in evenly_spaced(examples, plan.timed)),
    )


def run_all(
    systems: Sequence[System],
    workload: Workload,
    records: Records,
    progress: Progress = iter,
) -> None:
    """Runs every system on every prompt and adds the records that do not exist yet.

    Systems take turns at each prompt, so that a machine that slows down slows all of them. The
    costs of a system's round are timed right after its call for the same reason. A record depends
    on nothing but the prompt, the setting, the system, the sample's number and the seed. A later
    turn that does not fit into the context is left out.

    Args:
        systems: systems under test.
        workload: prompts and settings.
        records: where the records go; a `Journal` makes the measurement resumable.
        progress: wrapper of the list of jobs, for a progress bar.
    """
    context = min(system.context for system in systems)
    warm: set[tuple[System, str]] = set()
    jobs = [
        (repetition, prompt, setting, sample, system)
        for repetition in range(workload.repetitions)
        for prompt in workload.prompts
        for setting in workload.settings
        for sample in range(workload.samples)
        for system in systems
    ]
    for repetition, prompt, setting, sample, system in progress(jobs):
        answers: list[str] = []
        who = setting, system.name, system.num_speculative_tokens
        for turn in range(prompt.turns):
            key = *who, prompt.name, turn, sample, repetition
            if key not in records:
                ids = prompt.ids(answers)
                if turn and len(ids) + workload.max_new_tokens > context:
                    break
                measured = _measure(system, workload, setting, prompt, ids, key, warm)
                records.add({**dict(zip(RECORD_KEY, key)), "group": prompt.group, **measured})
            answers.append(records[key].get("text", ""))


def _measure(
    system: System,
    workload: Workload,
    setting: str,
    prompt: Prompt,
    ids: list[int],
    key: tuple,
    warm: set[tuple[System, str]],
) -> dict:
    """Runs a system once and returns the fields of the record that the run determines."""
    params, budget = workload.settings[setting], workload.max_new_tokens
    # Every system has its own random numbers, so that two samples of one prompt are independent.
    # All repetitions of a sample have the same ones, so that only their times differ.
    seed = _seed(workload.seed, *key[:-1])
    call = functools.partial(system.call, ids, params, budget, seed, workload.stop_at_eos)
    out = call()
    compile_seconds = out.stats.compile_seconds if out.stats else 0.0
    # The first run of a program takes longer than later ones, even without its compile time.
    if compile_seconds if out.stats else (system, setting) not in warm:
        out = call()
    warm.add((system, setting))
    record = {
        "role": str(system.role),
        "greedy": not params.temperature,
        "prompt_tokens": len(ids),
        "tokens": list(out.tokens),
        "seconds": out.seconds,
        "compile_seconds": compile_seconds,
    }
    if workload.tokenizer is not None:
        record["text"] = incremental_text(workload.tokenizer, ids, out.tokens)
    if system.time_round and prompt.name in workload.timed:
        record["round_cost"] = dataclasses.asdict(system.time_round(ids, params, budget))
    return record | _counts(out)


def _counts(sample: Sample) -> dict:
    """Returns the counts of a call, if the system reports them."""
    if sample.stats is None:
        return {}
    return {
        "prompt_seconds": sample.stats.prompt_seconds,
        "target_calls": sample.stats.target_calls,
        "proposed_tokens": sample.stats.proposed_tokens,
        "accepted_histogram": sample.stats.accepted_histogram,
    }


def evenly_spaced(items: Sequence, count: int) -> list:
    """Returns `count` evenly spaced items, or all of them if there are fewer."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _seed(*fields) -> int:
    """Returns a 32-bit seed by hashing the fields."""
    text = "\0".join(map(str, fields))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def final_answers(
    task: Task, examples: Sequence[Example], records: Sequence[dict]
) -> Iterator[tuple[Example, tuple, list[str]]]:
    """Yields an example, a system's key, and the answers to the last turn, by sample number."""
    answers: dict[tuple, dict[int, str]] = {}
    by_name = {example.name: example for example in examples}
    for record in records:
        example = by_name.get(record["example"])
        if example is None or record["turn"] != len(example.turns) - 1:
            continue
        text = task.answer(example, record["text"])
        answers.setdefault((example.name, system_key(record)), {})[record["sample"]] = text
    for (name, key), texts in answers.items():
        yield by_name[name], key, [texts[number] for number in sorted(texts)]


def system_key(record: dict) -> tuple[str, str, int]:
    """Returns the setting, the system and K of a record: `SYSTEM_FIELDS`."""
    return tuple(record[name] for name in SYSTEM_FIELDS)


def is_baseline(record: dict) -> bool:
    """Returns whether the baseline wrote a record."""
    return record["role"] == Role.BASELINE
