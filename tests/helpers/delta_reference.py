"""Gated delta net in NumPy, one token after another, as the oracle of `models.delta`.

Written from the recurrence of the paper (Yang et al. 2024, arXiv 2412.06464, equation 10) and the
description of Qwen3-Next's layer: convolutions, keys and queries of length 1, a gated norm.
"""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def layer(config, weights, x_TD):
    """Returns the outputs [T, D] of a layer, and its state after each token [T, H, C, V]."""
    weights = {name: np.asarray(leaf, np.float64) for name, leaf in _flat(weights)}
    x_TD = np.asarray(x_TD, np.float64)
    G, H, C = config.num_kv_heads, config.num_heads, config.head_dim
    query, key, value = (
        _convolved(config, weights, name, x_TD) for name in ("query", "key", "value")
    )
    query, key = (_unit(rows.reshape(len(x_TD), G, C)) for rows in (query, key))
    value = value.reshape(len(x_TD), H, -1)
    strength = 1 / (1 + np.exp(-x_TD @ weights["strength.kernel"]))
    pace = np.log1p(np.exp(x_TD @ weights["decay.kernel"] + weights["decay_bias"]))
    decay = np.exp(-np.exp(weights["decay_rate"]) * pace)
    gate = silu(x_TD @ weights["gate.kernel"]).reshape(value.shape)
    states = np.zeros((len(x_TD), H, C, value.shape[2]))
    mixed = np.zeros_like(value)
    for head in range(H):
        state, group = np.zeros(states.shape[2:]), head // (H // G)
        for token in range(len(x_TD)):
            k, v = key[token, group], value[token, head]
            state = decay[token, head] * state
            state = state + strength[token, head] * np.outer(k, v - k @ state)
            states[token, head] = state
            mixed[token, head] = query[token, group] @ state / C**0.5
    mixed /= np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True) + config.norm_eps)
    gated = mixed * weights["scale"] * gate
    return gated.reshape(len(x_TD), -1) @ weights["out.kernel"], states


def _flat(weights, prefix=""):
    for name, leaf in weights.items():
        if isinstance(leaf, dict):
            yield from _flat(leaf, f"{prefix}{name}.")
        else:
            yield prefix + name, leaf


def _convolved(config, weights, name, x_TD):
    rows, taps = x_TD @ weights[f"{name}.kernel"], weights[f"{name}_taps"]
    padded = np.pad(rows, ((len(taps) - 1, 0), (0, 0)))
    return silu(sum(padded[i : i + len(rows)] * tap for i, tap in enumerate(taps)))


def _unit(rows):
    return rows / np.sqrt(np.sum(rows**2, axis=-1, keepdims=True) + 1e-6)
