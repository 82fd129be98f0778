"""The interface of verifiers."""

import abc

from spsjax import sampling
from spsjax.errors import InputError
from spsjax.sampling import RowParams
from spsjax.types import Array, Proposal, Verdict
from spsjax.verifiers import verdicts


class Verifier(abc.ABC):
    """Decides which draft tokens are accepted, and draws the token that follows them.

    A concrete verifier is a final, frozen, hashable dataclass: it is a static argument of the
    jitted loop, but for fields declared with `utils.traced.number`. It computes acceptance
    probabilities and residual distributions as pure functions first and draws afterwards, so that
    the exactness tests enumerate the code that runs.

    Attributes:
        lossless: whether the emitted tokens follow the target's distribution exactly.
        trees: whether proposals may be trees.
    """

    lossless: bool
    trees: bool = False

    def __call__(
        self, keys_B: Array, proposal: Proposal, logits_BMV: Array, rows: RowParams
    ) -> Verdict:
        """Returns the verdict on N draft tokens per row.

        Args:
            keys_B: one key per row and round; draws use `sampling.uniforms` of the roles ACCEPT
                and NEXT.
            proposal: what the drafter proposed.
            logits_BMV: the target's logits at every node: what follows the root, and each token.
            rows: sampling parameters per row.
        """
        target_probs = sampling.to_probs(logits_BMV, rows)
        if not proposal.tokens.shape[1]:  # nothing was drafted, and nothing is to be decided
            return verdicts.accept_nothing(keys_B, proposal.tokens, target_probs[:, 0])
        return self.verify(keys_B, proposal, target_probs)

    @abc.abstractmethod
    def verify(self, keys_B: Array, proposal: Proposal, target_probs: Array) -> Verdict:
        """Returns the verdict, given the distributions [B, M, V] that should have been sampled."""

    @abc.abstractmethod
    def accept_probs(self, proposal: Proposal, target_probs: Array) -> Array:
        """Returns [B, N]: how probable it is that each draft token is accepted.

        Only the rule's own draws are random. The sum over a proposal's tokens is the mean number
        that is accepted of it.
        """

    def check(self, proposal: Proposal) -> None:
        """Raises InputError for a kind of proposal that the rule does not fit, when traced.

        It is not asked for a proposal without nodes.
        """
        if proposal.parents is not None and not self.trees:
            raise InputError(
                "verifier: expected a rule for trees, as the drafter proposes one, found a rule "
                'for chains. Use "recursive" or "match"'
            )
