"""Compares all rules of verification on the same pair, prompts and numbers of draft tokens.

python scripts/compare_verifiers.py --workdir=runs/verifiers

Every kind of draft (a chain, a tree without and with replacement, a dynamic tree) is judged by
every rule that fits it. The same command resumes an interrupted comparison. The table is in
`table.md`, its figures in `table.json`, a plot in `table.png`.
Every key of the config is a flag; configs/experiments/compare_verifiers.py lists them.
"""

import hashlib
import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from spsjax import generation, loading, verifiers
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_flag, check_integer, one_line
from spsjax.evaluation import (
    runner,
    samplers,
    significance,
    speed,
    summary,
    surprise,
    tree_planning,
)
from spsjax.evaluation import verifier_comparison as comparison
from spsjax.evaluation.journal import Journal
from spsjax.performance import hardware
from spsjax.utils import atomic_files, compilation, hashing

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")
main.require("workdir")

RESUMED = "rates.json", "expected.jsonl"  # and the folder `runs`
OUTPUTS = "experiment.json", *RESUMED, "table.json", "table.md", "table.png"
EXPECTED_KEY = "setting", "draft", "num_nodes", "example"


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    if jax.process_count() > 1:
        raise InputError(f"expected one process, found {jax.process_count()}")
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=True)
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [workdir])
    main.check_installed("the plot", "matplotlib")
    settings = check(config)
    mesh = configs.mesh(config.mesh)
    target = loading.load(config.target, mesh, config.dtype)
    draft = loading.load(config.draft, mesh, config.dtype)
    loading.as_drafter(draft, target)
    prompts = speed.prompts_of(config, target)
    kinds_of(config, target, draft, [1.0])  # finds sizes without a draft before any work
    stored = depends_on(config, target, draft, prompts)
    expected = Journal(workdir / "expected.jsonl", stored, EXPECTED_KEY)
    configs.begin(f"Rules of verification for {target.name} and {draft.name}", config, workdir)
    params = settings[config.planned_for]
    rates = stored_rates(workdir / "rates.json", stored)
    if rates is None:
        rates = child_rates(config, target, draft, prompts, params)
        text = json.dumps({"rates": rates, "depends_on": stored}, indent=2)
        atomic_files.write(workdir / "rates.json", text + "\n")
    kinds = kinds_of(config, target, draft, rates)
    chosen = {name: settings[name] for name in config.run_settings}
    rows = []
    for kind in kinds:
        expect(config, target, kind, prompts, chosen, expected)
        records = []
        if config.timed:
            path = workdir / "runs" / f"{kind.name} of {kind.num_nodes}.jsonl".replace(" ", "_")
            journal = Journal(path, stored, runner.RECORD_KEY)
            time_loops(config, target, kind, prompts, chosen, journal)
            records = journal.records
        rows += table_rows(target, kind, prompts, chosen, expected.records, records)
        compilation.clear()  # one process cannot hold the programs of all kinds
    rows.sort(key=lambda row: config.run_settings.index(row["setting"]))
    write(rows, rates, workdir)


def kinds_of(config, target, draft, rates: list[float]) -> list[comparison.Draft]:
    """Returns the kinds of drafts of every size; raises InputError if a size has none."""
    width = min(config.most_children, target.config.vocab_size)
    rates = [*rates, *[0.0] * (width - len(rates))]
    kinds = []
    for size in sorted(set(config.num_nodes)):
        found = comparison.drafts(target, draft, rates, size, config.levels, config.longest_chain)
        if not found:
            raise InputError(
                f"num_nodes: expected above levels = {config.levels}, or at most longest_chain = "
                f"{config.longest_chain}, found {size}"
            )
        kinds += found
    return kinds


def check(config) -> dict:
    """Returns the sampling settings by name; raises InputError for values that cannot be used."""
    least = {"levels": 1, "longest_chain": 0, "most_children": 2, "prompts": 1}
    for field, value in (least | {"prompt_tokens": 1, "max_new_tokens": 1}).items():
        check_integer(field, config[field], value)
    for field in ("num_nodes", "run_settings"):
        if not config[field]:
            raise InputError(f"{field}: expected at least one, found none")
    for size in config.num_nodes:
        check_integer("num_nodes", size, 1)
    check_flag("timed", config.timed)
    return speed.sampling_settings(config, [*config.run_settings, config.planned_for])


def depends_on(config, target, draft, prompts) -> dict:
    """Returns what all records depend on, as JSON gives it back."""
    ids = json.dumps(prompts).encode()
    fields = json.loads(config.to_json()) | {
        "weights": [hashing.params_fingerprint(model.params) for model in (target, draft)],
        "prompt ids": hashlib.sha256(ids).hexdigest()[:16],
        "rules": verifiers.NAMES,
        "machine": hardware.machine(target),
    }
    return json.loads(json.dumps(fields))


def stored_rates(path: pathlib.Path, stored: dict) -> list[float] | None:
    """Returns the rates of an interrupted comparison, so that its trees are the same; or None."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rates, same = [float(rate) for rate in found["rates"]], found["depends_on"] == stored
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: expected the rates that this script stored, found {one_line(error)}"
        ) from None
    if not same:
        raise InputError(f"{path}: expected rates of this comparison, found others. Remove it")
    return rates


def child_rates(config, target, draft, prompts, params) -> list[float]:
    """Returns the rate at which each child of a node is accepted, for the shapes of trees."""
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "stop_at_eos": False}
    ids = list(prompts.values())
    out = generation.generate(target, ids, draft, None, params, **options)
    texts = [(prompt, tokens.tolist()) for prompt, tokens in zip(ids, out.tokens)]
    width = min(config.most_children, target.config.vocab_size)
    progress = terminal.progress("acceptance by child")
    rates = tree_planning.child_rates(target, draft, texts, params, width, progress=progress)
    return rates.mean(axis=0).tolist()


def expect(config, target, kind, prompts, settings, journal) -> None:
    """Adds the tokens per call that every rule is expected to emit on the same drafts."""
    jobs = [(setting, name) for setting in settings for name in prompts]
    progress = terminal.progress(f"{kind.name} of {kind.num_nodes}, expected")
    for setting, name in progress(jobs):
        key = setting, kind.name, kind.num_nodes, name
        if key not in journal:
            tokens = comparison.expected_tokens(
                target, kind, prompts[name], settings[setting], config.max_new_tokens, config.seed
            )
            rules = dict(zip(kind.rules, tokens.sum(axis=0).tolist()))
            record = {"rounds": len(tokens), "tokens": rules}
            journal.add(dict(zip(EXPECTED_KEY, key)) | record)


def time_loops(config, target, kind, prompts, settings, journal) -> None:
    """Adds the records of the loop by every rule, in turn with plain sampling."""
    systems = [samplers.spsjax_system("ArS", target), *kind.systems(target)]
    workload = speed.workload(prompts, settings, config.max_new_tokens, seed=config.seed)
    progress = terminal.progress(f"{kind.name} of {kind.num_nodes}, running")
    runner.run_all(systems, workload, journal, progress)


def table_rows(target, kind, prompts, settings, expected, records) -> list[dict]:
    """Returns the rows of the table for a kind of draft: one per setting and rule."""
    summaries = {
        (row.setting, row.system, row.num_speculative_tokens): row
        for row in summary.summarize(records)
    }
    texts = {}
    for record in records:
        texts.setdefault(runner.system_key(record), []).append(record)
    rows = []
    for setting in settings:
        found = [
            record
            for record in expected
            if (record["setting"], record["draft"], record["num_nodes"])
            == (setting, kind.name, kind.num_nodes)
        ]
        rounds = [record["rounds"] for record in found]
        base = [record["tokens"][kind.rules[0]] for record in found]
        for rule, system in zip(kind.rules, kind.systems(target)):
            values = [record["tokens"][rule] for record in found]
            gain = significance.bootstrap_interval(ratio, values, base)
            row = {
                "setting": setting,
                "draft": kind.name,
                "num_nodes": kind.num_nodes,
                "levels": kind.depth,
                "rule": rule,
                "expected": float(ratio(values, rounds)),
                "expected_interval": significance.bootstrap_interval(ratio, values, rounds),
                "gain": float(ratio(values, base)),
                "gain_interval": gain if rule != kind.rules[0] else None,
            }
            key = setting, system.name, kind.depth
            if key in summaries:
                row |= of_loop(target, summaries[key], texts[key], prompts, settings[setting])
            rows.append(row)
    return rows


def ratio(values, base, axis=-1):
    """Returns the ratio of two sums over texts."""
    return np.sum(values, axis=axis) / np.sum(base, axis=axis)


def of_loop(target, summarized, records, prompts, params) -> dict:
    """Returns the figures of a rule's runs."""
    return {
        "tokens_per_call": summarized.block_efficiency,
        "ms_per_token": summarized.ms_per_token,
        "speedup": summarized.speedup,
        "same_tokens": summarized.same_tokens,
    } | surprise.of_records(target, records, prompts, params).figures()


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    header = ["sampling", "draft", "draft tokens", "rule", "tokens per call", "gain", "measured"]
    header += ["ms per token", "speed-up", "texts"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        cells = [row["setting"], row["draft"], row["num_nodes"], row["rule"]]
        ends = "{:.2f} to {:.2f}".format(*row["expected_interval"] or 2 * [row["expected"]])
        cells += [f"{row['expected']:.2f} ({ends})", gain(row)]
        for field in ("tokens_per_call", "ms_per_token", "speedup"):
            value = row.get(field)
            cells.append("-" if value is None else f"{value:.2f}")
        lines.append([*cells, surprise.described(row)])
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def gain(row: dict) -> str:
    """Returns the gain over the first rule on the same drafts, in percent, with its interval."""
    if row["gain_interval"] is None:
        return "-" if row["gain"] == 1 else f"{100 * (row['gain'] - 1):+.1f}%"
    low, high = (100 * (end - 1) for end in row["gain_interval"])
    return f"{100 * (row['gain'] - 1):+.1f}% ({low:+.1f} to {high:+.1f})"


def write(rows: list[dict], rates: list[float], workdir: pathlib.Path) -> None:
    """Writes the figures, the table and the plot."""
    from spsjax.cli import plots

    figures = {"rates": rates, "rows": rows}
    atomic_files.write(workdir / "table.json", json.dumps(figures, indent=2) + "\n")
    atomic_files.write(workdir / "table.md", table(rows))
    plots.verifiers(rows, workdir / "table.png")
    print(f"\n{table(rows)}\n{workdir / 'table.md'}, {workdir / 'table.png'}")


if __name__ == "__main__":
    main.run(run, _CONFIGS / "compare_verifiers.py", saves=True)
