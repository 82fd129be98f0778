"""Projections to heads, their norms, and their rotation, in one kernel."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spsjax.models.fused.rows import Columns, Matrix, Rows, Scale, call, columns_of, vector
from spsjax.types import Array
from spsjax.utils.powers import power

WIDEST = 256  # widest head


def heads(
    x_RD: Array,
    norm: Scale,
    matrices: Sequence[Matrix],
    head_norms: Sequence[Scale | None],
    angles: tuple[Array, Array] | None,
    head_dim: int,
    tokens: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Returns queries [R, H, C], keys and values [B, G, T, C], for rows before the layer's norm.

    Queries and keys are normalised and rotated, and values are finite (`context.finite_values`).

    Args:
        x_RD: rows: T tokens of each of B texts.
        norm: norm of the rows.
        matrices: projections to queries, keys and values.
        head_norms: norms of the heads of queries and of keys; None: they are not normalised.
        angles: cosine and sine [R, C/2] of the rows' positions; None: there is no rotation.
        head_dim: C, an even number.
        tokens: T.
    """
    H, G, _ = (matrix.kernel.shape[1] // head_dim for matrix in matrices)
    half = head_dim // 2
    # The norm of a head needs all of its columns.
    width = power(half)
    if head_norms[0] is None:
        width = min(width, columns_of(half * (H + G)))
    plan = _Heads(H, head_dim, tokens, width)
    R = len(x_RD)
    shape = R // tokens, G, tokens, head_dim
    run = call(
        "heads",
        functools.partial(_heads, plan=plan),
        [(R, H * head_dim), shape, shape],
        x_RD,
        interpret,
        (H + G) * plan.parts,
    )
    query, key, value = run(x_RD, norm, list(matrices), list(head_norms), angles)
    return query.reshape(R, H, head_dim), key, value


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Division of heads over programs.

    A program has columns of one head: some of its first half, and those of its second half that are
    rotated against them. Keys and values of a head belong to one program.
    """

    queries: int  # number of query heads; those of the keys follow
    head_dim: int
    tokens: int  # per text
    width: int  # columns of a program, of each half

    @property
    def parts(self) -> int:
        """Number of programs per head."""
        return pl.cdiv(self.head_dim // 2, self.width)


def _heads(
    x_ref, norm, matrices, head_norms, angles, query_ref, key_ref, value_ref, *, plan: _Heads
):
    rows, half = Rows.of(x_ref, norm), plan.head_dim // 2
    head = pl.program_id(0) // plan.parts
    column = (pl.program_id(0) % plan.parts) * plan.width + jnp.arange(plan.width)

    def halves(head):
        starts = head * plan.head_dim, head * plan.head_dim + half
        return [Columns(start + column, column < half) for start in starts]

    def placed(pair, head_norm):
        pair = pair if head_norm is None else _normalised(pair, head_norm, column, half)
        return pair if angles is None else _rotated(pair, rows, angles, column, half)

    def store_by_text(out_ref, head, pair):
        text, token = rows.index // plan.tokens, rows.index % plan.tokens
        for start, values in zip((0, half), pair):
            columns = Columns(start + column, column < half)
            at = out_ref.at[text[:, None], head, token[:, None], columns.index[None]]
            triton.store(at, values, mask=rows.mask(columns))

    @pl.when(head < plan.queries)
    def _():
        own = halves(head)
        pair = placed(rows.times([matrices[0]] * 2, own), head_norms[0])
        for columns, values in zip(own, pair):
            triton.store(rows.at(query_ref, columns), values, mask=rows.mask(columns))

    @pl.when(head >= plan.queries)
    def _():
        own = halves(head - plan.queries)
        *keys, first, second = rows.times([matrices[1]] * 2 + [matrices[2]] * 2, own * 2)
        keys, values = placed(keys, head_norms[1]), (first, second)
        finite = [value - value == 0 for value in values]
        keys = [jnp.where(mask, key, jnp.nan) for mask, key in zip(finite, keys)]
        values = [jnp.where(mask, value, 0) for mask, value in zip(finite, values)]
        store_by_text(key_ref, head - plan.queries, keys)
        store_by_text(value_ref, head - plan.queries, values)


def _normalised(pair, norm: Scale, column: Array, half: int) -> list[Array]:
    """Returns the halves of heads after their RMSNorm."""
    wide = [values.astype(jnp.float32) for values in pair]
    square = sum(jnp.sum(values * values, axis=1) for values in wide) / (2 * half)
    factor = lax.rsqrt(square + norm.eps)[:, None]
    normalised = []
    for index, values in enumerate(wide):
        scale = vector(norm.scale, Columns(column + index * half, column < half))
        normalised.append((values * factor * (norm.offset + scale[None])).astype(pair[0].dtype))
    return normalised


def _rotated(pair, rows: Rows, angles, column: Array, half: int) -> list[Array]:
    """Returns the halves of heads, rotated against each other (`rope.rotate`)."""
    columns = Columns(column, column < half)
    cos, sin = (
        triton.load(rows.at(angle, columns), mask=rows.mask(columns), other=0.0) for angle in angles
    )
    first, second = (values.astype(jnp.float32) for values in pair)
    rotated = first * cos - second * sin, second * cos + first * sin
    return [values.astype(pair[0].dtype) for values in rotated]
