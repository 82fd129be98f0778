"""Comparison of drafts whose training configs differ in a few values, trained here."""

import pathlib
import runpy
from typing import Any

from ml_collections import ConfigDict

from spsjax import loading
from spsjax.benchmarks import report, speed, workloads
from spsjax.benchmarks.systems import Role, spsjax_system
from spsjax.cli import config_flags, config_keys, configs, terminal
from spsjax.cli.measurements import plot
from spsjax.data.documents import Sources
from spsjax.errors import InputError, check_integer, one_line
from spsjax.sampling import SamplingParams
from spsjax.training import fit, metrics, run_folder
from spsjax.utils import from_config

# Labels of the figures in the order of the columns. The figures of sampled texts, one per
# temperature, follow the first two.
LABELS = {
    "acceptance_rate": "acceptance rate",
    "greedy_agreement": "greedy agreement",
    "ms_per_draft_step": "ms per draft step",
    "speedup": "speed-up",
}
INTERVALS = {"acceptance_rate": "acceptance_rate_interval"}
PLOTTED = "acceptance_rate", "block_efficiency", "speedup"

Figures = dict[str, float | None]


def run(config: ConfigDict, workdir: pathlib.Path, folder: pathlib.Path) -> str:
    """Trains drafts, resuming interrupted runs, compares them, and returns the table.

    `config` is like configs/experiments/distillspec.py; `folder` has the configs of `config.base`.
    """
    base, drafts = draft_configs(config, workdir, folder)
    start = str(workdir / "start" / "model") if "start" in drafts else None
    for name, draft in drafts.items():  # check all of them before the first is trained
        if start and name != "start" and pathlib.Path(start).exists():
            draft.init = start
        try:
            task: Any = fit.prepare(draft, workdir / name, configs.mesh(draft.mesh))[0]
        except InputError as error:
            raise InputError(with_section(name, config, str(error))) from None
    target = task.target
    prompts = speed_prompts(config.speed, base, target)
    title = f"Drafts of {base.target}, as changes of {config.base}: {', '.join(drafts)}"
    configs.begin(title, config, workdir)
    rows = {}
    for name, draft in drafts.items():
        if start and name != "start":
            draft.init = start
        figures = trained(name, draft, workdir)
        if name != "start":
            rows[name] = figures
    if prompts:
        for name, figures in time_drafts(config.speed, target, prompts, workdir, rows).items():
            rows[name] |= figures
    plotted = {key: text for key, text in labels(rows).items() if key.startswith(PLOTTED)}
    draw = plot("plots.bars", rows, plotted, INTERVALS)
    return report.write(workdir, {"rows": rows}, table(rows), draw)


def trained(name: str, config: ConfigDict, workdir: pathlib.Path) -> Figures:
    """Trains a draft, or resumes its training; returns the figures of its last evaluation."""
    print(f"== {name}", flush=True)
    folder = workdir / name
    fit.train(config, folder, configs.mesh(config.mesh))
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


def draft_configs(
    config: ConfigDict, workdir: pathlib.Path, folder: pathlib.Path
) -> tuple[ConfigDict, dict[str, ConfigDict]]:
    """Returns the common config, and the configs of the runs by name; "start" is the first.

    Raises InputError for runs or a base that cannot be used.
    """
    if not isinstance(config.runs, ConfigDict) or not config.runs or "start" in config.runs:
        raise InputError("runs: expected one or more by name, none of them 'start', found others")
    path = folder / f"{config.base}.py"
    if not path.is_file():
        raise InputError(f"base: expected a config of {folder}, found {config.base!r}")
    base = runpy.run_path(str(path))["get_config"]()
    base.lock()
    base = changed("common", base, config.common)
    if "cache" not in base or "draft_eval" not in base:
        raise InputError(f"base: expected the config of a draft, found {config.base!r}")
    base.cache = base.cache or str(workdir / "cache")
    changes = {"start": config.start} if config.start else {}
    changes |= dict(config.runs.items())
    return base, {name: changed(_section(name), base, values) for name, values in changes.items()}


def with_section(name: str, config: ConfigDict, message: str) -> str:
    """Returns an error about a draft's config with the section that has the value, or its name."""
    key, own = message.partition(": ")[0], _section(name)
    for section, values in ((own, config.start if own == "start" else config.runs[name]),
                            ("common", config.common)):  # fmt: skip
        if key in dict(config_flags.keys(values)):
            return f"{section}.{message}"
    return f"{name}: {message}"


def _section(name: str) -> str:
    """Returns the section of the config with the changes of a draft."""
    return name if name == "start" else f"runs.{name}"


def changed(section: str, config: ConfigDict, changes: ConfigDict) -> ConfigDict:
    """Returns a copy of a config with some values replaced, by those of a section."""
    config = config.copy_and_resolve_references()
    if not isinstance(changes, ConfigDict):
        raise InputError(f"{section}: expected keys and values, found {changes!r}")
    config_keys.check_unknown(changes, config, section=f"{section}.")
    config_keys.check_types(changes, config, section=f"{section}.")
    try:
        config.update(changes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = one_line(error).strip("\"'")
        raise InputError(
            f"{section}: expected keys and values of the config, found {text}"
        ) from None
    return config


def speed_prompts(
    options: ConfigDict, base: ConfigDict, target: loading.Model
) -> dict[str, list[int]]:
    """Returns the prompts on which speed is measured; {} if speed is not measured."""
    check_integer("speed.prompts", options.prompts, 0)
    for field in ("prompt_tokens", "max_new_tokens", "repetitions", "num_speculative_tokens"):
        check_integer(f"speed.{field}", options[field], 1)
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
    sources = from_config.build_section("data", Sources, base.data)
    size = options.prompts, options.prompt_tokens
    return workloads.held_out_prompts(target.tokenizer, *size, sources)


def time_drafts(options: ConfigDict, target, prompts, workdir, names) -> dict[str, Figures]:
    """Returns the speed-up and the time per draft step of each draft, on the same prompts."""
    systems = [spsjax_system("ArS", target)]
    for name in names:
        draft = loading.load(workdir / name / "model", target.mesh)
        systems.append(spsjax_system(name, target, draft, options.num_speculative_tokens))
    settings = {"": SamplingParams(temperature=options.temperature)}
    sizes, progress = (options.max_new_tokens, options.repetitions), terminal.progress("measuring")
    summaries = speed.compare_speed(
        systems, prompts, settings, *sizes, time_rounds=True, progress=progress
    )
    drafted = [system for system in summaries if system.role == Role.SPECULATIVE]
    times = {system.system: 1e3 * system.round_cost.draft_step for system in drafted}
    return {
        system.system: {"ms_per_draft_step": times[system.system], "speedup": system.speedup}
        for system in drafted
    }


def labels(rows: dict[str, Figures]) -> dict[str, str]:
    """Returns the labels of the table's columns by the keys of their figures."""
    efficiencies = {
        key: f"tokens per call, T = {key.rpartition('_')[2]}"
        for row in rows.values()
        for key in row
        if key.startswith("block_efficiency_")
    }
    first = ["acceptance_rate", "greedy_agreement"]
    ordered = {key: LABELS[key] for key in first} | efficiencies | LABELS
    return {key: ordered[key] for key in ordered if any(key in row for row in rows.values())}


def table(rows: dict[str, Figures]) -> str:
    """Returns a Markdown table; means have their intervals."""
    columns, lines = labels(rows), []
    for name, row in rows.items():
        cells = {key: report.number(row.get(key), 3) for key in columns}
        for key, interval in INTERVALS.items():
            cells[key] = metrics.with_interval(row[key], row[interval], 3)
        lines.append([name, *cells.values()])
    return report.markdown(["draft", *columns.values()], lines)
