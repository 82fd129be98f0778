"""What a drafter is."""

import abc

from spsjax.sampling import RowParams
from spsjax.types import Array, Proposal, PyTree


class Drafter(abc.ABC):
    """Three pure functions over pytrees.

    A concrete drafter is a final, frozen, hashable dataclass: it is a static argument of the jitted
    loop. It holds no arrays: parameters and state are arguments. Any drafter leaves the law of the
    output untouched, because acceptance is the verifier's business; what it must get right is that
    `Proposal.probs` are the distributions its tokens were drawn from.

    In all three functions `params` is `{"target": ..., "drafter": ...}`; a row's committed tokens
    are its first `lengths_B`, and after them there may be any token at all.
    """

    num_speculative_tokens: int

    @abc.abstractmethod
    def init(self, params: PyTree, tokens_BT: Array, lengths_B: Array, slots: int) -> PyTree:
        """State after the prompts, `tokens_BT[b, :lengths_B[b]]`, with room for `slots` tokens."""

    @abc.abstractmethod
    def propose(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BS: Array,
        lengths_B: Array,
        rows: RowParams,
        keys_B: Array,
    ) -> tuple[Proposal, PyTree]:
        """`num_speculative_tokens` draft tokens a row, drawn with `sampling.uniforms(DRAFT)`."""

    @abc.abstractmethod
    def commit(self, params: PyTree, state: PyTree, lengths_B: Array) -> PyTree:
        """State once `lengths_B` tokens a row are committed: a rollback of what was rejected."""
