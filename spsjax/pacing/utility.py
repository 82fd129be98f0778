"""The depth of the highest utility, which each row finds by trying (Cascade, arXiv 2506.20675)."""

import dataclasses

import jax.numpy as jnp

from spsjax.errors import check_integer
from spsjax.pacing.base import Pacer, scored_depths
from spsjax.types import Array, pytree_dataclass
from spsjax.utils import traced

_MOST_ROUNDS, _MOST_DOUBLINGS = 2**15, 15
_FIRST = 2  # level of the first trial
_FROM_TOP = 6  # every so many useless phases, the next one begins with the greatest depth


@pytree_dataclass
class Trials:
    """A row's place in its phases. A *level* is the index of a depth in `scored_depths`.

    All are [B].
    """

    level: Array  # int32, of the depth that is drafted now
    left: Array  # int32, rounds until the next decision
    tries: Array  # bool, whether a depth is tried; if not, one is kept
    tokens: Array  # int32, that the rounds of this trial gave
    time: Array  # float32, that they took by the costs
    step: Array  # int32, direction of the trials, in levels
    start: Array  # int32, level with which this test phase began
    best: Array  # int32, best level of this test phase
    utility: Array  # float32, its utility; 0 before any
    useless: Array  # int32, test phases in a row that found nothing of use


@dataclasses.dataclass(frozen=True)
class Utility(Pacer):
    """Tries depths for a few rounds each, and keeps the one of highest utility for many. Lossless.

    The utility of a depth is its tokens per time, relative to plain decoding. A test phase begins
    with the depth that was best before, and goes from one compiled depth to the next as long as the
    utility grows: up if it is 1 or more, or else down. After a phase in which no depth has a
    utility of 1 nothing is drafted for a while, twice as long each time in a row. Every sixth such
    phase is followed by one that begins with the greatest depth.

    It knows less than `Fastest`: a depth's utility comes from its own trial alone. Each row decides
    for itself, as if it were alone.

    Attributes:
        trial: rounds for which a depth is tried.
        keep: rounds for which the best one is kept.
        longest: most rounds without drafts.
    """

    trial: int = traced.number(8)
    keep: int = traced.number(128)
    longest: int = traced.number(512)

    def __post_init__(self):
        for name in ("trial", "keep", "longest"):
            check_integer(name, getattr(self, name), 1, _MOST_ROUNDS)

    def init(self, costs, batch, num_speculative_tokens):
        levels = len(scored_depths(num_speculative_tokens))
        first = jnp.full(batch, min(_FIRST, levels - 1), jnp.int32)
        zeros, up = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.int32)
        trial = jnp.full(batch, self.trial, jnp.int32)
        tries = jnp.ones(batch, bool)
        none = zeros.astype(jnp.float32)
        return Trials(first, trial, tries, zeros, none, up, first, first, none, zeros)

    def depths(self, costs, state, done_B):
        levels = jnp.asarray(scored_depths(len(costs.score) - 1), jnp.int32)
        return jnp.where(done_B, 0, levels[state.level])

    def update(self, costs, state, asked_B, offered_B, accepted_B):
        state = dataclasses.replace(
            state,
            tokens=state.tokens + 1 + jnp.minimum(accepted_B, asked_B),
            time=state.time + costs.propose[asked_B] + costs.score[jnp.minimum(offered_B, asked_B)],
            left=state.left - 1,
        )
        decided = _where(state.tries, self._judged(costs, state), self._begun(state))
        return _where(state.left > 0, state, decided)

    def _begun(self, state: Trials) -> Trials:
        """Returns the state at the beginning of a test phase."""
        zeros = jnp.zeros_like(state.left)
        return Trials(
            level=state.best,
            left=zeros + self.trial,
            tries=zeros == 0,
            tokens=zeros,
            time=zeros.astype(jnp.float32),
            step=zeros + 1,
            start=state.best,
            best=state.best,
            utility=jnp.zeros_like(state.utility),
            useless=state.useless,
        )

    def _judged(self, costs, state: Trials) -> Trials:
        """Returns the state after a trial: a trial of another depth, or rounds of the best one."""
        levels = len(scored_depths(len(costs.score) - 1))
        utility = state.tokens / state.time * (costs.propose[0] + costs.score[0])
        better, up = utility > state.utility, state.step > 0
        best = jnp.where(better, state.level, state.best)
        utility = jnp.maximum(utility, state.utility)
        useful = utility >= 1
        climbs = better & useful & up & (state.level + 1 < levels)
        # Down from the greatest depth of all only if that is of use; it costs most to try.
        down = useful | (state.start <= _FIRST)
        turns = up & ~climbs & down & (best == state.start) & (state.start > 1)
        descends = better & ~up & (state.level > 1)
        goes_on = climbs | turns | descends
        following = jnp.where(
            climbs, state.level + 1, jnp.where(turns, state.start, state.level) - 1
        )
        useless = jnp.where(goes_on, state.useless, jnp.where(useful, 0, state.useless + 1))
        rest = jnp.minimum(self.keep << jnp.minimum(useless, _MOST_DOUBLINGS) - 1, self.longest)
        # Where short chains do not pay, long ones may.
        from_top = useless % _FROM_TOP == 0
        next_start = jnp.where(from_top, levels - 1, min(_FIRST, levels - 1))
        return Trials(
            level=jnp.where(goes_on, following, jnp.where(useful, best, 0)),
            left=jnp.where(goes_on, self.trial, jnp.where(useful, self.keep, rest)),
            tries=goes_on,
            tokens=jnp.zeros_like(state.tokens),
            time=jnp.zeros_like(state.time),
            step=jnp.where(turns, -1, state.step),
            start=state.start,
            best=jnp.where(goes_on | useful, best, next_start),
            utility=utility,
            useless=useless,
        )


def _where(condition_B: Array, yes: Trials, no: Trials) -> Trials:
    names = (field.name for field in dataclasses.fields(Trials))
    return Trials(*(jnp.where(condition_B, getattr(yes, x), getattr(no, x)) for x in names))
