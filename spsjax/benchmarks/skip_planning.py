"""Sub-layers that a target can skip when it drafts for itself (Draft & Verify, arXiv 2309.08168).

The target generates texts. Attention and feed-forward sub-layers are skipped greedily, by the
highest expected speed-up. The cost of a pass is the bytes of weights that it reads. The best set is
then measured.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import generation, loading, sampling
from spsjax.benchmarks import text_pass, workloads
from spsjax.benchmarks.text_pass import Text
from spsjax.drafters.contrib import early_exit
from spsjax.errors import check_integer
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.parallel import sharding
from spsjax.planning import theory
from spsjax.planning.outcome import Outcome, Table
from spsjax.sampling import SamplingParams
from spsjax.types import Array, PyTree
from spsjax.utils import from_config
from spsjax.utils.progress import Progress, TitledProgress


@dataclasses.dataclass(frozen=True)
class SkipPlan:
    """Skipped sub-layers and their expected speed-up."""

    skipped: Skipped  # the sub-layers
    acceptance: float  # mean probability that a draft token is accepted
    # Bytes of weights that a draft step reads, over those of a pass of the whole target.
    cost: float
    num_speculative_tokens: int  # the fastest K
    speedup: float  # expected speed-up with it; below 1: it is slower than autoregressive sampling


def plan(config, mesh=None, progress: TitledProgress = lambda title: iter) -> Outcome:
    """Returns the best set of sub-layers to skip, with its measured tokens per call.

    `config` is configs/experiments/plan_skips.py. Raises InputError for a value that cannot be
    used.
    """
    params = from_config.build_section("sampling", SamplingParams, config.sampling)
    for field in ("most_tokens", "prompts", "prompt_tokens", "max_new_tokens"):
        check_integer(field, config[field], 1)
    target = loading.load(config.target, mesh, config.dtype)
    prompts = list(workloads.prompts_of(config, target).values())
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "sampling": params}
    texts = text_pass.written(target, prompts, **options)
    candidates = plans(target, texts, params, config.most_tokens, progress("sub-layers left out"))
    best = max(candidates, key=lambda plan: plan.speedup)
    drafter = early_exit.Drafter(target.config, best.skipped, best.num_speculative_tokens)
    tokens = generation.generate(target, prompts, drafter, **options).stats.block_efficiency
    figures = {
        "attention": list(best.skipped.attention),
        "ffn": list(best.skipped.ffn),
        "num_speculative_tokens": best.num_speculative_tokens,
        "acceptance": round(best.acceptance, 4),
        "expected_speedup": round(best.speedup, 4),
        "tokens_per_call": round(tokens, 4),
        "config": config.to_dict(),
    }
    attention, ffn = (
        ", ".join(map(str, layers)) or "none"
        for layers in (best.skipped.attention, best.skipped.ffn)
    )
    summary = (
        f"Without attention in layers {attention} and feed-forward in {ffn}: {tokens:.2f} tokens "
        f"per call at K = {best.num_speculative_tokens}, measured."
    )
    if best.speedup <= 1:
        summary += "\nNo set is expected to be faster than drafting nothing."
    return Outcome([_table(candidates)], figures, summary)


def _table(candidates: "Sequence[SkipPlan]") -> Table:
    header = "left out", "acceptance", "cost of a step", "best K", "expected speed-up"
    rows = [
        (
            number,
            f"{plan.acceptance:.3f}",
            f"{plan.cost:.3f}",
            plan.num_speculative_tokens,
            f"{plan.speedup:.2f}",
        )
        for number, plan in enumerate(candidates, start=1)
    ]
    return Table("", header, rows)


def plans(
    target: Model,
    texts: Sequence[Text],
    params: SamplingParams,
    most_tokens: int,
    progress: Progress = iter,
) -> list[SkipPlan]:
    """Returns one plan per number of skipped sub-layers, from one to all but one.

    A plan skips one more sub-layer than the plan before, the one with the highest expected speed-
    up. (The authors search by Bayesian optimisation.) The cost of a pass is the bytes that it
    reads. Drafts attend to keys and values that the draft itself would have computed, not to the
    target's, which underestimates the acceptance a little.
    """
    left = [(layer, kind) for layer in range(target.config.num_layers) for kind in (0, 1)]
    bytes_of, whole, chosen, best_by_count = _bytes(target), _whole(target), [], []
    for _ in progress(range(len(left) - 1)):
        candidates = []
        for one in left:
            skipped = _skipped([*chosen, one])
            rate = acceptance(target, texts, params, skipped)
            cost = 1 - sum(map(bytes_of.get, (*chosen, one))) / whole
            # K is at least 1, so that slow sets can be compared, too.
            best = max(range(1, most_tokens + 1), key=lambda K: theory.speedup(rate, K, cost))
            speedup = theory.speedup(rate, best, cost)
            candidates.append((speedup, one, SkipPlan(skipped, rate, cost, best, speedup)))
        _, one, plan = max(candidates, key=lambda candidate: candidate[0])
        chosen.append(one)
        left.remove(one)
        best_by_count.append(plan)
    return best_by_count


def acceptance(
    target: Model, texts: Sequence[Text], params: SamplingParams, skipped: Skipped
) -> float:
    """Returns the mean acceptance of drafts over the tokens of texts."""
    mask = np.zeros((target.config.num_layers, 2), bool)
    mask[list(skipped.attention), 0] = True
    mask[list(skipped.ffn), 1] = True
    accepted = functools.partial(_acceptance, target.config, target.params, mask)
    rates = [text_pass.of_tokens(accepted, target, *text, params) for text in texts]
    return float(np.concatenate(rates).mean())


@functools.partial(jax.jit, static_argnums=0)
def _acceptance(
    config: transformer.Config, params: PyTree, mask_L2: Array, tokens_BT: Array, rows
) -> Array:
    """Returns [T]: the acceptance after each token of the first row."""
    probs = []
    for mask in (jnp.zeros_like(mask_L2), mask_L2):
        skips = jnp.broadcast_to(mask, (len(tokens_BT), *mask.shape))
        logits = transformer.apply(config, params, tokens_BT, skipped=skips).logits
        probs.append(sampling.to_probs(sharding.gather_vocab(logits), rows)[0])
    return jnp.sum(jnp.minimum(*probs), axis=-1)


def _skipped(chosen: Sequence[tuple[int, int]]) -> Skipped:
    layers = [], []
    for layer, kind in sorted(chosen):
        layers[kind].append(layer)
    return Skipped(*map(tuple, layers))


def _bytes(target: Model) -> dict[tuple[int, int], int]:
    """Returns the bytes per sub-layer of its weights, with its norms."""
    sizes = {}
    for layer, weights in target.params["layers"].items():
        for kind, name in enumerate(("attention", "ffn")):
            own = [value for key, value in weights.items() if key.startswith(name)]
            sizes[int(layer), kind] = sum(leaf.nbytes for leaf in jax.tree.leaves(own))
    return sizes


def _whole(target: Model) -> int:
    """Returns the bytes of all weights that a pass reads; of an embedding, it reads few rows."""
    tied = target.config.tie_embeddings
    read = {name: leaves for name, leaves in target.params.items() if tied or name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))
