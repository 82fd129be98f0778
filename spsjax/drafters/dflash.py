"""DFlash: a block of draft tokens from one pass of layers on features (Chen et al. 2602.06036).

The slots of the block do not see each other's tokens: their distributions are marginals, given the
committed text. Tokens drawn from them independently rarely fit together, so that a chain takes the
most probable token of each slot, as a point mass. **Lossless**, as is every drafter.
"""

import dataclasses

import jax.numpy as jnp

from spsjax.drafters import block_folders, blocks, sample
from spsjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Drafter(blocks.BlockDrafter):
    """Drafts the most probable token of each slot, or trees of such tokens. Lossless."""

    def propose(self, params, state, now):
        logits_BKV = self.logits(params, self.slots(params, state, now.root))
        if self.tree is None:
            tokens = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
            # A chain has one token per slot, whatever is drawn elsewhere, and so one estimate.
            confidence = sample.certainty(logits_BKV) if now.estimates else None
            return Proposal(tokens, None, confidence=confidence)
        feed = sample.feed_by_depth(logits_BKV)
        return sample.grow(self.tree, self.num_speculative_tokens, feed, (), now)[0]


LAYOUT = block_folders.BlockLayout("dflash", "DFlashDraftModel")
