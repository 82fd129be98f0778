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

from absl import flags
from ml_collections import ConfigDict, config_flags

from spsjax import loading
from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.data.documents import Sources
from spsjax.errors import InputError, one_line
from spsjax.evaluation import race, samplers, speed
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.training import run_folder, train_draft
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the runs are kept.")
flags.mark_flag_as_required("workdir")


def main():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    print(cli.shown(config))
    cli.check_installed("the plot", "matplotlib")
    base, drafts = configs(config, workdir)
    begin_with = {} if "start" not in drafts else {"init": str(workdir / "start" / "model")}
    for name, each in drafts.items():  # all of them, before the first is trained
        if name != "start" and (workdir / "start" / "model").exists():
            each.update(begin_with)
        try:
            target = train_draft.check_draft_config(each, workdir / name, cli.mesh(each.mesh))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    prompts = prompts_of(config.speed, base, target)
    if "start" in drafts:
        train("start", drafts.pop("start"), workdir)
    for name, each in drafts.items():
        each.update(begin_with)
        train(name, each, workdir)
    rows = {name: quality(workdir / name) for name in drafts}
    if prompts:
        for name, figures in time_drafts(
            config.speed, target, prompts, workdir, list(drafts)
        ).items():
            rows[name] |= figures
    if multihost.is_main_process():
        atomic_files.write(workdir / "table.json", json.dumps(rows, indent=2) + "\n")
        atomic_files.write(workdir / "table.md", table(rows))
        from spsjax.cli import plots

        plots.bars(rows, workdir / "table.png")
        print(f"\n{table(rows)}\n{workdir / 'table.md'}, {workdir / 'table.png'}")


def configs(config: ConfigDict, workdir: pathlib.Path) -> tuple[ConfigDict, dict[str, ConfigDict]]:
    """What all have in common, and the config of each run by name, `start` among them."""
    if not isinstance(config.runs, ConfigDict) or not config.runs or "start" in config.runs:
        raise InputError("runs: expected one or more by name, none of them 'start', found others")
    path = _CONFIGS / f"{config.base}.py"
    if not path.is_file():
        raise InputError(f"base: expected a config of {_CONFIGS}, found {config.base!r}")
    base = runpy.run_path(str(path))["get_config"]()
    base.lock()
    base = changed("common", base, config.common)
    if "cache" not in base or "draft_eval" not in base:
        raise InputError(f"base: expected the config of a draft, found {config.base!r}")
    base.cache = base.cache or str(workdir / "cache")
    runs_of = {"start": config.start} if config.start else {}
    runs_of |= dict(config.runs.items())
    return base, {name: changed(name, base, changes) for name, changes in runs_of.items()}


def changed(name: str, config: ConfigDict, changes: ConfigDict) -> ConfigDict:
    """A copy of a config with some values replaced."""
    config = config.copy_and_resolve_references()
    if not isinstance(changes, ConfigDict):
        raise InputError(f"{name}: expected keys and values, found {changes!r}")
    try:
        config.update(changes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = one_line(error).strip("\"'")
        raise InputError(f"{name}: expected keys and values of the config, found {found}") from None
    return config


def train(name: str, config: ConfigDict, workdir: pathlib.Path) -> None:
    print(f"== {name}", flush=True)
    train_draft.distill_draft(config, workdir / name, cli.mesh(config.mesh))


def quality(run: pathlib.Path) -> dict[str, float]:
    """The last measurements of a run."""
    last = {record["group"]: record for record in run_folder.read_log(run)}
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


def prompts_of(how: ConfigDict, base: ConfigDict, target: loading.Model) -> list[list[int]]:
    """What speed is measured on, checked before anything is trained: there may be too few."""
    least = {"prompts": 0, "prompt_tokens": 1, "max_new_tokens": 1, "repetitions": 1}
    for field, value in (least | {"num_speculative_tokens": 1}).items():
        if type(how[field]) is not int or how[field] < value:
            raise InputError(f"speed.{field}: expected an integer >= {value}, found {how[field]!r}")
    SamplingParams(temperature=how.temperature)
    length, context = how.prompt_tokens + how.max_new_tokens, target.config.max_positions
    if length > context:
        raise InputError(
            f"speed.max_new_tokens: expected at most {context - how.prompt_tokens} after "
            f"{how.prompt_tokens} in a context of {context}, found {how.max_new_tokens}"
        )
    if not how.prompts:
        return []
    sources = from_config.build("data", Sources, base.data)
    size = how.prompts, how.prompt_tokens
    return list(speed.held_out_prompts(target.tokenizer, *size, sources).values())


def time_drafts(
    how: ConfigDict, target: loading.Model, prompts: list, workdir: pathlib.Path, names: list[str]
) -> dict[str, dict[str, float]]:
    """Drafts in turn with plain sampling, on the same prompts: speed-ups, and ms a draft step."""
    params = SamplingParams(temperature=how.temperature)
    entries = [samplers.ours(race.BASELINE, target)]
    for name in names:
        draft = loading.load(workdir / name / "model", target.mesh)
        entries.append(samplers.ours(name, target, draft, how.num_speculative_tokens))
    contenders = [race.Contender(each, "", params, how.max_new_tokens) for each in entries]
    progress = terminal.progress("measuring")
    lines = race.run(contenders, prompts, how.repetitions, parts=True, progress=progress)
    return {
        line.name: {"ms a draft step": 1e3 * line.parts.draft_step, "speed-up": line.speedup}
        for line in lines
        if line.name != race.BASELINE
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown; the interval stands beside its mean."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != "± "))
    lines = [["draft", *columns], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = [f"{row[column]:.3f}" if column in row else "-" for column in columns]
        cells[columns.index("acceptance")] += f" ± {row['± ']:.3f}"
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "distillspec.py", saves=True, free=("common", "start", "runs"))
