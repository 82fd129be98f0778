"""Tiny models whose next token depends on the whole context."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import loading
from spsjax.models import transformer
from spsjax.parallel import sharding

# Kinds of positions and attention: changes of `tiny_config`.
FAMILIES = {
    "rotary": {},
    "relative": {"positions": "relative", "ffn": "gelu"},
    "learned": {"positions": "learned", "norm": "layer", "ffn": "gelu", "biases": "all"},
    "latent": {
        "mixer": "latent", "num_kv_heads": 1, "head_dim": 6, "rotary_dim": 4, "latent_rank": 6,
        "value_dim": 4,
    },
    "gemma": {"post_norms": True, "qk_norm": True, "windows": (9, 0), "rope_theta_local": 1e3},
}  # fmt: skip
# Prompts of other lengths, one of which repeats itself.
PROMPTS = [list(range(1, 30)), [7, 7], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]]


def tiny_config(vocab_size: int, **changes) -> transformer.Config:
    """Returns a config of one layer, in which a mesh can split every axis by eight."""
    fields = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 512,
        "tie_embeddings": False,
    }
    return transformer.Config(**fields | changes)


def spread_params(config: transformer.Config, seed: int, sharpness: float = 2.0):
    """Returns random parameters with logits of standard deviation `sharpness`.

    The weights of `transformer.init` are too small: every context would get nearly the same, flat
    distribution.
    """
    params = transformer.init(config, jax.random.key(seed))

    def grow(path, leaf):
        names = [entry.key for entry in path]
        if leaf.ndim < 2:
            return leaf
        if names[0] == "embed":
            return leaf / 0.02
        gain = sharpness if names[0] == "head" else 2.0
        return leaf / 0.02 * gain / leaf.shape[0] ** 0.5

    return jax.tree_util.tree_map_with_path(grow, params)


def spread_model(vocab_size: int, seed: int = 0, mesh=None, sharpness: float = 2.0, **changes):
    """Returns a model of random weights whose logits are spread and depend on the whole context."""
    config = tiny_config(vocab_size, **changes)
    return build_model(config, spread_params(config, seed, sharpness), mesh)


def nearby_model(model: loading.Model, seed: int = 1, distance: float = 0.2, mesh=None):
    """Returns a model near another, whose drafts are sometimes accepted and sometimes rejected."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
        leaf + distance * jnp.std(leaf) * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys)
    ]
    return build_model(model.config, jax.tree.unflatten(structure, leaves), mesh)


def build_model(config: transformer.Config, params, mesh) -> loading.Model:
    """Returns a model of these parameters, sharded over the mesh if there is one."""
    params = sharding.shard_params(params, sharding.param_shardings(mesh, config))
    return loading.Model("tiny", config, params, mesh=mesh)


def logits_of(model: loading.Model):
    """Returns the model in the oracle's form: tokens -> float64 logits [V], without a cache."""
    config, width = model.config, 64

    @jax.jit
    def logits(tokens, length):
        output = transformer.apply(config, model.params, tokens[None])
        return output.logits[0, length - 1]

    @functools.cache
    def cached(tokens):
        padded = np.zeros(width, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(logits(padded, len(tokens)), np.float64)

    return lambda tokens: cached(tuple(tokens))
