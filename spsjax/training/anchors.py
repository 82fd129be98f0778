"""Random indices at which drafts begin in training, so that a batch needs fewer of them.

A drafter of blocks costs a whole block per draft, and its authors begin 512 blocks per text (Chen
et al. 2026, 2602.06036).
"""

import jax
import jax.numpy as jnp

from spsjax.training import step as train_step
from spsjax.types import Array, PyTree

_ROLE = 4  # of the random key


def drawn(batch: PyTree, count: int, steps: int) -> tuple[Array, Array]:
    """Returns `count` distinct indices per row, in order, and their weights: [B, N] each.

    They are drawn without replacement among the indices whose drafts count, by `loss_mask`, in at
    least one of their steps. The draft at index t predicts the tokens of columns t + 1 to
    t + steps. A weight is the number of these indices over the number of draws, so that the
    expected loss is that of drafts at every index. If a row has fewer of them, other indices are
    drawn, too, with weight 0.

    The texts determine the draws, so that a resumed run repeats them.

    Args:
        batch: `tokens` [B, T+1] and columns of `loss_mask`.
        count: number of indices per row, at most T.
        steps: number of steps that are trained.
    """
    mask_BT = train_step.loss_mask(batch)
    T = mask_BT.shape[1]
    padded = jnp.pad(mask_BT, ((0, 0), (0, steps)))
    counts_BT = sum(padded[:, 1 + step : 1 + step + T] for step in range(steps)) > 0
    numbers = jax.random.uniform(train_step.text_key(batch["tokens"], _ROLE), mask_BT.shape)
    numbers = jnp.where(counts_BT, numbers, -1)
    index_BN = jnp.sort(jax.lax.top_k(numbers, count)[1], axis=1)
    eligible_B1 = jnp.sum(counts_BT, axis=1, keepdims=True)
    weight = eligible_B1 / jnp.clip(eligible_B1, 1, count)
    return index_BN, weight * jnp.take_along_axis(counts_BT, index_BN, axis=1)


def in_columns(values_BL: Array, columns: Array, length: int) -> Array:
    """Returns values [B, T] with 0 in all other columns; columns beyond the text are dropped.

    The columns are [L], the same in all rows, or [B, L].
    """

    def row(values_L, columns_L):
        whole = jnp.zeros(length, values_L.dtype)
        return whole.at[columns_L].set(values_L, mode="drop")

    return jax.vmap(row, in_axes=(0, None if columns.ndim == 1 else 0))(values_BL, columns)
