"""Reading of prompts, in chunks that bound the memory of attention scores."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from spsjax.decode import logprobs
from spsjax.decode.schedule import Costs
from spsjax.decode.state import DecodeState, Program
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.sampling import RowParams
from spsjax.types import Array, Chunk, PyTree

PREFILL_SCORES = 2**22  # the most attention scores (tokens x slots) per head and row in one pass


def prefill(
    program: Program,
    slots: int,
    params: PyTree,
    rows: RowParams,
    tokens_BT: Array,
    lengths_B: Array,
    limits_B: Array,
    keys_B: Array,
    costs: Costs | None = None,
) -> DecodeState:
    """Returns the state after prompts.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        slots: size of the token buffer and of the caches.
        rows: sampling parameters per row.
        tokens_BT: prompts `tokens_BT[b, :lengths_B[b]]`, padded with any tokens.
        lengths_B: lengths of the prompts.
        limits_B: lengths at which rows are done.
        keys_B: one key per row.
        costs: what the program's schedule knows before the first round.
    """
    T = tokens_BT.shape[1]
    width = chunk_width(T, max_chunk(program, slots), program.target)
    if width == T:
        carry = read_first(program, slots, width, params, tokens_BT, lengths_B)
    else:
        carry = _read_all(program, slots, width, params, tokens_BT, lengths_B)
    return begin(program, params, carry, rows, tokens_BT, lengths_B, limits_B, keys_B, costs)


def _read_all(
    program: Program, slots: int, width: int, params: PyTree, tokens_BT: Array, lengths_B: Array
) -> tuple[kv.KVCache, PyTree]:
    """Returns cache and drafter state after prompts, read in as many chunks as the longest needs.

    The number of chunks is data, so that one program reads prompts of all lengths up to T.
    """
    longest = jnp.max(lengths_B)

    def chunk(carry: PyTree) -> PyTree:
        start, caches = carry
        return start + width, read(program, width, params, tokens_BT, lengths_B, start, caches)

    start = jnp.zeros((), jnp.int32), empty_caches(program, slots, len(tokens_BT), params)
    return lax.while_loop(lambda carry: carry[0] < longest, chunk, start)[1]


def max_chunk(program: Program, slots: int) -> int:
    """Returns the most tokens of a prompt that may be read at once."""
    return min(program.prefill_tokens, max(PREFILL_SCORES // slots, 1))


def chunk_width(tokens: int, most: int, target: transformer.Config) -> int:
    """Returns the width of the chunks in which prompts are read, at most `most`.

    Where chunks do not add up to all tokens, the last chunk repeats tokens of the one before: no
    more than a window can be set back by, if a width above half of `most` allows it. A recurrent
    state cannot be set back, so that no token is repeated.
    """
    if tokens <= most:
        return tokens
    if target.is_recurrent:
        return max(width for width in range(1, most + 1) if tokens % width == 0)
    widths = range(most, most // 2, -1)
    return min(widths, key=lambda width: max(-tokens % width - kv.SLACK, 0))


def empty_caches(
    program: Program, slots: int, batch: int, params: PyTree
) -> tuple[kv.KVCache, PyTree]:
    """Returns the target's cache and the drafter's state before anything is read."""
    cache = transformer.empty_cache(program.target, params["target"], batch, slots)
    return cache, program.drafter.init(params, batch, slots)


def read_first(
    program: Program, slots: int, width: int, params: PyTree, tokens_BT: Array, lengths_B: Array
) -> tuple[kv.KVCache, PyTree]:
    """Returns cache and drafter state after the first chunk of prompts; see `read`."""
    carry = empty_caches(program, slots, len(tokens_BT), params)
    return read(program, width, params, tokens_BT, lengths_B, 0, carry, first=True)


def read(
    program: Program,
    width: int,
    params: PyTree,
    tokens_BT: Array,
    lengths_B: Array,
    start: int | Array,
    carry: tuple[kv.KVCache, PyTree],
    first: bool = False,
) -> tuple[kv.KVCache, PyTree]:
    """Returns cache and drafter state after one more chunk of prompts.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        width: tokens of a chunk, at most T.
        tokens_BT, lengths_B: prompts, as for `prefill`.
        start: number of tokens that were read before.
        carry: result of `read_first`, or of `read` for the chunk before.
        first: whether the caches are known to be empty, so that no pass attends to them.
    """
    (cache, drafter), (B, T) = carry, tokens_BT.shape
    # The last chunk repeats tokens of the one before rather than exceed the buffers.
    start = jnp.minimum(start, T - width)
    tokens, following = (
        lax.dynamic_slice_in_dim(array, start, width, axis=1)
        for array in (tokens_BT, jnp.roll(tokens_BT, -1, axis=1))
    )
    # Without the barrier the compiler evaluates an empty cache's masks itself: up to 30 s.
    starts = lax.optimization_barrier(jnp.full(B, start, jnp.int32))
    past, taps = None if first else cache.at(starts), program.drafter.tap_layers
    output = transformer.apply(program.target, params["target"], tokens, past, tap_layers=taps)
    # Neither padding nor the root may reach a recurrent state, which cannot be cut back.
    cache = cache.at(starts).extend(output, lengths_B - 1)
    chunk = Chunk(tokens, following, starts, lengths_B, cache)
    return cache, program.drafter.prefill(params, drafter, chunk, output)


def begin(
    program: Program,
    params: PyTree,
    carry: tuple[kv.KVCache, PyTree],
    rows: RowParams,
    tokens_BT: Array,
    lengths_B: Array,
    limits_B: Array,
    keys_B: Array,
    costs: Costs | None = None,
) -> DecodeState:
    """Returns the state before the first round, after all chunks of the prompts were read.

    `carry` is the result of the last `read`; the other arguments are those of `prefill`.
    """
    cache, drafter = carry
    (B, T), K, schedule = tokens_BT.shape, program.drafter.num_speculative_tokens, program.schedule
    cache = cache.at(lengths_B - 1)
    zeros, n = jnp.zeros(B, jnp.int32), program.logprobs
    return DecodeState(
        tokens=jnp.pad(tokens_BT, ((0, 0), (0, cache.num_slots - T)), mode="edge"),
        lengths=lengths_B,
        done=lengths_B >= limits_B,
        cache=cache,
        drafter=drafter,
        history=() if schedule is None else schedule.init(costs, B, K),
        rows=rows,
        limits=limits_B,
        keys=keys_B,
        failed=jnp.zeros(B, bool),
        rounds=zeros,
        proposed=zeros,
        accepted=jnp.zeros((B, K + 1), jnp.int32),
        logprobs=None if n is None else logprobs.empty(B, cache.num_slots, n),
    )


def empty(
    program: Program, slots: int, params: PyTree, rows: RowParams, tokens_BT: Array, *others: Any
) -> DecodeState:
    """Returns the state of `prefill` with nothing read, for rows that `rows.insert` replaces.

    Takes what `prefill` takes.
    """
    carry = empty_caches(program, slots, len(tokens_BT), params)
    return begin(program, params, carry, rows, tokens_BT, *others)
