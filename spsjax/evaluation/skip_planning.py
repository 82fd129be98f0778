"""The sub-layers that a target can leave out when it drafts for itself (Draft & Verify)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.evaluation import text_pass
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import multihost, sharding
from spsjax.performance import theory
from spsjax.sampling import SamplingParams
from spsjax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sub-layers that are left out, and what that is expected to give.

    Attributes:
        skipped: the sub-layers.
        acceptance: mean probability that a draft token is accepted.
        cost: bytes of weights that a draft step reads, over those of a pass of the whole target.
        num_speculative_tokens: the fastest K.
        speedup: expected speed-up with it; below 1: it is slower than autoregressive sampling.
    """

    skipped: Skipped
    acceptance: float
    cost: float
    num_speculative_tokens: int
    speedup: float


def plans(
    target: Model,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    most_tokens: int,
    progress: Callable[[Sequence], Iterable] = iter,
) -> list[Plan]:
    """Returns one plan per number of sub-layers that are left out, from one to all but one.

    Each leaves out one more than the plan before, the one with which the expected speed-up is
    highest. (The authors search by Bayesian optimisation.) A pass is taken to cost what it reads.
    Drafts see what they would have made of earlier tokens, not the target's keys and values, so
    that their acceptance is underestimated a little.

    Args:
        target: target model.
        texts: pairs of a prompt and what the target wrote after it, as token ids.
        params: sampling parameters.
        most_tokens: greatest K.
        progress: wrapper of the list of steps, for a progress bar.
    """
    left = [(layer, part) for layer in range(target.config.num_layers) for part in (0, 1)]
    bytes_of, whole, chosen, found = _bytes(target), _whole(target), [], []
    for _ in progress(range(len(left) - 1)):
        candidates = []
        for one in left:
            skipped = _skipped([*chosen, one])
            rate = acceptance(target, texts, params, skipped)
            cost = 1 - sum(bytes_of[each] for each in (*chosen, one)) / whole
            # With K = 1 at least, so that worse ones can be told apart.
            best = max(range(1, most_tokens + 1), key=lambda K: theory.speedup(rate, K, cost))
            speedup = theory.speedup(rate, best, cost)
            candidates.append((speedup, one, Plan(skipped, rate, cost, best, speedup)))
        _, one, plan = max(candidates, key=lambda candidate: candidate[0])
        chosen.append(one)
        left.remove(one)
        found.append(plan)
    return found


def acceptance(
    target: Model,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    skipped: Skipped,
) -> float:
    """Returns the mean acceptance of drafts over the tokens of texts; as of `plans`."""
    mask = np.zeros((target.config.num_layers, 2), bool)
    mask[list(skipped.attention), 0] = True
    mask[list(skipped.ffn), 1] = True
    rates = []
    for prompt, tokens in texts:
        padded, rows, span = text_pass.inputs(target, prompt, tokens, params)
        with target.in_mesh():
            found = _acceptance(target.config, target.params, padded, rows, mask)
        rates.append(multihost.to_host(found)[span])
    return float(np.concatenate(rates).mean())


@functools.partial(jax.jit, static_argnums=0)
def _acceptance(
    config: transformer.Config, params: PyTree, tokens_BT: Array, rows, mask_L2: Array
) -> Array:
    """Returns [T]: the acceptance after each token of the first row."""
    probs = []
    for mask in (jnp.zeros_like(mask_L2), mask_L2):
        skips = jnp.broadcast_to(mask, (len(tokens_BT), *mask.shape))
        logits = transformer.apply(config, params, tokens_BT, skipped=skips).logits
        probs.append(sampling.to_probs(sharding.gather_vocab(logits), rows)[0])
    return jnp.sum(jnp.minimum(*probs), axis=-1)


def _skipped(chosen: Sequence[tuple[int, int]]) -> Skipped:
    parts = [tuple(sorted(layer for layer, part in chosen if part == each)) for each in (0, 1)]
    return Skipped(*parts)


def _bytes(target: Model) -> dict[tuple[int, int], int]:
    """Returns the bytes of each sub-layer's weights, with its norms."""
    found = {}
    for layer, weights in target.params["layers"].items():
        for part, name in enumerate(("attention", "ffn")):
            own = [value for key, value in weights.items() if key.startswith(name)]
            found[int(layer), part] = sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    return found


def _whole(target: Model) -> int:
    """Returns the bytes of all weights that a pass reads: of an embedding of its own few rows."""
    tied = target.config.tie_embeddings
    read = {name: part for name, part in target.params.items() if tied or name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))
