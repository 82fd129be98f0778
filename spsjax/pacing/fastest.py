"""The depth with the most expected tokens per time, of the whole batch."""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax.errors import check_number
from spsjax.pacing.base import Pacer
from spsjax.types import Array, pytree_dataclass
from spsjax.utils import traced


@pytree_dataclass
class History:
    """Weighted counts of rounds per depth, of which the newest count most."""

    asked: Array  # [B, K] float32, rounds that were drafted as deep as this
    offered: Array  # [B, K] float32, of which the drafter proposed a token here
    reached: Array  # [B, K] float32, rounds asked so deep in which all tokens above were accepted
    accepted: Array  # [B, K] float32, of which one here was, too


@dataclasses.dataclass(frozen=True)
class Fastest(Pacer):
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

    def __post_init__(self):
        check_number("memory", self.memory, 0, 1)
        check_number("rest", self.rest, 0, 1)
        check_number("hope", self.hope, 0, 1)
        check_number("prior", self.prior, 1e-3, 1e6)
        check_number("trust", self.trust, 0, 1e6)

    def init(self, costs, batch, num_speculative_tokens):
        zeros = jnp.zeros((batch, num_speculative_tokens))
        if costs is None:
            return History(zeros, zeros, zeros, zeros)
        rates = jnp.broadcast_to(costs.rates, (num_speculative_tokens,))
        above = jnp.cumprod(jnp.concatenate([jnp.ones(1), rates[:-1]]))
        reached = zeros + jnp.where(rates >= 0, self.trust * above, 0)
        return History(zeros, zeros, reached, reached * rates)

    def depths(self, costs, state, done_B):
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

    def update(self, costs, state, asked_B, offered_B, accepted_B):
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
        kept = jnp.where(asked > 0, self.memory, self.rest)
        return jax.tree.map(lambda old, now: kept * old + now, state, new)
