"""Times per shape with random weights, of the loop and of Hugging Face, and greedy texts that flip.

Every result is stored at once. The same command measures missing results, for which time ran out or
which failed.
"""

import concurrent.futures
import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from spsjax import loading
from spsjax.benchmarks import flips, peers, report, shapes, workloads
from spsjax.benchmarks.peers import hf_shapes
from spsjax.benchmarks.records import Journal
from spsjax.benchmarks.shapes import Cell, ShapePair
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.data.documents import Sources
from spsjax.errors import InputError, check_flag, check_integer, check_number, short_repr
from spsjax.models import transformer
from spsjax.planning import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config, kernel_choice

KEY = "pair", "program", "batch", "context"
# Keys of the config on which no record depends.
_LIMITS = "benchmark", "loop", "threads", "compile_seconds", "seconds", "profiled", "flips"


def run(
    config: ConfigDict, workdir: pathlib.Path, folder: pathlib.Path, peer_names: Sequence[str]
) -> str:
    """Measures missing results of a folder, and returns the tables.

    `config` is like configs/experiments/shapes.py, `folder` has the configs of models, and the
    peers may be ("hf",).
    """
    for field in ("threads", "repetitions", "new_tokens"):
        check_integer(field, config[field], 1)
    check_integer("profiled", config.profiled, 0)
    check_number("acceptance", config.acceptance, 0, 1)
    check_flag("loop", config.loop)
    for name, pair in [*config.pairs.items(), ("", config.flips)]:
        configs.choose_pair(pair, models=True, section=f"pairs.{name}." if name else "flips.")
    pairs, cells = pairs_of(config, folder), cells_of(config)
    if {*peer_names} - {"hf"}:
        raise InputError("--peer: expected hf, which alone has these shapes, found another")
    for name in peer_names:
        peers.require(name)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    stored = {key: value for key, value in config.to_dict().items() if key not in _LIMITS}
    journal = Journal(workdir / "records.jsonl", stored | {"machine": machine}, KEY)
    configs.begin(f"Shapes of {', '.join(pairs)} on {machine['device']}", config, workdir)
    if config.loop:
        time_loops(config, pairs, cells, journal, workdir)
    if peer_names:
        time_peers(config, pairs, journal)
    differences = texts_that_flip(config.flips) if config.flips.prompts else []
    figures = {"machine": machine, "rows": journal.records, "flips": differences}
    text = tables(journal.records, differences)
    return report.write(workdir, figures, text, plot("plots.shapes", journal.records))


def pairs_of(config: ConfigDict, folder: pathlib.Path) -> dict[str, ShapePair]:
    """Returns the pairs of a config by name."""
    sampling = from_config.build_section("sampling", SamplingParams, config.sampling)

    def model_shape(role: str, shape) -> transformer.Config:
        if isinstance(shape, ConfigDict):
            shape = from_config.build(role, transformer.Config, shape)
        else:
            shape = configs.model_config(shape, folder)
        return dataclasses.replace(shape, **config.changes)

    if not config.pairs:
        raise InputError("pairs: expected at least one, found none")
    return {
        name: ShapePair(
            model_shape("target", pair["target"]),
            model_shape("draft", pair["draft"]),
            config.acceptance,
            config.new_tokens,
            sampling,
        )
        for name, pair in config.pairs.items()
    }


def cells_of(config: ConfigDict) -> list[Cell]:
    """Returns the cells to time, the most important first, because time may run out."""
    for field in ("batches", "contexts", "num_speculative_tokens", "scored"):
        for number in config[field]:
            check_integer(field, number, 1)
        if field != "scored" and not config[field]:
            raise InputError(f"{field}: expected at least one, found none")
    first, (K, *others) = config.contexts[0], config.num_speculative_tokens
    cells = [Cell("rounds", 1, first), Cell("rounds", 1, first, K)]
    cells += [Cell("score", 1, first), Cell("score", 1, first, K), Cell("draft", 1, first, K)]
    cells += [
        Cell("rounds", batch, context, count)
        for context in config.contexts
        for batch in config.batches
        for count in (0, K)
    ]
    cells += [Cell("rounds", 1, first, count) for count in others]
    cells += [Cell("rounds", 1, first, branching=tuple(tree)) for tree in config.trees]
    cells += [Cell("score", 1, first, count - 1) for count in config.scored]
    if not config.kernels or {*config.kernels} - {*kernel_choice.MODES}:
        expected = f"kernels: expected some of {', '.join(kernel_choice.MODES)}"
        raise InputError(f"{expected}, found {short_repr(tuple(config.kernels))}")
    return [
        dataclasses.replace(cell, kernels=mode)
        for cell in dict.fromkeys(cells)
        for mode in config.kernels
    ]


def time_loops(config, pairs, cells, journal: Journal, workdir: pathlib.Path) -> None:
    """Adds the missing times of rounds, drafts and scoring passes."""
    start = time.monotonic()
    missing = {
        name: [cell for cell in cells if (name, cell.name, cell.batch, cell.context) not in journal]
        for name in pairs
    }
    threads = max(config.threads // len(pairs), 1)

    def compile_pair(name):
        return shapes.compile_all(pairs[name], missing[name], threads, config.compile_seconds)

    with concurrent.futures.ThreadPoolExecutor(len(pairs)) as pool:
        compiled = dict(zip(pairs, pool.map(compile_pair, pairs)))
    bandwidth = hardware.bandwidth(jax.devices()[0])
    for name, pair in pairs.items():
        first = list(compiled[name])[: config.profiled]
        traces = {cell: workdir / f"profile-{name}" / cell.name.replace(" ", "_") for cell in first}
        left = config.seconds - (time.monotonic() - start)
        times = shapes.time_cells(pair, compiled[name], bandwidth, config.repetitions, left, traces)
        for row in terminal.progress(name)(times):
            cell, figures = row.cell, dataclasses.asdict(row)
            del figures["cell"]
            key = dict(zip(KEY, (name, cell.name, cell.batch, cell.context)))
            more = {"draft_tokens": cell.nodes, "bandwidth": bandwidth}
            journal.add(key | more | figures)
            missing[name].remove(cell)
        if missing[name]:
            print(f"{name}, left out:", "; ".join(map(str, missing[name])))


def time_peers(config, pairs, journal: Journal) -> None:
    """Adds the missing times of Hugging Face `generate`."""
    options = config.peer
    for name, pair in pairs.items():
        calls = [
            call
            for call in hf_shapes.calls_of(options.variants, options.batches, options.contexts)
            if (name, f"HF {call[0]}", *call[1:]) not in journal
        ]
        if not calls:
            continue
        models = hf_shapes.HFShapes(pair, options.num_speculative_tokens)
        sizes = options.new_tokens, options.repetitions
        for row in hf_shapes.time_all(models, calls, *sizes, options.seconds):
            figures = {"ms": row.ms, "fastest_ms": None, "slowest_ms": None, "tokens": row.tokens}
            figures |= {"lower_bound_ms": None, "compile_seconds": row.first_seconds}
            key = name, f"HF {row.variant}", row.batch, row.context
            journal.add(dict(zip(KEY, key)) | {"draft_tokens": -1} | figures)


def texts_that_flip(options: ConfigDict) -> list[dict]:
    """Returns the differences of a pair's greedy texts by compute type and by speculation."""
    # By default, GPUs round the factors of float32 products.
    with jax.default_matmul_precision("highest"):
        pairs = {
            dtype: (
                loading.load(options.target, dtype=dtype),
                loading.load(options.draft, dtype=dtype),
            )
            for dtype in ("float32", "bfloat16")
        }
        tokenizer = pairs["float32"][0].tokenizer
        if tokenizer is None:
            raise InputError(
                f"flips.target: expected a model with a tokenizer, found {options.target}"
            )
        size, sources = (options.prompts, options.prompt_tokens), Sources(("stdlib",))
        prompts = workloads.held_out_prompts(tokenizer, *size, sources)
        differences = flips.compare(pairs, list(prompts.values()), options.new_tokens)
    return list(map(dataclasses.asdict, differences))


def tables(rows: list[dict], differences: list[dict]) -> str:
    """Returns Markdown tables of the times per pair, and of the texts that flip."""
    header = "program", "batch", "context", "ms", "from", "to", "bound", "x bound", "ms/token"
    text = ""
    for pair in dict.fromkeys(row["pair"] for row in rows):
        lines = []
        for row in (row for row in rows if row["pair"] == pair):
            bound, tokens = row["lower_bound_ms"], row["tokens"]
            times = row["ms"], row["fastest_ms"], row["slowest_ms"], bound
            cells = [row[name] for name in KEY[1:]] + [report.number(ms, 3) for ms in times]
            cells.append(report.number(bound and row["ms"] / bound))
            lines.append([*cells, report.number(tokens and row["ms"] / tokens, 3)])
        text += f"{pair}:\n\n{report.markdown(header, lines)}\n"
    if differences:
        header = "compared", "texts", "differ", "tokens", "largest margin"
        lines = [
            [*(row[name] for name in header[:-1]), f"{max(row['margins'], default=0):.2g}"]
            for row in differences
        ]
        text += f"Greedy texts:\n\n{report.markdown(header, lines)}"
    return text
