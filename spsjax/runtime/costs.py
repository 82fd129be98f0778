"""Costs of rounds by depth, measured on the devices by timing rounds of ordinary programs."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from spsjax.decode import DecodeState, Program, schedule, step
from spsjax.decode.schedule import Costs
from spsjax.drafters import base
from spsjax.models.caches import KVCache
from spsjax.parallel import multihost, sharding
from spsjax.runtime.batch import Batch
from spsjax.runtime.loop import Loop
from spsjax.types import Array, Proposal, PyTree
from spsjax.utils import fields

_OWN_KEYS = 2**31 - 1  # folded into the keys of a call
# Rounds in a row that are timed: as many as last so many seconds, within these bounds. The first
# rounds after a pause are slower.
_LONG, _LEAST_ROUNDS, _MOST_ROUNDS = 0.06, 4, 16
# How often all depths are timed: for so many seconds, within these bounds.
_SECONDS, _LEAST_SWEEPS, _MOST_SWEEPS = 1.5, 3, 12
_MOST_DEPTHS = 8  # of which all are timed; of more depths, those that have a scoring pass
_DRAFTS = 8  # drafts in a row that are timed
_COSTS: dict = {}  # by program, shapes and weights, the newest ones
_MOST_KEPT = 64


@dataclasses.dataclass(frozen=True)
class Filler(base.Wrapper):
    """Proposes as many tokens as the drafter may, all of them token 0. Lossless.

    Rounds of a drafter that often proposes fewer tokens do not show what scoring costs.
    """

    drafter: base.Drafter
    num_speculative_tokens: int = fields.derived()

    def __post_init__(self):
        if self.num_speculative_tokens is None:
            K = self.drafter.num_speculative_tokens
            object.__setattr__(self, "num_speculative_tokens", K)

    @property
    def score_sizes(self):
        return self.drafter.score_sizes

    def propose(self, params, state, now):
        shapes = jax.eval_shape(self.drafter.propose, params, state, now)
        proposal, K = base.no_tokens(shapes), self.num_speculative_tokens
        tokens, probs, parents = proposal.tokens + 1, proposal.probs, proposal.parents
        if probs is not None:  # a rule may need distributions, and they cost time
            probs = probs.at[..., 0].set(1)
        if parents is not None:  # several chains from the root
            node = jnp.arange(tokens.shape[1])
            parents = jnp.broadcast_to(jnp.where(node % K == 0, 0, node), tokens.shape)
        return dataclasses.replace(
            proposal,
            tokens=tokens,
            probs=probs,
            parents=parents,
            eligible=None,
            confidence=None if proposal.confidence is None else proposal.confidence + 1,
        )


def of(loop: Loop, batch: Batch) -> Costs | None:
    """Returns the costs by which a loop's schedule decides; None if it decides by none.

    They are measured once per program, shape and set of weights in a process, on the batch's own
    prompts, and include the acceptance that was met. The time counts as `Loop.compile_seconds`.
    All processes take the costs of process 0.
    """
    if loop.program.schedule is None or not loop.program.schedule.needs_costs:
        return None
    weights = jax.tree.leaves(loop.params)
    types = tuple((leaf.shape, leaf.dtype) for leaf in weights)
    kinds = jax.tree.structure(loop.params), types  # quantization is one
    program = dataclasses.replace(loop.program, schedule=None)  # costs do not depend on it
    key = program, _timed(loop.program), loop.slots, len(batch.lengths), loop.mesh, kinds
    key += tuple(map(id, weights))
    while len(_COSTS) > _MOST_KEPT:
        _COSTS.pop(next(iter(_COSTS)))  # the oldest
    if multihost.all_true(key in _COSTS):  # else some processes would measure alone
        return _COSTS[key]
    start = time.perf_counter()
    costs = measure(loop, batch)
    loop.compile_seconds += time.perf_counter() - start
    if _half(batch).max() < _last_length(loop):  # else there was no room for a round
        _COSTS[key] = costs
    return costs


def measure(loop: Loop, batch: Batch) -> Costs:
    """Returns the costs of rounds in seconds, by depth, and the acceptance that was met."""
    program = dataclasses.replace(loop.program, schedule=_timed(loop.program))
    drafter, K = program.drafter, program.drafter.num_speculative_tokens
    depths = range(K + 1) if K <= _MOST_DEPTHS else schedule.scored_depths(K)
    filled = dataclasses.replace(program, drafter=Filler(drafter))
    own, other = (
        _Clock(Loop(one, loop.params, loop.slots, loop.mesh), batch) for one in (program, filled)
    )
    if len(drafter.score_sizes) > 1:
        (score,) = _by_depth([other.round], depths, K)
        (propose,) = _by_depth([own.draft], depths[1:], K)
        own.round(K)  # to count what is accepted
    elif program.schedule.reads_confidence:  # a part of a draft may be scored
        together, score = _by_depth([own.round, other.round], depths, K)
        propose = np.maximum.accumulate(together - score)
    else:
        # It proposes all tokens in every round: what a draft and its scoring take together is all
        # that matters.
        (score,) = _by_depth([own.round], depths, K)
        propose = np.zeros_like(score)
    propose[0] = 0
    costs = propose, np.maximum.accumulate(score), own.rates()  # a larger pass never takes less
    if jax.process_count() > 1:
        costs = multihost_utils.broadcast_one_to_all(costs)
    return jax.device_put(Costs(*costs), sharding.replicated(loop.mesh))


def _timed(program: Program) -> schedule.Schedule:
    """Returns the schedule of rounds that are timed: one that obeys `schedule.only`.

    Costs of a schedule that may score a part of a draft are measured with that schedule, whose
    drafters make estimates.
    """
    own = program.schedule
    return own if own is not None and own.reads_confidence else schedule.Fastest()


def _by_depth(
    timers: Sequence[Callable[[int], float]], depths: Sequence[int], K: int
) -> list[np.ndarray]:
    """Returns [K+1] float32 per timer: seconds by depth, medians of sweeps over some depths."""
    for seconds in timers:
        for depth in depths:
            seconds(depth)  # compiles; rounds right after it are slower
    times, end, unfinished = [], time.perf_counter() + len(timers) * _SECONDS, True
    while unfinished:
        times.append([seconds(depth) for depth in depths for seconds in timers])
        unfinished = len(times) < _MOST_SWEEPS and time.perf_counter() < end
        unfinished |= len(times) < _LEAST_SWEEPS
        unfinished = bool(multihost.broadcast_int(int(unfinished)))  # clocks may differ
    # A machine's speed drifts from one sweep to the next, but for all that is timed in one alike.
    times = np.asarray(times)
    speed = times.mean(axis=1, keepdims=True)
    typical = np.median(times / speed, axis=0) * np.median(speed)
    return [
        np.interp(np.arange(K + 1), depths, own).astype(np.float32)
        for own in typical.reshape(len(depths), len(timers)).T
    ]


def _last_length(loop: Loop) -> int:
    """Returns the length at which a row's buffers have no room for one more round."""
    return loop.slots - loop.program.drafter.num_speculative_tokens - 1


def _half(batch: Batch) -> np.ndarray:
    """Returns how much of each prompt costs are measured on: there is room after it for rounds."""
    return (batch.lengths + 1) // 2


@functools.cache
def _folding(where: jax.sharding.Sharding):
    """Returns a jitted function that folds a number into each key."""
    return jax.jit(jax.vmap(jax.random.fold_in, (0, None)), out_shardings=where)


class _Clock:
    """Times rounds and drafts at given depths."""

    def __init__(self, loop: Loop, batch: Batch):
        self.loop, self.batch, self.count = loop, batch, len(batch.prompts)
        self.K = loop.program.drafter.num_speculative_tokens
        self.state: DecodeState | None = None
        self.call = np.inf  # seconds of a call without any rounds
        self.accepted = np.zeros(self.K + 1)  # rounds that were drafted to K, by accepted tokens

    def round(self, depth: int) -> float:
        """Returns the seconds of a round that is drafted to one depth."""
        costs = self._costs(depth)
        self._begin_if_ended()
        first, _ = self._run(1, costs)  # which may have pending features to read
        count = int(np.clip(_LONG / max(first, 1e-9), _LEAST_ROUNDS, _MOST_ROUNDS))
        count = multihost.broadcast_int(count)  # clocks may differ
        self._begin_if_ended(count * (1 + depth))
        self.call = min(self.call, self._run(0, costs)[0])
        before = multihost.to_host(self.state.accepted)
        seconds, rounds = self._run(count, costs)
        if depth == self.K:
            after = multihost.to_host(self.state.accepted)
            self.accepted += (after - before)[: self.count].sum(axis=0)
        return max(seconds - self.call, 1e-9) / max(rounds, 1)  # a clock may be coarse

    def draft(self, depth: int) -> float:
        """Returns the seconds of a draft of one depth, without its scoring."""
        self._begin_if_ended()
        repeat = self.loop.call(draft_repeatedly, self.loop.program, _DRAFTS)
        compiled_before, start = self.loop.compile_seconds, time.perf_counter()
        jax.block_until_ready(repeat(self.loop.params, self.state, np.int32(depth)))
        seconds = time.perf_counter() - start - (self.loop.compile_seconds - compiled_before)
        return max(seconds, 1e-9) / _DRAFTS

    def rates(self) -> np.ndarray:
        """Returns [K] float32: of the tokens reached at each depth, the share that was accepted."""
        deeper = np.cumsum(self.accepted[::-1])[::-1]  # rounds by the least of accepted tokens
        reached = deeper[:-1]
        # Where nothing was reached, as at the depth above.
        rates, rate = [], -1.0
        for count, accepted in zip(reached, deeper[1:]):
            rate = accepted / count if count else rate
            rates.append(rate)
        return np.asarray(rates, np.float32)

    def _costs(self, depth: int) -> Costs:
        """Returns costs by which all rounds have one depth."""
        costs = schedule.only(depth, self.K)
        return jax.device_put(costs, sharding.replicated(self.loop.mesh))

    def _begin_if_ended(self, tokens: int = 1) -> None:
        """Begins the texts again if one has ended, or has no room for so many tokens."""
        if self.state is not None:
            done, lengths, limits = map(
                multihost.to_host, (self.state.done, self.state.lengths, self.state.limits)
            )
            if not (done | (limits - lengths < tokens))[: self.count].any():
                return
        self.state = None  # there need not be room for two
        limits = np.zeros(len(self.batch.lengths), np.int32)  # 0: a row that only fills the mesh
        limits[: self.count] = _last_length(self.loop)
        rows, tokens, lengths, _, keys = self.loop.inputs(self.batch)
        # The random numbers differ from those of the call, whose depths must not depend on its
        # draws. No row is as long as the number that is folded in, so no round has these keys.
        keys = _folding(keys.sharding)(keys, _OWN_KEYS)
        halves = jax.device_put((_half(self.batch), limits), lengths.sharding)
        self.state = self.loop.read_arrays((rows, tokens, *halves, keys), self._costs(0))

    def _run(self, count: int, costs: Costs) -> tuple[float, int]:
        """Returns the seconds of a call of so many rounds, and how many there were."""
        before = multihost.to_host(self.state.rounds)
        compiled_before, start = self.loop.compile_seconds, time.perf_counter()
        self.state = self.loop.run(self.state, count, costs)
        rounds = multihost.to_host(self.state.rounds) - before
        compiling = self.loop.compile_seconds - compiled_before
        return time.perf_counter() - start - compiling, int(rounds.max())


def draft_repeatedly(
    program: Program, repeats: int, params: PyTree, state: DecodeState, depth: Array | None = None
) -> tuple[Array, Proposal]:
    """Drafts again and again, each time after a token of the proposal before, to be timed.

    `depth` is how deep each row is drafted; None: K.
    """
    depths_B = None if depth is None else jnp.full_like(state.lengths, depth)

    def proposed(state):
        state, now = step.next_round(program, params, state, depths_B)
        return dataclasses.replace(step.propose(program, params, state, now), aux=())

    def once(_, carry):
        tokens, before = carry
        never = before.tokens[:, -1] < -1  # but the compiler cannot know

        def changing(leaf):
            """Returns a feature that the compiler takes for a new one, or the draft is hoisted."""
            if isinstance(leaf, KVCache) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            return leaf + never.reshape(-1, *[1] * (leaf.ndim - 1)).astype(leaf.dtype)

        drafter = jax.tree.map(
            changing, state.drafter, is_leaf=lambda leaf: isinstance(leaf, KVCache)
        )
        proposal = proposed(dataclasses.replace(state, tokens=tokens, drafter=drafter))
        last = jnp.arange(tokens.shape[1]) == state.lengths[:, None] - 1
        return jnp.where(last, proposal.tokens[:, -1:], tokens), proposal

    proposal = jax.eval_shape(proposed, state)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), proposal)
    return lax.fori_loop(0, repeats, once, (state.tokens, nothing))
