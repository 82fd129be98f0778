r"""Trains drafts that differ in a few things, and sets them side by side.

python scripts/compare_drafts.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec
python scripts/compare_drafts.py --config=configs/experiments/wide_shallow.py \
    --workdir=runs/wide_shallow

The same command goes on with a comparison that was stopped. The table is in `table.md`, its figures
in `table.json`, a plot in `table.png`.
"""

import json
import pathlib
import runpy

import display
from absl import flags
from ml_collections import ConfigDict, config_flags

from spsjax import (
    arguments,
    benchmark,
    cli,
    distributed,
    files,
    loading,
    probes,
    race,
    recipes,
    runs,
)
from spsjax.documents import Sources
from spsjax.sampling import SamplingParams

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the runs are kept.")
flags.mark_flag_as_required("workdir")


def main():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    print(cli.shown(config))
    cli.check_installed("the plot", "matplotlib")
    base = runpy.run_path(str(_CONFIGS / f"{config.base}.py"))["get_config"]()
    base.lock()
    base.update(config.common)
    base.cache = base.cache or str(workdir / "cache")
    drafts = {name: changed(base, changes) for name, changes in config.runs.items()}
    target = loading.load(base.target, cli.mesh(base.mesh))
    prompts = prompts_of(config.speed, base, target.tokenizer)
    if config.start:
        train("start", changed(base, config.start), workdir)
        for each in drafts.values():
            each.init = str(workdir / "start" / "model")
    for name, each in drafts.items():
        train(name, each, workdir)
    rows = {name: quality(workdir / name) for name in drafts}
    if prompts:
        for name, figures in speed(config.speed, target, prompts, workdir, list(drafts)).items():
            rows[name] |= figures
    if distributed.is_first():
        files.write(workdir / "table.json", json.dumps(rows, indent=2) + "\n")
        files.write(workdir / "table.md", table(rows))
        display.bars(rows, workdir / "table.png")
        print(f"\n{table(rows)}\n{workdir / 'table.md'}, {workdir / 'table.png'}")


def changed(base: ConfigDict, changes: ConfigDict) -> ConfigDict:
    """A copy of a config with some values replaced."""
    config = base.copy_and_resolve_references()
    config.update(changes)
    return config


def train(name: str, config: ConfigDict, workdir: pathlib.Path) -> None:
    print(f"== {name}", flush=True)
    recipes.draft(config, workdir / name, cli.mesh(config.mesh))


def quality(run: pathlib.Path) -> dict[str, float]:
    """The last measurements of a run."""
    last = {record["group"]: record for record in runs.records(run)}
    held_out = last["held_out"]
    figures = {
        "acceptance": held_out["acceptance"]["mean"],
        "± ": held_out["acceptance"]["interval"] or 0.0,
        "greedy agreement": held_out["greedy_agreement"]["mean"],
    }
    for group in sorted(last):
        if group.startswith("temperature_"):
            temperature = group.removeprefix("temperature_")
            figures[f"tokens a call, T = {temperature}"] = last[group]["block_efficiency"]
    return figures


def prompts_of(how: ConfigDict, base: ConfigDict, tokenizer) -> list[list[int]]:
    """What speed is measured on, chosen before anything is trained: there may be too few."""
    if not how.prompts or tokenizer is None:  # training refuses such a target
        return []
    sources = arguments.build("data", Sources, base.data)
    size = how.prompts, how.prompt_tokens
    return list(benchmark.held_out_prompts(tokenizer, *size, sources).values())


def speed(
    how: ConfigDict, target: loading.Model, prompts: list, workdir: pathlib.Path, names: list[str]
) -> dict[str, dict[str, float]]:
    """Drafts in turn with plain sampling, on the same prompts: speed-ups, and ms a draft step."""
    params = SamplingParams(temperature=how.temperature)
    contenders = [race.contender(race.BASELINE, "", target, None, params, how.max_new_tokens)]
    parts_of, count = {}, how.num_speculative_tokens
    for name in names:
        draft = loading.load(workdir / name / "model", target.mesh)
        contenders.append(
            race.contender(name, "", target, draft, params, how.max_new_tokens, count)
        )
        length = how.prompt_tokens + how.max_new_tokens
        parts_of[name, "", count] = probes.probe(target, draft, count, params, length)
    lines = race.run(
        contenders, prompts, how.repetitions, 0, parts_of, display.progress("measuring"),
    )  # fmt: skip
    return {
        line.name: {"ms a draft step": 1e3 * line.parts.draft_step, "speed-up": line.speedup}
        for line in lines
        if line.name != race.BASELINE
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown; the interval stands beside its mean."""
    columns = [name for name in next(iter(rows.values())) if name != "± "]
    lines = [["draft", *columns], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = [f"{row[column]:.3f}" for column in columns]
        cells[columns.index("acceptance")] += f" ± {row['± ']:.3f}"
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "distillspec.py", saves=True, free=("common", "start", "runs"))
