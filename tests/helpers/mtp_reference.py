"""The head for multi-token prediction in NumPy, one text at a time, written from the report.

DeepSeek-V3 (2412.19437, 2.2) in the order of inputs that published files have. There is no cache
and no batch: all pairs of a text are read again for each draft token.
"""

import numpy as np
from helpers.block_reference import turned
from scipy.special import expit, softmax


def logits(config, weights, embedding, head_DV, text, hidden_TD, drafted):
    """Returns the logits [K, V] of each draft token, before which the earlier ones were drafted.

    Args:
        config: config of the head's layer.
        weights: weights of the head, in NumPy.
        embedding, head_DV: embedding and vocabulary matrix of the target.
        text: tokens of the text.
        hidden_TD: hidden states of the target after its final norm, at all tokens but the last.
        drafted: draft tokens.
    """
    features, lines = [*hidden_TD], []
    for count in range(len(drafted)):
        tokens = [*text[1:], *drafted[:count]]
        outputs = _layer_outputs(config, weights, embedding[tokens], np.stack(features))
        features.append(outputs[-1])  # the next pair reads what this one gave
        lines.append(outputs[-1] @ head_DV)
    return np.stack(lines)


def _layer_outputs(config, weights, embedded_PD, features_PD):
    """Returns the head's normalised outputs [P, D] at pairs of a token and a hidden state."""
    pair = normed(config, weights["embed_norm"], embedded_PD)
    pair = pair, normed(config, weights["feature_norm"], features_PD)
    stream, layer = np.concatenate(pair, axis=-1) @ weights["fc"]["kernel"], weights["layer"]
    read = normed(config, layer["attention_norm"], stream)
    stream = stream + _attention(config, layer["attention"], read)
    read = normed(config, layer["ffn_norm"], stream)
    mixture = _mixture if config.num_experts else _feed_forward
    return normed(config, weights["norm"], stream + mixture(config, layer["ffn"], read))


def normed(config, weights, x):
    """Returns the RMS norm of x, whose scale is stored without a constant in some families."""
    size = np.sqrt(np.square(x).mean(-1, keepdims=True) + config.norm_eps)
    return x / size * (config.norm_offset + weights["scale"])


def _attention(config, weights, read_PD):
    P = len(read_PD)
    heads, positions = (P, -1, config.head_dim), np.arange(P)

    def projected(name):
        rows = (read_PD @ weights[name]["kernel"]).reshape(heads)
        if config.qk_norm and name != "value":
            rows = normed(config, weights[f"{name}_norm"], rows)
        return rows if name == "value" else turned(rows, positions, config.rope_theta)

    query, key, value = map(projected, ("query", "key", "value"))
    result = np.zeros_like(query)
    for head in range(config.num_heads):
        group = head * config.num_kv_heads // config.num_heads
        scores = query[:, head] @ key[:, group].T / np.sqrt(config.head_dim)
        scores = np.where(np.tril(np.ones((P, P), bool)), scores, -np.inf)
        result[:, head] = softmax(scores, axis=-1) @ value[:, group]
    return result.reshape(P, -1) @ weights["out"]["kernel"]


def _gated(read, gate, up, down):
    inner = read @ gate
    return inner * expit(inner) * (read @ up) @ down


def _feed_forward(config, weights, read_PD):
    return _gated(read_PD, *(weights[name]["kernel"] for name in ("gate", "up", "down")))


def _mixture(config, weights, read_PD):
    probs, result = softmax(read_PD @ weights["router"]["kernel"], axis=-1), np.zeros_like(read_PD)
    for token, row in enumerate(probs):
        chosen = np.argsort(-row)[: config.experts_per_token]
        shares = row[chosen] / (row[chosen].sum() if config.renormalize else 1)
        for expert, share in zip(chosen, shares):
            kernels = (weights[f"experts_{name}"][expert] for name in ("gate", "up", "down"))
            result[token] += share * _gated(read_PD[token], *kernels)
    return result
