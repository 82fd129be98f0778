"""Distributions of all tokens of a text, from one pass of a model."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import decode, generation
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.sampling import RowParams, SamplingParams
from spsjax.types import Array, PyTree

Text = tuple[list[int], list[int]]  # token ids of a prompt, and of what follows it


def written(target: Model, prompts: Sequence[list[int]], drafter=None, **options) -> list[Text]:
    """Returns prompts with the tokens that a target generates after them, if there are any.

    Raises InputError if nothing is generated after any prompt. `options` are those of `generate`.
    """
    out = generation.generate(target, prompts, drafter, **options)
    texts = [(prompt, tokens.tolist()) for prompt, tokens in zip(prompts, out.tokens)]
    texts = [(prompt, tokens) for prompt, tokens in texts if tokens]
    if not texts:
        raise InputError("prompts: expected texts that continue after them, found none")
    return texts


def of_tokens(
    function: Callable[[Array, RowParams], PyTree],
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
) -> PyTree:
    """Returns arrays [N, ...] of a function of a text, one entry per token of `tokens`.

    The function gets the text as a batch of equal rows [B, T], a row per data shard of the model's
    mesh, padded to few different lengths; and the sampling parameters of the rows. It returns
    arrays [T, ...] of the first row. Kept are the positions whose logits give the distributions of
    `tokens`.
    """
    text = np.asarray([*prompt, *tokens], np.int32)
    rows = 1 if model.mesh is None else model.mesh.shape["data"]
    padded = np.zeros((rows, decode.sizes.num_slots(len(text))), np.int32)
    padded[:, : len(text)] = text
    with model.in_mesh():
        placed = jax.device_put((padded, params.rows(rows)), sharding.batch_sharding(model.mesh))
        arrays = multihost.to_host(function(*placed))
    return jax.tree.map(lambda array: array[len(prompt) - 1 : len(text) - 1], arrays)


def logits(
    config: transformer.Config, params: PyTree, tokens_BT: Array, vocab_size: int | None = None
) -> Array:
    """Returns the logits [B, T, V], cut or padded to `vocab_size`: padding has probability 0."""
    whole = sharding.gather_vocab(transformer.apply(config, params, tokens_BT).logits)
    size = whole.shape[-1]
    padding = (0, 0), (0, 0), (0, max((vocab_size or size) - size, 0))
    lowest = jnp.finfo(whole.dtype).min / 2  # finite, or `to_probs` would report it
    return jnp.pad(whole[..., :vocab_size], padding, constant_values=lowest)
