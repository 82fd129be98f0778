"""Experiments of the literature for a pair of models (configs/experiments/reproduce.py)."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from spsjax.benchmarks import acceptance_analysis, runner, summary, task_workloads, theory_check
from spsjax.benchmarks.acceptance_analysis import Divergence, Share
from spsjax.benchmarks.records import Journal
from spsjax.benchmarks.summary import SystemSummary
from spsjax.benchmarks.systems import System, speculative_systems, spsjax_system
from spsjax.benchmarks.task_workloads import TaskPlan
from spsjax.benchmarks.tasks.base import Task
from spsjax.benchmarks.theory_check import LoopCosts, Prediction
from spsjax.errors import InputError, check_integer
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.planning import hardware
from spsjax.utils import from_config, hashing
from spsjax.utils.progress import TitledProgress

EXPERIMENTS = "table1", "figure1", "specbench"


@dataclasses.dataclass(frozen=True)
class Divergences:
    """Greedy texts of one system that differ from the baseline's."""

    # Name and K of the system.
    system: str
    num_speculative_tokens: int
    num_texts: int  # number of texts that were compared
    divergences: list[Divergence]  # first difference of each text that has one


@dataclasses.dataclass
class DraftAnalysis:
    """Acceptance of the draft model, by setting.

    Attributes:
        costs: cost breakdown of a round, without settings in which it was not timed.
        acceptance_by_position: measured acceptance rates at the largest K.
        predictions: predicted and measured speed-ups by K.
        by_token_class: exact acceptance rates in the baseline's texts, by the class of a token.
        by_entropy: exact acceptance rates by the entropy of the target's distribution.
    """

    costs: dict[str, LoopCosts] = dataclasses.field(default_factory=dict)
    acceptance_by_position: dict[str, list[float | None]] = dataclasses.field(default_factory=dict)
    predictions: dict[str, list[Prediction]] = dataclasses.field(default_factory=dict)
    by_token_class: dict[str, dict[str, Share]] = dataclasses.field(default_factory=dict)
    by_entropy: dict[str, dict[str, Share]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Results of one task."""

    systems: list[SystemSummary]  # summary per setting and system, over all examples
    # Summaries over the examples of a group, by group; {} for a task without groups.
    groups: dict[str, list[SystemSummary]]
    too_long: int  # number of examples that did not fit into the context
    draft: DraftAnalysis  # acceptance of the draft model; empty for other drafters
    # Greedy texts that differ from the baseline's, by greedy setting.
    divergences: dict[str, list[Divergences]]
    sample_texts: dict[str, dict[str, str]]  # first prompt and the texts of all systems, by setting


@dataclasses.dataclass(frozen=True)
class _Job:
    """A task with its selected examples and its journal."""

    task: Task
    selected: task_workloads.SelectedExamples
    journal: Journal


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A checked experiment, with open journals in a folder that is locked."""

    target: Model  # target model
    drafter: object  # drafter, as for `generate`
    systems: Sequence[System]  # systems under test; the first is the baseline
    plan: TaskPlan  # amount of sampling per task
    analysed_texts: int  # number of texts per setting whose tokens are analysed
    jobs: Mapping[str, _Job]  # tasks with their examples and journals, by name


def prepare(
    experiment: str, config, target: Model, drafter, others: Sequence[System], workdir: pathlib.Path
) -> Experiment:
    """Checks an experiment of `EXPERIMENTS`, then locks its folder and opens its journals.

    `config` is like configs/experiments/reproduce.py. Raises InputError if the config, a file or a
    journal is not usable.
    """
    section = config[experiment]
    counts, field = section.num_speculative_tokens, f"{experiment}.num_speculative_tokens"
    if not counts:
        raise InputError(f"{field}: expected at least one, found none")
    check_integer("analysed_texts", config.analysed_texts, 0)
    plan = from_config.build_section(f"{experiment}.plan", TaskPlan, section.plan)
    drafted = speculative_systems(target, drafter, counts, field)
    systems = [spsjax_system("ArS", target), *drafted, *others]
    # The examples of all tasks are selected first: a mistake is found before anything is written.
    tasks = task_workloads.load_tasks(config, section.tasks, f"{experiment}.tasks")
    with from_config.whole_keys(f"{experiment}.plan", section.plan):
        selected = {
            name: (task, task_workloads.select_examples(task, target, systems, plan))
            for name, task in tasks.items()
        }
    multihost.lock_folder(workdir)
    depends_on = {"experiment": experiment, **_dependencies(config, target, drafter, systems, plan)}
    jobs = {}
    for name, (task, examples) in selected.items():
        fingerprint = task_workloads.examples_fingerprint(task, target, examples.examples)
        more = {"task": {name: dataclasses.asdict(task)}, "examples": fingerprint}
        jobs[name] = _Job(
            task, examples, _open_journal(workdir / f"{name}.jsonl", depends_on | more)
        )
    return Experiment(target, drafter, systems, plan, config.analysed_texts, jobs)


def run(experiment: Experiment, progress: TitledProgress) -> dict[str, TaskReport]:
    """Runs, or resumes, an experiment that `prepare` returned; returns a report per task."""
    target, plan = experiment.target, experiment.plan
    for name, job in experiment.jobs.items():
        workload = task_workloads.task_workload(job.task, target, job.selected.examples, plan)
        runner.run_all(experiment.systems, workload, job.journal, progress(f"{name}: sampling"))
    return {
        name: _report(job, target, experiment.drafter, plan, experiment.analysed_texts, progress)
        for name, job in experiment.jobs.items()
    }


def _dependencies(
    config, target: Model, drafter, systems: Sequence[System], plan: TaskPlan
) -> dict:
    """Returns the values on which the records of every task depend.

    The user's options come first, because a journal names the first field that differs. The weights
    follow, because a name does not determine them.
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
    job: _Job, target: Model, drafter, plan: TaskPlan, analysed_texts: int, progress: TitledProgress
) -> TaskReport:
    """Returns the report of a task from the records of its journal."""
    task, examples, records = job.task, job.selected.examples, job.journal.records
    scores = summary.score_examples(task, examples, records, progress("scoring"))
    summaries = summary.summarize(records, scores)
    groups = {
        group: summary.summarize([record for record in records if record["group"] == group], scores)
        for group in dict.fromkeys(example.group for example in examples)
    }
    settings = task_workloads.plan_settings(task, plan)
    prompts = {
        example.name: task_workloads.prompt_ids(target, task, example.turns[:1], ())
        for example in examples
    }
    draft, first = DraftAnalysis(), _first_texts(records)
    if isinstance(drafter, Model):
        for setting, params in settings.items():
            of_setting = [system for system in summaries if system.setting == setting]
            _add_predictions(draft, setting, of_setting)
            base = next(iter(first[setting].values()))
            texts = [(prompts[name], row["tokens"]) for name, row in base.items() if row["tokens"]]
            options = texts[:analysed_texts], params, task.code, progress("token by token")
            by_class = acceptance_analysis.acceptance_by_class(target, drafter, *options)
            draft.by_token_class[setting], draft.by_entropy[setting] = by_class
    return TaskReport(
        systems=summaries,
        groups=groups if len(groups) > 1 else {},
        too_long=job.selected.too_long,
        draft=draft,
        divergences={
            setting: _divergences(target, prompts, first[setting])
            for setting, params in settings.items()
            if not params.temperature
        },
        sample_texts={
            setting: {"prompt": examples[0].turns[0]}
            | {label(*key): rows[examples[0].name]["text"] for key, rows in by_system.items()}
            for setting, by_system in first.items()
        },
    )


def _add_predictions(
    draft: DraftAnalysis, setting: str, summaries: Sequence[SystemSummary]
) -> None:
    rates = theory_check.acceptance_rates(summaries)
    draft.acceptance_by_position[setting] = rates
    if costs := theory_check.loop_costs(summaries):
        draft.costs[setting] = costs
        draft.predictions[setting] = theory_check.predict(summaries, rates, costs)


def _first_texts(records: Sequence[dict]) -> dict[str, dict[tuple, dict[str, dict]]]:
    """Returns the records of first turns and samples, by setting, system and K, and example.

    The first system is the baseline.
    """
    texts: dict[str, dict[tuple, dict[str, dict]]] = {}
    for record in records:
        if record["turn"] == record["sample"] == 0:
            setting, *system = runner.system_key(record)
            by_system = texts.setdefault(setting, {})
            by_system.setdefault(tuple(system), {})[record["example"]] = record
    return texts


def _divergences(
    target: Model, prompts: Mapping[str, list[int]], by_system: Mapping[tuple, dict[str, dict]]
) -> list[Divergences]:
    """Returns the divergences of one setting's texts from the baseline's."""
    base, *others = by_system.values()
    reports = []
    for (system, K), by_example in zip(list(by_system)[1:], others):
        differences = [
            acceptance_analysis.divergence(
                target, prompts[name], base[name]["tokens"], record["tokens"]
            )
            for name, record in by_example.items()
        ]
        reports.append(Divergences(system, K, len(differences), list(filter(None, differences))))
    return reports


def label(name: str, num_speculative_tokens: int) -> str:
    """Returns the title of a system in tables."""
    return f"{name}, K = {num_speculative_tokens}" if num_speculative_tokens else name
