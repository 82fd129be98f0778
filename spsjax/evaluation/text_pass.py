"""Distributions of all tokens of a text, from one pass of a model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import decode
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.sampling import RowParams, SamplingParams
from spsjax.types import Array, PyTree


def inputs(
    model: Model, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> tuple[Array, RowParams, slice]:
    """Returns a text as a batch of equal rows, with sampling parameters, and where its tokens are.

    The batch has a row per data shard of the model's mesh, padded to few different lengths. The
    slice holds the positions whose logits give the distributions of `tokens`.
    """
    text = np.asarray([*prompt, *tokens], np.int32)
    rows = 1 if model.mesh is None else model.mesh.shape["data"]
    padded = np.zeros((rows, decode.num_slots(len(text))), np.int32)
    padded[:, : len(text)] = text
    with model.in_mesh():
        placed = jax.device_put((padded, params.rows(rows)), sharding.batch_sharding(model.mesh))
    return *placed, slice(len(prompt) - 1, len(text) - 1)


def logits(
    config: transformer.Config, params: PyTree, tokens_BT: Array, vocab_size: int | None = None
) -> Array:
    """Returns the logits [B, T, V], cut or padded to `vocab_size`: padding has probability 0."""
    whole = sharding.gather_vocab(transformer.apply(config, params, tokens_BT).logits)
    size = whole.shape[-1]
    padding = (0, 0), (0, 0), (0, max((vocab_size or size) - size, 0))
    lowest = jnp.finfo(whole.dtype).min / 2  # finite, or `to_probs` would report it
    return jnp.pad(whole[..., :vocab_size], padding, constant_values=lowest)
