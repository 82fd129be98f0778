"""Times of a target that drafts for itself with a small cache, and lower bounds on them.

The target has random weights, and acceptance is forced. `planning.contexts` predicts such times.
"""

import jax

from spsjax.benchmarks import shapes
from spsjax.drafters import sparse_self
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.models.config import Config
from spsjax.planning import hardware
from spsjax.planning.outcome import Outcome, Table
from spsjax.utils import from_config
from spsjax.utils.progress import TitledProgress

_PASSES = "plain round", "round", "draft", "1 token", "K + 1 tokens"


def plan(options, progress: TitledProgress = lambda title: iter) -> Outcome:
    """Returns the measured and the predicted speed-up per batch and context.

    `options` is the section `measured` of configs/experiments/plan_context.py. Raises InputError
    for a value that cannot be used, or for a point that does not fit into memory.
    """
    shape = from_config.build_section("measured.shape", Config, options.shape)
    check_integer("measured.slots", options.slots, sparse_self.Drafter.sinks + 1)
    for field in ("num_speculative_tokens", "new_tokens", "repetitions"):
        check_integer(f"measured.{field}", options[field], 1)
    for point in options.points:
        is_pair = isinstance(point, (tuple, list)) and len(point) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in point):
            raise InputError(
                f"measured.points: expected a batch and a context, found {short_repr(point)}"
            )
    bandwidth = hardware.bandwidth(jax.devices()[0])
    rows = [
        _timed(options, shape, batch, context, bandwidth)
        for batch, context in progress("measuring")(options.points)
    ]
    lines = [
        [
            row["batch"],
            row["context"],
            *(f"{t['ms']:.1f} ({t['ms'] / t['lower_bound_ms']:.2f})" for t in row["ms"].values()),
            f"{row['speedup']:.2f}",
            f"{row['predicted']:.2f}",
        ]
        for row in rows
    ]
    title = "Milliseconds (x the time of the bytes that are read)"
    note = f"measured here, where memory delivers {bandwidth / 1e9:.1f} GB/s"
    header = "batch", "context", *_PASSES, "speed-up", "predicted"
    return Outcome([Table(title, header, lines, note)], rows)


def _timed(options, shape: Config, batch: int, context: int, bandwidth: float) -> dict:
    """Returns the times of rounds and passes, and the measured and predicted speed-ups."""
    K, slots, Cell = options.num_speculative_tokens, options.slots, shapes.Cell
    pair = shapes.ShapePair(shape, shape, options.acceptance, options.new_tokens)
    cells = (
        Cell("rounds", batch, context),
        Cell("rounds", batch, context, K, slots=slots),
        Cell("draft", batch, context, K, slots=slots),
        Cell("score", batch, context),
        Cell("score", batch, context, K),
    )
    compiled = shapes.compile_all(pair, cells, threads=2, seconds=1e9)
    times = shapes.time_cells(pair, compiled, bandwidth, options.repetitions, 1e9)
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
