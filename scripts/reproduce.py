r"""Reproduces the table and the figure of Chen et al. 2023, and Spec-Bench, for a pair of models.

python scripts/reproduce.py --experiment=table1 --workdir=runs/table1
python scripts/reproduce.py --experiment=figure1 --workdir=runs/figure1
python scripts/reproduce.py --experiment=specbench --workdir=runs/specbench \
    --config.tasks.spec_bench.path=question.jsonl
python scripts/reproduce.py --experiment=table1 --peer=hf --workdir=runs/peers

The same command resumes an interrupted run. The folder then holds a journal of all continuations,
`report.html`, its pictures, its figures in `report.json`, and the config in `experiment.json`.
"""

import base64
import dataclasses
import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jinja2
from absl import flags
from ml_collections import config_flags

from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.evaluation import paper, peers, summary
from spsjax.evaluation.paper import TaskReport
from spsjax.evaluation.summary import SystemSummary
from spsjax.parallel import multihost
from spsjax.performance import hardware
from spsjax.utils import atomic_files

_SCRIPTS = pathlib.Path(__file__).resolve().parent
_CONFIGS = _SCRIPTS.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to reproduce.", lock_config=True)
_EXPERIMENT = flags.DEFINE_enum("experiment", None, paper.EXPERIMENTS, "Experiment to reproduce.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_PEER = flags.DEFINE_multi_enum("peer", [], peers.NAMES, peers.HELP)
main.require("experiment", "workdir")

Table = tuple[str, list[str], list[list]]  # title, header and rows

OUTPUTS = "experiment.json", "report.json", "report.html", "figure1.png", "acceptance.png"
TITLES = {
    "table1": "Time, quality and parity: table 1 of Chen et al. 2023",
    "figure1": "Over the length of a draft: figure 1 of Chen et al. 2023",
    "specbench": "Spec-Bench, by category: Xia et al. 2024",
}


def run():
    config, experiment, workdir = _CONFIG.value, _EXPERIMENT.value, pathlib.Path(_WORKDIR.value)
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [workdir])
    configs.choose_pair(config, _TARGET.value, _DRAFT.value)
    main.check_installed("the report", "matplotlib")
    for name in _PEER.value:
        main.check_installed(f"--peer={name}", *peers.modules(name))
    mesh = configs.mesh(config.mesh)
    target = loading.load(config.target, mesh, config.dtype)
    drafter = configs.load_drafter(config.drafter, config.draft, config, target, config.dtype)
    draft = drafter if isinstance(drafter, loading.Model) else None
    others = peers.systems(_PEER.value, config.peer, target, draft)
    prepared = paper.prepare(experiment, config, target, drafter, others, workdir)
    name = config.draft if config.drafter in configs.OF_DRAFT else config.drafter
    configs.begin(
        f"{TITLES[experiment]}. Target: {config.target}. Drafter: {name}", config, workdir
    )
    reports = paper.run(prepared, terminal.progress)
    tables = [table for name, report in reports.items() for table in all_tables(name, report)]
    for title, header, rows in tables:
        terminal.heading(title)
        terminal.print_table(header, rows, left=[0, 1])
    if multihost.is_main_process():
        write(experiment, config, reports, tables, hardware.machine(target), workdir)
        print(f"{workdir / 'report.html'}, {workdir / 'report.json'}")


def all_tables(task: str, report: TaskReport) -> list[Table]:
    """Returns the tables of a task; the first two columns of each are text."""
    tables = [(f"{task}: time", *times(report.systems))]
    for group, systems in report.groups.items():
        tables.append((f"{task}, {group}: time", *times(systems)))
    tables.append((f"{task}: quality", *quality(report.systems)))
    if any(report.draft.predictions.values()):
        tables.append((f"{task}: speed-up of the loop, by theory and measured", *theory(report)))
    if report.draft.by_token_class:
        tables.append((f"{task}: where drafts are accepted", *acceptance(report)))
    if any(report.divergences.values()):
        title = f"{task}: divergence of greedy texts from plain sampling"
        tables.append((title, *divergences(report)))
    return tables


def times(systems: list[SystemSummary]) -> tuple[list[str], list[list]]:
    """Returns the table of time, speed-up and tokens per call."""
    levels = ", ".join(f"P{level}" for level in summary.PERCENTILES)
    header = ["setting", "system", "texts", "ms/token", "speed-up (95%)", "tokens per call"]
    rows = []
    for system in systems:
        speedup = "1"
        if system.speedup:
            speedup = within(system.speedup, system.speedup_interval, 2)
        rows.append(
            [
                system.setting,
                label(system),
                system.num_texts,
                f"{system.ms_per_token:.2f}",
                speedup,
                number(system.block_efficiency),
                ", ".join(f"{system.latency_ms[level]:.0f}" for level in summary.PERCENTILES),
            ]
        )
    return [*header, f"{levels} ms"], rows


def quality(systems: list[SystemSummary]) -> tuple[list[str], list[list]]:
    """Returns the table of the task's metrics and n-grams, with tests against plain sampling."""
    rows = []
    for system in systems:
        for name in dict.fromkeys((*system.scores, *system.p_values)):
            means = (means.get(name) for means in (system.scores, system.score_differences))
            cells = [within(*mean) if mean else "-" for mean in means]
            p_value = number(system.p_values.get(name), 3)
            rows.append([system.setting, label(system), name, *cells, p_value])
    header = ["setting", "system", "metric", "mean (95%)", "difference from ArS (95%)", "p-value"]
    return header, rows


def label(system: SystemSummary) -> str:
    """Returns the text that names a system and its K."""
    return paper.label(system.system, system.num_speculative_tokens)


def theory(report: TaskReport) -> tuple[list[str], list[list]]:
    """Returns the table of predicted and measured speed-ups."""
    header = ["setting", "K", "tokens per call", "draft step", "scoring"]
    header += ["speed-up if scoring is free", "by theory", "measured", "measured / by theory"]
    header += ["round time / sum of its costs"]
    rows = []
    for setting, predictions in report.draft.predictions.items():
        costs = report.draft.costs[setting]
        for prediction in predictions:
            K = prediction.num_speculative_tokens
            measured, expected = prediction.loop_speedup, prediction.cost_aware_speedup
            rows.append(
                [
                    setting,
                    K,
                    f"{prediction.block_efficiency:.2f}",
                    f"{costs.draft_step[K]:.3f}",
                    f"{costs.scoring[K]:.2f}",
                    f"{prediction.predicted_speedup:.2f}",
                    f"{expected:.2f}",
                    f"{measured:.2f}",
                    f"{measured / expected:.2f}",
                    number(prediction.round_over_cost),
                ]
            )
    return header, rows


def acceptance(report: TaskReport) -> tuple[list[str], list[list]]:
    """Returns the table of exact acceptance rates by class, and of measured ones by position."""
    rows, draft = [], report.draft
    for kind, by_setting in (("class", draft.by_token_class), ("entropy, nats", draft.by_entropy)):
        for setting, shares in by_setting.items():
            for name, share in shares.items():
                rows.append([setting, kind, name, f"{share.share:.1%}", f"{share.acceptance:.3f}"])
    for setting, rates in draft.acceptance_by_position.items():
        for index, rate in enumerate(rates, 1):
            rows.append([setting, "position, if reached", index, "-", number(rate, 3)])
    return ["setting", "grouped by", "group", "share of tokens", "acceptance rate"], rows


def divergences(report: TaskReport) -> tuple[list[str], list[list]]:
    """Returns the table of greedy texts that diverge, with the target's margins there."""
    rows = []
    for setting, systems in report.divergences.items():
        for system in systems:
            margins = sorted(divergence.margin for divergence in system.divergences)
            ends = [f"{margins[0]:.2g}", f"{margins[-1]:.2g}"] if margins else ["-", "-"]
            name = paper.label(system.system, system.num_speculative_tokens)
            rows.append([setting, name, system.num_texts, len(margins), *ends])
    header = ["setting", "system", "texts", "diverging", "least logit margin", "greatest"]
    return header, rows


def within(value: float, interval, digits: int = 3) -> str:
    """Returns a value with its interval, if it has one."""
    if interval is None:
        return f"{value:.{digits}f}"
    low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value:.{digits}f} ({low} to {high})"


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number as text, or "-" if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def write(
    experiment: str,
    config,
    reports: dict[str, TaskReport],
    tables: list[Table],
    machine: dict,
    workdir: pathlib.Path,
) -> None:
    """Writes the figures, the pictures, and the page that shows both."""
    from spsjax.cli import plots

    figures = {name: dataclasses.asdict(report) for name, report in reports.items()}
    record = {
        "experiment": experiment,
        "machine": machine,
        "config": config.to_dict(),
        "tasks": figures,
    }
    atomic_files.write(workdir / "report.json", json.dumps(record, indent=2) + "\n")
    pictures = []
    if experiment == "figure1":
        tokens = config.figure1.plan.new_tokens or 128
        plots.figure1(reports, tokens, workdir / "figure1.png")
        pictures.append("figure1.png")
    if any(report.draft.by_token_class for report in reports.values()):
        plots.acceptance(reports, workdir / "acceptance.png")
        pictures.append("acceptance.png")
    source = (_SCRIPTS / "report.html").read_text("utf-8")
    page = jinja2.Environment(autoescape=True).from_string(source)
    page = page.render(
        title=TITLES[experiment],
        config=config,
        config_text=configs.to_yaml(config),
        machine=machine,
        tables=tables,
        pictures={
            name: base64.b64encode((workdir / name).read_bytes()).decode() for name in pictures
        },
        reports=reports,
    )
    page = page.replace("\0", "\N{REPLACEMENT CHARACTER}")  # HTML does not allow the null character
    atomic_files.write(workdir / "report.html", page + "\n")


if __name__ == "__main__":
    main.run(run, _CONFIGS / "reproduce.py", free=["tasks"])
