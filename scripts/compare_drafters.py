"""Compares drafters of one target, as chains and as trees, on the same prompts.

python scripts/compare_drafters.py --workdir=runs/drafters \
    --drafters=model=pystdlib/draft,EAGLE-1=runs/eagle/drafter,EAGLE-3=runs/eagle3/drafter

A drafter is whatever `spsjax.load_drafter` takes. Each is run in every shape of the config that it
can draft; `--trees=EAGLE-1=runs/tree.json` adds a tree of its own, from plan_tree.py, and
`--verifiers=Medusa=typical` runs all its drafts by another rule, too. The tables are in `table.md`:
the fastest draft of every drafter, and all drafts. The figures are in `table.json`, a plot in
`table.png`: acceptance by depth, and tokens per call by kind of draft. They are written anew after
every drafter. The column "texts" says whether greedy texts are those of plain decoding, and of
others by how many standard deviations the target finds them more surprising than its own samples:
around 0 for a lossless rule.
`--config.run_tasks="('stdlib', 'edit')"` takes the prompts of tasks, each by itself.
Every key of the config is a flag; configs/experiments/compare_drafters.py lists them.
"""

import dataclasses
import functools
import json
import pathlib
import statistics

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags

from spsjax import decode, loading, request, verifiers
from spsjax.cli import configs, main, terminal
from spsjax.drafters import base
from spsjax.drafters.shapes import DynamicTree, Shape, Tree
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.evaluation import runner, samplers, speed, surprise, task_prompts
from spsjax.evaluation.journal import Records
from spsjax.evaluation.samplers import Role
from spsjax.evaluation.summary import SystemSummary
from spsjax.performance import hardware, microbenchmarks
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, compilation

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_DRAFTERS = flags.DEFINE_list("drafters", [], "Drafters, as NAME=FOLDER.")
_TREES = flags.DEFINE_list("trees", [], "Trees of single drafters, as NAME=FILE.")
_VERIFIERS = flags.DEFINE_list("verifiers", [], "Further rules of drafters, as NAME=RULE.")
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")
main.require("workdir", "drafters")

_DRAFTS_TIMED = 5
AUTO = "chain, K chosen"
OUTPUTS = "experiment.json", "table.json", "table.md", "table.png"


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    if jax.process_count() > 1:
        raise InputError(f"expected one process, found {jax.process_count()}")
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [workdir])
    main.check_installed("the plot", "matplotlib")
    for field in ("prompts", "prompt_tokens", "max_new_tokens", "repetitions"):
        check_integer(field, config[field], 1)
    settings, shapes = speed.sampling_settings(config), all_shapes(config)
    folders, trees = named("drafters", _DRAFTERS.value), named("trees", _TREES.value)
    rules = named("verifiers", _VERIFIERS.value)
    for flag, names in (("trees", trees), ("verifiers", rules)):
        for name in names.keys() - folders.keys():
            raise InputError(f"{flag}: expected a name of --drafters, found {short_repr(name)}")
    for rule in rules.values():
        verifiers.by_name(rule)
    if "none" in folders.values():
        raise InputError("drafters: expected drafters, found none, which drafts nothing")
    own = {name: own_tree(file) for name, file in trees.items()}
    config.target = _TARGET.value or config.target
    target = loading.load(
        config.target, configs.mesh(config.mesh), config.dtype, quantize=config.quantize
    )
    prompts = prompts_by_task(config, target)
    # All of them are loaded before the first is run, to find what does not fit.
    drafters = {
        name: of_shapes(folder, target, shapes, own.get(name, {}))
        for name, folder in folders.items()
    }
    drafted = {
        name: [(shape, None) for shape in drafts] + judged_by(name, drafts, rules.get(name), target)
        for name, drafts in drafters.items()
    }
    for drafts in drafters.values():
        check_room(drafts, target, prompts, config)
    configs.begin(f"Drafters of {target.name}: {', '.join(drafters)}", config, workdir)
    rows = []
    for name, drafts in drafters.items():
        times = draft_times(target, drafts, next(iter(settings.values())), config)
        for task, texts in prompts.items():
            own = rows_of(name, drafts, drafted[name], target, texts, settings, config, times)
            rows += [{"task": task} | row for row in own]
        compilation.clear()  # one process cannot hold the programs of all drafters
        order = list(prompts), list(settings)
        rows.sort(key=lambda row: (order[0].index(row["task"]), order[1].index(row["setting"])))
        text = write(rows, hardware.machine(target), workdir)  # whatever happens to the next one
    print(f"\n{text}\n{workdir / 'table.md'}, {workdir / 'table.png'}")


def check_room(drafts, target, prompts, config) -> None:
    """Raises InputError unless target and drafter have room for every prompt and its new tokens."""
    longest = max((text for texts in prompts.values() for text in texts.values()), key=len)
    options = SamplingParams(), config.max_new_tokens, config.seed, None, config.stop_at_eos
    for shape, drafter in drafts.items():
        count = request.AUTO if shape == AUTO else None
        request.Request("drafters", target, [longest], drafter, count, *options)


def judged_by(name: str, drafts, rule: str | None, target) -> list[tuple[str, str]]:
    """Returns the shapes that a rule fits, with the rule; raises InputError if it fits none."""
    fits, refusal = [], None
    for shape, drafter in drafts.items() if rule else ():
        call = request.Request(
            "verifiers", target, [[0]], drafter, None, SamplingParams(), 1, 0, rule, False
        )
        prefill = functools.partial(decode.prefill, call.program, call.slots)
        try:
            state = jax.eval_shape(prefill, call.params, *call.inputs)
            jax.eval_shape(functools.partial(decode.step, call.program), call.params, state)
            fits.append((shape, rule))
        except InputError as error:
            refusal = error
    if refusal and not fits:
        raise InputError(f"verifiers: {name}: {refusal}")
    return fits


def prompts_by_task(config, target) -> dict[str, dict[str, list[int]]]:
    """Returns the prompts of each task by name; those of no task are under ""."""
    names = config.run_tasks
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise InputError(f"run_tasks: expected a tuple of names, found {short_repr(names)}")
    if not names:
        return {"": speed.prompts_of(config, target)}
    return task_prompts.by_group(config, names, target, config.prompts, config.max_new_tokens)


def rows_of(name, drafts, judged, target, prompts, settings, config, times) -> list[dict]:
    """Runs a drafter in its shapes, by its rules, and returns its rows of the table."""
    systems, drafted = [samplers.spsjax_system("ArS", target)], {}
    for shape, rule in judged:
        title, drafter = titled(shape, rule), drafts[shape]
        K, drafted[title] = drafter.drafter.num_speculative_tokens, (shape, rule)
        K = request.AUTO if shape == AUTO else K
        systems.append(samplers.spsjax_system(title, target, drafter, K, verifier=rule))
    records = Records(runner.RECORD_KEY)
    summaries = speed.compare_speed(
        systems,
        prompts,
        settings,
        config.max_new_tokens,
        config.repetitions,
        config.seed,
        progress=terminal.progress(name),
        records=records,
        stop_at_eos=config.stop_at_eos,
    )
    rows = []
    for summary in summaries:
        if summary.role == Role.BASELINE:
            continue
        shape, rule = drafted[summary.system]
        texts = [
            record
            for record in records.records
            if (record["setting"], record["system"]) == (summary.setting, summary.system)
            and record["repetition"] == 0
        ]
        figures = surprise.of_records(target, texts, prompts, settings[summary.setting]).figures()
        row = row_of(name, shape, drafts[shape], rule, times[shape], summary)
        rows.append(row | figures)
    return rows


def titled(shape: str, rule: str | None) -> str:
    """Returns a shape's name with that of a rule other than the default one."""
    return f"{shape}, {rule}" if rule else shape


def named(flag: str, pairs: list[str]) -> dict[str, str]:
    """Returns paths by name, from a flag's values."""
    found = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder) or name in found:
            raise InputError(f"{flag}: expected NAME=PATH, each name once, found {pair!r}")
        found[name] = folder
    return found


def all_shapes(config) -> dict[str, Shape | int]:
    """Returns the shapes of a config by the names under which they are shown; chains by K."""
    shapes = {}
    for K in config.chains:
        check_integer("chains", K, 1)
        shapes[f"chain of {K}"] = K
    if config.auto:
        shapes[AUTO] = None
    for counts in config.branching:
        if not isinstance(counts, (tuple, list)):
            found = short_repr(counts)
            raise InputError(f"branching: expected a tuple of tuples, found {found} in it")
        tree = Tree.branching(*counts)
        shapes[f"tree of {tree.num_nodes} ({'-'.join(map(str, counts))})"] = tree
    for sizes in config.dynamic:
        if not isinstance(sizes, (tuple, list)) or len(sizes) != 3:
            raise InputError(f"dynamic: expected (nodes, levels, width), found {short_repr(sizes)}")
        nodes, levels, width = sizes
        shapes[f"dynamic tree of {nodes} ({levels} x {width})"] = DynamicTree(*sizes)
    return shapes


def own_tree(file: str) -> dict[str, Shape]:
    """Returns the tree of a file, by the name under which it is shown."""
    tree = configs.read_tree(file)
    return {f"own tree of {tree.num_nodes}": tree}


def of_shapes(folder: str, target: loading.Model, shapes, own) -> dict[str, loading.LoadedDrafter]:
    """Returns a drafter in every shape that it can draft, and in all shapes of its own."""
    loaded, found = loading.load_drafter(folder, target), {}
    grows_trees = "tree" in {field.name for field in dataclasses.fields(loaded.drafter)}
    most = base.max_steps(loaded.drafter)
    for name, shape in (shapes | own).items():
        if name == AUTO:
            found[name] = loaded
            continue
        chain = isinstance(shape, int)
        K = shape if chain else shape.depth
        if (most and most < K) or not (chain or grows_trees):
            if name in own:
                raise InputError(f"trees: expected a tree that {folder} can draft, found {name}")
            continue
        fields = {"num_speculative_tokens": K} | ({} if chain else {"tree": shape})
        drafter = dataclasses.replace(loaded.drafter, **fields)
        found[name] = dataclasses.replace(loaded, drafter=drafter)
    if not found:
        raise InputError(f"drafters: {folder}: expected a shape that it can draft, found none")
    return found


def draft_times(target, drafts, params, config) -> dict[str, float]:
    """Returns the milliseconds of a draft in each shape, timed alone: medians."""
    length = config.prompt_tokens + config.max_new_tokens
    timers = {
        name: microbenchmarks.draft_timer(target, drafter, params, length)
        for name, drafter in drafts.items()
    }
    return {
        name: 1e3 * statistics.median(timer() for _ in range(_DRAFTS_TIMED))
        for name, timer in timers.items()
    }


def row_of(
    name: str,
    shape: str,
    drafter: loading.LoadedDrafter,
    rule: str | None,
    ms_per_draft: float,
    summary: SystemSummary,
) -> dict:
    """Returns a row of the table, without what its texts say of their distribution."""
    return {
        "setting": summary.setting,
        "drafter": name,
        "shape": shape,
        "rule": rule,
        "draft_tokens": base.num_nodes(drafter.drafter),
        "parameters": num_weights(drafter.params),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(drafter.params)),
        "ms_per_draft": ms_per_draft,
        "tokens_per_call": summary.block_efficiency,
        "acceptance_by_depth": summary.acceptance_by_position,
        "ms_per_round": summary.ms_per_round,
        "ms_per_token": summary.ms_per_token,
        "plain_ms_per_token": summary.ms_per_token * summary.speedup,
        "speedup": summary.speedup,
        "speedup_interval": summary.speedup_interval,
        "same_tokens": summary.same_tokens,
    }


def num_weights(params) -> int:
    """Returns the number of weights; the tokens of a store are none."""
    weights = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(leaf.size for leaf in weights)


def fastest(rows: list[dict]) -> list[dict]:
    """Returns the row with the highest speed-up of every drafter in every task and setting.

    Rows of further rules count as drafters of their own.
    """
    best = {}
    for row in rows:
        key = row["task"], row["setting"], row["drafter"], row["rule"]
        if key not in best or row["speedup"] > best[key]["speedup"]:
            best[key] = row
    return list(best.values())


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    tasks = any(row["task"] for row in rows)
    header = ["task"] * tasks + [
        "sampling",
        "drafter",
        "parameters",
        "MB",
        "drafts",
        "tokens per call",
    ]
    header += ["ms per draft", "ms per round", "speed-up", "texts"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        interval = row["speedup_interval"]  # None for too few prompts
        cells = [row["task"]] * tasks + [
            row["setting"],
            row["drafter"],
            f"{row['parameters'] / 1e6:.2f}M",
        ]
        cells += [f"{row['bytes'] / 1e6:.1f}", titled(row["shape"], row["rule"])]
        cells.append(f"{row['tokens_per_call']:.2f}")
        cells += [f"{row['ms_per_draft']:.2f}", f"{row['ms_per_round']:.2f}"]
        within = " ({:.2f} to {:.2f})".format(*interval) if interval else ""
        cells.append(f"{row['speedup']:.2f}{within}")
        lines.append([*cells, surprise.described(row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: list[dict], machine: dict, workdir: pathlib.Path) -> str:
    """Writes the figures, the tables and the plot; returns the tables."""
    from spsjax.cli import plots

    figures = {"machine": machine, "rows": rows}
    atomic_files.write(workdir / "table.json", json.dumps(figures, indent=2) + "\n")
    text = f"The fastest draft of every drafter:\n\n{table(fastest(rows))}"
    text += f"\nAll drafts:\n\n{table(rows)}"
    atomic_files.write(workdir / "table.md", text)
    plot = plots.tasks if len({row["task"] for row in rows}) > 1 else plots.drafters
    plot([row for row in rows if row["rule"] is None], workdir / "table.png")
    return text


if __name__ == "__main__":
    main.run(run, _CONFIGS / "compare_drafters.py", saves=True)
