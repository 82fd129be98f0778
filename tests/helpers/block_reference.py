"""Block drafters in NumPy, one text at a time, written from the papers.

There is no cache, no batch and no chunk: all features of a text are read again for each block.
"""

import numpy as np
from scipy.special import expit


def normed(x, scale, eps):
    """Returns the RMS norm of x."""
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * scale


def turned(x_THC, positions, theta):
    """Returns heads rotated by their positions."""
    half = x_THC.shape[-1] // 2
    angles = np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x_THC[..., :half], x_THC[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attended(drafter, weights, layer, read_PD, features_TD):
    """Returns the attention of a block's slots to all features and to the block itself."""
    config, T, P = drafter.config, len(features_TD), len(read_PD)
    both, heads = np.concatenate([features_TD, read_PD]), (-1, config.head_dim)
    positions = np.arange(T + P)

    def projected(name, x, where):
        rows = (x @ weights[name]["kernel"]).reshape(len(x), *heads)
        if name != "value":
            rows = normed(rows, weights[f"{name}_norm"]["scale"], config.norm_eps)
            rows = turned(rows, where, config.rope_theta)
        return rows

    query = projected("query", read_PD, positions[T:])
    key, value = (projected(name, both, positions) for name in ("key", "value"))
    window = config.window(layer)
    causal = drafter.causal == "all" or (drafter.causal == "windows" and window)
    result = np.zeros_like(query)
    for slot in range(P):
        seen = positions > T + slot - window if window else positions >= 0
        seen = seen & (positions <= T + slot) if causal else seen
        for head in range(config.num_heads):
            group = head * config.num_kv_heads // config.num_heads
            scores = key[seen, group] @ query[slot, head] / np.sqrt(config.head_dim)
            shares = np.exp(scores - scores.max())
            result[slot, head] = shares @ value[seen, group] / shares.sum()
    return result.reshape(P, -1) @ weights["out"]["kernel"]


def plain(read, sublayer, conv):
    """Returns the output of a sub-layer, without convolutions around it."""
    return sublayer(read)


def outputs(drafter, weights, embedding, taps_TW, anchor, around=plain):
    """Returns the outputs [P, D] of a block's slots behind a text.

    Args:
        drafter, weights: drafter and its weights in NumPy.
        embedding: embedding of the target.
        taps_TW: inputs of the target's tapped layers at all tokens before the anchor.
        anchor: last token of the text.
        around: function of the input of a sub-layer, the sub-layer, and the weights of its
            convolutions, which returns the output.
    """
    eps = drafter.config.norm_eps
    features = normed(taps_TW @ weights["fc"]["kernel"], weights["hidden_norm"]["scale"], eps)
    tokens = [anchor] + [drafter.mask_token_id] * (drafter.block_size - 1)
    stream = embedding[tokens] * drafter.embed_scale
    for index in range(drafter.config.num_layers):
        layer = weights["layers"][index]

        def attention(read, index=index, layer=layer):
            return attended(drafter, layer["attention"], index, read, features)

        def feed_forward(read, ffn=layer["ffn"]):
            gate = read @ ffn["gate"]["kernel"]
            return gate * expit(gate) * (read @ ffn["up"]["kernel"]) @ ffn["down"]["kernel"]

        for name, sublayer in (("attention", attention), ("ffn", feed_forward)):
            read = normed(stream, layer[f"{name}_norm"]["scale"], eps)
            stream = stream + around(read, sublayer, layer.get(f"{name}_conv"))
    return normed(stream, weights["norm"]["scale"], eps)


def logits(drafter, head_DV, outputs_PD):
    """Returns the logits [K, V] of the slots that draft."""
    drafting = outputs_PD[1 - drafter.anchor_drafts :][: drafter.num_speculative_tokens]
    result = drafting @ head_DV * drafter.output_scale
    return drafter.softcap * np.tanh(result / drafter.softcap) if drafter.softcap else result


def convolved(read, sublayer, conv):
    """Returns the output of a sub-layer with DFlash2's convolutions around it."""
    base, projection = conv["base_kernel"], conv["kernel_projection"]["kernel"]
    (_, taps, D), P = base.shape, len(read)
    groups = projection.shape[1] // (2 * taps)
    deltas = (read @ projection).reshape(P, 2, taps, groups)

    def mixed(x, side):
        result = np.zeros_like(x)
        for slot in range(P):
            for tap in range(min(taps, slot + 1)):
                delta = np.repeat(deltas[slot, side, tap], D // groups)
                result[slot] += (base[side, tap] + delta) * x[slot - tap]
        return result

    return mixed(sublayer(mixed(read, 0)), 1)


def selected(drafter, selector, line_V, output, previous):
    """Returns the logits [V] of DFlash2's selector for a slot; -inf: no candidate."""
    result = np.full_like(line_V, -np.inf)
    hidden = output @ selector["hidden_projection"]["kernel"]
    mixed = selector["predecessor_codebook"][previous] * hidden
    for candidate in np.argsort(-line_V)[: drafter.selector_top_k]:
        result[candidate] = line_V[candidate] + mixed @ selector["successor_codebook"][candidate]
    return result


def selector_loss(drafter, selector, line_V, output, previous, target_V, hard):
    """Returns the cross entropy of the target's choice among the candidates of a slot.

    It is its best token if labels are hard, else its distribution over the candidates.
    """
    candidates, label = list(np.argsort(-line_V)[: drafter.selector_top_k]), target_V.argmax()
    if label not in candidates:
        candidates[-1] = label
    hidden = output @ selector["hidden_projection"]["kernel"]
    mixed = selector["predecessor_codebook"][previous] * hidden
    scores = [line_V[c] + mixed @ selector["successor_codebook"][c] for c in candidates]
    logs = scores - np.log(np.exp(scores).sum())
    wanted = target_V[candidates] / target_V[candidates].sum()
    return -logs[candidates.index(label)] if hard else -wanted @ logs


def confidence_loss(weights, output, previous, overlap):
    """Returns the binary cross entropy of DSpark's confidence with a rate of acceptance."""
    embedded = weights["markov_head"]["markov_w1"]["embedding"][previous]
    proj = weights["confidence_head"]["proj"]
    both = np.concatenate([output, embedded])
    guess = expit(both @ proj["kernel"][:, 0] + proj["bias"][0])
    return -overlap * np.log(guess) - (1 - overlap) * np.log(1 - guess)


def pace(confidences, share):
    """Returns the weights of D-PACE for the tokens of a draft, all of which count."""
    accepted = [
        np.prod((1 - share) * confidences[: m + 1] + share) for m in range(len(confidences))
    ]
    return np.asarray([sum(accepted[j:]) for j in range(len(confidences))])


def markov(head, line_V, output, previous):
    """Returns the logits [V] of a slot with those of DSpark's Markov head."""
    embedded = head["markov_w1"]["embedding"][previous]
    if "gate_proj" in head:
        both = np.concatenate([output, embedded])
        gate = both @ head["gate_proj"]["kernel"] + head["gate_proj"]["bias"]
        embedded = embedded * expit(gate)
    return line_V + (embedded @ head["markov_w2"]["kernel"])[: len(line_V)]


def confidence(weights, outputs_KD, previous_K):
    """Returns the probabilities [K] that DSpark's chain is accepted up to each slot."""
    embedded = weights["markov_head"]["markov_w1"]["embedding"][previous_K]
    proj = weights["confidence_head"]["proj"]
    both = np.concatenate([outputs_KD, embedded], axis=-1)
    return np.cumprod(expit(both @ proj["kernel"][:, 0] + proj["bias"]))
