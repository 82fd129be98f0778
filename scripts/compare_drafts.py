r"""Trains drafts whose configs differ in a few values, and compares them.

python scripts/compare_drafts.py --config=configs/experiments/distillspec.py \
    --workdir=runs/distillspec
python scripts/compare_drafts.py --config=configs/experiments/wide_shallow.py \
    --workdir=runs/wide_shallow

The same command resumes an interrupted comparison. The table is in `table.md`, its figures in
`table.json`, a plot in `table.png`, the config in `experiment.json`.
"""

import json
import pathlib
import runpy

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import ConfigDict, config_flags

from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.data.documents import Sources
from spsjax.errors import InputError, one_line
from spsjax.evaluation import samplers, speed
from spsjax.evaluation.samplers import Role
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.training import metrics, run_folder, train_draft
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs.")
main.require("workdir")


# Labels of the figures in the table, in the order of its columns. Those of sampled texts come after
# the first two, one per temperature.
LABELS = {
    "acceptance_rate": "acceptance rate",
    "greedy_agreement": "greedy agreement",
    "ms_per_draft_step": "ms per draft step",
    "speedup": "speed-up",
}
OUTPUTS = "experiment.json", "table.json", "table.md", "table.png"
INTERVALS = {"acceptance_rate": "acceptance_rate_interval"}
PLOTTED = "acceptance_rate", "block_efficiency", "speedup"


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [workdir])
    main.check_installed("the plot", "matplotlib")
    base, drafts = draft_configs(config, workdir)
    start = str(workdir / "start" / "model") if "start" in drafts else None
    for name, draft in drafts.items():  # check all of them before the first is trained
        if start and name != "start" and pathlib.Path(start).exists():
            draft.init = start
        try:
            target = train_draft.check_draft_config(draft, workdir / name, configs.mesh(draft.mesh))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    prompts = speed_prompts(config.speed, base, target)
    title = f"Drafts of {base.target}, as changes of {config.base}: {', '.join(drafts)}"
    configs.begin(title, config, workdir)
    if start:
        train("start", drafts.pop("start"), workdir)
    for name, draft in drafts.items():
        if start:
            draft.init = start
        train(name, draft, workdir)
    rows = {name: quality(workdir / name) for name in drafts}
    if prompts:
        timed = time_drafts(config.speed, target, prompts, workdir, list(drafts))
        for name, figures in timed.items():
            rows[name] |= figures
    if multihost.is_main_process():
        write(rows, workdir)


def draft_configs(
    config: ConfigDict, workdir: pathlib.Path
) -> tuple[ConfigDict, dict[str, ConfigDict]]:
    """Returns the common config, and the config of each run by name, `start` included."""
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
    changes = {"start": config.start} if config.start else {}
    changes |= dict(config.runs.items())
    return base, {name: changed(name, base, values) for name, values in changes.items()}


def changed(name: str, config: ConfigDict, changes: ConfigDict) -> ConfigDict:
    """Returns a copy of a config with some values replaced."""
    config = config.copy_and_resolve_references()
    if not isinstance(changes, ConfigDict):
        raise InputError(f"{name}: expected keys and values, found {changes!r}")
    try:
        config.update(changes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = one_line(error).strip("\"'")
        raise InputError(f"{name}: expected keys and values of the config, found {text}") from None
    return config


def train(name: str, config: ConfigDict, workdir: pathlib.Path) -> None:
    """Trains one draft, or resumes its training."""
    print(f"== {name}", flush=True)
    train_draft.distill_draft(config, workdir / name, configs.mesh(config.mesh))


def quality(folder: pathlib.Path) -> dict[str, float | None]:
    """Returns the figures of a run's last evaluation."""
    last = {record["group"]: record for record in run_folder.read_log(folder)}
    if "held_out" not in last:
        raise InputError(f"{folder / 'log.jsonl'}: expected the log of a run, found no evaluation")
    held_out = last["held_out"]
    figures = {
        "acceptance_rate": held_out["acceptance"]["mean"],
        "acceptance_rate_interval": held_out["acceptance"]["interval"],
        "greedy_agreement": held_out["greedy_agreement"]["mean"],
    }
    for group in sorted(last):
        if group.startswith("temperature_"):
            figures[f"block_efficiency_{group}"] = last[group]["block_efficiency"]
    return figures


def speed_prompts(
    options: ConfigDict, base: ConfigDict, target: loading.Model
) -> dict[str, list[int]]:
    """Returns the prompts on which speed is measured; there may be too few, or none wanted."""
    least = {"prompts": 0, "prompt_tokens": 1, "max_new_tokens": 1, "repetitions": 1}
    for field, value in (least | {"num_speculative_tokens": 1}).items():
        if type(options[field]) is not int or options[field] < value:
            raise InputError(
                f"speed.{field}: expected an integer >= {value}, found {options[field]!r}"
            )
    SamplingParams(temperature=options.temperature)
    length, context = options.prompt_tokens + options.max_new_tokens, target.config.max_positions
    if length > context:
        raise InputError(
            f"speed.max_new_tokens: expected at most {context - options.prompt_tokens} after "
            f"{options.prompt_tokens} in a context of {context}, found {options.max_new_tokens}"
        )
    if options.num_speculative_tokens >= context:
        raise InputError(
            f"speed.num_speculative_tokens: expected less than the context, {context}, "
            f"found {options.num_speculative_tokens}"
        )
    if not options.prompts:
        return {}
    sources = from_config.build("data", Sources, base.data)
    size = options.prompts, options.prompt_tokens
    return speed.held_out_prompts(target.tokenizer, *size, sources)


def time_drafts(
    options: ConfigDict,
    target: loading.Model,
    prompts: dict[str, list[int]],
    workdir: pathlib.Path,
    names: list[str],
) -> dict[str, dict[str, float]]:
    """Returns the speed-up of each draft and its time per draft step, on the same prompts."""
    systems = [samplers.spsjax_system("ArS", target)]
    for name in names:
        draft = loading.load(workdir / name / "model", target.mesh)
        K = options.num_speculative_tokens
        systems.append(samplers.spsjax_system(name, target, draft, K))
    summaries = speed.compare_speed(
        systems,
        prompts,
        {"": SamplingParams(temperature=options.temperature)},
        options.max_new_tokens,
        options.repetitions,
        time_rounds=True,
        progress=terminal.progress("measuring"),
    )
    return {
        system.system: {
            "ms_per_draft_step": 1e3 * system.round_cost.draft_step,
            "speedup": system.speedup,
        }
        for system in summaries
        if system.role == Role.SPECULATIVE
    }


def labels(rows: dict[str, dict[str, float]]) -> dict[str, str]:
    """Returns the label of each column of the table, by the key of its figure."""
    efficiencies = {
        key: f"tokens per call, T = {key.rpartition('_')[2]}"
        for row in rows.values()
        for key in row
        if key.startswith("block_efficiency_")
    }
    first = ["acceptance_rate", "greedy_agreement"]
    ordered = {key: LABELS[key] for key in first} | efficiencies | LABELS
    return {key: ordered[key] for key in ordered if any(key in row for row in rows.values())}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Returns a Markdown table; an interval stands beside its mean."""
    columns = labels(rows)
    lines = [["draft", *columns.values()], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = {key: f"{row[key]:.3f}" if key in row else "-" for key in columns}
        for key, interval in INTERVALS.items():
            cells[key] = metrics.with_interval(row[key], row[interval], 3)
        lines.append([name, *cells.values()])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: dict[str, dict[str, float]], workdir: pathlib.Path) -> None:
    """Writes the figures, the table and the plot."""
    from spsjax.cli import plots

    atomic_files.write(workdir / "table.json", json.dumps(rows, indent=2) + "\n")
    atomic_files.write(workdir / "table.md", table(rows))
    plotted = {key: text for key, text in labels(rows).items() if key.startswith(PLOTTED)}
    plots.bars(rows, plotted, INTERVALS, workdir / "table.png")
    print(f"\n{table(rows)}\n{workdir / 'table.md'}, {workdir / 'table.png'}")


if __name__ == "__main__":
    main.run(run, _CONFIGS / "distillspec.py", saves=True, free=("common", "start", "runs"))
