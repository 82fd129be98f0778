"""Tiny models like those of `helpers.models`, drawn by NumPy, so that nothing is compiled."""

import jax
import numpy as np
from helpers.models import build_model, tiny_config

from spsjax import loading
from spsjax.models import transformer


def drawn(shapes, seed: int, scale: float = 0.02):
    """Returns parameters of some shapes like those of an `init`: biases are 0 and scales 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if leaf.ndim < 2:
            return np.full(leaf.shape, path[-1].key == "scale", leaf.dtype)
        return rng.normal(0, scale, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def numpy_params(config: transformer.Config, seed: int, scale: float = 0.02):
    """Returns random parameters of a transformer in float32."""
    return drawn(transformer.param_shapes(config), seed, scale)


def numpy_spread_params(config: transformer.Config, seed: int, sharpness: float = 2.0):
    """Returns random parameters with logits of standard deviation `sharpness`."""

    def grow(path, leaf):
        names = [entry.key for entry in path]
        if leaf.ndim < 2 or names[0] == "embed":
            return leaf
        gain = sharpness if names[0] == "head" else 2.0
        return leaf * np.float32(gain / leaf.shape[0] ** 0.5)

    return jax.tree_util.tree_map_with_path(grow, numpy_params(config, seed, 1.0))


def numpy_spread_model(vocab_size: int, seed=0, mesh=None, sharpness=2.0, **changes):
    """Returns a model of random weights whose logits are spread and depend on the whole context."""
    config = tiny_config(vocab_size, **changes)
    return build_model(config, numpy_spread_params(config, seed, sharpness), mesh)


def numpy_nearby_model(model: loading.Model, seed=1, distance=0.2, mesh=None) -> loading.Model:
    """Returns a model near another, whose drafts are sometimes accepted and sometimes rejected."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        leaf = np.asarray(leaf)
        noise = rng.normal(0, distance * leaf.std(), leaf.shape)
        return leaf + noise.astype(leaf.dtype)

    return build_model(model.config, jax.tree.map(moved, model.params), mesh)
