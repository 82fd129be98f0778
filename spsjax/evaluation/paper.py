"""A target, a draft and tasks into what the literature shows of them: configs/.../reproduce.py."""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Iterable, Sequence

from spsjax.errors import InputError
from spsjax.evaluation import acceptance_analysis, race, runner, samplers, summary, theory_check
from spsjax.evaluation.journal import Journal
from spsjax.evaluation.runner import Plan
from spsjax.evaluation.samplers import Sampler
from spsjax.evaluation.tasks.base import Example, Task
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.performance import microbenchmarks
from spsjax.utils import from_config, hashing

WHAT = "table1", "figure1", "specbench"


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is to say of one task.

    Attributes:
        rows: of all its examples.
        groups: of those of each group, if it has groups.
        too_long: examples that did not fit into the context.
        costs, rates, predicted: by setting; of the draft model; `prediction.rates_of`.
        kinds, entropies: by setting: exact acceptance of the draft in texts that plain sampling
            wrote, by the class of a token and by the target's entropy.
        partings: by setting and sampler, of greedy texts: how many were compared, and where they
            part from those of plain sampling.
        examples: by setting, one prompt and what each sampler wrote.
    """

    rows: list[summary.Row]
    groups: dict[str, list[summary.Row]]
    too_long: int
    costs: dict[str, theory_check.Costs]
    rates: dict[str, list[float | None]]
    predicted: dict[str, list[theory_check.Predicted]]
    kinds: dict[str, dict[str, acceptance_analysis.Share]]
    entropies: dict[str, dict[str, acceptance_analysis.Share]]
    partings: dict[str, dict[str, tuple[int, list[acceptance_analysis.Parting]]]]
    examples: dict[str, dict[str, str]]


Progress = Callable[[str], Callable[[Sequence], Iterable]]


def tasks(config, names: Sequence[str]) -> dict[str, Task]:
    """The tasks of these names whose files are named; raises InputError where there is none."""
    found = {}
    for name in names:
        if name not in config.tasks:
            known = ", ".join(config.tasks)
            raise InputError(f"tasks: expected some of {known}, found {name!r}")
        fields = config.tasks[name]
        files = [key for key in ("path", "shots") if key in fields]
        missing = [key for key in files if not fields[key]]
        if missing and len(missing) < len(files):
            raise InputError(f"tasks.{name}.{missing[0]}: expected a file, found none")
        if not missing:
            kind = importlib.import_module(f"spsjax.evaluation.tasks.{name}").Task
            found[name] = from_config.build(f"tasks.{name}", kind, fields)
    if not found:
        raise InputError(f"tasks.{names[0]}.path: expected a file, found none")
    return found


def run(
    what: str,
    config,
    target: Model,
    drafter,
    others: Sequence[Sampler],
    workdir: pathlib.Path,
    progress: Progress,
) -> dict[str, Found]:
    """By task, what there is to say. The same call goes on with one that was stopped.

    Args:
        what: one of `WHAT`, which is a part of the config.
        config: as configs/experiments/reproduce.py.
        target: the model.
        drafter: what `generate` takes.
        others: samplers that run beside.
        workdir: of the journals.
        progress: given a title, what wraps a list of things to do.

    Raises:
        InputError: a config, a file or a journal that is not as it should be.
    """
    section = config[what]
    if not section.num_speculative_tokens:
        raise InputError(f"{what}.num_speculative_tokens: expected at least one, found none")
    plan = from_config.build(f"{what}.plan", Plan, section.plan)
    entries = [
        samplers.ours(race.BASELINE, target),
        *(samplers.ours("SpS", target, drafter, K) for K in section.num_speculative_tokens),
        *others,
    ]
    chosen = {  # all of them, before anything is written
        name: (task, runner.choose(task, target, entries, plan))
        for name, task in tasks(config, section.tasks).items()
    }
    multihost.lock_folder(workdir)
    jobs = {}
    for name, (task, examples) in chosen.items():
        depends_on = {
            "task": {name: dataclasses.asdict(task)},
            "plan": dataclasses.asdict(plan),
            "examples": runner.fingerprint(task, target, examples.examples),
            "target": _identity(target),
            "drafter": _identity(drafter),
            "mesh": dict(target.mesh.shape) if target.mesh else {},
            "samplers": [[each.name, each.num_speculative_tokens] for each in entries],
            "machine": microbenchmarks.machine(target),
        }
        jobs[name] = task, examples, _journal(workdir / f"{name}.jsonl", depends_on)
    for name, (task, examples, journal) in jobs.items():
        title = progress(f"{name}: sampling")
        runner.sample(journal, task, examples.examples, target, entries, plan, title)
    return {
        name: _found(task, examples, journal.records, target, drafter, plan, config, progress)
        for name, (task, examples, journal) in jobs.items()
    }


def _journal(path: pathlib.Path, depends_on: dict) -> Journal:
    """The first process writes it; the others have its records, and the same ones to add."""
    if multihost.is_main_process():
        journal = Journal(path, depends_on, runner.KEY)
    multihost.barrier("journal")
    if not multihost.is_main_process():
        journal = Journal(path, depends_on, runner.KEY, writes=False)
    return journal


def _identity(drafter) -> str:
    if not isinstance(drafter, Model):
        return repr(drafter)
    return f"{hashing.params_fingerprint(drafter.params)} {drafter.config}"


def _found(
    task: Task,
    chosen: runner.Chosen,
    records: list[dict],
    target: Model,
    drafter,
    plan: Plan,
    config,
    progress: Progress,
) -> Found:
    scores = summary.scores_of(task, chosen.examples, records, progress("scoring"))
    rows = summary.rows(records, scores)
    groups = {
        group: summary.rows([record for record in records if record["group"] == group], scores)
        for group in dict.fromkeys(example.group for example in chosen.examples)
    }
    settings = runner.settings(task, plan)
    firsts = _first_turns(records)
    prompts = {
        example.name: runner.ids_of(target, task, example.turns[:1], ())
        for example in chosen.examples
    }
    costs, rates, predicted, kinds, entropies = {}, {}, {}, {}, {}
    if isinstance(drafter, Model):
        for setting, params in settings.items():
            mine = [row for row in rows if row.setting == setting]
            rates[setting] = theory_check.rates_of(mine)
            if found := theory_check.costs_of(mine):
                costs[setting] = found
                predicted[setting] = theory_check.predict(mine, rates[setting], found)
            texts = [
                (prompts[name], tokens)
                for name, tokens in firsts[setting, race.BASELINE, 0].items()
                if tokens
            ]
            kinds[setting], entropies[setting] = acceptance_analysis.by_class(
                target,
                drafter,
                texts[: config.attribution],
                params,
                task.code,
                progress("token by token"),
            )
    partings = {
        setting: _partings(target, prompts, firsts, setting)
        for setting, params in settings.items()
        if not params.temperature
    }
    return Found(
        rows=rows,
        groups=groups if len(groups) > 1 else {},
        too_long=chosen.too_long,
        costs=costs,
        rates=rates,
        predicted=predicted,
        kinds=kinds,
        entropies=entropies,
        partings=partings,
        examples=_shown(chosen.examples[0], records),
    )


def _first_turns(records: Sequence[dict]) -> dict[tuple, dict[str, list[int]]]:
    """Who -> example -> tokens of its first turn and sample."""
    found: dict[tuple, dict[str, list[int]]] = {}
    for record in records:
        if record["turn"] == record["sample"] == 0:
            found.setdefault(runner.who(record), {})[record["example"]] = record["tokens"]
    return found


def _partings(
    target: Model, prompts: dict[str, list[int]], firsts: dict[tuple, dict], setting: str
) -> dict[str, tuple[int, list[acceptance_analysis.Parting]]]:
    base, found = firsts[setting, race.BASELINE, 0], {}
    for (other, name, K), texts in firsts.items():
        if other != setting or name == race.BASELINE:
            continue
        pairs = [(prompts[each], base[each], texts[each]) for each in texts if each in base]
        parted = [acceptance_analysis.parting(target, *pair) for pair in pairs]
        found[label(name, K)] = (len(pairs), [each for each in parted if each])
    return found


def _shown(example: Example, records: Sequence[dict]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for record in records:
        if record["example"] == example.name and record["turn"] == record["sample"] == 0:
            texts = found.setdefault(record["setting"], {"prompt": example.turns[0]})
            who = label(record["sampler"], record["num_speculative_tokens"])
            texts[who] = record["text"]
    return found


def label(name: str, num_speculative_tokens: int) -> str:
    """A sampler as tables and texts name it."""
    return f"{name}, K = {num_speculative_tokens}" if num_speculative_tokens else name
