"""Experiments of the literature for a pair of models: configs/experiments/reproduce.py."""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from spsjax.errors import InputError
from spsjax.evaluation import acceptance_analysis, runner, samplers, summary, theory_check
from spsjax.evaluation.acceptance_analysis import Divergence, Share
from spsjax.evaluation.journal import Journal
from spsjax.evaluation.runner import Plan
from spsjax.evaluation.samplers import Role, System
from spsjax.evaluation.summary import SystemSummary
from spsjax.evaluation.tasks.base import Example, Task
from spsjax.evaluation.theory_check import LoopCosts, Prediction
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.performance import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config, hashing

EXPERIMENTS = "table1", "figure1", "specbench"

Progress = Callable[[str], Callable[[Sequence], Iterable]]


@dataclasses.dataclass(frozen=True)
class Divergences:
    """Greedy texts of one system that differ from the baseline's.

    Attributes:
        system, num_speculative_tokens: name and K of the system.
        num_texts: number of texts that were compared.
        divergences: first difference of each text that has one.
    """

    system: str
    num_speculative_tokens: int
    num_texts: int
    divergences: list[Divergence]


@dataclasses.dataclass
class DraftAnalysis:
    """Acceptance of the draft model, by setting.

    Attributes:
        costs: cost breakdown of a round; a setting where it was not timed is missing.
        acceptance_by_position: measured acceptance rates at the largest K.
        predictions: predicted and measured speed-ups by K.
        by_token_class: exact acceptance rates in the baseline's texts, by the class of a token.
        by_entropy: the same, by the entropy of the target's distribution.
    """

    costs: dict[str, LoopCosts] = dataclasses.field(default_factory=dict)
    acceptance_by_position: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    predictions: dict[str, list[Prediction]] = dataclasses.field(default_factory=dict)
    by_token_class: dict[str, dict[str, Share]] = dataclasses.field(default_factory=dict)
    by_entropy: dict[str, dict[str, Share]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Results of one task.

    Attributes:
        systems: summary per setting and system, over all examples.
        groups: the same over the examples of each group, if the task has groups.
        too_long: number of examples that did not fit into the context.
        draft: acceptance of the draft model; empty for other drafters.
        divergences: greedy texts that differ from the baseline's, by greedy setting.
        sample_texts: the first prompt and the text of each system, by setting.
    """

    systems: list[SystemSummary]
    groups: dict[str, list[SystemSummary]]
    too_long: int
    draft: DraftAnalysis
    divergences: dict[str, list[Divergences]]
    sample_texts: dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class _Job:
    """A task with its selected examples and its journal."""

    task: Task
    selected: runner.SelectedExamples
    journal: Journal


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A checked experiment, with open journals in a folder that is locked.

    Attributes:
        target: target model.
        drafter: drafter, as for `generate`.
        systems: systems under test, of which the first is the baseline.
        plan: amount of sampling per task.
        analysed_texts: number of texts per setting whose tokens are analysed one by one.
        jobs: work by task.
    """

    target: Model
    drafter: object
    systems: Sequence[System]
    plan: Plan
    analysed_texts: int
    jobs: Mapping[str, _Job]


def load_tasks(config, names: Sequence[str]) -> dict[str, Task]:
    """Returns the tasks whose files the config names. Raises InputError if there is none."""
    tasks = {}
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
            tasks[name] = from_config.build(f"tasks.{name}", kind, fields)
    if not tasks:
        raise InputError(f"tasks.{names[0]}.path: expected a file, found none")
    return tasks


def prepare(
    experiment: str,
    config,
    target: Model,
    drafter,
    others: Sequence[System],
    workdir: pathlib.Path,
) -> Experiment:
    """Checks an experiment, then locks its folder and opens its journals.

    Args:
        experiment: one of `EXPERIMENTS`, which is a section of the config.
        config: config such as configs/experiments/reproduce.py.
        target: target model.
        drafter: drafter, as for `generate`.
        others: further systems.
        workdir: folder of the journals.

    Raises:
        InputError: the config, a file or a journal is not usable.
    """
    section = config[experiment]
    counts, field = section.num_speculative_tokens, f"{experiment}.num_speculative_tokens"
    if not counts:
        raise InputError(f"{field}: expected at least one, found none")
    plan = from_config.build(f"{experiment}.plan", Plan, section.plan)
    systems = [
        samplers.spsjax_system("ArS", target),
        *samplers.speculative_systems(target, drafter, counts, field),
        *others,
    ]
    # Select the examples of all tasks first, so that a mistake is found before anything is written.
    selected = {
        name: (task, runner.select_examples(task, target, systems, plan))
        for name, task in load_tasks(config, section.tasks).items()
    }
    multihost.lock_folder(workdir)
    depends_on = {"experiment": experiment, **_dependencies(config, target, drafter, systems, plan)}
    jobs = {}
    for name, (task, examples) in selected.items():
        fingerprint = runner.examples_fingerprint(task, target, examples.examples)
        more = {"task": {name: dataclasses.asdict(task)}, "examples": fingerprint}
        jobs[name] = _Job(
            task, examples, _open_journal(workdir / f"{name}.jsonl", depends_on | more)
        )
    return Experiment(target, drafter, systems, plan, config.analysed_texts, jobs)


def run(experiment: Experiment, progress: Progress) -> dict[str, TaskReport]:
    """Runs an experiment and returns a report per task. An interrupted experiment resumes.

    Args:
        experiment: experiment that `prepare` returned.
        progress: function from a title to a wrapper of a list of jobs.
    """
    target, plan = experiment.target, experiment.plan
    for name, job in experiment.jobs.items():
        workload = runner.task_workload(job.task, target, job.selected.examples, plan)
        runner.run_all(experiment.systems, workload, job.journal, progress(f"{name}: sampling"))
    return {
        name: _report(job, target, experiment.drafter, plan, experiment.analysed_texts, progress)
        for name, job in experiment.jobs.items()
    }


def _dependencies(config, target: Model, drafter, systems: Sequence[System], plan: Plan) -> dict:
    """Returns what the records of every task depend on.

    What the user wrote comes first: a journal names the first field that differs. The weights
    follow, which may change under a name.
    """
    options = {f"drafter {config.drafter}": config.to_dict().get(config.drafter, {})}
    return {
        "target": config.target,
        "drafter": config.drafter,
        **({"draft": config.draft} if getattr(drafter, "name", None) == config.draft else options),
        "plan": dataclasses.asdict(plan),
        "target model": _identity(target),
        "draft model": _identity(drafter),
        "mesh": dict(target.mesh.shape) if target.mesh else {},
        "systems": [[system.name, system.num_speculative_tokens] for system in systems],
        "machine": hardware.machine(target),
    }


def _open_journal(path: pathlib.Path, depends_on: dict) -> Journal:
    """Opens a journal. The main process writes it; the others read it and add the same records."""
    if multihost.is_main_process():
        journal = Journal(path, depends_on, runner.RECORD_KEY)
    multihost.barrier("journal")
    if not multihost.is_main_process():
        journal = Journal(path, depends_on, runner.RECORD_KEY, writes=False)
    return journal


def _identity(drafter) -> dict:
    """Returns fields that identify weights and shape, or a drafter without weights."""
    if not isinstance(drafter, (Model, LoadedDrafter)):
        return {"fields": repr(drafter)}
    weights = {"weights": hashing.params_fingerprint(drafter.params)}
    if isinstance(drafter, LoadedDrafter):
        return weights | {"fields": repr(drafter.drafter)}
    return weights | dataclasses.asdict(drafter.config)


def _report(
    job: _Job, target: Model, drafter, plan: Plan, analysed_texts: int, progress: Progress
) -> TaskReport:
    """Returns the report of a task from the records of its journal."""
    task, examples, records = job.task, job.selected.examples, job.journal.records
    scores = summary.score_examples(task, examples, records, progress("scoring"))
    summaries = summary.summarize(records, scores)
    groups = {
        group: summary.summarize([record for record in records if record["group"] == group], scores)
        for group in dict.fromkeys(example.group for example in examples)
    }
    settings = runner.plan_settings(task, plan)
    prompts = {
        example.name: runner.prompt_ids(target, task, example.turns[:1], ()) for example in examples
    }
    draft = DraftAnalysis()
    if isinstance(drafter, Model):
        for setting, params in settings.items():
            of_setting = [system for system in summaries if system.setting == setting]
            _add_predictions(draft, setting, of_setting)
            texts = [
                (prompts[name], tokens)
                for name, tokens in _baseline_texts(records, setting).items()
                if tokens
            ]
            classes, entropies = acceptance_analysis.acceptance_by_class(
                target,
                drafter,
                texts[:analysed_texts],
                params,
                task.code,
                progress("token by token"),
            )
            draft.by_token_class[setting], draft.by_entropy[setting] = classes, entropies
    return TaskReport(
        systems=summaries,
        groups=groups if len(groups) > 1 else {},
        too_long=job.selected.too_long,
        draft=draft,
        divergences=_divergences(target, prompts, records, settings),
        sample_texts=_sample_texts(examples[0], records),
    )


def _add_predictions(
    draft: DraftAnalysis, setting: str, summaries: Sequence[SystemSummary]
) -> None:
    rates = theory_check.acceptance_rates(summaries)
    draft.acceptance_by_position[setting] = rates
    if costs := theory_check.loop_costs(summaries):
        draft.costs[setting] = costs
        draft.predictions[setting] = theory_check.predict(summaries, rates, costs)


def _first_samples(records: Sequence[dict], setting: str) -> list[dict]:
    """Returns the records of the first turn and sample of each example, in one setting."""
    return [
        record
        for record in records
        if record["turn"] == record["sample"] == 0 and record["setting"] == setting
    ]


def _baseline_texts(records: Sequence[dict], setting: str) -> dict[str, list[int]]:
    """Returns the tokens of the baseline's first text per example."""
    return {
        record["example"]: record["tokens"]
        for record in _first_samples(records, setting)
        if record["role"] == Role.BASELINE
    }


def _divergences(
    target: Model,
    prompts: Mapping[str, list[int]],
    records: Sequence[dict],
    settings: Mapping[str, SamplingParams],
) -> dict[str, list[Divergences]]:
    """Returns where the greedy texts of each system differ from the baseline's, by setting."""
    reports: dict[str, list[Divergences]] = {}
    for setting, params in settings.items():
        if params.temperature:
            continue
        base = _baseline_texts(records, setting)
        texts: dict[tuple, dict[str, list[int]]] = {}
        for record in _first_samples(records, setting):
            if record["role"] != Role.BASELINE and record["example"] in base:
                key = record["system"], record["num_speculative_tokens"]
                texts.setdefault(key, {})[record["example"]] = record["tokens"]
        reports[setting] = []
        for key, by_example in texts.items():
            first_differences = [
                acceptance_analysis.divergence(target, prompts[name], base[name], tokens)
                for name, tokens in by_example.items()
            ]
            differing = [difference for difference in first_differences if difference]
            reports[setting].append(Divergences(*key, len(by_example), differing))
    return reports


def _sample_texts(example: Example, records: Sequence[dict]) -> dict[str, dict[str, str]]:
    """Returns the prompt of one example and each system's text, by setting and label."""
    samples: dict[str, dict[str, str]] = {}
    for record in records:
        if record["example"] == example.name and record["turn"] == record["sample"] == 0:
            texts = samples.setdefault(record["setting"], {"prompt": example.turns[0]})
            texts[label(record["system"], record["num_speculative_tokens"])] = record["text"]
    return samples


def label(name: str, num_speculative_tokens: int) -> str:
    """Returns the text that names a system in tables."""
    return f"{name}, K = {num_speculative_tokens}" if num_speculative_tokens else name
