"""Draws where speculation pays: batch by context, with the best way to draft in every cell.

python scripts/plan_context.py --workdir=runs/context
python scripts/plan_context.py --workdir=runs/context --measure

The time of a pass is that of the bytes it reads, or of its products, and of its all-reduces
(`spsjax.performance.context_theory`). Nothing runs on the devices of the map. Rates of acceptance
are assumptions of the config. Ways to draft: a draft model; one with a small cache; the target with
a small cache (`sparse_self`). With --measure, a target of random weights is timed on this machine,
as it is and with a small cache that drafts for it, beside what the model of time predicts.
The figures are in `map.json` and `measured.json`, the map in `map.png`.
Every key of the config is a flag; configs/experiments/plan_context.py lists them.
"""

import dataclasses
import importlib.util
import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main, terminal
from spsjax.drafters import sparse_self
from spsjax.errors import InputError, check_integer, check_number, short_repr
from spsjax.models.config import Config
from spsjax.performance import context_theory, decode_times, hardware
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to plan.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name of a shape, or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name of a shape, or folder of the draft model.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")
_MEASURE = flags.DEFINE_bool("measure", False, "Also time a model on this machine.")
main.require("workdir")


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    for field in ("slots", "most_tokens"):
        check_integer(field, config[field], 1)
    check_number("collective_us", config.collective_us, 0, 1e6)
    for field in ("batches", "contexts", "devices"):
        if not config[field]:
            raise InputError(f"{field}: expected at least one, found none")
    for field in ("batches", "contexts"):
        for number in config[field]:
            check_integer(field, number, 1)
    target = configs.model_config(config.target, _CONFIGS / "models")
    if max(config.contexts) > target.max_positions:
        raise InputError(
            f"contexts: expected at most the target's {target.max_positions}, found "
            f"{max(config.contexts)}"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    main.check_writable(str(workdir / "map.json"))
    maps = {name: map_of(config, name) for name in config.devices}
    for name, cells in maps.items():
        terminal.heading(f"{config.target} on {name}")
        terminal.print_table(*table(config, cells))
    print("way to draft, K, speed-up over plain decoding; -: the target does not fit")
    rows = [
        {"devices": name, "batch": batch, "context": context}
        | ({"fits": False} if choice is None else {"fits": True} | dataclasses.asdict(choice))
        for name, cells in maps.items()
        for (batch, context), choice in cells.items()
    ]
    atomic_files.write(workdir / "map.json", json.dumps(rows, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        terminal.note(f"no plot in {workdir}: matplotlib is not installed")
    else:
        from spsjax.cli import plots

        plots.contexts(rows, workdir / "map.png")
    if _MEASURE.value:
        measure(config.measured, workdir)


def map_of(config, name: str) -> dict[tuple[int, int], context_theory.Choice | None]:
    """Returns the best way to decode by batch and context, on devices such as "v5p:4"."""
    kind, _, count = str(name).partition(":")
    if kind not in hardware.CHIPS or not count.isdecimal() or not int(count):
        known = ", ".join(hardware.CHIPS)
        raise InputError(f"devices: expected one of {known} and a number, as v5p:4, found {name}")
    devices = context_theory.Devices(hardware.CHIPS[kind], int(count), sum_us=config.collective_us)
    target, draft = (
        configs.model_config(shape, _CONFIGS / "models") for shape in (config.target, config.draft)
    )
    of, rates = context_theory.reads_of, config.acceptance
    methods = {
        "model": context_theory.Method(of(draft), rates.model),
        "window": context_theory.Method(of(draft, config.slots), rates.window),
        "sparse_self": context_theory.Method(
            of(target, config.slots), rates.sparse_self, own=False
        ),
    }
    return {
        (batch, context): context_theory.best(
            devices, of(target), methods, batch, context, config.most_tokens
        )
        for batch in config.batches
        for context in config.contexts
    }


def table(config, cells) -> tuple[list[str], list[list[str]]]:
    """Returns a table of the fastest way by batch and context."""

    def text(choice):
        if choice is None:
            return "-"
        if not choice.name:
            return "plain"
        return f"{choice.name} {choice.num_speculative_tokens}, {choice.speedup:.2f}"

    header = ["batch", *map(str, config.contexts)]
    rows = [
        [str(batch), *(text(cells[batch, context]) for context in config.contexts)]
        for batch in config.batches
    ]
    return header, rows


def measure(options, workdir: pathlib.Path) -> None:
    """Times a target on this machine, and prints what was predicted beside it."""
    shape = from_config.build("measured.shape", Config, options.shape)
    least = sparse_self.Drafter.sinks + 1
    check_integer("measured.slots", options.slots, least)
    for field in ("num_speculative_tokens", "new_tokens", "repetitions"):
        check_integer(f"measured.{field}", options[field], 1)
    points = [tuple(point) for point in options.points]
    for point in points:
        if len(point) != 2 or not all(type(size) is int and size > 0 for size in point):
            raise InputError(
                f"measured.points: expected a batch and a context, found {short_repr(point)}"
            )
    pair = decode_times.Pair(shape, shape, options.acceptance, options.new_tokens)
    bandwidth = hardware.bandwidth(jax.devices()[0])
    print(f"\nMeasured here, where memory delivers {bandwidth / 1e9:.1f} GB/s:")
    rows = []
    for batch, context in terminal.progress("measuring")(points):
        rows.append(timed(options, pair, batch, context, bandwidth))
        atomic_files.write(workdir / "measured.json", json.dumps(rows, indent=1) + "\n")
    header = "batch", "context", *_PASSES, "speed-up", "predicted"
    cells = [[row["batch"], row["context"], *map(_shown, row["ms"].values())] for row in rows]
    speedups = ([f"{row['speedup']:.2f}", f"{row['predicted']:.2f}"] for row in rows)
    terminal.heading("Milliseconds (x the time of the bytes that are read)")
    terminal.print_table(header, [[*some, *more] for some, more in zip(cells, speedups)], left=())


_PASSES = "plain round", "round", "draft", "1 token", "K + 1 tokens"


def timed(options, pair, batch: int, context: int, bandwidth: float) -> dict:
    """Returns the times of rounds and passes, and the speed-up: measured, and that of the bytes."""
    K, slots, Cell = options.num_speculative_tokens, options.slots, decode_times.Cell
    cells = (
        Cell("rounds", batch, context),
        Cell("rounds", batch, context, K, slots=slots),
        Cell("draft", batch, context, K, slots=slots),
        Cell("score", batch, context),
        Cell("score", batch, context, K),
    )
    compiled = decode_times.compile_all(pair, cells, threads=2, seconds=1e9)
    times = decode_times.time_cells(pair, compiled, bandwidth, options.repetitions, 1e9)
    times = {row.cell: row for row in times}
    if len(times) < len(cells):
        raise InputError(
            f"measured.points: expected what fits into memory, found {batch}, {context}"
        )
    plain, drafted = (times[cell] for cell in cells[:2])
    return {
        "batch": batch,
        "context": context,
        "tokens": drafted.tokens,
        "ms": {
            name: {"ms": times[cell].ms, "lower_bound_ms": times[cell].lower_bound_ms}
            for name, cell in zip(_PASSES, cells)
        },
        "speedup": drafted.tokens * plain.ms / drafted.ms,
        "predicted": drafted.tokens * plain.lower_bound_ms / drafted.lower_bound_ms,
    }


def _shown(times: dict) -> str:
    return f"{times['ms']:.1f} ({times['ms'] / times['lower_bound_ms']:.2f})"


if __name__ == "__main__":
    main.run(run, _CONFIGS / "experiments" / "plan_context.py")
