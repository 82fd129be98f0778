"""DFlash: a block of draft tokens from one pass of layers on features (Chen et al. 2602.06036).

The slots of the block do not see each other's tokens: their distributions are marginals, given the
committed text. The first slot's is also the conditional one, so that a chain draws its first token.
Tokens drawn from the others rarely fit together, so that a chain takes the most probable token of
each, as a point mass. **Lossless**, as is every drafter.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax.drafters import block_folders, blocks, sample
from spsjax.types import Proposal, PyTree, Round


@dataclasses.dataclass(frozen=True)
class Drafter(blocks.BlockDrafter):
    """Drafts a token of the first slot and the most probable ones of the others. Lossless.

    Trees are drawn from the marginals of all slots, or have the most probable tokens.
    """

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        choices = self.choices(params, self.slots(params, state, now.root))
        feed, K = sample.feed_by_depth(choices), self.num_speculative_tokens
        if self.tree is not None:
            return sample.grow(self.tree, K, feed, (), now)[0]
        # Only chains that are drawn to their end may end early by a rule.
        alone = dataclasses.replace(now, stops=None, estimates=False)
        first = sample.grow(None, 1, feed, (), alone)[0]
        assert first.probs is not None  # of drawn tokens
        best = jnp.argmax(choices.logits, axis=-1).astype(jnp.int32)
        best_BK = choices.tokens(best[..., None])[:, 1:, 0]
        masses = jax.nn.one_hot(best_BK, first.probs.shape[-1], dtype=first.probs.dtype)
        return Proposal(
            jnp.concatenate([first.tokens, best_BK], axis=1),
            jnp.concatenate([first.probs, masses], axis=1),
            # No slot reads a drawn token, so that a chain has one estimate per slot.
            confidence=sample.certainty(choices.logits) if now.estimates else None,
        )


LAYOUT = block_folders.BlockLayout[Drafter]("dflash", ("DFlashDraftModel", "DFlashSpeculator"))
