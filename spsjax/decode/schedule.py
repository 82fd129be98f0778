"""Schedules: rules that decide how deep each round is drafted, and how much of it is scored.

**Lossless.** A schedule decides the depth by what was accepted in the rounds before. It decides
what is scored by estimates of acceptance (`Proposal.confidence`), and a token is dropped before
anything that depends on it is read: see `Schedule.kept`. But the samples drawn with one seed change
with its decisions, which a row may share with the other rows of its batch.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.drafters import base
from spsjax.errors import check_integer, check_number
from spsjax.types import AnyArray, Array, PyTree, pytree_dataclass
from spsjax.utils import traced


@pytree_dataclass
class Costs:
    """Times of a round, in any unit. A *depth* is a token of a chain, or a tree's level."""

    propose: AnyArray  # [K+1] to draft k depths; 0 for none
    score: AnyArray  # [K+1] the rest of a round in which k depths are scored
    # [K] share of tokens accepted at each depth, among those that were reached while costs were
    # measured; below 0: unknown.
    rates: AnyArray | np.float32 = np.float32(-1)


class Schedule(abc.ABC):
    """Decides before each round how deep it is drafted. A frozen, hashable dataclass.

    Attributes:
        needs_costs: whether it decides by costs, which are then measured.
        reads_confidence: whether it decides what is scored, by the drafter's estimates.
        longest: the deepest draft that it asks of a drafter whose own K is smaller.
    """

    needs_costs: ClassVar[bool] = True
    reads_confidence: ClassVar[bool] = False

    @property
    def longest(self) -> int:
        return base.SCHEDULED_TOKENS

    def scored_depths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """Returns the depths for which a scoring pass is compiled, K among them."""
        return scored_depths(num_speculative_tokens)

    def check(self, num_speculative_tokens: int) -> None:  # noqa: B027 (most rules take any K)
        """Raises InputError if it asks for deeper drafts than the drafter's K."""

    @abc.abstractmethod
    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        """Returns the state before the first round; all leaves have a batch axis first.

        `costs` are those of its depths, None if they are unknown.
        """

    @abc.abstractmethod
    def depths(self, costs: Costs | None, state: PyTree, done_B: Array) -> Array:
        """Returns [B] int32, the depth to which each row is drafted, at most K; 0 if it is done."""

    def kept(
        self, costs: Costs | None, state: PyTree, asked_B: Array, confidence_BK: Array
    ) -> Array:
        """Returns [B] int32, how many tokens of each row's chain are scored.

        Only a schedule that reads confidence has it. **It must be a stopping rule:** whether token
        k of a row is scored may depend on the row's estimates 1 to k only, which know the tokens
        above k. Estimate k + 1 was made after token k. If it could drop token k, tokens with
        doubtful successors would be proposed less often than their distribution says, and
        the target's distribution takes their place: samples would be biased. So a maximum over all
        lengths of a chain is not allowed. Other rows' estimates are, as their draws are independent
        of this row's.

        Args:
            costs, state: as for `depths`.
            asked_B: result of `depths`.
            confidence_BK: `Proposal.confidence`; 0 where there is no token.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def update(self, state: PyTree, asked_B: Array, offered_B: Array, accepted_B: Array) -> PyTree:
        """Returns the state after a round.

        Args:
            state: state before the round.
            asked_B: result of `depths`.
            offered_B: the greatest depth at which a token was scored.
            accepted_B: accepted draft tokens.

        A schedule that reads confidence takes that argument of `kept`, too; None: nothing was
        drafted.
        """


def scored_depths(num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the depths 0, 1, 2, 4, 6, 7, 11, 15, 23, ... up to K, and K.

    A scoring pass of a depth between two of them takes about as long as one of the deeper. With the
    root, the long ones are 8, 12, 16, 24, ... rows of a matrix product.
    """
    K = num_speculative_tokens
    rows = {step << i for i in range(K.bit_length()) for step in (8, 12)}
    sizes = {0, 1, 2, 4, 6, K} | {count - 1 for count in rows}
    return tuple(sorted(size for size in sizes if size <= K))


def only(depth: int, num_speculative_tokens: int) -> Costs:
    """Returns costs by which every other depth takes forever, so that `Fastest` takes this one."""
    propose = np.full(num_speculative_tokens + 1, np.inf, np.float32)
    propose[depth] = 0
    unknown = np.full(num_speculative_tokens, -1, np.float32)
    return Costs(propose, np.ones_like(propose), unknown)


@pytree_dataclass
class History:
    """Weighted counts of rounds per depth, of which the newest count most."""

    asked: Array  # [B, K] float32, rounds that were drafted as deep as this
    offered: Array  # [B, K] float32, of which the drafter proposed a token here
    reached: Array  # [B, K] float32, rounds asked so deep in which all tokens above were accepted
    accepted: Array  # [B, K] float32, of which one here was, too


@dataclasses.dataclass(frozen=True)
class Fastest(Schedule):
    """Takes the depth with the most expected tokens per time, 0 included. Lossless.

    The rate of acceptance at each depth is that of the last rounds, as if `prior` rounds at the
    rate of the depth above had come before; at the first depth, one at the rate `hope`. At first
    the last rounds are `trust` rounds with the acceptance that was met when costs were measured.
    Counts shrink by `memory` in every round with a draft, and by `rest` in others. So a drafter
    that was given up is forgiven after a while, and tried again. Where nothing is ever accepted,
    this costs in the long run at most a share `hope` x (1 - `rest`) of the time, beside what the
    drafter has to catch up on.

    Attributes:
        memory: factor of all counts per round that is drafted.
        rest: factor of all counts per round that is not.
        hope: expected rate of acceptance before any round.
        prior: rounds that the rate of the depth above counts for.
        trust: rounds that acceptance while costs were measured counts for, before any other.
    """

    memory: float = traced.number(0.98)
    rest: float = traced.number(0.99)
    hope: float = traced.number(0.75)
    prior: float = traced.number(8.0)
    trust: float = traced.number(4.0)

    def __post_init__(self) -> None:
        check_number("memory", self.memory, 0, 1)
        check_number("rest", self.rest, 0, 1)
        check_number("hope", self.hope, 0, 1)
        check_number("prior", self.prior, 1e-3, 1e6)
        check_number("trust", self.trust, 0, 1e6)

    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        zeros = jnp.zeros((batch, num_speculative_tokens))
        if costs is None:
            return History(zeros, zeros, zeros, zeros)
        rates = jnp.broadcast_to(costs.rates, (num_speculative_tokens,))
        above = jnp.cumprod(jnp.concatenate([jnp.ones(1), rates[:-1]]))
        reached = zeros + jnp.where(rates >= 0, self.trust * above, 0)
        return History(zeros, zeros, reached, reached * rates)

    def depths(self, costs: Costs | None, state: PyTree, done_B: Array) -> Array:
        assert costs is not None  # see `needs_costs`
        live = ~done_B[:, None]
        # Tokens expected of a round that is drafted k deep, beyond the one that is always drawn.
        drafted = jnp.cumsum(jnp.cumprod(self.rates(state), axis=1) * live, axis=1)
        tokens = jnp.sum(live) + jnp.pad(jnp.sum(drafted, axis=0), (1, 0))
        # A depth costs its scoring only if some row has a token there.
        missing = 1 - (state.offered + 1) / (state.asked + 1)
        present = 1 - jnp.prod(jnp.where(live, missing, 1), axis=0)
        scoring = jnp.cumsum(jnp.diff(costs.score) * present)
        time = costs.propose + costs.score[0] + jnp.pad(scoring, (1, 0))
        best = jnp.argmax(tokens / time).astype(jnp.int32)
        return jnp.where(done_B, 0, best)

    def rates(self, state: History) -> Array:
        """Returns [B, K], the expected rate of acceptance at each depth if it is reached."""
        rates, weight = [jnp.full_like(state.reached[:, 0], self.hope)], 1.0
        for depth in range(state.reached.shape[1]):
            accepted = state.accepted[:, depth] + weight * rates[-1]
            rates.append(accepted / (state.reached[:, depth] + weight))
            weight = self.prior
        return jnp.stack(rates[1:], axis=1)

    def update(self, state: PyTree, asked_B: Array, offered_B: Array, accepted_B: Array) -> PyTree:
        depth = jnp.arange(1, state.asked.shape[1] + 1)
        asked, offered, accepted = (
            count[:, None] for count in (asked_B, offered_B, jnp.minimum(accepted_B, asked_B))
        )
        new = History(
            depth <= asked,
            depth <= jnp.minimum(asked, offered),
            (depth <= asked) & (depth <= accepted + 1),
            depth <= accepted,
        )
        return self.added(state, new, asked)

    def added(self, state: PyTree, new: PyTree, asked_B1: Array) -> PyTree:
        """Returns the sums [B, ...] of old counts, which shrink, and those of a round."""
        kept = jnp.where(asked_B1 > 0, self.memory, self.rest)
        return jax.tree.map(lambda old, now: kept * old + now, state, new)


@dataclasses.dataclass(frozen=True)
class Fixed(Schedule):
    """Drafts every round to the same depth, which is data. Lossless.

    All depths share their programs: a sweep over K compiles two. A round may take longer than one
    of a program for this K alone: there are two scoring passes, for half the greatest depth and
    for all of it, and the smaller one that holds the round's is taken.

    Attributes:
        depth: depth of every round, at most `longest`.
        longest: the greatest depth that shares these programs. A drafter's own K counts if it is
            greater.
    """

    depth: int = traced.number()
    longest: int = 8
    needs_costs = False

    def __post_init__(self) -> None:
        check_integer("longest", self.longest, 1)
        check_integer("depth", self.depth, 0, self.longest)

    def scored_depths(self, num_speculative_tokens: int) -> tuple[int, ...]:
        return num_speculative_tokens // 2, num_speculative_tokens

    def check(self, num_speculative_tokens: int) -> None:
        check_integer("depth", self.depth, 0, num_speculative_tokens)

    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        return ()

    def depths(self, costs: Costs | None, state: PyTree, done_B: Array) -> Array:
        return jnp.where(done_B, 0, jnp.asarray(self.depth, jnp.int32))

    def update(self, state: PyTree, asked_B: Array, offered_B: Array, accepted_B: Array) -> PyTree:
        return state
