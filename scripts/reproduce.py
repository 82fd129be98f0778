r"""The table and the figure of Chen et al. 2023, and Spec-Bench, for a pair of models.

python scripts/reproduce.py --what=table1 --workdir=runs/table1
python scripts/reproduce.py --what=figure1 --workdir=runs/figure1
python scripts/reproduce.py --what=specbench --workdir=runs/specbench \
    --config.tasks.spec_bench.path=question.jsonl
python scripts/reproduce.py --what=table1 --peer=hf --workdir=runs/peers

The same command goes on with a run that was stopped. The folder then holds a journal of all
continuations, `report.html`, its pictures, and its figures in `report.json`.
"""

import base64
import dataclasses
import json
import pathlib

import jinja2
from absl import flags
from ml_collections import config_flags

from spsjax import loading
from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.evaluation import hf_baseline, paper
from spsjax.parallel import multihost
from spsjax.performance import microbenchmarks
from spsjax.utils import atomic_files

_SCRIPTS = pathlib.Path(__file__).resolve().parent
_CONFIGS = _SCRIPTS.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What is sampled.", lock_config=True)
_WHAT = flags.DEFINE_enum("what", None, paper.WHAT, "What is reproduced.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.")
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_PEER = flags.DEFINE_enum("peer", None, ["hf"], "Who runs beside: Hugging Face generate.")
flags.mark_flags_as_required(["what", "workdir"])

TITLES = {
    "table1": "Time, quality and parity: table 1 of Chen et al. 2023",
    "figure1": "Over the length of a draft: figure 1 of Chen et al. 2023",
    "specbench": "Spec-Bench, by category: Xia et al. 2024",
}


def main():
    config, what, workdir = _CONFIG.value, _WHAT.value, pathlib.Path(_WORKDIR.value)
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    print(cli.shown(config))
    cli.check_installed("the report", "matplotlib")
    if _PEER.value:
        cli.check_installed("--peer=hf", "torch", "transformers")
    mesh = cli.mesh(config.mesh)
    target = loading.load(config.target, mesh, config.dtype)
    drafter = cli.load_drafter(config.drafter, config.draft, config, config.dtype, mesh)
    draft = drafter if isinstance(drafter, loading.Model) else None
    others = hf_baseline.samplers(config.peer, target, draft) if _PEER.value else []
    found = paper.run(what, config, target, drafter, others, workdir, terminal.progress)
    tables = [table for name, each in found.items() for table in all_tables(name, each)]
    for title, header, rows in tables:
        terminal.heading(title)
        terminal.columns(header, rows, left=[0, 1])
    if multihost.is_main_process():
        write(what, config, found, tables, microbenchmarks.machine(target), workdir)
        print(f"{workdir / 'report.html'}, {workdir / 'report.json'}")


def all_tables(task: str, found: paper.Found) -> list[tuple[str, list[str], list[list]]]:
    """Title, header and rows of each table of a task; the first two columns are text."""
    tables = [(f"{task}: time", *times(found.rows))]
    tables += [(f"{task}, {group}: time", *times(rows)) for group, rows in found.groups.items()]
    tables.append((f"{task}: what was written", *quality(found.rows)))
    if any(found.predicted.values()):
        tables.append((f"{task}: the loop's speed-up, by theory and measured", *theory(found)))
    if found.kinds:
        tables.append((f"{task}: where drafts are accepted", *shares(found)))
    if any(found.partings.values()):
        tables.append((f"{task}: where greedy texts part from plain sampling's", *parted(found)))
    return tables


def times(rows) -> tuple[list[str], list[list]]:
    """Time, speed-up and tokens a call."""
    header = ["setting", "sampler", "texts", "ms a token", "speed-up (95%)", "tokens a call"]
    header.append("P50, P90, P99 ms")
    lines = []
    for row in rows:
        speedup = "1"
        if row.speedup:
            speedup = within(row.speedup, row.speedup_interval, 2)
        cells = [row.setting, who(row), row.texts, f"{row.ms_per_token:.2f}", speedup]
        levels = ", ".join(f"{row.latency_ms[level]:.0f}" for level in (50, 90, 99))
        lines.append([*cells, number(row.tokens_per_call), levels])
    return header, lines


def quality(rows) -> tuple[list[str], list[list]]:
    """The task's metrics and n-grams, with the chance that two samplers are one."""
    lines = []
    for row in rows:
        for name in dict.fromkeys((*row.metrics, *row.chances)):
            means = (each.get(name) for each in (row.metrics, row.differences))
            shown = [within(*mean) if mean else "-" for mean in means]
            p = number(row.chances.get(name), 3)
            lines.append([row.setting, who(row), name, *shown, p])
    header = ["setting", "sampler", "metric", "mean (95%)", "less the first's (95%)"]
    return [*header, "p, as the first"], lines


def who(row) -> str:
    """The sampler, and its K."""
    return paper.label(row.sampler, row.num_speculative_tokens)


def theory(found: paper.Found) -> tuple[list[str], list[list]]:
    """Predictions beside measurements."""
    header = ["setting", "sampler", "tokens a call", "draft step", "scoring"]
    header += ["speed-up if scoring is free", "by theory", "measured", "ratio", "round / parts"]
    lines = []
    for setting, predicted in found.predicted.items():
        costs = found.costs[setting]
        for each in predicted:
            K = each.num_speculative_tokens
            cells = [
                setting,
                paper.label("SpS", K),
                f"{each.tokens_per_call:.2f}",
                f"{costs.draft_step[K]:.3f}",
            ]
            cells += [f"{costs.scoring[K]:.2f}", f"{each.free:.2f}", f"{each.speedup:.2f}"]
            cells += [f"{each.measured:.2f}", f"{each.measured / each.speedup:.2f}"]
            cells.append(number(each.loop_over_parts))
            lines.append(cells)
    return header, lines


def shares(found: paper.Found) -> tuple[list[str], list[list]]:
    """Acceptance by class, exact, and by position in the draft, as it was counted."""
    lines = []
    for by, classes in (("class", found.kinds), ("entropy, nats", found.entropies)):
        for setting, known in classes.items():
            for name, share in known.items():
                row = [setting, by, name, f"{share.share:.1%}", f"{share.acceptance:.3f}"]
                lines.append(row)
    for setting, rates in found.rates.items():
        for index, rate in enumerate(rates, 1):
            lines.append([setting, "position, if reached", index, "-", number(rate, 3)])
    return ["setting", "by", "tokens", "of all", "acceptance"], lines


def parted(found: paper.Found) -> tuple[list[str], list[list]]:
    """Where greedy texts part, and how nearly equal the two best tokens were."""
    lines = []
    for setting, by_sampler in found.partings.items():
        for sampler, (texts, partings) in by_sampler.items():
            margins = sorted(each.margin for each in partings)
            shown = [f"{margins[0]:.2g}", f"{margins[-1]:.2g}"] if margins else ["-", "-"]
            lines.append([setting, sampler, texts, len(partings), *shown])
    return ["setting", "sampler", "texts", "part", "least margin of logits", "greatest"], lines


def within(value: float, interval, digits: int = 3) -> str:
    """A value and its interval, if it has one."""
    if interval is None:
        return f"{value:.{digits}f}"
    low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value:.{digits}f} ({low} to {high})"


def number(value: float | None, digits: int = 2) -> str:
    """As short as it says something."""
    return "-" if value is None else f"{value:.{digits}f}"


def write(what: str, config, found: dict, tables: list, machine: dict, workdir) -> None:
    """The figures, the pictures, and the page that shows both."""
    from spsjax.cli import plots

    figures = {name: dataclasses.asdict(each) for name, each in found.items()}
    record = {"what": what, "machine": machine, "config": config.to_dict(), "tasks": figures}
    atomic_files.write(workdir / "report.json", json.dumps(record, indent=2) + "\n")
    drawn = {}
    if what == "figure1":
        tokens = config.figure1.plan.new_tokens or 128
        drawn["figure1.png"] = lambda path: plots.figure1(found, tokens, path)
    if any(each.kinds for each in found.values()):
        drawn["accepted.png"] = lambda path: plots.accepted(found, path)
    shown = {}
    for name, draw in drawn.items():
        draw(workdir / name)
        shown[name] = base64.b64encode((workdir / name).read_bytes()).decode()
    source = (_SCRIPTS / "report.html").read_text("utf-8")
    page = jinja2.Environment(autoescape=True).from_string(source)
    page = page.render(
        title=TITLES[what],
        config=config,
        shown=cli.shown(config),
        machine=machine,
        tables=tables,
        pictures=shown,
        found=found,
    )
    page = page.replace("\0", "\N{REPLACEMENT CHARACTER}")  # texts may have it, HTML may not
    atomic_files.write(workdir / "report.html", page + "\n")


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "reproduce.py", free=["tasks"])
