"""A table in the place of the transformer: the logits of every context, looked up through caches.

The real code of caches, positions and masks decides which tokens a node can see. So a wrong mask or
position gives NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.models.context import context_of
from spsjax.types import Block, ModelOutput

CONTEXT = 10  # the most tokens that a model can see


def config(vocab: int) -> transformer.Config:
    """Returns a config whose cache holds two numbers per token: room for a token id."""
    return transformer.Config(vocab, 1, 1, 1, 1, 1, 2, 64)


@functools.lru_cache
def table(vocab: int, seed: int, length: int = CONTEXT, spread: float = 1.5) -> np.ndarray:
    """Returns random logits [contexts, V] of all contexts of up to `length` tokens, float64."""
    contexts = sum(vocab**size for size in range(length + 1))
    return np.random.default_rng(seed).normal(0, spread, (contexts, vocab))


def model_of(table: np.ndarray):
    """Returns the table in the form of the oracle's model: tokens -> logits."""

    def logits(tokens):
        index = 0
        for token in tokens:
            index = index * table.shape[1] + token + 1
        return table[index]

    return logits


def params_of(table: np.ndarray):
    """Returns the table as parameters of `apply`."""
    return {"table": jnp.asarray(table), "norm": {"scale": jnp.ones(1, table.dtype)}}


def apply(
    config,
    params,
    tokens_BT,
    cache=None,
    *,
    block=None,
    tap_layers=(),
    num_logits=None,
    skipped=Skipped(),
    **where,
):
    """Replaces `transformer.apply`: looks a table up by the tokens that a node can see.

    Caches hold tokens. The real code decides which slots and nodes are visible. The residual stream
    is the target's logits. Without some sub-layers they are another token's: a bad draft.

    Args:
      where: positions and ancestors, as `transformer.apply` takes them.
    """
    B, T = tokens_BT.shape
    settings = {"positions_BT": None, "ancestors": None} | where
    context = context_of(T, cache, block, **settings)
    rows = jnp.tile(tokens_BT[:, None, :, None], (1, 1, 1, 2)).astype(params["table"].dtype)
    if block is not None:
        start = (0, 0, block.size, 0)
        rows = jax.lax.dynamic_update_slice(block.keys[0], rows, [jnp.int32(i) for i in start])
    P = rows.shape[2]
    seen = jnp.broadcast_to(context.block_visible, (B, T, P))
    held = rows[:, 0, :, 0]
    if cache is not None:
        cached = jnp.broadcast_to((cache.positions() >= 0)[:, None], (B, T, cache.num_slots))
        seen = jnp.concatenate([cached, seen], axis=2)
        # With one head of two numbers every layout of a cache is [B, S, 2].
        slots = cache.keys[0].reshape(B, cache.num_slots, 2)[:, :, 0]
        held = jnp.concatenate([slots, held], axis=1)
    index = jnp.zeros(tokens_BT.shape, jnp.int32)
    if config.recent:
        held, seen = _windowed(config, context, cache, held, seen)
    # Slots come in order of positions, and nodes after their parents.
    for column in range(held.shape[1]):
        longer = index * config.vocab_size + held[:, column, None].astype(jnp.int32) + 1
        index = jnp.where(seen[:, :, column], longer, index)
    logits = params["table"][jnp.clip(index, 0, len(params["table"]) - 1)]
    # NaN reveals a wrong position, and a mask that shows too much or too little.
    most = config.sinks + config.recent if config.recent else config.max_positions
    valid = jnp.sum(seen, axis=-1) == jnp.minimum(context.positions + 1, most)
    logits = jnp.where(valid[..., None], logits, jnp.nan)
    positions = jnp.broadcast_to(context.block_positions, (B, P))
    size = jnp.int32(T) + (0 if block is None else block.size)
    extended = Block((rows,), (rows,), positions, size)
    last = logits if num_logits is None else logits[:, -num_logits:]
    last = jnp.roll(last, 1, axis=-1) if skipped.attention else last
    return ModelOutput(last, logits, (logits,) * len(tap_layers), extended)


def _windowed(config, context, cache, held_BP, seen_BTP):
    """Returns tokens in the order of their positions, and which of them each token sees."""
    B, _, P = seen_BTP.shape
    known = jnp.broadcast_to(context.block_positions, (B, P - (cache.num_slots if cache else 0)))
    known = jnp.concatenate([cache.positions(), known], axis=1) if cache else known
    near = known[:, None] > context.positions[:, :, None] - config.recent
    seen_BTP = seen_BTP & (near | (known < config.sinks)[:, None])
    order = jnp.argsort(known, axis=1)
    seen_BTP = jnp.take_along_axis(seen_BTP, order[:, None], axis=2)
    return jnp.take_along_axis(held_BP, order, axis=1), seen_BTP


def embed(config, params, tokens_BT):
    """Replaces `transformer.embed`: one number per token."""
    return jax.nn.one_hot(tokens_BT, config.vocab_size, dtype=params["table"].dtype)


def head(config, params, hidden_BTD):
    """Replaces `transformer.head`: a drafter of features regresses the table's logits."""
    return hidden_BTD


REPLACED = {"apply": apply, "embed": embed, "head": head}
