"""Probes of the hardware: the parts of one round, each alone, and the memory's bandwidth."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import decode, sampling
from spsjax.drafters import draft_model, none
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.performance.hardware import machine, memory_bandwidth, num_cores  # noqa: F401
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Parts:
    """What one round is made of, each timed on its own, in seconds.

    Attributes:
        draft_step: a token of the draft: all that a round drafts, over K.
        scoring: the pass over K + 1 tokens.
    """

    draft_step: float
    scoring: float

    def together(self, num_speculative_tokens: int) -> float:
        """Seconds of a round that is nothing but these."""
        return num_speculative_tokens * self.draft_step + self.scoring


def median(parts: Sequence[Parts]) -> Parts:
    """Of each part."""
    return Parts(*(float(np.median(times)) for times in zip(*map(dataclasses.astuple, parts))))


def probe(
    target: Model,
    draft: Model | None,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repeats: int = 8,
) -> Callable[[], Parts]:
    """Times the parts of a round alone, in caches such as `generate` has for `length` tokens.

    What it returns is to be called again and again, in turn with what is compared: machines drift.
    """
    K = num_speculative_tokens
    drafter = draft_model.Drafter(draft.config, K) if draft and K else none.Drafter()
    program = decode.Program(target.config, drafter)
    weights = {"target": target.params, "drafter": draft.params if draft and K else {}}
    slots = decode.num_slots(length + K + 1)
    place = sharding.batch_sharding(target.mesh)
    B = 1 if target.mesh is None else target.mesh.shape["data"]
    with target.in_mesh():
        keys = jax.jit(lambda: sampling.row_keys(jax.random.key(0), B), out_shardings=place)()
    rows = jax.device_put(params.rows(B), place)
    middle = jax.device_put(np.full(B, slots // 2, np.int32), place)
    block = jax.device_put(np.zeros((B, K + 1), np.int32), place)
    tokens = jax.device_put(np.zeros((B, slots), np.int32), place)

    def measure() -> Parts:
        with target.in_mesh():
            return parts()

    def parts() -> Parts:
        cache = transformer.empty_cache(target.config, weights["target"], B, slots).at(middle)
        many = decode.compiled(_score_often, program, repeats)
        scoring = _seconds(many, weights, rows, cache, block) / repeats
        step = 0.0
        if K and draft:
            cache = transformer.empty_cache(draft.config, weights["drafter"], B, slots)
            often = decode.compiled(_draft_often, drafter, repeats)
            step = _seconds(often, weights, rows, cache.at(middle - 1), tokens, keys)
            step /= repeats * K
        return Parts(step, scoring)

    return measure


def _seconds(call: Callable, *args) -> float:
    """Of a second run: the first finds weights and fresh memory where a loop would not."""
    jax.block_until_ready(args)
    jax.block_until_ready(call(*args)[0])
    start = time.perf_counter()
    result, compiling = call(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start - compiling


def _score_often(program, repeats, params, rows, cache, block):
    """Scoring passes one after another, each waiting for all of the one before."""

    def once(_, carry):
        block, cache, _ = carry
        output = decode.score(program, params, block, cache)
        probs = sampling.to_probs(sharding.gather_vocab(output.logits), rows)
        return block + (probs[..., 0] > 2), output.cache.at(cache.lengths), probs

    probs = jnp.zeros((*block.shape, program.target.vocab_size), jnp.float32)
    return lax.fori_loop(0, repeats, once, (block, cache, probs))


def _draft_often(drafter, repeats, params, rows, state, tokens, keys):
    """Drafts of K tokens one after another, with their distributions and draws."""
    lengths = state.lengths + 1

    def once(index, carry):
        state, _ = carry
        fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        proposal, state = drafter.propose(params, state, tokens, lengths, rows, fresh)
        return drafter.commit(params, state, lengths), proposal

    shapes = jax.eval_shape(drafter.propose, params, state, tokens, lengths, rows, keys)[0]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.fori_loop(0, repeats, once, (state, nothing))
