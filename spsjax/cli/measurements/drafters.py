"""Comparison of drafters of one target, as chains and as trees."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from spsjax import decode, loading, verifiers
from spsjax.benchmarks import (
    microbenchmarks,
    report,
    runner,
    speed,
    surprise,
    task_workloads,
    workloads,
)
from spsjax.benchmarks.records import Records
from spsjax.benchmarks.summary import SystemSummary
from spsjax.benchmarks.systems import Role, spsjax_system
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.drafters import base
from spsjax.drafters.shapes import DynamicTree, Shape, Tree
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.planning import hardware
from spsjax.runtime import drafting
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.utils import compilation

AUTO = "chain, K chosen"
_DRAFTS_TIMED = 5  # timings per shape, of which the median counts

Prompts = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A drafter in one shape, with the rule that verifies its drafts."""

    shape: str  # title of the shape
    drafter: LoadedDrafter  # drafter of drafts of this shape
    rule: str | None = None  # name of the rule; None: what suits the shape

    @property
    def title(self) -> str:
        return _title(self.shape, self.rule)

    @property
    def count(self) -> int | str:
        """K as `generate` takes it."""
        own = self.drafter.drafter.num_speculative_tokens
        return drafting.AUTO if self.shape == AUTO else own


def run(
    config,
    workdir: pathlib.Path,
    drafters: Sequence[str],
    trees: Sequence[str],
    rules: Sequence[str],
) -> str:
    """Compares drafters and returns the tables, which are written after every drafter.

    `config` is like configs/experiments/compare_drafters.py. Drafters are NAME=FOLDER, trees of
    single drafters NAME=FILE, and further rules of drafters NAME=RULE.
    """
    for field in ("prompts", "prompt_tokens", "max_new_tokens", "repetitions"):
        check_integer(field, config[field], 1)
    settings, shapes = workloads.sampling_settings(config), shapes_of(config)
    folders, further = _by_name("drafters", drafters), _by_name("verifiers", rules)
    files = _by_name("trees", trees)
    _check_names(folders, files, further)
    own = {name: _own_tree(file) for name, file in files.items()}
    target = loading.load(
        config.target, configs.mesh(config.mesh), config.dtype, quantize=config.quantize
    )
    prompts = prompts_by_task(config, target)
    # All drafters are loaded before the first is run, so that mistakes are found early.
    loaded = {
        name: in_shapes(folder, target, shapes, own.get(name, {}))
        for name, folder in folders.items()
    }
    for name, variants in loaded.items():
        variants += by_rule(name, variants, further.get(name), target)
        _check_room(variants, target, prompts, config)
    configs.begin(f"Drafters of {target.name}: {', '.join(loaded)}", config, workdir)
    rows, text = [], ""
    for name, variants in loaded.items():
        times = draft_times(target, variants, next(iter(settings.values())), config)
        for task, texts in prompts.items():
            jobs = name, variants, times, target, texts, settings, config
            rows += [{"task": task} | row for row in rows_of(*jobs)]
        compilation.clear()  # one process cannot hold the programs of all drafters
        order = list(prompts), list(settings)
        rows.sort(key=lambda row: (order[0].index(row["task"]), order[1].index(row["setting"])))
        text = _write(rows, hardware.machine(target), workdir)  # the next drafter may fail
    return text


def _check_names(folders, files, further) -> None:
    """Raises InputError for trees and rules of unknown drafters, and for unknown rules."""
    for flag, names in (("trees", files), ("verifiers", further)):
        for name in names.keys() - folders.keys():
            raise InputError(f"--{flag}: expected a name of --drafters, found {short_repr(name)}")
    for rule in further.values():
        verifiers.by_name(rule)
    if not folders or "none" in folders.values():
        raise InputError("drafters: expected drafters, found none, which drafts nothing")


def _check_room(variants, target, prompts, config) -> None:
    """Raises InputError unless target and drafter have room for every prompt and its new tokens."""
    longest = max((text for texts in prompts.values() for text in texts.values()), key=len)
    for variant in variants:
        setup = Setup(target, variant.drafter, variant.count, None, config.stop_at_eos)
        setup.batch([longest], SamplingParams(), config.max_new_tokens, config.seed)


def by_rule(name: str, variants, rule: str | None, target) -> list[Variant]:
    """Returns the variants that a rule supports, with the rule; raises InputError for none."""
    fits, refusal = [], None
    for variant in variants if rule else ():
        setup = Setup(target, variant.drafter, None, rule, False)
        batch = setup.batch([[0]], SamplingParams(), 1, 0)
        loop = setup.loop(batch.slots(setup.num_speculative_tokens))
        prefill = functools.partial(decode.prompt.prefill, setup.program, loop.slots)
        try:
            state = jax.eval_shape(prefill, setup.params, *loop.inputs(batch))
            jax.eval_shape(functools.partial(decode.step.step, setup.program), setup.params, state)
            fits.append(dataclasses.replace(variant, rule=rule))
        except InputError as error:
            refusal = error
    if refusal and not fits:
        raise InputError(f"verifiers: {name}: {refusal}")
    return fits


def prompts_by_task(config, target: Model) -> Mapping[str, Prompts]:
    """Returns the prompts per task by name; without tasks, the key is ""."""
    names = config.run_tasks
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise InputError(f"run_tasks: expected a tuple of names, found {short_repr(names)}")
    if not names:
        return {"": workloads.prompts_of(config, target)}
    return task_workloads.by_group(config, names, target, config.prompts, config.max_new_tokens)


def rows_of(name, variants, times, target, prompts, settings, config) -> list[dict]:
    """Runs the variants of a drafter and returns its rows of the table."""
    by_title = {variant.title: variant for variant in variants}
    systems = [spsjax_system("ArS", target)]
    systems += [
        spsjax_system(title, target, variant.drafter, variant.count, verifier=variant.rule)
        for title, variant in by_title.items()
    ]
    records = Records(runner.RECORD_KEY)
    options = {"records": records, "stop_at_eos": config.stop_at_eos}
    sizes = config.max_new_tokens, config.repetitions, config.seed
    progress = terminal.progress(name)
    summaries = speed.compare_speed(
        systems, prompts, settings, *sizes, progress=progress, **options
    )
    texts = surprise.by_system(target, records.records, prompts, settings)
    rows = []
    for summary in summaries:
        if summary.role != Role.BASELINE:
            variant = by_title[summary.system]
            row = row_of(name, variant, times[variant.shape], summary)
            rows.append(row | texts[summary.setting, summary.system].figures())
    return rows


def _title(shape: str, rule: str | None) -> str:
    """Returns a shape's name, with that of its rule unless it is the default."""
    return f"{shape}, {rule}" if rule else shape


def _by_name(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Returns paths by name, from a flag's values."""
    paths = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path) or name in paths:
            raise InputError(f"--{flag}: expected NAME=PATH, each name once, found {pair!r}")
        paths[name] = path
    return paths


def shapes_of(config) -> dict[str, Shape | int | None]:
    """Returns the draft shapes of a config by title: K of a chain, None for K chosen, or a tree."""
    shapes = {}
    for K in config.chains:
        check_integer("chains", K, 1)
        shapes[f"chain of {K}"] = K
    if config.auto:
        shapes[AUTO] = None
    for counts in config.branching:
        if not isinstance(counts, (tuple, list)):
            value = short_repr(counts)
            raise InputError(f"branching: expected a tuple of tuples, found {value} in it")
        tree = Tree.branching(*counts)
        shapes[f"tree of {tree.num_nodes} ({'-'.join(map(str, counts))})"] = tree
    for sizes in config.dynamic:
        if not isinstance(sizes, (tuple, list)) or len(sizes) != 3:
            raise InputError(f"dynamic: expected (nodes, levels, width), found {short_repr(sizes)}")
        nodes, levels, width = sizes
        shapes[f"dynamic tree of {nodes} ({levels} x {width})"] = DynamicTree(*sizes)
    return shapes


def _own_tree(file: str) -> dict[str, Shape]:
    """Returns the tree of a file by its title."""
    tree = configs.read_tree(file)
    return {f"own tree of {tree.num_nodes}": tree}


def in_shapes(folder: str, target: Model, shapes, own) -> list[Variant]:
    """Returns the drafter configured for each draft shape that it supports.

    Raises InputError if it supports no shape, or does not support a tree of its own.
    """
    loaded, variants = loading.load_drafter(folder, target), []
    grows_trees = "tree" in {field.name for field in dataclasses.fields(loaded.drafter)}
    most = base.max_steps(loaded.drafter)
    for name, shape in (shapes | own).items():
        if name == AUTO:
            variants.append(Variant(name, loaded))
            continue
        chain = isinstance(shape, int)
        K = shape if chain else shape.depth
        if (most and most < K) or not (chain or grows_trees):
            if name in own:
                raise InputError(f"trees: expected a tree that {folder} can draft, found {name}")
            continue
        fields = {"num_speculative_tokens": K} | ({} if chain else {"tree": shape})
        drafter = dataclasses.replace(loaded.drafter, **fields)
        variants.append(Variant(name, dataclasses.replace(loaded, drafter=drafter)))
    if not variants:
        raise InputError(f"drafters: {folder}: expected a shape that it can draft, found none")
    return variants


def draft_times(target, variants, params, config) -> dict[str, float]:
    """Returns the milliseconds per draft in each shape, timed separately."""
    length = config.prompt_tokens + config.max_new_tokens
    timers = {
        variant.shape: microbenchmarks.draft_timer(target, variant.drafter, params, length)
        for variant in variants
        if variant.rule is None
    }
    times = microbenchmarks.median_times(timers, _DRAFTS_TIMED)
    return {shape: 1e3 * seconds for shape, seconds in times.items()}


def row_of(name: str, variant: Variant, ms_per_draft: float, summary: SystemSummary) -> dict:
    """Returns a row of the table, without the figures of its texts (`Surprise.figures`)."""
    # The tokens of a store are not weights.
    leaves = jax.tree.leaves(variant.drafter.params)
    weights = [leaf.size for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    fields = "ms_per_round", "ms_per_token", "speedup", "speedup_interval", "same_tokens"
    fields += "first_token_ms", "cold_first_token_ms"
    return {
        "setting": summary.setting,
        "drafter": name,
        "shape": variant.shape,
        "rule": variant.rule,
        "draft_tokens": base.num_nodes(variant.drafter.drafter),
        "parameters": sum(weights),
        "bytes": sum(leaf.nbytes for leaf in leaves),
        "ms_per_draft": ms_per_draft,
        "tokens_per_call": summary.block_efficiency,
        "acceptance_by_depth": summary.acceptance_by_position,
        "plain_ms_per_token": summary.ms_per_token * summary.speedup,
    } | {field: getattr(summary, field) for field in fields}


def fastest(rows: list[dict]) -> list[dict]:
    """Returns the row with the highest speed-up per task, setting, drafter and rule."""
    best = {}
    for row in rows:
        key = row["task"], row["setting"], row["drafter"], row["rule"]
        best[key] = max(best.get(key, row), row, key=lambda row: row["speedup"])
    return list(best.values())


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    columns = {
        "task": "task",
        "sampling": "setting",
        "drafter": "drafter",
        "parameters": lambda row: f"{row['parameters'] / 1e6:.2f}M",
        "MB": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "drafts": lambda row: _title(row["shape"], row["rule"]),
        "tokens per call": report.figure("tokens_per_call"),
        "ms per draft": report.figure("ms_per_draft"),
        "ms per round": report.figure("ms_per_round"),
        "speed-up": lambda row: report.within(row["speedup"], row["speedup_interval"]),
        "texts": surprise.described,
    }
    if not any(row["task"] for row in rows):
        del columns["task"]
    return report.table(rows, columns)


def _write(rows: list[dict], machine: dict, workdir: pathlib.Path) -> str:
    text = f"The fastest draft of every drafter:\n\n{table(fastest(rows))}"
    text += f"\nAll drafts:\n\n{table(rows)}"
    name = "tasks" if len({row["task"] for row in rows}) > 1 else "drafters"
    drawn = plot(f"comparison_plots.{name}", [row for row in rows if row["rule"] is None])
    return report.write(workdir, {"machine": machine, "rows": rows}, text, drawn)
