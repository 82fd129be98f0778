"""Attention to a cache and a block as one kernel, or two where the slots are shared out.

Each program of the first kernel reads a share of the slots of one key-value head for a tile of its
queries, and skips slots that no query sees. The second kernel merges the shares, as flash-decoding
does (Dao et al. 2023, "Flash-Decoding for long-context inference").
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.models.caches import Segment
from spsjax.models.fused.rows import MOST_TOKENS
from spsjax.types import Array
from spsjax.utils.powers import LEAST, power

_MOST = 64  # the most slots that a program reads at a time, and queries of a tile
_TILE_BYTES = 2**14  # the most of keys that it reads at a time, and of queries; memory is shared
_PROGRAMS = 128  # about as many programs as a GPU has multiprocessors
_MOST_SHARES = 32
_WIDEST = 256  # widest head


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Division of the work over programs."""

    group: int  # query heads per key-value head
    rows: int  # queries of a tile, a power of two; they are tokens times query heads
    tiles: int  # number of tiles per key-value head
    shares: int  # number of programs that share the slots of a tile
    chunk: int  # the most slots that a program reads at a time
    width: int  # width of a head's keys, rounded up to a power of two
    value_width: int  # the same of its values


def supports(query_BTHC: Array, segments: Sequence[Segment]) -> bool:
    """Returns whether the kernels can compute this attention."""
    B, T, _, C = query_BTHC.shape
    widths = [C, *(segment.values.shape[3] for segment in segments)]
    types = {query_BTHC.dtype, *(segment.keys.dtype for segment in segments)}
    return (
        T <= MOST_TOKENS
        and max(widths) <= _WIDEST
        and len(types) == 1
        and query_BTHC.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and all(len(segment.keys) == B and not segment.split for segment in segments)
    )


def attend(
    query_BTHC: Array,
    segments: Sequence[Segment],
    scale: float,
    softcap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """Attends to several segments under one softmax: [B, T, H, V].

    It computes what `models.attention.attend` does without biases and sinks.

    Args:
        query_BTHC: queries.
        segments: keys and values, as `supports` allows them.
        scale, softcap: factor of the scores; limit c in c tanh(x / c), 0: none.
        interpret: whether the kernels are interpreted, on any device.
    """
    B, T, H, _ = query_BTHC.shape
    tiling = _tiling(query_BTHC, segments)
    values = segments[0].values
    shape = B, T, H, values.shape[3]
    grid = B * (H // tiling.group), tiling.tiles, tiling.shares
    call = functools.partial(
        pl.pallas_call, interpret=interpret, compiler_params=triton.CompilerParams(num_warps=4)
    )
    shares = tiling.shares
    if shares == 1:
        kinds = [jax.ShapeDtypeStruct(shape, values.dtype)]
    else:
        sums = jax.ShapeDtypeStruct((shares, B, T, H), jnp.float32)
        kinds = [jax.ShapeDtypeStruct((shares, *shape), jnp.float32), sums, sums]
    kernel = functools.partial(_attend, tiling=tiling, scale=scale, softcap=softcap)
    arrays = [array for segment in segments for array in _arrays(segment)]
    results = call(kernel, out_shape=kinds, grid=grid, name="attend")(query_BTHC, *arrays)
    if shares == 1:
        return results[0]
    kernel = functools.partial(_merge, tiling=tiling)
    (merged,) = call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, values.dtype)],
        grid=(B, T, H),
        name="merge",
    )(*results)
    return merged


def _tiling(query_BTHC: Array, segments: Sequence[Segment]) -> _Tiling:
    B, T, H, C = query_BTHC.shape
    G, values = segments[0].keys.shape[1], segments[0].values.shape[3]
    width, value_width = map(power, (C, values))
    most = _TILE_BYTES // (max(width, value_width) * query_BTHC.dtype.itemsize)
    most = max(min(most, _MOST), LEAST)
    rows = min(power(T * H // G), most)
    tiles = pl.cdiv(T * H // G, rows)
    chunks = max(pl.cdiv(segment.keys.shape[2], most) for segment in segments)
    shares = min(chunks, _MOST_SHARES, max(1, pl.cdiv(_PROGRAMS, B * G * tiles)))
    return _Tiling(H // G, rows, tiles, shares, most, width, value_width)


def _arrays(segment: Segment) -> tuple[Array, ...]:
    """Returns keys, values, mask as bytes, and the first visible slot and the end [B or 1]."""
    seen_BS = jnp.any(segment.visible, axis=1)
    slot = jnp.arange(seen_BS.shape[1], dtype=jnp.int32)
    first_B = jnp.min(jnp.where(seen_BS, slot, slot.size), axis=1)
    end_B = jnp.max(jnp.where(seen_BS, slot + 1, 0), axis=1)
    return segment.keys, segment.values, segment.visible.astype(jnp.int8), first_B, end_B


def _attend(query_ref, *refs, tiling: _Tiling, scale: float, softcap: float):
    """Attends to one share of the slots of all segments, for a tile of queries of one head."""
    T, G = query_ref.shape[1], refs[0].shape[1]
    num_outs = 1 if tiling.shares == 1 else 3
    inputs, outs = refs[:-num_outs], refs[-num_outs:]
    b, g = pl.program_id(0) // G, pl.program_id(0) % G
    tile, share = pl.program_id(1), pl.program_id(2)
    rows = tile * tiling.rows + jnp.arange(tiling.rows)
    is_row = rows < T * tiling.group
    token, head = rows // tiling.group, g * tiling.group + rows % tiling.group

    columns = jnp.arange(tiling.width)
    is_entry = is_row[:, None] & (columns < query_ref.shape[3])[None]
    at = query_ref.at[b, token[:, None], head[:, None], columns[None]]
    query = triton.load(at, mask=is_entry, other=0.0)
    carry = (
        jnp.full(tiling.rows, -jnp.inf, jnp.float32),
        jnp.zeros(tiling.rows, jnp.float32),
        jnp.zeros((tiling.rows, tiling.value_width), jnp.float32),
    )
    for segment in zip(*(inputs[part::5] for part in range(5))):
        carry = _segment(
            carry, query, b, g, token, share, *segment, tiling=tiling, scale=scale, softcap=softcap
        )
    top, total, mixed = carry
    columns = jnp.arange(tiling.value_width)
    is_entry = is_row[:, None] & (columns < outs[0].shape[-1])[None]
    if tiling.shares == 1:
        mixed = mixed / total[:, None]
        at = outs[0].at[b, token[:, None], head[:, None], columns[None]]
        triton.store(at, mixed.astype(outs[0].dtype), mask=is_entry)
        return
    at = outs[0].at[share, b, token[:, None], head[:, None], columns[None]]
    triton.store(at, mixed, mask=is_entry)
    for out, value in zip(outs[1:], (top, total)):
        triton.store(out.at[share, b, token, head], value, mask=is_row)


def _segment(
    carry, query, b, g, token, share, keys, values, visible, firsts, ends, *, tiling, scale, softcap
):
    """Returns greatest score, sum of weights, and weighted values after a share of a segment."""
    slots, precision = keys.shape[2], lax.Precision.HIGHEST
    length = min(tiling.chunk, power(slots))  # of a chunk
    per_share = pl.cdiv(pl.cdiv(slots, length), tiling.shares)
    first, end = share * per_share, (share + 1) * per_share
    if slots > length:  # reads no slots that nothing sees
        own = b if firsts.shape[0] > 1 else 0
        first = jnp.maximum(firsts[own] // length, first)
        end = jnp.minimum(pl.cdiv(ends[own], length), end)
    else:
        end = jnp.minimum(end, pl.cdiv(slots, length))
    mask_row = b if visible.shape[0] > 1 else 0
    mask_token = token if visible.shape[1] > 1 else jnp.zeros_like(token)

    def chunk(index, carry):
        top, total, mixed = carry
        slot = index * length + jnp.arange(length)
        is_slot = slot < slots
        columns = jnp.arange(tiling.width)
        key_CS = triton.load(
            keys.at[b, g, slot[None], columns[:, None]],
            mask=is_slot[None] & (columns < keys.shape[3])[:, None],
            other=0.0,
        )
        seen = triton.load(
            visible.at[mask_row, mask_token[:, None], slot[None]],
            mask=jnp.broadcast_to(is_slot[None], (tiling.rows, length)),
            other=0,
        )
        scores = triton.dot(query, key_CS, precision=precision) * scale
        scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
        scores = jnp.where(seen != 0, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        finite = jnp.where(new_top == -jnp.inf, 0, new_top)  # no slot so far: 0, and not NaN
        weights, kept = jnp.exp(scores - finite[:, None]), jnp.exp(top - finite)
        columns = jnp.arange(tiling.value_width)
        value_SC = triton.load(
            values.at[b, g, slot[:, None], columns[None]],
            mask=is_slot[:, None] & (columns < values.shape[3])[None],
            other=0.0,
        )
        added = triton.dot(weights.astype(value_SC.dtype), value_SC, precision=precision)
        return (
            new_top,
            total * kept + jnp.sum(weights, axis=1),
            mixed * kept[:, None] + added,
        )

    return lax.fori_loop(first, end, chunk, carry)


def _merge(mixed_ref, top_ref, total_ref, out_ref, *, tiling: _Tiling):
    """Merges the shares of one query: the sums of all shares at the greatest of their scores."""
    b, t, h = (pl.program_id(axis) for axis in range(3))
    shares = jnp.arange(power(tiling.shares))
    is_share = shares < tiling.shares
    top = triton.load(top_ref.at[shares, b, t, h], mask=is_share, other=-jnp.inf)
    total = triton.load(total_ref.at[shares, b, t, h], mask=is_share, other=0.0)
    columns = jnp.arange(tiling.value_width)
    is_column = columns < mixed_ref.shape[-1]
    mixed = triton.load(
        mixed_ref.at[shares[:, None], b, t, h, columns[None]],
        mask=is_share[:, None] & is_column[None],
        other=0.0,
    )
    greatest = jnp.max(top)
    share = jnp.exp(top - jnp.where(greatest == -jnp.inf, 0, greatest))
    total = jnp.sum(total * share)
    merged = jnp.sum(mixed * share[:, None], axis=0) / total
    triton.store(out_ref.at[b, t, h, columns], merged.astype(out_ref.dtype), mask=is_column)
