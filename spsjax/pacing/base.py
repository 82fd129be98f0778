"""The interface of rules that choose the depth of every round, and the costs that they read."""

import abc

import numpy as np

from spsjax.types import Array, PyTree, pytree_dataclass


@pytree_dataclass
class Costs:
    """Times of a round's parts, in any unit. A *depth* is a token of a chain, or a tree's level."""

    propose: Array  # [K+1] to draft k depths; 0 for none
    score: Array  # [K+1] the rest of a round in which k depths are scored
    least: Array  # [] int32, depths that are scored even if nothing is drafted; for measurements
    fixed: Array = np.int32(-1)  # [] int32, depth of all rounds, for measurements; -1: the rule's
    rates: Array = np.float32(-1)  # [K] share of the tokens accepted at each depth, of those that
    #   were reached while costs were measured; below 0: not known


class Pacer(abc.ABC):
    """Decides before each round how deep it is drafted. A frozen, hashable dataclass."""

    @abc.abstractmethod
    def init(self, costs: Costs | None, batch: int, num_speculative_tokens: int) -> PyTree:
        """Returns the state before the first round; all leaves have a batch axis first.

        `costs` are those of its depths, None if they are not known yet.
        """

    @abc.abstractmethod
    def depths(self, costs: Costs, state: PyTree, done_B: Array) -> Array:
        """Returns [B] int32, the depth to which each row is drafted, at most K; 0 if it is done."""

    @abc.abstractmethod
    def update(
        self, costs: Costs, state: PyTree, asked_B: Array, offered_B: Array, accepted_B: Array
    ) -> PyTree:
        """Returns the state after a round.

        Args:
            costs: those of its depths.
            state: the state before.
            asked_B: what `depths` returned.
            offered_B: the greatest depth at which the drafter proposed a token.
            accepted_B: accepted draft tokens.
        """


def scored_depths(num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the depths for which a scoring pass is compiled: 0, 1, 2, 4, 6, 7, 11, 15, ..., K.

    With the root, the long ones are 8, 12, 16, 24, ... rows.
    """
    K = num_speculative_tokens
    rows = {step << i for i in range(K.bit_length()) for step in (8, 12)}
    sizes = {0, 1, 2, 4, 6, K} | {count - 1 for count in rows}
    return tuple(sorted(size for size in sizes if size <= K))


def forced(depth: int, num_speculative_tokens: int, least: int = 0) -> Costs:
    """Returns costs with which all rounds have one depth, to measure what it costs."""
    equal = np.ones(num_speculative_tokens + 1, np.float32)
    unknown = np.full(num_speculative_tokens, -1, np.float32)
    return Costs(equal, equal, np.int32(least), np.int32(depth), unknown)
