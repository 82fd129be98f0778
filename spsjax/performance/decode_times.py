"""Times of the compiled loop at given shapes, with random weights: no text and no trained pair.

A cell is one program at one batch and context. Cells are compiled beside each other, and timed one
after another, so that a machine that is lent by the minute spends its minutes on timing.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import decode, loading, sampling
from spsjax.caches import KVCache, WindowCache
from spsjax.drafters import draft_model, none, shapes, sparse_self
from spsjax.errors import one_line
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.performance import forced_acceptance, microbenchmarks, roofline, theory
from spsjax.sampling import SamplingParams
from spsjax.types import Array, PyTree
from spsjax.utils import atomic_files
from spsjax.verifiers import recursive, rejection

_REPEATS = 8  # passes in a row of a cell that times one pass


@dataclasses.dataclass(frozen=True)
class Pair:
    """Models and settings that all cells share.

    Attributes:
        target, draft: shapes of the models.
        acceptance: probability with which each token of a chain is accepted.
        new_tokens: room for new tokens after the context.
        params: sampling parameters.
        dtype: compute type; None: what suits the device.
    """

    target: transformer.Config
    draft: transformer.Config
    acceptance: float = 0.8
    new_tokens: int = 128
    params: SamplingParams = SamplingParams()
    dtype: object = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """Program to time, at one batch and context.

    Attributes:
        kind: "rounds" of the loop; "draft", a proposal alone; or "score", a scoring pass alone.
        batch: rows.
        context: tokens of each row before the first round.
        num_speculative_tokens: K; 0: without a drafter.
        branching: children per node at each depth, of a tree; (): a chain.
        slots: slots of the cache with which the target drafts for itself; 0: the draft model
            drafts.
    """

    kind: str
    batch: int
    context: int
    num_speculative_tokens: int = 0
    branching: tuple[int, ...] = ()
    slots: int = 0

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
        """Whether the draft model has a part in it."""
        return self.drafts and not self.slots

    @property
    def name(self) -> str:
        """Name shown in reports."""
        if self.kind == "score":
            return f"score {self.nodes + 1}"
        if self.kind == "draft":
            return f"draft {self.nodes}"
        shape = "tree" if self.branching else "SpS"
        small = f", {self.slots} slots" if self.slots else ""
        return f"{shape} {self.nodes}{small}" if self.nodes else "ArS"

    @property
    def title(self) -> str:
        """Name with the batch and the context."""
        return f"{self.name}, batch {self.batch}, context {self.context}"


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured times of a cell.

    Attributes:
        cell: the cell.
        ms: milliseconds of a round, a draft or a pass: the median of the repetitions.
        fastest_ms, slowest_ms: the extremes.
        tokens: expected new tokens per row and round; None for a pass alone, and for trees, whose
            acceptance is not forced.
        lower_bound_ms: bytes of weights and filled caches that it reads, over the bandwidth.
        compile_seconds: time to compile it, beside others.
    """

    cell: Cell
    ms: float
    fastest_ms: float
    slowest_ms: float
    tokens: float | None
    lower_bound_ms: float
    compile_seconds: float


def program_of(pair: Pair, cell: Cell) -> decode.Program:
    """Returns the loop's configuration in a cell."""
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


def slots_of(pair: Pair, cell: Cell) -> int:
    """Returns the size of the buffers, which is that of a call of `generate` of this size."""
    return decode.num_slots(cell.context + pair.new_tokens + cell.depth + 1)


def rounds_of(pair: Pair, cell: Cell) -> int:
    """Returns as many rounds as no row can end in."""
    return max(pair.new_tokens // (cell.depth + 1), 1)


def start(
    program: decode.Program,
    slots: int,
    sampled: SamplingParams,
    params: PyTree,
    context: Array,
    limit: Array,
    keys_B: Array,
) -> decode.DecodeState:
    """Returns the state after prompts that were never read: the caches hold a pattern."""
    B = len(keys_B)
    cache, drafter = decode.unread(program, slots, B, params)
    lengths, limits = (jnp.full(B, value, jnp.int32) for value in (context, limit))
    rows = jax.tree.map(jnp.asarray, sampled.rows(B))
    tokens = jnp.zeros((B, slots), jnp.int32)
    carry = _patterned(cache, lengths - 1), _patterned(drafter, lengths - 1)
    return decode.begin(program, params, carry, rows, tokens, lengths, limits, keys_B)


def _patterned(state: PyTree, lengths_B: Array) -> PyTree:
    """Returns a state with numbers in its caches, as products with zeros can be faster."""

    def fill(leaf):
        if not isinstance(leaf, KVCache):
            return leaf
        S, C = leaf.keys[0].shape[2:]
        pattern = jnp.cos(1 + jnp.arange(S * C, dtype=jnp.float32)).reshape(S, C)
        keys, values = (
            tuple(jnp.broadcast_to(pattern, old.shape).astype(old.dtype) for old in buffers)
            for buffers in (leaf.keys, leaf.values)
        )
        leaf = dataclasses.replace(leaf, keys=keys, values=values)
        return leaf.filled(lengths_B) if isinstance(leaf, WindowCache) else leaf

    return jax.tree.map(fill, state, is_leaf=lambda leaf: isinstance(leaf, KVCache))


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A cell's programs: that which makes its state, and that which is timed."""

    begin: Callable
    timed: Callable
    seconds: float


def compile_cell(pair: Pair, cell: Cell) -> _Compiled:
    """Compiles the programs of a cell for the default device, without any weights."""
    begun = time.perf_counter()
    program, slots = program_of(pair, cell), slots_of(pair, cell)
    dtype = loading.compute_type(pair.dtype, pair.target)
    params = {
        "target": transformer.param_shapes(pair.target, dtype),
        "drafter": transformer.param_shapes(pair.draft, dtype) if cell.has_draft_model else {},
    }
    number = jax.ShapeDtypeStruct((), jnp.int32)
    keys = jax.eval_shape(lambda: _keys(cell.batch))
    first = functools.partial(start, program, slots, pair.params)
    begin = jax.jit(first).lower(params, number, number, keys).compile()
    state = jax.eval_shape(first, params, number, number, keys)
    if cell.kind == "rounds":
        run = functools.partial(decode.run, program)
        lowered = jax.jit(run, donate_argnums=1).lower(params, state, number)
    elif cell.kind == "draft":
        run = functools.partial(microbenchmarks.draft_often, program, _REPEATS)
        lowered = jax.jit(run).lower(params, state)
    else:
        run = functools.partial(microbenchmarks.score_often, program, _REPEATS)
        drafts = jax.ShapeDtypeStruct((cell.batch, cell.nodes), jnp.int32)
        lowered = jax.jit(run).lower(params, state, drafts)
    return _Compiled(begin, lowered.compile(), time.perf_counter() - begun)


def _keys(batch: int) -> Array:
    return sampling.row_keys(jax.random.key(0, impl=sampling.GENERATOR), batch)


def compile_all(
    pair: Pair,
    cells: Sequence[Cell],
    threads: int,
    seconds: float,
    note: Callable[[str], None] = print,
) -> dict[Cell, _Compiled]:
    """Compiles cells beside each other, in their order, and begins none after so many seconds.

    `note` is told which cells cannot be compiled; the others are returned.
    """
    end = time.monotonic() + seconds

    def one(cell):
        if time.monotonic() > end:
            return None
        try:
            return compile_cell(pair, cell)
        except jax.errors.JaxRuntimeError as error:
            note(f"{cell.title}: not compiled: {one_line(error)}")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        results = zip(cells, pool.map(one, cells))
        return {cell: result for cell, result in results if result is not None}


def time_cells(
    pair: Pair,
    compiled: dict[Cell, _Compiled],
    bandwidth: float,
    repetitions: int,
    seconds: float,
    profile: pathlib.Path | None = None,
    profiled: int = 2,
    note: Callable[[str], None] = print,
) -> Iterator[Times]:
    """Yields the times of cells, and begins none after so many seconds.

    Args:
        pair: the pair.
        compiled: what `compile_all` returned.
        bandwidth: bytes per second that the memory delivers.
        repetitions: timed runs of each cell, after one that is not counted.
        seconds: most seconds until the last one begins.
        profile: folder that receives the program of each of the first cells, and a trace of one
            more run; None: there is none.
        profiled: how many cells these are.
        note: is told which cells fail, as one that does not fit into memory; the others go on.
    """
    end = time.monotonic() + seconds
    dtype = loading.compute_type(pair.dtype, pair.target)
    models = [loading.random(shape, seed, None, dtype) for seed, shape in enumerate(_shapes(pair))]
    for index, (cell, programs) in enumerate(compiled.items()):
        if time.monotonic() > end:
            return
        drafter = models[1].params if cell.has_draft_model else {}
        weights = {"target": models[0].params, "drafter": drafter}
        folder = profile / cell.name.replace(" ", "_") if profile and index < profiled else None
        try:
            times = _times(pair, cell, programs, weights, repetitions, folder)
        except jax.errors.JaxRuntimeError as error:
            note(f"{cell.title}: not timed: {one_line(error)}")
            continue
        yield Times(
            cell=cell,
            ms=float(np.median(times)),
            fastest_ms=min(times),
            slowest_ms=max(times),
            tokens=_tokens(pair, cell),
            lower_bound_ms=1e3 * bytes_read(pair, cell) / bandwidth,
            compile_seconds=programs.seconds,
        )


def _times(pair, cell, programs: _Compiled, weights, repetitions: int, folder) -> list[float]:
    """Returns milliseconds; traces one more run if there is a folder for it."""
    times = [1e3 * _run(pair, cell, programs, weights) for _ in range(repetitions + 1)]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write(folder / "program.txt", programs.timed.as_text())
        with jax.profiler.trace(folder):
            _run(pair, cell, programs, weights)
    return times[1:]


def _tokens(pair: Pair, cell: Cell) -> float | None:
    if cell.kind != "rounds" or cell.branching:
        return None
    return theory.block_efficiency(pair.acceptance, cell.num_speculative_tokens)


def _shapes(pair: Pair) -> tuple[transformer.Config, transformer.Config]:
    return pair.target, pair.draft


def _run(pair: Pair, cell: Cell, programs: _Compiled, weights) -> float:
    """Returns the seconds of one round, draft or pass."""
    limit = np.int32(slots_of(pair, cell) - cell.depth - 1)
    state = programs.begin(weights, np.int32(cell.context), limit, _keys(cell.batch))
    arguments = [weights, state]
    if cell.kind == "rounds":
        count = rounds_of(pair, cell)
        arguments.append(np.int32(count))
    elif cell.kind == "score":
        arguments.append(np.zeros((cell.batch, cell.nodes), np.int32))
    jax.block_until_ready(arguments)
    begun = time.perf_counter()
    result = programs.timed(*arguments)
    jax.block_until_ready(result)
    took = time.perf_counter() - begun
    return took / (int(np.max(result.rounds)) if cell.kind == "rounds" else _REPEATS)


def bytes_read(pair: Pair, cell: Cell) -> int:
    """Returns the bytes of weights and of filled caches that a round, draft or pass must read.

    Rounds fill the caches on their way: half of the new tokens count, on average.
    """
    dtype = loading.compute_type(pair.dtype, pair.target)
    filled = cell.context + (pair.new_tokens // 2 if cell.kind == "rounds" else 0)

    def read(config, tokens):
        cache = roofline.cache_bytes(config, sharding.mesh(1, 1), cell.batch, tokens, dtype)
        return _weight_bytes(config, dtype) + cache

    target, drafts = read(pair.target, filled), (pair.draft, filled)
    if cell.slots:
        drafts = pair.target, min(cell.slots, filled)
    drafted = cell.depth * read(*drafts)
    return {"rounds": target + drafted, "draft": drafted, "score": target}[cell.kind]


def _weight_bytes(config: transformer.Config, dtype) -> int:
    read = roofline.multiplied(config, transformer.param_shapes(config, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
