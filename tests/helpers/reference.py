"""Reference implementation (the oracle): Algorithms 1 and 2 of Chen et al. 2023, in NumPy float64.

The paper is arXiv 2302.01318. The oracle has one row, no cache, no batch, and imports nothing of
spsjax. A model is a function from a sequence of tokens to the logits of the next token. Random
numbers are an argument, `uniforms(role, length, index)`: with the numbers of spsjax, the oracle
must give the tokens of spsjax.
"""

import collections
from fractions import Fraction

import numpy as np


def to_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Applies temperature, top-k, top-p, min-p, in that order: [V] logits -> [V] probabilities."""
    logits = np.asarray(logits, np.float64)
    # A stable sort of the negated logits puts the lower id first among equal logits.
    order = np.argsort(-logits, kind="stable")
    probs = np.zeros(len(logits))
    if temperature == 0:
        probs[order[0]] = 1
        return probs
    kept = np.exp((logits[order] - logits[order[0]]) / temperature)
    if 0 < top_k < len(kept):
        kept[top_k:] = 0
    kept /= kept.sum()
    if top_p < 1:
        # Keeps the smallest prefix whose mass reaches top_p, and always the first token.
        kept[np.searchsorted(np.cumsum(kept), top_p) + 1 :] = 0
        kept /= kept.sum()
    kept[kept < min_p * kept[0]] = 0
    probs[order] = kept / kept.sum()
    return probs


def draw(weights, uniforms, width=128):
    """Draws a block of tokens by the first of two uniforms, then a token of it by the second."""
    blocks = np.split(np.asarray(weights, np.float64), range(width, len(weights), width))
    block = _first_above([block.sum() for block in blocks], uniforms[0])
    return width * block + _first_above(blocks[block], uniforms[1])


def _first_above(weights, uniform):
    """Returns the first index whose cumulative weight exceeds the uniform's share of the total."""
    ends = np.cumsum(np.asarray(weights, np.float64))
    last = np.flatnonzero(weights)[-1]
    return int(min(np.searchsorted(ends, uniform * ends[-1], side="right"), last))


def autoregressive(target, prompt, limit, uniforms, eos_ids=(), **params):
    """Runs Algorithm 1: the tokens after `prompt`, up to `limit` tokens in all or an eos id."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(draw(to_probs(target(tokens), **params), uniforms("next", len(tokens), 0)))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(prompt) :]


def lookup(tokens, K, min_ngram=1, max_ngram=3):
    """Continues the latest of the longest earlier occurrences: prompt lookup (Saxena 2023)."""
    last = len(tokens) - 1
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(last - 1, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[len(tokens) - size :]:
                return [tokens[end + 1 + k % (last - end)] for k in range(K)]
    return [-1] * K


def suffix_proposals(tokens, K, N, max_match, factor, min_prob):
    """Returns the nodes of suffix decoding for every length of the match, the longest first.

    Nodes are (path, probability), in the order in which they are added. N is 0 for a chain
    (Oliaro et al. 2024). Tokens that follow equally often go by their last place.
    """
    last = len(tokens) - 1

    def children(path, match):
        """Counts of the next token after the last `match` tokens and then `path`."""
        context = [*tokens[len(tokens) - match :], *path]
        ends = [
            end
            for end in range(len(context) - 1, last)
            if tokens[end + 1 - len(context) : end + 1] == context and end - len(path) < last
        ]
        following = [tokens[end + 1] for end in ends][::-1]  # the latest first
        counts = collections.Counter(following).most_common()  # of equal ones the first
        return [(token, Fraction(count, len(ends))) for token, count in counts]

    proposals = []
    for match in range(min(max_match, last), 0, -1):
        limit = min(K, int(match * factor + 1e-6))
        nodes, frontier = [], [(Fraction(1), ())]
        while frontier and len(nodes) < (N or K):
            options = [
                (prob * share, (*path, token))
                for prob, path in frontier
                for token, share in children(path, match)
                if len(path) < limit and (*path, token) not in [node for node, _ in nodes]
            ]
            options = [option for option in options if option[0] >= min_prob]
            if not options:
                break
            prob, path = max(options, key=lambda option: option[0])
            nodes.append((path, prob))
            frontier = [*frontier, (prob, path)] if N else [(prob, path)]
        if nodes:
            proposals.append(nodes)
    return proposals


def aggressive_place(prompt, output, start, max_suffix, replaces):
    """Returns the index in the prompt of the token to copy next, or -1 (Sun et al. 2021).

    With `replaces` a token without a place stands for the expected one, which is not published.
    """
    place = start if start < len(prompt) else -1
    for count in range(1, len(output) + 1):
        if place >= 0 and prompt[place] == output[count - 1]:
            place += 1
        else:
            place = place + 1 if replaces and place >= 0 else -1
            for size in range(1, min(max_suffix, count) + 1):
                suffix = output[count - size : count]
                ends = [
                    end
                    for end in range(size, len(prompt) + 1)
                    if prompt[end - size : end] == suffix
                ]
                if len(ends) <= 1:
                    place = ends[0] if ends else place
                    break
        if place >= len(prompt):
            place = -1
    return place


def speculative(target, draft, prompt, K, limit, uniforms, eos_ids=(), rounds=None, **params):
    """Runs Algorithm 2. `draft` is a model, or a function that returns K ids, -1 for no token.

    The list `rounds` gets the numbers of proposed and accepted draft tokens of every round.
    """
    tokens = list(prompt)
    while len(tokens) < limit:
        n, drafted, draft_probs = len(tokens), [], []
        for k in range(K):
            proposed = draft([*tokens, *drafted])
            if isinstance(proposed, list):  # point masses: the drafter is certain
                stop = [*proposed, -1].index(-1)
                drafted = proposed[:stop]
                draft_probs = list(np.eye(len(target(tokens)))[drafted])
                break
            draft_probs.append(to_probs(proposed, **params))
            drafted.append(draw(draft_probs[-1], uniforms("draft", n, k)))
        # K + 1 distributions of the target, the last one after all draft tokens.
        target_probs = [
            to_probs(target([*tokens, *drafted[:k]]), **params) for k in range(len(drafted) + 1)
        ]
        block = []
        for k, token in enumerate(drafted):
            if uniforms("accept", n, k) * draft_probs[k][token] < target_probs[k][token]:
                block.append(token)
                continue
            residual = np.maximum(target_probs[k] - draft_probs[k], 0)
            residual = residual if residual.any() else target_probs[k]
            block.append(draw(residual, uniforms("next", n, 0)))
            break
        else:
            block.append(draw(target_probs[-1], uniforms("next", n, 0)))
        if rounds is not None:
            rounds.append((len(drafted), len(block) - 1))
        for token in block[: limit - n]:
            tokens.append(token)
            if token in eos_ids:
                return tokens[len(prompt) :]
    return tokens[len(prompt) :]


def joint_distribution(target, prompt, limit, eos_ids=(), **params):
    """Returns the distribution of `autoregressive`: sequence of new tokens -> probability."""
    distribution, open_ = collections.Counter(), {(): 1.0}
    while open_:
        grown = {}
        for new, mass in open_.items():
            if len(prompt) + len(new) >= limit or (new and new[-1] in eos_ids):
                distribution[new] += mass
                continue
            probs = to_probs(target([*prompt, *new]), **params)
            for token in np.flatnonzero(probs):
                grown[(*new, int(token))] = mass * probs[token]
        open_ = grown
    return distribution
