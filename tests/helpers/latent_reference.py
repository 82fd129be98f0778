"""A decoder with latent attention and mixtures, written in NumPy from the papers of DeepSeek.

Latent attention: arXiv 2405.04434, 2.1. Mixtures: arXiv 2412.19437, 2.1.2. One token and one head
at a time, in float64, without a cache.
"""

import numpy as np


def rms(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def rotated(x, position, theta, interleaved):
    """Returns a rotated vector; pairs are neighbours, or numbers of the two halves."""
    half = len(x) // 2
    pairs = x.reshape(half, 2) if interleaved else x.reshape(2, half).T
    angles = position * theta ** (-np.arange(half) / half)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(-1)


def attention(config, weights, x_TD):
    """Returns the output of latent attention for the normalised inputs of one text."""
    head, rotary, rank = config.head_dim, config.rotary_dim, config.latent_rank
    theta, interleaved = config.rope_theta, config.rope_interleaved
    compressed = x_TD @ weights["latent"]["kernel"] + weights["latent"].get("bias", 0)
    latents = rms(compressed[:, :rank], weights["latent_norm"]["scale"], 1e-6)
    if config.query_rank:
        down = weights["query_down"]
        inner = rms(
            x_TD @ down["kernel"] + down.get("bias", 0), weights["query_norm"]["scale"], 1e-6
        )
        queries = inner @ weights["query_up"]["kernel"]
    else:
        queries = x_TD @ weights["query"]["kernel"]
    queries = queries.reshape(len(x_TD), config.num_heads, head)
    scale = config.query_scale or head**-0.5
    mixed = np.zeros((len(x_TD), config.num_heads, config.value_dim))
    for h in range(config.num_heads):
        keys, values = (
            latents @ weights["key_up"]["kernel"][h].T,
            latents @ weights["value_up"]["kernel"][h],
        )
        for t in range(len(x_TD)):
            query = queries[t, h]
            turned = rotated(query[head - rotary :], t, theta, interleaved)
            scores = [
                query[: head - rotary] @ keys[s]
                + turned @ rotated(compressed[s, rank:], s, theta, interleaved)
                for s in range(t + 1)
            ]
            shares = np.exp(scale * np.array(scores))
            mixed[t, h] = shares / shares.sum() @ values[: t + 1]
    return mixed.reshape(len(x_TD), -1) @ weights["out"]["kernel"] + weights["out"].get("bias", 0)


def gated(weights, x):
    gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def mixture(config, weights, x):
    """Returns the output of the chosen experts and of the shared one for one token."""
    scores = 1 / (1 + np.exp(-(x @ weights["router"]["kernel"])))
    preferred = scores + weights["choice_bias"]
    groups = np.split(np.arange(config.num_experts), config.expert_groups)
    groups.sort(key=lambda group: -np.sort(preferred[group])[-2:].sum())
    allowed = np.concatenate(groups[: config.groups_per_token])
    chosen = sorted(allowed, key=lambda expert: -preferred[expert])[: config.experts_per_token]
    total = scores[chosen].sum() if config.renormalize else 1
    out = gated(weights["shared"], x) if config.shared_d_ff else 0
    for expert in chosen:
        names = ("gate", "up", "down")
        own = {name: {"kernel": weights[f"experts_{name}"][expert]} for name in names}
        out = out + config.expert_scale * scores[expert] / total * gated(own, x)
    return out


def logits(config, params, tokens):
    """Returns the logits [T, V] of one text."""
    x = params["embed"]["embedding"][tokens]
    for layer in range(config.num_layers):
        weights, own = params["layers"][layer], config.layer(layer)
        eps = own.norm_eps
        x = x + attention(
            own, weights["attention"], rms(x, weights["attention_norm"]["scale"], eps)
        )
        normed = rms(x, weights["ffn_norm"]["scale"], eps)
        if own.num_experts:
            x = x + np.stack([mixture(own, weights["ffn"], token) for token in normed])
        else:
            x = x + gated(weights["ffn"], normed)
    return rms(x, params["norm"]["scale"], config.norm_eps) @ params["head"]["kernel"]
