"""Fastest tree of draft tokens for a pair on this machine.

The target generates texts. At every position, draft tokens are drawn and verified, which gives the
acceptance rate per child of a node. Passes of both models are timed. The shape with most tokens per
call is computed per number of draft tokens and of levels, and the fastest shape is returned
(Sequoia, arXiv 2402.12374).

A drafter of the target's features gets a tree of its most probable tokens, which grows where they
are accepted most often, by depth and rank (Medusa, arXiv 2401.10774). Its drafting is timed on
chains, so the costs of wide trees of a drafter with a layer are underestimated.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import loading, sampling
from spsjax.benchmarks import microbenchmarks, significance, text_pass, workloads
from spsjax.benchmarks.text_pass import Text
from spsjax.drafters import base, sample, shapes
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.planning import trees
from spsjax.planning.outcome import Outcome, Table
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config
from spsjax.utils.progress import Progress, TitledProgress
from spsjax.verifiers import recursive

_POSITIONS = 16  # positions per batch, which bounds the memory


def plan(config, mesh=None, progress: TitledProgress = lambda title: iter) -> Outcome:
    """Returns the fastest tree for a pair, with the rates and costs it depends on.

    `config` is configs/experiments/plan_tree.py. Raises InputError for a value that cannot be used,
    or if no tree can be drafted.
    """
    params = from_config.build_section("sampling", SamplingParams, config.sampling)
    sizes = "most_children", "most_levels", "prompts", "prompt_tokens", "max_new_tokens"
    for field in (*sizes, "repetitions"):
        check_integer(field, config[field], 1)
    trees.check_sizes(config.num_nodes)
    target = loading.load(config.target, mesh, config.dtype)
    if loading.is_feature_drafter(config.draft):
        draft = drafter = loading.load_drafter(config.draft, target)
        measure, choose = _by_rank, trees.plans_by_rank
    else:
        draft = loading.load(config.draft, mesh, config.dtype)
        drafter, measure = loading.as_drafter(draft, target), _by_child
        choose = functools.partial(trees.plans, most_levels=config.most_levels)
    prompts = list(workloads.prompts_of(config, target).values())
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "sampling": params}
    texts = text_pass.written(target, prompts, drafter, **options)
    rates, drafting = measure(target, draft, texts, params, config, progress)
    scoring = _costs(target, config, params, progress("timing the target"))
    by_count = (_by_count(times, scoring[1]) for times in (drafting, scoring))
    plans = choose(rates.mean(axis=0), config.num_nodes, *by_count)
    if not plans:
        shown = short_repr(config.num_nodes)
        raise InputError(f"num_nodes: expected a tree that can be drafted, found {shown}")
    name, fastest = max(plans.items(), key=lambda entry: entry[1].speedup)
    figures = {
        "parents": list(fastest.tree.parents),
        "replacement": fastest.tree.replacement,
        "chosen": fastest.tree.chosen,
        "tokens_per_call": round(fastest.tokens_per_call, 4),
        "speedup": round(fastest.speedup, 4),
        "rates": np.round(rates.mean(axis=0), 5).tolist(),
        "config": config.to_dict(),
    }
    tables = [*_rates_tables(rates), trees.table(plans, 1e3 * scoring[1])]
    return Outcome(tables, figures, f"best: {name}, {short_repr(fastest.tree.parents)}")


def _by_child(target, draft, texts, params, config, progress: TitledProgress) -> tuple:
    """Returns rates [texts, W], and the seconds per pass of the draft by number of tokens."""
    bar, width = progress("acceptance by child"), min(config.most_children, _vocab(target))
    rates = child_rates(target, draft, texts, params, width, config.seed, bar)
    return rates, _costs(draft, config, params, progress("timing the draft"))


def _by_rank(target, drafter, texts, params, config, progress: TitledProgress) -> tuple:
    """Returns rates [texts, K, W], and the seconds of drafting by number of levels."""
    levels = min(config.most_levels, base.max_steps(drafter.drafter) or config.most_levels)
    inner = dataclasses.replace(drafter.drafter, num_speculative_tokens=levels)
    drafter = dataclasses.replace(drafter, drafter=inner)
    bar, width = progress("acceptance by rank"), min(config.most_children, _vocab(target))
    rates = rank_rates(target, drafter, texts, params, width, bar)
    length, timers = config.prompt_tokens + config.max_new_tokens, {}
    for K in range(1, levels + 1):
        chain = dataclasses.replace(inner, num_speculative_tokens=K)
        chain = dataclasses.replace(drafter, drafter=chain)
        timers[K] = microbenchmarks.draft_timer(target, chain, params, length)
    bar = progress("timing the drafter")
    return rates, microbenchmarks.median_times(timers, config.repetitions, bar)


def _vocab(target: Model) -> int:
    return target.config.vocab_size


def _costs(model: Model, config, params: SamplingParams, progress) -> dict[int, float]:
    """Returns the seconds per pass of a model, sampling parameters applied, by number of tokens."""
    powers = (2**power + 1 for power in range(max(config.num_nodes).bit_length()))
    counts = sorted({1, *powers, *(size + 1 for size in config.num_nodes)})
    length = config.prompt_tokens + config.max_new_tokens
    timers = {
        count: microbenchmarks.scoring_timer(model, count, params, length) for count in counts
    }
    return microbenchmarks.median_times(timers, config.repetitions, progress)


def _by_count(times: dict[int, float], one: float) -> Callable[[int], float]:
    """Returns a cost as a function of a count, in passes of the target, linearly interpolated."""
    counts = sorted(times)
    return lambda count: float(np.interp(count, counts, [times[count] / one for count in counts]))


def _rates_tables(rates: np.ndarray) -> list[Table]:
    """Returns tables of rates [texts, W] or [texts, K, W], with intervals over texts."""
    levels = {"child": rates}
    if rates.ndim == 3:
        levels = {f"level {k + 1}, rank": rates[:, k] for k in range(rates.shape[1])}
    tables = []
    for name, rates_NW in levels.items():
        rows = []
        for rank, values in enumerate(rates_NW.T, start=1):
            interval = significance.bootstrap_interval(np.mean, values)
            shown = "{:.3f} to {:.3f}".format(*interval) if interval else "-"
            rows.append((rank, f"{values.mean():.3f}", shown))
        tables.append(Table("", [name, "accepted", "95% interval"], rows))
    return tables


def child_rates(
    target: Model,
    draft: Model,
    texts: Sequence[Text],
    params: SamplingParams,
    width: int,
    seed: int = 0,
    progress: Progress = iter,
) -> np.ndarray:
    """Returns [texts, width]: the rate at which the b-th child of a node is accepted.

    At every position of a text, `width` children are drawn without replacement, as trees of a draft
    model draw them, and verified recursively. Their acceptance probabilities are averaged, so that
    only the children are random. The rates depend strongly on the sampling parameters.
    """
    configs, weights, means = (target.config, draft.config), (target.params, draft.params), []
    for row, (prompt, tokens) in enumerate(progress(texts)):
        key = jax.random.fold_in(jax.random.key(seed, impl=sampling.GENERATOR), row)
        rates = functools.partial(_rates, *configs, width, *weights, key, params.rows(1))
        means.append(text_pass.of_tokens(rates, target, prompt, tokens, params).mean(axis=0))
    return np.stack(means)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rates(target_config, draft_config, width, target_params, draft_params, key, one, tokens_BT, _):
    """Returns [T, width] of the first row; `one` has the sampling parameters of a single row."""
    logits_TV = text_pass.logits(target_config, target_params, tokens_BT)[0]
    vocab = logits_TV.shape[-1]  # the draft's may be padded or smaller
    drafted_TV = text_pass.logits(draft_config, draft_params, tokens_BT, vocab)[0]
    tree = shapes.Tree.branching(width)

    def at_position(inputs):
        target_V, drafted_V, key = inputs

        def feed(state, *_):
            return drafted_V[None, None], None, state

        uniforms = sampling.uniforms(key[None], sampling.DRAFT, 2 * width).reshape(1, width, 2)
        proposal, *_ = sample.draw_tree(tree, feed, (), jnp.zeros(1, jnp.int32), one, uniforms)
        probs = sampling.to_probs(target_V[None, None], one)
        probs = jnp.broadcast_to(probs, (1, width + 1, vocab))  # only the root's are used
        return recursive.Verifier().accept_probs(proposal, probs)[0]

    keys = sampling.row_keys(key, len(logits_TV))
    return jax.lax.map(at_position, (logits_TV, drafted_TV, keys), batch_size=_POSITIONS)


def rank_rates(
    target: Model,
    head: LoadedDrafter,
    texts: Sequence[Text],
    params: SamplingParams,
    width: int,
    progress: Progress = iter,
) -> np.ndarray:
    """Returns [texts, K, width]: the target's probability of a drafter's best tokens, by rank.

    Sampling parameters are applied, and the preceding tokens are those of the text. It is the rate
    at which matching accepts a token if the tokens before it are accepted. Raises InputError if a
    prompt has no more than K tokens.
    """
    means, K = [], head.drafter.num_speculative_tokens
    rates = functools.partial(_rank_rates, head.drafter, width, target.params, head.params)
    for prompt, tokens in progress(texts):
        if len(prompt) <= K:
            raise InputError(
                f"texts: expected prompts of more than {K} tokens, as deep as drafts are, "
                f"found one of {len(prompt)}"
            )
        means.append(text_pass.of_tokens(rates, target, prompt, tokens, params).mean(axis=0))
    return np.stack(means)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rank_rates(drafter, width, target_params, head_params, tokens_BT, rows):
    """Returns [T, K, width] of the first row; garbage where a draft would begin before the text."""
    params = {"target": target_params, "drafter": head_params}
    output = transformer.apply(
        drafter.target, target_params, tokens_BT, tap_layers=drafter.tap_layers
    )
    probs_BTV = sampling.to_probs(sharding.gather_vocab(output.logits), rows)
    following = jnp.roll(tokens_BT, -1, axis=1)
    by_step, features = [], drafter.features(params, output)
    steps = drafter.unrolled(params, following, features, drafter.num_speculative_tokens)
    for step, outputs in enumerate(steps):
        best = drafter.choices(params, outputs, step).best(width)[1]
        # The draft token after index t and `step` tokens has index t + 1 + step.
        at = jnp.roll(best, 1 + step, axis=1)
        by_step.append(jnp.take_along_axis(probs_BTV, at, axis=2)[0])
    return jnp.stack(by_step, axis=1)
