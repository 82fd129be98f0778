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

import _environment  # must be first: names a package that is missing
import jinja2
from absl import flags
from ml_collections import config_flags

from spsjax import loading
from spsjax.benchmarks import paper, paper_tables, peers, report
from spsjax.benchmarks.paper import TaskReport
from spsjax.cli import configs, main, terminal
from spsjax.parallel import multihost
from spsjax.planning import hardware
from spsjax.planning.outcome import Table
from spsjax.utils import atomic_files, extras

_SCRIPTS = pathlib.Path(__file__).resolve().parent
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to reproduce.", lock_config=True)
_EXPERIMENT = flags.DEFINE_enum("experiment", None, paper.EXPERIMENTS, "Experiment to reproduce.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_PEER = flags.DEFINE_multi_enum("peer", [], peers.NAMES, peers.HELP)
main.require("experiment", "workdir")

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
    extras.require("plots", "matplotlib")
    for name in _PEER.value:
        peers.require(name)
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
    tables = [
        table for name, result in reports.items() for table in paper_tables.all_tables(name, result)
    ]
    terminal.print_tables(tables)
    if multihost.is_main_process():
        write(experiment, config, reports, tables, hardware.machine(target), workdir)
        print(f"{workdir / 'report.html'}, {workdir / 'report.json'}")


def write(
    experiment: str,
    config,
    reports: dict[str, TaskReport],
    tables: list[Table],
    machine: dict,
    workdir: pathlib.Path,
) -> None:
    """Writes the figures, the pictures, and the page that shows both."""
    from spsjax.cli import paper_plots as plots

    figures = {name: dataclasses.asdict(result) for name, result in reports.items()}
    record = {
        "made": report.provenance(),
        "experiment": experiment,
        "machine": machine,
        "config": config.to_dict(),
        "tasks": figures,
        "tables": list(map(dataclasses.asdict, tables)),
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
    main.run(run, _environment.EXPERIMENTS / "reproduce.py", free=["tasks"])
