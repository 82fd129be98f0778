"""Training passes of Falcon's layer over all units of a text at once."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.drafters import features
from spsjax.drafters.contrib import sequences
from spsjax.models import caches as kv
from spsjax.types import Array, Block, PyTree


def unrolled(
    drafter: Any,  # `falcon.Drafter`, which imports this module
    params: PyTree,
    next_BT: Array,
    features_BTD: Array,
    steps: int,
    detached: bool = False,
    remat: bool = False,
    later: Array | None = None,
    anchors: Array | None = None,
    glanced: Array | None = None,
) -> Iterator[Array]:
    """Yields the outputs of each step, as `FeatureDrafter.unrolled` does.

    `glanced` [B, T] bool marks the drafts whose first pair is replaced by the pair k tokens later,
    which its slot has to predict ("Coupled Sequential Glancing Distillation" of the paper).
    """
    k, (B, T) = drafter.tokens_per_step, next_BT.shape
    run = jax.checkpoint(drafter.run) if remat else drafter.run
    read, carries = drafter.read(
        params, next_BT, features_BTD, drafter.no_carry(B, features_BTD.dtype)
    )
    _, text = run(params, read, None)
    read_BTkD = sequences.last(read, k)
    if glanced is not None:
        read_BTkD = _glancing(drafter, params, next_BT, features_BTD, carries, read_BTkD, glanced)

    def unit(read_BLkD: Array, index: Array, block: Block) -> tuple[Array, Block]:
        """Returns the outputs [B, L, k, D] of the next unit of each draft, and the block."""
        lengths = features.lengths_before(jnp.maximum(index - k, -1), B)
        cache = kv.KVCache(text.keys, text.values, lengths, (None,))
        positions = lengths[:, None] + block.size + jnp.arange(k)
        visible = jnp.ones((1, k, block.positions.shape[1]), bool)  # units attend both ways
        rows = sequences.rows(read_BLkD)
        outputs, block = run(params, rows, cache, block, positions, visible)
        return outputs.reshape(read_BLkD.shape), block

    index = jnp.arange(T)
    if anchors is not None:
        index = anchors
        read_BTkD, carries = (features.entries(array, anchors) for array in (read_BTkD, carries))
    drafts, slots = B * index.shape[-1], -(-steps // k) * k
    empty = kv.empty_block(kv.shapes(drafter.config, drafts, slots), read.dtype)
    outputs, block = unit(read_BTkD, index, empty)
    yield outputs[:, :, 0]
    if later is not None:
        index, outputs, carries = later, outputs[:, later], carries[:, later]
        block = sequences.at_indices(block, B, later)
    carry = sequences.rows(carries)
    for step in range(1, steps):
        if step % k == 0:
            drafted = lax.stop_gradient(outputs) if detached else outputs
            columns = index[..., None] + step - k + 1 + jnp.arange(k)
            tokens = features.entries(next_BT, columns.reshape(*index.shape[:-1], -1))
            tokens = tokens.reshape(-1, k)
            read, carries = drafter.read(params, tokens, sequences.rows(drafted), carry)
            carry = carries[:, -1]
            outputs, block = unit(read.reshape(outputs.shape), index, block)
        yield outputs[:, :, step % k]


def _glancing(
    drafter: Any,  # `falcon.Drafter`, which imports this module
    params: PyTree,
    next_BT: Array,
    features_BTD: Array,
    carries: Array,
    read_BTkD: Array,
    glanced_BT: Array,
) -> Array:
    """Returns the units' inputs, with the first pair replaced by the pair k later where glanced."""
    k = drafter.tokens_per_step

    def replaced(array: Array) -> Array:
        pairs = sequences.last(array, k)
        flags = glanced_BT.reshape(*glanced_BT.shape, *[1] * (array.ndim - 2))
        first = jnp.where(flags, jnp.roll(array, -1, axis=1), pairs[:, :, 0])
        return sequences.rows(pairs.at[:, :, 0].set(first))

    before = sequences.rows(sequences.last(carries, k + 1)[:, :, 0])
    read, _ = drafter.read(params, replaced(next_BT), replaced(features_BTD), before)
    return jnp.where(glanced_BT[..., None, None], read.reshape(read_BTkD.shape), read_BTkD)
