"""Measures what the choice of a tree depends on: acceptance by child, and costs by tokens."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.drafters import sample, shapes
from spsjax.errors import InputError
from spsjax.evaluation import text_pass
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams
from spsjax.verifiers import recursive

_POSITIONS = 16  # at a time, which bounds the memory


def child_rates(
    target: Model,
    draft: Model,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    width: int,
    seed: int = 0,
    progress: Callable[[Sequence], Iterable] = iter,
) -> np.ndarray:
    """Returns [texts, width]: how often each child of a node is the one that is accepted.

    At every position of a text so many children are drawn as trees of a draft model draw them,
    without replacement, and verified recursively. What they would have been accepted with is
    averaged, so that only the children are random.

    Args:
        target: target model.
        draft: draft model.
        texts: pairs of a prompt and what the target wrote after it, as token ids.
        params: sampling parameters, of which the rates depend much.
        width: number of children.
        seed: random seed of the children.
        progress: wrapper of the list of texts, for a progress bar.
    """
    means = []
    for row, (prompt, tokens) in enumerate(progress(texts)):
        padded, _, span = text_pass.inputs(target, prompt, tokens, params)
        key = jax.random.fold_in(jax.random.key(seed, impl=sampling.GENERATOR), row)
        configs, weights = (target.config, draft.config), (target.params, draft.params)
        with target.in_mesh():
            rates = _rates(*configs, width, *weights, padded, params.rows(1), key)
        means.append(multihost.to_host(rates)[span].mean(axis=0))
    return np.stack(means)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rates(target_config, draft_config, width, target_params, draft_params, tokens_BT, rows, key):
    """Returns [T, width] of the first row."""

    logits_TV = text_pass.logits(target_config, target_params, tokens_BT)[0]
    vocab = logits_TV.shape[-1]  # the draft's may be padded or smaller
    drafted_TV = text_pass.logits(draft_config, draft_params, tokens_BT, vocab)[0]
    tree = shapes.Tree.branching(width)

    def at_position(inputs):
        target_V, drafted_V, key = inputs

        def feed(state, *_):
            return drafted_V[None, None], None, state

        uniforms = sampling.uniforms(key[None], sampling.DRAFT, 2 * width).reshape(1, width, 2)
        proposal, *_ = sample.draw_tree(tree, feed, (), jnp.zeros(1, jnp.int32), rows, uniforms)
        probs = sampling.to_probs(target_V[None, None], rows)
        probs = jnp.broadcast_to(probs, (1, width + 1, vocab))  # only the root's is looked at
        return recursive.Verifier().accept_probs(proposal, probs)[0]

    keys = sampling.row_keys(key, len(logits_TV))
    return jax.lax.map(at_position, (logits_TV, drafted_TV, keys), batch_size=_POSITIONS)


def rank_rates(
    target: Model,
    head: LoadedDrafter,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    width: int,
    progress: Callable[[Sequence], Iterable] = iter,
) -> np.ndarray:
    """Returns [texts, K, width]: how probable a drafter's best tokens are, by depth and rank.

    It is the target's probability of the token, at its temperature and with its filters, after the
    text's own tokens: how often matching accepts it if the tokens before are accepted.

    Args:
        target: target model.
        head: drafter of the target's features.
        texts, params, progress: as of `child_rates`; prompts are longer than K tokens.
        width: number of ranks.

    Raises:
        InputError: a prompt is too short.
    """
    means, K = [], head.drafter.num_speculative_tokens
    for prompt, tokens in progress(texts):
        if len(prompt) <= K:
            raise InputError(
                f"texts: expected prompts of more than {K} tokens, as deep as drafts are, "
                f"found one of {len(prompt)}"
            )
        padded, rows, span = text_pass.inputs(target, prompt, tokens, params)
        with target.in_mesh():
            rates = _rank_rates(head.drafter, width, target.params, head.params, padded, rows)
        rates = multihost.to_host(rates)
        means.append([each[span].mean(axis=0) for each in rates])
    return np.asarray(means)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rank_rates(drafter, width, target_params, head_params, tokens_BT, rows):
    """Returns [K, T, width] of the first row; garbage where a draft would begin before the text."""
    params = {"target": target_params, "drafter": head_params}
    output = transformer.apply(
        drafter.target, target_params, tokens_BT, tap_layers=drafter.tap_layers
    )
    probs_BTV = sampling.to_probs(sharding.gather_vocab(output.logits), rows)
    following = jnp.roll(tokens_BT, -1, axis=1)
    found, features = [], drafter.features(params, output)
    steps = drafter.unrolled(params, following, features, drafter.num_speculative_tokens)
    for step, outputs in enumerate(steps):
        best = jax.lax.top_k(drafter.logits(params, outputs, step), width)[1]
        # What follows index t after `step` tokens stands at t + 1 + step.
        at = jnp.roll(best, 1 + step, axis=1)
        found.append(jnp.take_along_axis(probs_BTV, at, axis=2)[0])
    return jnp.stack(found)


def pass_costs(
    model: Model,
    counts: Sequence[int],
    params: SamplingParams,
    length: int,
    repetitions: int,
    progress: Callable[[Sequence], Iterable] = iter,
) -> dict[int, float]:
    """Returns the seconds of a pass over so many tokens, sampling parameters applied: medians.

    Caches are as for `length` tokens. The counts take turns, because the speed of machines drifts.
    """
    timers = {
        count: microbenchmarks.round_cost_timer(model, None, count - 1, params, length)
        for count in counts
    }
    times = {count: [] for count in counts}
    for count in progress([count for _ in range(repetitions) for count in counts]):
        times[count].append(timers[count]().scoring)
    return {count: float(np.median(seconds)) for count, seconds in times.items()}


def draft_costs(
    target: Model,
    drafter: LoadedDrafter,
    levels: int,
    params: SamplingParams,
    length: int,
    repetitions: int,
    progress: Callable[[Sequence], Iterable] = iter,
) -> dict[int, float]:
    """Returns the seconds of drafting chains of 1 to `levels` tokens; as of `pass_costs`."""
    counts, timers = range(1, levels + 1), {}
    for K in counts:
        chain = dataclasses.replace(drafter.drafter, num_speculative_tokens=K)
        chain = dataclasses.replace(drafter, drafter=chain)
        timers[K] = microbenchmarks.draft_timer(target, chain, params, length)
    times = {K: [] for K in counts}
    for K in progress([K for _ in range(repetitions) for K in counts]):
        times[K].append(timers[K]())
    return {K: float(np.median(seconds)) for K, seconds in times.items()}
