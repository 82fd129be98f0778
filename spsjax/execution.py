"""Runs a checked call on its devices: the prompts, bounded runs of the loop, and measured costs."""

import dataclasses
import functools
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from spsjax import decode, pacing
from spsjax.parallel import multihost, sharding
from spsjax.request import Request
from spsjax.utils.compilation import compiled

_FOREVER = 2**31 - 1
# Rounds in a row that are timed: as many as last so many seconds, within these bounds. The first
# ones after a pause are slower.
_LONG, _LEAST_ROUNDS, _MOST_ROUNDS = 0.06, 4, 16
# How often everything is timed: so long, but this often at least, and that often at most.
_SECONDS, _LEAST_SWEEPS, _MOST_SWEEPS = 3.0, 3, 12
_COSTS: dict = {}  # of each program and shape that was measured, the newest ones
_MOST_KEPT = 64


def prefill(request: Request) -> tuple[decode.DecodeState, float]:
    """Returns the state after the prompts, and the seconds it took to compile."""
    start = compiled(decode.prefill, request.program, request.slots)
    with request.model.in_mesh():
        return start(request.params, *request.inputs)


def run(
    request: Request, state: decode.DecodeState, max_rounds: int = _FOREVER
) -> tuple[decode.DecodeState, float]:
    """Returns the state after at most so many rounds, and the seconds it took to compile.

    The given state is used up.
    """
    loop = compiled(decode.run, request.program, donate=1)
    with request.model.in_mesh():
        return loop(request.params, state, np.int32(max_rounds))


def prepare(request: Request) -> float:
    """Gives a request with a pacer the costs of its rounds; returns the seconds it took.

    They are measured once for each program, shape and set of weights in a process, whatever the
    pacer, on the request's own prompts. With them comes the acceptance that was met, which the
    pacer expects at first. All processes take those of process 0.
    """
    if request.program.pacer is None:
        return 0.0
    start = time.perf_counter()
    request.params.pop("costs", None)
    weights = jax.tree.leaves(request.params)
    types = tuple((leaf.shape, leaf.dtype) for leaf in weights)
    kinds = jax.tree.structure(request.params), types  # of quantisation, among others
    program = dataclasses.replace(request.program, pacer=None)  # which does not decide
    key = program, request.slots, len(request.lengths), request.model.mesh, kinds
    key += tuple(map(id, weights))
    while len(_COSTS) > _MOST_KEPT:
        _COSTS.pop(next(iter(_COSTS)))  # the oldest
    if multihost.all_true(key in _COSTS):  # else some would measure, and others not
        request.params["costs"] = _COSTS[key]
        return 0.0
    costs = _measure(request)
    if _half(request).max() < _most_tokens(request):  # else no round could be run
        _COSTS[key] = costs
    request.params["costs"] = costs
    return time.perf_counter() - start


def _most_tokens(request: Request) -> int:
    """Returns the length at which a row's buffers have no room for one more round."""
    return request.slots - request.program.drafter.num_speculative_tokens - 1


def _half(request: Request) -> np.ndarray:
    """Returns how much of each prompt costs are measured on: there is room after it for rounds."""
    return (request.lengths + 1) // 2


def _measure(request: Request) -> pacing.Costs:
    """Returns the costs of rounds in seconds, by depth, and the acceptance that was met.

    Depths whose scoring passes are compiled are measured.
    """
    K = request.program.drafter.num_speculative_tokens
    depths = np.asarray(pacing.scored_depths(K))
    clock, times, goes_on = _Clock(request), [], True

    def sweep() -> list[list[float]]:
        # Of each round once with the drafter, and once with as many tokens of no meaning.
        return [[clock.seconds(own, depth) for own in (True, False)] for depth in depths]

    sweep()  # compiles; rounds right after it are slower
    end = time.perf_counter() + _SECONDS
    while goes_on:
        times.append(sweep())
        goes_on = len(times) < _MOST_SWEEPS and time.perf_counter() < end
        goes_on |= len(times) < _LEAST_SWEEPS
        goes_on = bool(multihost.broadcast_int(int(goes_on)))  # clocks may differ
    costs = *_costs(np.asarray(times), depths), clock.rates()
    if jax.process_count() > 1:
        costs = multihost_utils.broadcast_one_to_all(costs)
    propose, score, rates = costs
    return placed(request, pacing.Costs(propose, score, np.int32(0), rates=rates))


def _costs(times: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the times [K+1] of drafting and of the rest of a round.

    Args:
        times: [S, D, 2] seconds of rounds with and without the drafter, of S sweeps.
        depths: [D] depths that were timed, ascending; the first is 0 and the last K.
    """
    # A machine's speed drifts from one sweep to the next, but for all depths alike.
    speed = times.mean(axis=(1, 2), keepdims=True)
    drafted, score = np.moveaxis(np.median(times / speed, axis=0) * np.median(speed), -1, 0)
    every = np.arange(depths[-1] + 1)
    begin, step = _line(depths[1:], np.maximum(drafted - score, 0)[1:])
    propose = np.where(every > 0, begin + step * every, 0)
    score = np.maximum.accumulate(score)  # a larger pass never takes less
    above = np.searchsorted(depths, every)  # a pass is as large as the next size that is compiled
    return propose.astype(np.float32), score[above].astype(np.float32)


def _line(depths: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Returns the line `begin + step * depth`, neither below 0, that is nearest to some times.

    One more depth takes about as long to draft as the one before.
    """
    if not len(times):
        return 0.0, 0.0
    (begin, step), *_ = np.linalg.lstsq(np.stack([depths**0, depths], axis=1), times)
    if begin < 0:
        return 0.0, depths @ times / (depths @ depths)
    return (begin, step) if step >= 0 else (times.mean(), 0.0)


def placed(request: Request, arrays):
    """Returns host arrays on all devices of a request's mesh."""
    return jax.device_put(arrays, sharding.replicated(request.model.mesh))


@functools.cache
def _folding(where: jax.sharding.Sharding):
    """Returns a jitted function that folds a number into each key."""
    return jax.jit(jax.vmap(jax.random.fold_in, (0, None)), out_shardings=where)


class _Clock:
    """Times rounds of a request at given depths."""

    def __init__(self, request: Request):
        self.request = request
        self.state = None
        self.call = np.inf  # seconds of a call without any rounds
        K = request.program.drafter.num_speculative_tokens
        self.accepted = np.zeros(K + 1)  # rounds that were drafted to K, by accepted tokens

    def seconds(self, drafts: bool, depth: int) -> float:
        """Returns the seconds of a round in which so many depths are scored, and maybe drafted."""
        K = self.request.program.drafter.num_speculative_tokens
        costs = pacing.forced(depth if drafts else 0, K, depth)
        self.request.params["costs"] = placed(self.request, costs)
        self._begin_if_ended()
        first, _ = self._run(1)  # which may have to catch up
        count = int(np.clip(_LONG / max(first, 1e-9), _LEAST_ROUNDS, _MOST_ROUNDS))
        count = multihost.broadcast_int(count)  # clocks may differ
        self._begin_if_ended(count * (1 + depth * drafts))
        self.call = min(self.call, self._run(0)[0])
        before = multihost.to_host(self.state.accepted)
        seconds, rounds = self._run(count)
        if drafts and depth == K:
            after = multihost.to_host(self.state.accepted)
            self.accepted += (after - before)[: len(self.request.prompts)].sum(axis=0)
        return max(seconds - self.call, 1e-9) / max(rounds, 1)  # a clock may be coarse

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

    def _begin_if_ended(self, tokens: int = 1) -> None:
        """Begins texts again of which one has ended, or has no room for so many tokens."""
        request, count = self.request, len(self.request.prompts)
        if self.state is not None:
            done, lengths, limits = map(
                multihost.to_host, (self.state.done, self.state.lengths, self.state.limits)
            )
            if not (done | (limits - lengths < tokens))[:count].any():
                return
        self.state = None  # there need not be room for two
        limits = np.zeros(len(request.lengths), np.int32)  # 0: a row that only fills the mesh
        limits[:count] = _most_tokens(request)
        rows, tokens, lengths, _, keys = request.inputs
        # Other random numbers than the call's own: its K must not depend on its draws. No row is as
        # long as the number that is folded in, so that no round of the call uses it.
        keys = _folding(keys.sharding)(keys, _FOREVER)
        halves = jax.device_put((_half(request), limits), lengths.sharding)
        start = compiled(decode.prefill, request.program, request.slots)
        with request.model.in_mesh():
            self.state, _ = start(request.params, rows, tokens, *halves, keys)

    def _run(self, count: int) -> tuple[float, int]:
        """Returns the seconds of a call of so many rounds, and how many there were."""
        before = multihost.to_host(self.state.rounds)
        start = time.perf_counter()
        self.state, compiling = run(self.request, self.state, count)
        rounds = multihost.to_host(self.state.rounds) - before
        return time.perf_counter() - start - compiling, int(rounds.max())
