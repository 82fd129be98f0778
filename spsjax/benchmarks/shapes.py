"""Workload of shapes: times of the compiled loop with random weights, without texts.

A cell is one program at one batch and context. Cells are compiled in parallel and timed one after
another, so that a machine that is lent by the minute spends its minutes on timing.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import decode, loading, sampling
from spsjax.benchmarks import forced_acceptance, microbenchmarks
from spsjax.drafters import draft_model, none, shapes, sparse_self
from spsjax.errors import one_line
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.planning import roofline, theory
from spsjax.sampling import SamplingParams
from spsjax.types import Array
from spsjax.utils import atomic_files
from spsjax.utils.kernel_choice import KERNELS
from spsjax.verifiers import recursive, rejection

_REPEATS = 8  # consecutive passes of a cell that times one pass


@dataclasses.dataclass(frozen=True)
class ShapePair:
    """Models without weights, and settings that all cells share."""

    # Shapes of the models.
    target: transformer.Config
    draft: transformer.Config
    acceptance: float = 0.8  # probability with which each token of a chain is accepted
    new_tokens: int = 128  # room for new tokens after the context
    params: SamplingParams = SamplingParams()  # sampling parameters
    dtype: object = None  # compute type; None: what suits the device

    def weights(self) -> list[loading.Model]:
        """Returns target and draft with random weights."""
        dtype = loading.compute_type(self.dtype, self.target)
        both = enumerate((self.target, self.draft))
        return [loading.random(shape, seed, None, dtype) for seed, shape in both]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Program to time, at one batch and context."""

    kind: str  # "rounds" of the loop; "draft", a proposal alone; or "score", a scoring pass alone
    batch: int  # number of rows
    context: int  # tokens per row before the first round
    num_speculative_tokens: int = 0  # K; 0: without a drafter
    branching: tuple[int, ...] = ()  # children per node at each depth, of a tree; (): a chain
    # Slots of the cache with which the target drafts for itself; 0: the draft model drafts.
    slots: int = 0
    kernels: str = "off"  # mode of `models.fused`

    @property
    def nodes(self) -> int:
        """Draft tokens that a round scores."""
        return int(np.cumprod(self.branching).sum()) or self.num_speculative_tokens

    @property
    def depth(self) -> int:
        """Passes of the draft per round, which is the most draft tokens that a round accepts."""
        return len(self.branching) or self.num_speculative_tokens

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted in it."""
        return self.kind != "score" and self.nodes > 0

    @property
    def has_draft_model(self) -> bool:
        """Whether the draft model drafts in it."""
        return self.drafts and not self.slots

    @property
    def name(self) -> str:
        """Name shown in reports."""
        return self._name + ", fused" * (self.kernels != "off")

    @property
    def _name(self) -> str:
        """Name without the mode of its kernels."""
        if self.kind == "score":
            return f"score {self.nodes + 1}"
        if self.kind == "draft":
            return f"draft {self.nodes}"
        shape = "tree" if self.branching else "SpS"
        small = f", {self.slots} slots" if self.slots else ""
        return f"{shape} {self.nodes}{small}" if self.nodes else "ArS"

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}, context {self.context}"


@dataclasses.dataclass(frozen=True)
class CellTimes:
    """Measured times of a cell."""

    cell: Cell  # the cell
    ms: float  # milliseconds per round, draft or pass: the median of the repetitions
    # The extremes.
    fastest_ms: float
    slowest_ms: float
    # Expected new tokens per row and round; None for a pass alone, and for trees, whose acceptance
    # is not forced.
    tokens: float | None
    lower_bound_ms: float  # bytes of weights and filled caches that it reads, over the bandwidth
    compile_seconds: float  # time to compile it, in parallel with others


def program_of(pair: ShapePair, cell: Cell) -> decode.Program:
    """Returns the loop's configuration of a cell."""
    if not cell.drafts:
        return decode.Program(pair.target, none.Drafter(), rejection.Verifier())
    if cell.branching:
        tree = shapes.Tree.branching(*cell.branching)
        drafter = draft_model.Drafter(pair.draft, tree=tree)
        return decode.Program(pair.target, drafter, recursive.Verifier())
    drafter = draft_model.Drafter(pair.draft, cell.num_speculative_tokens)
    if cell.slots:
        recent = cell.slots - sparse_self.Drafter.sinks
        drafter = sparse_self.Drafter(pair.target, cell.num_speculative_tokens, recent=recent)
    return decode.Program(pair.target, drafter, forced_acceptance.Verifier(pair.acceptance))


def slots_of(pair: ShapePair, cell: Cell) -> int:
    """Returns the size of the buffers, the same as for a call of `generate` of this size."""
    return decode.sizes.num_slots(cell.context + pair.new_tokens + cell.depth + 1)


def rounds_of(pair: ShapePair, cell: Cell) -> int:
    """Returns a number of rounds in which no row can end."""
    return max(pair.new_tokens // (cell.depth + 1), 1)


@dataclasses.dataclass(frozen=True)
class CompiledCell:
    """Programs of a cell: one makes its state, the other is timed."""

    begin: Callable
    timed: Any
    seconds: float


def compile_cell(pair: ShapePair, cell: Cell) -> CompiledCell:
    """Compiles the programs of a cell for the default device, without any weights."""
    with KERNELS(cell.kernels):
        return _compile(pair, cell)


def _compile(pair: ShapePair, cell: Cell) -> CompiledCell:
    begun = time.perf_counter()
    program, slots = program_of(pair, cell), slots_of(pair, cell)
    dtype = loading.compute_type(pair.dtype, pair.target)
    params = {
        "target": transformer.param_shapes(pair.target, dtype),
        "drafter": transformer.param_shapes(pair.draft, dtype) if cell.has_draft_model else {},
    }
    number = jax.ShapeDtypeStruct((), jnp.int32)
    keys = jax.eval_shape(lambda: row_keys(cell.batch))
    first = functools.partial(microbenchmarks.unread_state, program, slots, pair.params)
    begin = jax.jit(first).lower(params, number, number, keys).compile()
    state = jax.eval_shape(first, params, number, number, keys)
    if cell.kind == "rounds":
        run = functools.partial(decode.step.run, program)
        lowered = jax.jit(run, donate_argnums=1).lower(params, state, number)
    elif cell.kind == "draft":
        run = functools.partial(microbenchmarks.draft_repeatedly, program, _REPEATS)
        lowered = jax.jit(run).lower(params, state)
    else:
        run = functools.partial(microbenchmarks.score_often, program, _REPEATS)
        drafts = jax.ShapeDtypeStruct((cell.batch, cell.nodes), jnp.int32)
        lowered = jax.jit(run).lower(params, state, drafts)
    return CompiledCell(begin, lowered.compile(), time.perf_counter() - begun)


def row_keys(batch: int) -> Array:
    """Returns the random keys of all cells of a batch."""
    return sampling.row_keys(jax.random.key(0, impl=sampling.GENERATOR), batch)


def compile_all(
    pair: ShapePair,
    cells: Sequence[Cell],
    threads: int,
    seconds: float,
    note: Callable[[str], None] = print,
) -> dict[Cell, CompiledCell]:
    """Compiles cells in parallel, in their order; no cell begins after `seconds`.

    Errors of cells that cannot be compiled are passed to `note`; the other cells are returned.
    """
    end = time.monotonic() + seconds

    def one(cell):
        if time.monotonic() > end:
            return None
        try:
            return compile_cell(pair, cell)
        except jax.errors.JaxRuntimeError as error:
            note(f"{cell}: not compiled: {one_line(error)}")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        results = zip(cells, pool.map(one, cells))
        return {cell: result for cell, result in results if result is not None}


def time_cells(
    pair: ShapePair,
    compiled: dict[Cell, CompiledCell],
    bandwidth: float,
    repetitions: int,
    seconds: float,
    traces: Mapping[Cell, pathlib.Path] = {},
    note: Callable[[str], None] = print,
) -> Iterator[CellTimes]:
    """Yields the times of compiled cells; no cell begins after `seconds`.

    `bandwidth` is in bytes per second. A first run per cell is not counted. The folders of `traces`
    receive a cell's program and a trace of a further run. Errors of cells, for example for lack of
    memory, are passed to `note`.
    """
    end = time.monotonic() + seconds
    target, draft = pair.weights()
    for cell, programs in compiled.items():
        if time.monotonic() > end:
            return
        drafter = draft.params if cell.has_draft_model else {}
        weights = {"target": target.params, "drafter": drafter}
        run = functools.partial(_run, pair, cell, programs, weights)
        try:
            times = [1e3 * run() for _ in range(repetitions + 1)][1:]
            if cell in traces:
                _trace(traces[cell], programs, run)
        except jax.errors.JaxRuntimeError as error:
            note(f"{cell}: not timed: {one_line(error)}")
            continue
        forced = cell.kind == "rounds" and not cell.branching
        K = cell.num_speculative_tokens
        yield CellTimes(
            cell=cell,
            ms=float(np.median(times)),
            fastest_ms=min(times),
            slowest_ms=max(times),
            tokens=theory.block_efficiency(pair.acceptance, K) if forced else None,
            lower_bound_ms=1e3 * bytes_read(pair, cell) / bandwidth,
            compile_seconds=programs.seconds,
        )


def _trace(folder: pathlib.Path, programs: CompiledCell, run: Callable) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write(folder / "program.txt", programs.timed.as_text())
    with jax.profiler.trace(folder):
        run()


def _run(pair: ShapePair, cell: Cell, programs: CompiledCell, weights) -> float:
    """Returns the seconds per round, draft or pass."""
    limit = np.int32(slots_of(pair, cell) - cell.depth - 1)
    state = programs.begin(weights, np.int32(cell.context), limit, row_keys(cell.batch))
    arguments = [weights, state]
    if cell.kind == "rounds":
        arguments.append(np.int32(rounds_of(pair, cell)))
    elif cell.kind == "score":
        arguments.append(np.zeros((cell.batch, cell.nodes), np.int32))
    jax.block_until_ready(arguments)
    begun = time.perf_counter()
    result = programs.timed(*arguments)
    jax.block_until_ready(result)
    took = time.perf_counter() - begun
    return took / (int(np.max(result.rounds)) if cell.kind == "rounds" else _REPEATS)


def bytes_read(pair: ShapePair, cell: Cell) -> int:
    """Returns the bytes of weights and of filled caches that a round, draft or pass must read.

    Rounds fill the caches gradually: half of the new tokens count, on average.
    """
    dtype = loading.compute_type(pair.dtype, pair.target)
    filled = cell.context + (pair.new_tokens // 2 if cell.kind == "rounds" else 0)

    def read(config, tokens):
        weights = roofline.multiplied(config, transformer.param_shapes(config, dtype))
        cache = roofline.cache_bytes(config, sharding.mesh(1, 1), cell.batch, tokens, dtype)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)) + cache

    target, drafts = read(pair.target, filled), (pair.draft, filled)
    if cell.slots:
        drafts = pair.target, min(cell.slots, filled)
    drafted = cell.depth * read(*drafts)
    return {"rounds": target + drafted, "draft": drafted, "score": target}[cell.kind]
