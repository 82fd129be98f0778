"""Interface of verifiers."""

import abc

from spsjax import sampling
from spsjax.errors import InputError
from spsjax.sampling import RowParams
from spsjax.types import Array, Proposal, Verdict
from spsjax.utils.fields import Checked
from spsjax.verifiers import verdicts


class Verifier(Checked, abc.ABC):
    """Decides which draft tokens are accepted, and draws the token that follows them.

    A concrete verifier is a final, frozen, hashable dataclass: it is a static argument of the
    jitted loop, except for fields declared with `utils.traced.number`. Pure functions compute
    acceptance probabilities and residual distributions, and tokens are drawn afterwards. So the
    exactness tests can enumerate all outcomes of the code that runs.

    Attributes:
        trees: whether proposals may be trees.
    """

    trees: bool = False

    @property
    @abc.abstractmethod
    def lossless(self) -> bool:
        """Whether the emitted tokens follow the target's distribution exactly."""

    def __call__(
        self, keys_B: Array, proposal: Proposal, logits_BMV: Array, rows: RowParams
    ) -> Verdict:
        """Returns the verdict on N draft tokens per row.

        Args:
            keys_B: one key per row and round; draws use `sampling.uniforms` of the roles ACCEPT
                and NEXT.
            proposal: proposal of the drafter.
            logits_BMV: logits of the target at every node, for the token after it.
            rows: sampling parameters per row.
        """
        target_probs_BMV = sampling.to_probs(logits_BMV, rows)
        if not proposal.tokens.shape[1]:  # K = 0: autoregressive sampling
            return verdicts.accept_nothing(keys_B, proposal.tokens, target_probs_BMV[:, 0])
        return self.verify(keys_B, proposal, target_probs_BMV)

    @abc.abstractmethod
    def verify(self, keys_B: Array, proposal: Proposal, target_probs_BMV: Array) -> Verdict:
        """Returns the verdict, from the target's distribution at every node."""

    @abc.abstractmethod
    def accept_probs(self, proposal: Proposal, target_probs_BMV: Array) -> Array:
        """Returns the probability [B, N] that each draft token is accepted, given the proposal.

        The sum over the tokens of a proposal is the expected number of accepted tokens.
        """

    def check(self, proposal: Proposal) -> None:
        """Raises InputError for a kind of proposal that the rule does not support.

        It is called when the loop is traced, except for proposals without nodes.
        """
        if proposal.parents is not None and not self.trees:
            raise InputError(
                "verifier: expected a rule for trees, as the drafter proposes one, found a rule "
                'for chains. Use "recursive" or "match"'
            )
