"""Writes to the caches of all layers in one kernel."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.models.fused.rows import MOST_TOKENS
from spsjax.types import Array
from spsjax.utils.powers import power

_MOST_BUFFERS = 64  # per kernel


def supports(buffers: Mapping[int, Array], rows: Mapping[int, Array]) -> bool:
    """Returns whether `write` can write these rows."""
    return (
        all(buffer.size for buffer in buffers.values())  # compressed caches have empty values
        and all(new.shape[2] <= MOST_TOKENS for new in rows.values())
        and all(buffer.dtype == rows[at].dtype for at, buffer in buffers.items())
        and all(rows[at].shape[2] <= buffer.shape[2] for at, buffer in buffers.items())
    )


def write(
    buffers: Mapping[int, Array],
    rows: Mapping[int, Array],
    starts_B: Array,
    interpret: bool = False,
) -> dict[int, Array]:
    """Returns buffers [B, G, S, C] with new rows [B, G, P, C] from the slots `starts_B` on.

    Rows that would go beyond the last slot go into the last slots.
    """
    names, written = list(buffers), []
    for first in range(0, len(names), _MOST_BUFFERS):
        part = names[first : first + _MOST_BUFFERS]
        written += _write(
            [rows[name] for name in part], [buffers[name] for name in part], starts_B, interpret
        )
    return dict(zip(names, written))


def _write(rows, buffers, starts_B, interpret) -> list[Array]:
    """Does what `write` does in one kernel."""
    count = len(buffers)
    heads = [buffer.shape[0] * buffer.shape[1] for buffer in buffers]

    def kernel(starts_ref, rows_refs, _, *out_refs):
        own, head = pl.program_id(0), pl.program_id(1)
        for index, (rows_ref, out_ref) in enumerate(zip(rows_refs, out_refs)):
            write_head = functools.partial(_write_head, starts_ref, rows_ref, out_ref, head)
            pl.when((own == index) & (head < heads[index]))(write_head)

    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers],
        grid=(count, max(heads)),
        name="write",
        interpret=interpret,
        input_output_aliases={1 + count + index: index for index in range(count)},
        compiler_params=triton.CompilerParams(num_warps=4),
    )
    return list(call(starts_B, rows, buffers))


def _write_head(starts_ref, rows_ref, out_ref, head) -> None:
    """Writes the new rows of one head of one text; heads are counted over all texts."""
    _, G, P, C = rows_ref.shape
    text, head = head // G, head % G
    row, column = (jnp.arange(power(size)) for size in (P, C))
    mask = (row < P)[:, None] & (column < C)[None]
    new = triton.load(rows_ref.at[text, head, row[:, None], column[None]], mask=mask, other=0.0)
    slot = jnp.minimum(starts_ref[text], out_ref.shape[2] - P) + row
    triton.store(out_ref.at[text, head, slot[:, None], column[None]], new, mask=mask)
