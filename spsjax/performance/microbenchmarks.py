"""Costs of a draft step and of a scoring pass, each timed alone."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import decode, sampling
from spsjax.caches import KVCache
from spsjax.drafters import draft_model, none
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import sharding
from spsjax.sampling import SamplingParams
from spsjax.types import Proposal
from spsjax.utils.compilation import compiled
from spsjax.verifiers import match, rejection


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """Costs of the passes of one round in seconds, each timed alone.

    Attributes:
        draft_step: time per draft token, of all that a round drafts.
        scoring: time of the pass over K + 1 tokens.
    """

    draft_step: float
    scoring: float

    def total(self, num_speculative_tokens: int) -> float:
        """Returns the seconds of a round that consists of these passes only."""
        return num_speculative_tokens * self.draft_step + self.scoring


def median(costs: Sequence[RoundCost]) -> RoundCost:
    """Returns the median of each cost."""
    return RoundCost(*(float(np.median(times)) for times in zip(*map(dataclasses.astuple, costs))))


def round_cost_timer(
    target: Model,
    draft: Model | None,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repeats: int = 8,
) -> Callable[[], RoundCost]:
    """Returns a function that times the passes of a round, in caches as for `length` tokens.

    Call it repeatedly, in turn with what is compared, because the speed of machines drifts.
    """
    K = num_speculative_tokens
    drafter = draft_model.Drafter(draft.config, K) if draft and K else none.Drafter()
    program = decode.Program(target.config, drafter, rejection.Verifier())
    weights = {"target": target.params, "drafter": draft.params if draft and K else {}}
    begin = _beginner(target, program, weights, params, decode.num_slots(length + K + 1))
    B = 1 if target.mesh is None else target.mesh.shape["data"]
    drafts = jax.device_put(np.zeros((B, K), np.int32), sharding.batch_sharding(target.mesh))

    def measure() -> RoundCost:
        with target.in_mesh():
            state = begin()
            many = compiled(score_often, program, repeats)
            scoring = _seconds(many, weights, state, drafts) / repeats
            step = _draft_seconds(program, weights, state, repeats) / K if K and draft else 0.0
        return RoundCost(step, scoring)

    return measure


def draft_timer(
    target: Model, drafter: LoadedDrafter, params: SamplingParams, length: int, repeats: int = 8
) -> Callable[[], float]:
    """Returns a function that times a whole draft, chain or tree, in seconds; as above."""
    program = decode.Program(target.config, drafter.drafter, match.Verifier())
    weights = drafter.with_target(target.params)
    slots = decode.num_slots(length + drafter.drafter.num_speculative_tokens + 1)
    begin = _beginner(target, program, weights, params, slots)

    def measure() -> float:
        with target.in_mesh():
            return _draft_seconds(program, weights, begin(), repeats)

    return measure


def _beginner(target, program, weights, params, slots) -> Callable[[], decode.DecodeState]:
    """Returns a function that makes a state whose rows fill half of the caches."""
    where = sharding.batch_sharding(target.mesh)
    B = 1 if target.mesh is None else target.mesh.shape["data"]
    with target.in_mesh():
        keys = jax.jit(lambda: sampling.row_keys(jax.random.key(0), B), out_shardings=where)()
    ones, tokens = np.ones(B, np.int32), np.zeros((B, slots), np.int32)
    inputs = jax.device_put((params.rows(B), tokens, ones, ones), where)
    middle = jax.device_put(np.full(B, slots // 2, np.int32), where)
    return lambda: compiled(_halfway, program, slots)(weights, middle, *inputs, keys)[0]


def _draft_seconds(program, weights, state, repeats: int) -> float:
    many = compiled(draft_often, program, repeats)
    return _seconds(many, weights, state) / repeats


def _halfway(program, slots, params, lengths_B, *inputs):
    """Returns a state whose rows have the given lengths, of tokens that do not matter."""
    state = decode.prefill(program, slots, params, *inputs)
    return dataclasses.replace(state, lengths=lengths_B, cache=state.cache.at(lengths_B - 1))


def _seconds(call: Callable, *args) -> float:
    """Times the second of two runs.

    The first one pays for cold caches and allocation, which a running loop does not.
    """
    jax.block_until_ready(args)
    jax.block_until_ready(call(*args)[0])
    start = time.perf_counter()
    result, compiling = call(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start - compiling


def score_often(program, repeats, params, state, drafts_BK):
    """Runs scoring passes one after another, each on tokens that depend on the one before."""

    def once(_, carry):
        tokens, drafts, _ = carry
        proposal = Proposal(drafts, None)
        output = decode.score(program, params, dataclasses.replace(state, tokens=tokens), proposal)
        probs = sampling.to_probs(output.logits, state.rows)
        never = jnp.max(probs) > 2  # but the compiler cannot know
        return tokens + never, drafts + never, probs

    shape = (drafts_BK.shape[0], drafts_BK.shape[1] + 1, program.target.vocab_size)
    carry = state.tokens, drafts_BK, jnp.zeros(shape, jnp.float32)
    return lax.fori_loop(0, repeats, once, carry)


def draft_often(program, repeats, params, state):
    """Drafts K tokens again and again, each time after a token of the proposal before."""

    def proposed(state):
        state, now = decode.next_round(program, params, state)
        return dataclasses.replace(decode.propose(program, params, state, now), aux=())

    def once(_, carry):
        tokens, before = carry
        never = before.tokens[:, -1] < -1  # but the compiler cannot know

        def changing(leaf):
            """A feature with which the draft begins. From a constant one it would be run once."""
            if isinstance(leaf, KVCache) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            return leaf + never.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)

        drafter = jax.tree.map(
            changing, state.drafter, is_leaf=lambda leaf: isinstance(leaf, KVCache)
        )
        now = dataclasses.replace(state, tokens=tokens, drafter=drafter)
        proposal = proposed(now)
        last = jnp.arange(tokens.shape[1]) == state.lengths[:, None] - 1
        return jnp.where(last, proposal.tokens[:, -1:], tokens), proposal

    proposal = jax.eval_shape(proposed, state)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), proposal)
    return lax.fori_loop(0, repeats, once, (state.tokens, nothing))
