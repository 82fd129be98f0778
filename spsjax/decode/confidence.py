"""Schedules that decide by estimates of acceptance how much of a round's drafts is scored.

A drafter estimates for each token of a chain, before it draws the token, whether it will be
accepted (`Proposal.confidence`). DSpark has a head for it; other drafters report the greatest
probability of the distribution (`sample.certainty`). The product of a chain's estimates is the
probability that it *survives*, which is that all of its tokens are accepted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.decode.schedule import Costs, Fastest, History, Schedule
from spsjax.errors import check_number
from spsjax.types import Array, PyTree, pytree_dataclass
from spsjax.utils import traced

_BINS = 10  # of estimates in [0, 1], each of which is corrected on its own


@pytree_dataclass
class Estimated:
    """History of `Confident`, and weighted sums over scored tokens by the size of their estimate.

    A token counts if all tokens above it were accepted, since only then it was decided about.
    """

    history: History
    scored: Array  # [B, bins] float32, tokens
    estimated: Array  # [B, bins] float32, their estimates
    accepted: Array  # [B, bins] float32, those that were accepted


@dataclasses.dataclass(frozen=True)
class Confident(Fastest):
    """Drafts as deep as "auto" does, and scores as much of it as gives the most tokens per time.

    Following DSpark (arXiv 2607.05147) the batch is scored to the depth with the most expected
    tokens of all its rows per time of a round. A pass has one size, so that cutting one row further
    than others would save nothing: all rows are scored as deep, unless their chains end before.

    The depth is found from small sizes of passes to larger ones. At each, the estimates up to the
    next token of every row are known, and deeper ones are taken to be what such tokens were worth
    before. If a larger size promises more tokens per time, the next size is looked at; else this
    one is taken. So each decision precedes all estimates that depend on a token that it drops, and
    samples are not biased (`Schedule.kept`). The best size in hindsight would bias them.

    Estimates may be wrong. An estimate is multiplied by a factor: of the scored tokens whose
    estimates were about as large, the number that was accepted over the sum of the estimates. It
    is as if `prior` tokens, of which as many were accepted as estimated, had come before. Old
    tokens count less and less, so that the factor of tokens that are not scored any more is
    forgotten after a while.
    """

    reads_confidence = True

    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        zeros = jnp.zeros((batch, _BINS))
        history = super().init(costs, batch, num_speculative_tokens)
        return Estimated(history, zeros, zeros, zeros)

    def depths(self, costs: Costs | None, state: PyTree, done_B: Array) -> Array:
        return super().depths(costs, state.history, done_B)

    def kept(
        self, costs: Costs | None, state: PyTree, asked_B: Array, confidence_BK: Array
    ) -> Array:
        assert costs is not None
        K = confidence_BK.shape[1]
        sizes, slot = np.asarray(self.scored_depths(K)), np.arange(K)
        # By stage: of size s, the first s tokens are kept, so that estimate s + 1 is known as well.
        known = (slot <= sizes[:-1, None])[:, None]
        typical = self.typical(state)[:, None]
        chances = jnp.where(known, self.corrected(state, confidence_BK), typical)
        chances *= slot < asked_B[:, None]
        survivors = jnp.sum(jnp.cumprod(chances, axis=2), axis=1)
        drafted = jnp.pad(jnp.cumsum(survivors, axis=1), ((0, 0), (1, 0)))
        tokens = jnp.sum(asked_B > 0) + drafted[:, sizes]  # [stages, sizes]
        times = jnp.take(costs.propose, jnp.max(asked_B)) + costs.score[sizes]
        speeds = tokens / times
        stage = np.arange(len(sizes) - 1)
        larger = stage[:, None] < np.arange(len(sizes))
        promised = jnp.max(jnp.where(larger, speeds, 0), axis=1)
        goes_on = promised >= speeds[stage, stage]
        count = jnp.sum(jnp.cumprod(goes_on))
        return jnp.where(asked_B > 0, jnp.asarray(sizes, jnp.int32)[count], 0)

    def corrected(self, state: Estimated, confidence_BK: Array) -> Array:
        """Returns [B, K], the estimates corrected by how such estimates turned out."""
        weight = self.prior * (np.arange(_BINS) + 0.5) / _BINS
        factors = (state.accepted + weight) / (state.estimated + weight)
        factors = jnp.take_along_axis(factors, _bins(confidence_BK), axis=1)
        return jnp.minimum(confidence_BK * factors, 1)

    def typical(self, state: Estimated) -> Array:
        """Returns [B], the share of scored tokens that were accepted if those above them were."""
        accepted = jnp.sum(state.accepted, axis=1) + self.prior * self.hope
        return accepted / (jnp.sum(state.scored, axis=1) + self.prior)

    def update(
        self,
        state: PyTree,
        asked_B: Array,
        offered_B: Array,
        accepted_B: Array,
        confidence_BK: Array | None = None,
    ) -> PyTree:
        history = super().update(state.history, asked_B, offered_B, accepted_B)
        if confidence_BK is None:
            confidence_BK, offered_B = jnp.zeros((len(asked_B), 1)), jnp.zeros_like(asked_B)
        depth = np.arange(1, confidence_BK.shape[1] + 1)
        accepted = (depth <= accepted_B[:, None])[..., None]
        decided = depth <= jnp.minimum(offered_B, accepted_B + 1)[:, None]
        tokens = jax.nn.one_hot(_bins(confidence_BK), _BINS) * decided[..., None]
        observed = tokens, tokens * confidence_BK[..., None], tokens * accepted
        new = tuple(jnp.sum(counts, axis=1) for counts in observed)
        old = state.scored, state.estimated, state.accepted
        return Estimated(history, *self.added(old, new, asked_B[:, None]))


def _bins(confidence_BK: Array) -> Array:
    return jnp.clip(confidence_BK * _BINS, 0, _BINS - 1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Surviving(Schedule):
    """Drafts K tokens in every round, and scores each chain as long as it probably survives.

    Survival up to a token is a product of estimates that precede it, so that this is a stopping
    rule (`Schedule.kept`). Nothing is measured, and no row depends on another one.

    Attributes:
        least: probability of survival of a scored token.
    """

    least: float = traced.number()
    needs_costs = False
    reads_confidence = True
    longest = 1  # K is the drafter's own

    def __post_init__(self) -> None:
        check_number("least", self.least, 0, 1)

    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        return jnp.full(batch, num_speculative_tokens, jnp.int32)

    def depths(self, costs: Costs | None, state: PyTree, done_B: Array) -> Array:
        return jnp.where(done_B, 0, state)

    def kept(
        self, costs: Costs | None, state: PyTree, asked_B: Array, confidence_BK: Array
    ) -> Array:
        survival = jnp.cumprod(confidence_BK, axis=1)
        # The leading run, so that no later estimate matters even if it is above 1.
        return jnp.sum(jnp.cumprod(survival >= self.least, axis=1), axis=1, dtype=jnp.int32)

    def update(
        self,
        state: PyTree,
        asked_B: Array,
        offered_B: Array,
        accepted_B: Array,
        confidence_BK: Array | None = None,
    ) -> PyTree:
        return state
