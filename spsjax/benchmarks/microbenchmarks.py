"""Costs of a draft step and of a scoring pass, timed separately."""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import decode, sampling
from spsjax.drafters import draft_model, none
from spsjax.loading import LoadedDrafter, Model
from spsjax.models.caches import KVCache, WindowCache
from spsjax.parallel import sharding
from spsjax.runtime.costs import draft_repeatedly
from spsjax.sampling import SamplingParams
from spsjax.types import Array, Proposal, PyTree
from spsjax.utils.compilation import compiled, fast_options
from spsjax.utils.progress import Progress
from spsjax.verifiers import match, rejection


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Costs of the passes of one round in seconds, timed separately."""

    draft_step: float  # time per draft token
    scoring: float  # time of the pass over K + 1 tokens

    def total(self, num_speculative_tokens: int) -> float:
        """Returns the seconds of a round that consists of these passes only."""
        return num_speculative_tokens * self.draft_step + self.scoring


def median(costs: Sequence[RoundCost]) -> RoundCost:
    """Returns the medians of the costs."""
    return RoundCost(*(float(np.median(times)) for times in zip(*map(dataclasses.astuple, costs))))


Key = TypeVar("Key", bound=Hashable)


def median_times(
    timers: Mapping[Key, Callable[[], float]], repetitions: int, progress: Progress = iter
) -> dict[Key, float]:
    """Returns the median time per timer. The timers alternate, because machines' speeds drift."""
    times = {key: [] for key in timers}
    for key in progress([key for _ in range(repetitions) for key in timers]):
        times[key].append(timers[key]())
    return {key: float(np.median(values)) for key, values in times.items()}


def round_cost_timer(
    target: Model,
    draft: Model | None,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repeats: int = 8,
) -> Callable[[], RoundCost]:
    """Returns a function that times the passes of a round, with caches for `length` tokens.

    Alternate its calls with those of the systems it is compared with: machines' speeds drift.
    """
    K = num_speculative_tokens
    drafter = draft_model.Drafter(draft.config, K) if draft and K else none.Drafter()
    program = decode.Program(target.config, drafter, rejection.Verifier())
    weights = {"target": target.params, "drafter": draft.params if draft and K else {}}
    begin = _state_maker(target, program, weights, params, decode.sizes.num_slots(length + K + 1))
    drafts = np.zeros((_num_rows(target), K), np.int32)
    drafts = jax.device_put(drafts, sharding.batch_sharding(target.mesh))

    def measure() -> RoundCost:
        with target.in_mesh():
            state = begin()
            options = fast_options(weights["target"], target.mesh)
            many = compiled(score_often, program, repeats, options=options)
            scoring = _seconds(many, weights, state, drafts) / repeats
            step = _draft_seconds(program, weights, state, repeats) / K if K and draft else 0.0
        return RoundCost(step, scoring)

    return measure


def scoring_timer(
    model: Model, tokens: int, params: SamplingParams, length: int
) -> Callable[[], float]:
    """Returns a function that times a pass over some tokens, in seconds."""
    timer = round_cost_timer(model, None, tokens - 1, params, length)
    return lambda: timer().scoring


def draft_timer(
    target: Model, drafter: LoadedDrafter, params: SamplingParams, length: int, repeats: int = 8
) -> Callable[[], float]:
    """Returns a function that times a whole draft, chain or tree, in seconds."""
    program = decode.Program(target.config, drafter.drafter, match.Verifier())
    weights = drafter.with_target(target.params)
    slots = decode.sizes.num_slots(length + drafter.drafter.num_speculative_tokens + 1)
    begin = _state_maker(target, program, weights, params, slots)

    def measure() -> float:
        with target.in_mesh():
            return _draft_seconds(program, weights, begin(), repeats)

    return measure


def _state_maker(target, program, weights, params, slots) -> Callable[[], decode.DecodeState]:
    """Returns a function that creates a state whose rows fill half of the caches."""
    where, B = sharding.batch_sharding(target.mesh), _num_rows(target)
    with target.in_mesh():
        keys = jax.jit(lambda: sampling.row_keys(jax.random.key(0), B), out_shardings=where)()
    begin = compiled(unread_state, program, slots, params)
    return lambda: begin(weights, np.int32(slots // 2), np.int32(slots), keys)[0]


def _num_rows(target: Model) -> int:
    return 1 if target.mesh is None else target.mesh.shape["data"]


def _draft_seconds(program, weights, state, repeats: int) -> float:
    options = fast_options(weights["target"])
    many = compiled(draft_repeatedly, program, repeats, options=options)
    return _seconds(many, weights, state) / repeats


def _seconds(call: Callable, *args) -> float:
    """Times the second of two runs. The first pays for cold caches and allocation."""
    jax.block_until_ready(args)
    jax.block_until_ready(call(*args)[0])
    start = time.perf_counter()
    result, compiling = call(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start - compiling


def score_often(program, repeats, params, state, drafts_BK):
    """Runs consecutive scoring passes. The tokens of a pass depend on the pass before."""

    def once(_, carry):
        tokens, drafts, _ = carry
        proposal = Proposal(drafts, None)
        output = decode.step.score(
            program, params, dataclasses.replace(state, tokens=tokens), proposal
        )
        probs = sampling.to_probs(output.logits, state.rows)
        never = jnp.max(probs) > 2  # but the compiler cannot know
        return tokens + never, drafts + never, probs

    shape = (drafts_BK.shape[0], drafts_BK.shape[1] + 1, program.target.vocab_size)
    carry = state.tokens, drafts_BK, jnp.zeros(shape, jnp.float32)
    return lax.fori_loop(0, repeats, once, carry)


def unread_state(
    program: decode.Program,
    slots: int,
    sampled: SamplingParams,
    params: PyTree,
    context: Array,
    limit: Array,
    keys_B: Array,
) -> decode.DecodeState:
    """Returns a state as after prompts, without reading any: the caches hold a pattern."""
    B = len(keys_B)
    cache, drafter = decode.prompt.empty_caches(program, slots, B, params)
    lengths, limits = (jnp.full(B, value, jnp.int32) for value in (context, limit))
    rows = jax.tree.map(jnp.asarray, sampled.rows(B))
    tokens = jnp.zeros((B, slots), jnp.int32)
    carry = _patterned(cache, lengths - 1), _patterned(drafter, lengths - 1)
    return decode.prompt.begin(program, params, carry, rows, tokens, lengths, limits, keys_B)


def _patterned(state: PyTree, lengths_B: Array) -> PyTree:
    """Fills the caches of a state with numbers, because products with zeros can be faster."""

    def fill(leaf):
        if not isinstance(leaf, KVCache):
            return leaf

        def numbers(old):
            pattern = jnp.cos(1 + jnp.arange(math.prod(old.shape[2:]), dtype=jnp.float32))
            pattern = pattern.reshape(old.shape[2:])
            return jnp.broadcast_to(pattern, old.shape).astype(old.dtype)

        keys, values = jax.tree.map(numbers, (leaf.keys, leaf.values))
        leaf = dataclasses.replace(leaf, keys=keys, values=values)
        return leaf.filled(lengths_B) if isinstance(leaf, WindowCache) else leaf

    return jax.tree.map(fill, state, is_leaf=lambda leaf: isinstance(leaf, KVCache))
