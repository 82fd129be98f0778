"""Workloads of tasks: prompts of the examples that fit into a context."""

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Sequence

from spsjax.benchmarks.systems import System, spsjax_system
from spsjax.benchmarks.tasks.base import Example, Task
from spsjax.benchmarks.workloads import Prompt, Workload
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import Model
from spsjax.runtime.batch import token_ids
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """Amount of sampling per task."""

    settings: tuple[str, ...] = ()  # names of the task's settings; (): all settings
    samples: int = 1  # number of samples per example, setting and system
    new_tokens: int = 0  # token budget per turn; 0: the task's budget
    limit: int = 0  # number of examples; 0: all. Examples that exceed the context do not count.
    seed: int = 0  # random seed of all samples
    # Number of evenly spaced examples at which the costs of a round are timed, too.
    timed: int = 100

    def __post_init__(self):
        for field in ("samples", "new_tokens", "limit", "seed", "timed"):
            check_integer(field, getattr(self, field), int(field == "samples"))


@dataclasses.dataclass(frozen=True)
class SelectedExamples:
    """Examples that fit into every context, and the number of examples that are too long."""

    examples: list[Example]
    too_long: int


def select_examples(
    task: Task, target: Model, systems: Sequence[System], plan: TaskPlan
) -> SelectedExamples:
    """Selects the examples that fit into the context of every system.

    Raises InputError for an unknown setting, for a duplicate name, or if no example fits.
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


def token_budget(task: Task, plan: TaskPlan) -> int:
    """Returns the number of new tokens per turn."""
    budget = plan.new_tokens or task.max_new_tokens
    check_integer("max_new_tokens", budget, 1)
    return budget


def plan_settings(task: Task, plan: TaskPlan) -> dict[str, SamplingParams]:
    """Returns the settings of a plan; raises InputError for one that the task does not have."""
    for name in plan.settings:
        if name not in task.settings:
            known = ", ".join(task.settings)
            raise InputError(f"settings: expected some of {known}, found {name!r}")
    return {name: task.settings[name] for name in plan.settings or task.settings}


def prompt_ids(
    target: Model, task: Task, turns: Sequence[str], answers: Sequence[str]
) -> list[int]:
    """Returns a prompt of turns and the answers between them, in the chat template if any."""
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
    return token_ids(target, ["\n\n".join(texts)])[0]


def task_workload(
    task: Task, target: Model, examples: Sequence[Example], plan: TaskPlan
) -> Workload:
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


def evenly_spaced(items: Sequence, count: int) -> list:
    """Returns `count` evenly spaced items, or all items if there are fewer."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def load_tasks(config, names: Sequence[str], field: str = "run_tasks") -> dict[str, Task]:
    """Returns the tasks whose files the config names; raises InputError if there is none.

    `field` is the key of the config that has the names.
    """
    tasks = {}
    for name in names:
        if name not in config.tasks:
            known = ", ".join(config.tasks)
            raise InputError(f"{field}: expected some of {known}, found {short_repr(name)}")
        fields = config.tasks[name]
        files = [key for key in ("path", "shots") if key in fields]
        missing = [key for key in files if not fields[key]]
        if missing and len(missing) < len(files):
            raise InputError(f"tasks.{name}.{missing[0]}: expected a file, found none")
        if not missing:
            kind = importlib.import_module(f"spsjax.benchmarks.tasks.{name}").Task
            tasks[name] = from_config.build_section(f"tasks.{name}", kind, fields)
    if not tasks:
        raise InputError(f"tasks.{names[0]}.path: expected a file, found none")
    return tasks


def by_group(
    config, names: Sequence[str], target: Model, count: int, new_tokens: int
) -> dict[str, dict[str, list[int]]]:
    """Returns token ids of prompts by task and name; tasks with groups have one entry per group.

    Prompts are the first `count` first turns per group that leave room for the new tokens. The
    fields of the tasks are in `config.tasks`. Raises InputError if a task is unknown, has no file,
    or no prompt that fits.
    """
    tasks = load_tasks(config, names)
    for name in names:
        if name not in tasks:
            raise InputError(f"tasks.{name}.path: expected a file, found none")
    systems, plan = [spsjax_system("ArS", target)], TaskPlan(new_tokens=new_tokens)
    by_task = {}
    for name, task in tasks.items():
        for example in select_examples(task, target, systems, plan).examples:
            group = f"{name}: {example.group}" if example.group else name
            prompts = by_task.setdefault(group, {})
            if len(prompts) < count:
                prompts[example.name] = prompt_ids(target, task, example.turns[:1], ())
    return by_task
