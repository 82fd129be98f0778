"""A toy language that a tiny model learns in a few steps, and programs that its tests share."""

import functools

import jax
import numpy as np
from helpers.models import tiny_config

from spsjax.training import step as train_step

VOCAB = 16
CONFIG = tiny_config(VOCAB, tie_embeddings=True)


def toy_examples(count, seed):
    """[count, 17] sequences: each token is mostly its predecessor times 3 plus 1."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((count, 17), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, count)
    for position in range(1, 17):
        follow = (tokens[:, position - 1] * 3 + 1) % VOCAB
        noise = rng.integers(0, VOCAB, count)
        tokens[:, position] = np.where(rng.random(count) < 0.9, follow, noise)
    return tokens


EXAMPLES, HELD_OUT = toy_examples(64, 0), toy_examples(16, 1)


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, tokens):
    """Returns the output of a pass over whole texts [B, T]."""
    output = train_step.forward(config, params, tokens)
    return output.logits, output.hidden
