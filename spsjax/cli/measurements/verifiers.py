"""Comparison of all verifiers on the same pair, prompts and numbers of draft tokens."""

import hashlib
import json
import pathlib

import numpy as np

from spsjax import loading, verifiers
from spsjax.benchmarks import (
    report,
    runner,
    significance,
    summary,
    surprise,
    text_pass,
    tree_planning,
    workloads,
)
from spsjax.benchmarks import verifier_comparison as comparison
from spsjax.benchmarks.records import Journal
from spsjax.benchmarks.systems import spsjax_system
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError, check_flag, check_integer, short_repr
from spsjax.planning import hardware
from spsjax.utils import atomic_files, compilation, hashing

OUTPUTS = "rates.jsonl", "expected.jsonl"  # in addition to `report.OUTPUTS` and the folder `runs`
EXPECTED_KEY = "setting", "draft", "num_nodes", "example"


def run(config, workdir: pathlib.Path) -> str:
    """Compares rules on every kind of draft, and returns the table; stored results are reused.

    `config` is like configs/experiments/compare_verifiers.py.
    """
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [])
    settings = check(config)
    mesh = configs.mesh(config.mesh)
    target = loading.load(config.target, mesh, config.dtype)
    draft = loading.load(config.draft, mesh, config.dtype)
    loading.as_drafter(draft, target)
    prompts = workloads.prompts_of(config, target)
    kinds_of(config, target, draft, [1.0])  # finds sizes without a draft before any work
    stored = depends_on(config, target, draft, prompts)
    expected = Journal(workdir / "expected.jsonl", stored, EXPECTED_KEY)
    configs.begin(f"Rules of verification for {target.name} and {draft.name}", config, workdir)
    # The shapes of trees must stay the same if the comparison is interrupted.
    known, planned = Journal(workdir / "rates.jsonl", stored, ("setting",)), config.planned_for
    if (planned,) not in known:
        rates = child_rates(config, target, draft, prompts, settings[planned])
        known.add({"setting": planned, "rates": rates})
    rates = known[planned,]["rates"]
    chosen = {name: settings[name] for name in config.run_settings}
    rows = []
    for kind in kinds_of(config, target, draft, rates):
        expect(config, target, kind, prompts, chosen, expected)
        records = []
        if config.timed:
            path = workdir / "runs" / f"{kind.name} of {kind.num_nodes}.jsonl".replace(" ", "_")
            journal = Journal(path, stored, runner.RECORD_KEY)
            time_loops(config, target, kind, prompts, chosen, journal)
            records = journal.records
        rows += rows_of(target, kind, prompts, chosen, expected.records, records)
        compilation.clear()  # one process cannot hold the programs of all kinds
    rows.sort(key=lambda row: config.run_settings.index(row["setting"]))
    draw = plot("comparison_plots.verifiers", rows)
    figures = {"machine": hardware.machine(target), "rates": rates, "rows": rows}
    return report.write(workdir, figures, table(rows), draw)


def kinds_of(config, target, draft, rates: list[float]) -> list[comparison.DraftKind]:
    """Returns the kinds of drafts of every size; raises InputError if a size has none."""
    width = min(config.most_children, target.config.vocab_size)
    rates = [*rates, *[0.0] * (width - len(rates))]
    kinds = []
    for size in sorted(set(config.num_nodes)):
        of_size = comparison.drafts(target, draft, rates, size, config.levels, config.longest_chain)
        if not of_size:
            raise InputError(
                f"num_nodes: expected above levels = {config.levels}, or at most longest_chain = "
                f"{config.longest_chain}, found {size}"
            )
        kinds += of_size
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
    if config.planned_for not in config.settings:
        known, name = ", ".join(config.settings), short_repr(config.planned_for)
        raise InputError(f"planned_for: expected one of {known}, found {name}")
    return workloads.sampling_settings(config, [*config.run_settings, config.planned_for])


def depends_on(config, target, draft, prompts) -> dict:
    """Returns the values that all records depend on, as JSON would return them."""
    ids = json.dumps(prompts).encode()
    values = json.loads(config.to_json())
    del values["compare"]  # no record depends on it
    fields = values | {
        "weights": [hashing.params_fingerprint(model.params) for model in (target, draft)],
        "prompt ids": hashlib.sha256(ids).hexdigest()[:16],
        "rules": verifiers.NAMES,
        "machine": hardware.machine(target),
    }
    return json.loads(json.dumps(fields))


def child_rates(config, target, draft, prompts, params) -> list[float]:
    """Returns the acceptance rates by child of a node, for the shapes of trees."""
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "stop_at_eos": False}
    texts = text_pass.written(target, list(prompts.values()), draft, sampling=params, **options)
    width = min(config.most_children, target.config.vocab_size)
    progress = terminal.progress("acceptance by child")
    rates = tree_planning.child_rates(target, draft, texts, params, width, progress=progress)
    return rates.mean(axis=0).tolist()


def expect(config, target, kind, prompts, settings, journal) -> None:
    """Adds the expected tokens per call of every rule on the same drafts."""
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
    """Adds the records of the loop by every rule, alternating with plain sampling."""
    systems = [spsjax_system("ArS", target), *kind.systems(target)]
    workload = workloads.of_prompts(prompts, settings, config.max_new_tokens, seed=config.seed)
    progress = terminal.progress(f"{kind.name} of {kind.num_nodes}, running")
    runner.run_all(systems, workload, journal, progress)


def rows_of(target, kind, prompts, settings, expected, records) -> list[dict]:
    """Returns the rows of the table for a kind of draft: one per setting and rule."""
    summaries = {(row.setting, row.system): row for row in summary.summarize(records)}
    texts = surprise.by_system(target, records, prompts, settings)
    rows = []
    for setting in settings:
        key = setting, kind.name, kind.num_nodes
        own = [row for row in expected if tuple(row[name] for name in EXPECTED_KEY[:3]) == key]
        rounds = [record["rounds"] for record in own]
        first = [record["tokens"][kind.rules[0]] for record in own]
        for rule, system in zip(kind.rules, kind.systems(target)):
            values = [record["tokens"][rule] for record in own]
            gain = significance.bootstrap_interval(ratio, values, first)
            row = {
                "setting": setting,
                "draft": kind.name,
                "num_nodes": kind.num_nodes,
                "levels": kind.depth,
                "rule": rule,
                "expected": float(ratio(values, rounds)),
                "expected_interval": significance.bootstrap_interval(ratio, values, rounds),
                "gain": float(ratio(values, first)),
                "gain_interval": gain if rule != kind.rules[0] else None,
            }
            if (timed := summaries.get((setting, system.name))) is not None:
                row |= {"tokens_per_call": timed.block_efficiency}
                fields = "ms_per_token", "speedup", "same_tokens"
                row |= {field: getattr(timed, field) for field in fields}
                row |= texts[setting, system.name].figures()
            rows.append(row)
    return rows


def ratio(values, base, axis=-1):
    """Returns the ratio of two sums over texts."""
    return np.sum(values, axis=axis) / np.sum(base, axis=axis)


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    columns = {
        "sampling": "setting",
        "draft": "draft",
        "draft tokens": "num_nodes",
        "rule": "rule",
        "tokens per call": _expected,
        "gain": _gain,
        "measured": report.figure("tokens_per_call"),
        "ms per token": report.figure("ms_per_token"),
        "speed-up": report.figure("speedup"),
        "texts": surprise.described,
    }
    return report.table(rows, columns)


def _expected(row: dict) -> str:
    """Returns a cell: the expected tokens per call, with their interval."""
    return report.within(row["expected"], row["expected_interval"])


def _gain(row: dict) -> str:
    """Returns a cell: the gain over the first rule on the same drafts, with its interval."""
    if row["gain_interval"] is None:
        return "-" if row["gain"] == 1 else f"{100 * (row['gain'] - 1):+.1f}%"
    low, high = (100 * (end - 1) for end in row["gain_interval"])
    return f"{100 * (row['gain'] - 1):+.1f}% ({low:+.1f} to {high:+.1f})"
