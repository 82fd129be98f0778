"""Verification by matching: the target draws at every node, and the child with that token wins.

**Lossless** for any proposal, chain or tree, however its tokens were chosen, as long as that did
not depend on these draws: the emitted tokens are the target's own draws. For a chain it accepts
less than rejection sampling does; for tokens that are chosen deterministically there is nothing
better that looks at one path (Miao et al. 2023, arXiv 2305.09781, naive sampling).
"""

import dataclasses

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.types import Verdict
from spsjax.verifiers import base


@dataclasses.dataclass(frozen=True)
class Verifier(base.Verifier):
    """Walks from the root to the child that equals the target's draw, until there is none.

    Lossless. Every node has one draw, whatever paths lead to it.
    """

    lossless = True
    trees = True

    def __call__(self, keys_B, proposal, logits_BMV, rows):
        target_probs = sampling.to_probs(logits_BMV, rows)
        B, M, _ = target_probs.shape
        uniforms = sampling.uniforms(keys_B, sampling.NEXT, 2 * M).reshape(B, M, 2)
        return walk(proposal, sampling.draw(target_probs, uniforms), jnp.sum(target_probs, axis=-1))


def walk(proposal, drawn_BM, mass_BM) -> Verdict:
    """Returns the verdict that the target's draws at every node lead to.

    Args:
        proposal: N draft tokens per row.
        drawn_BM: the token drawn at each node.
        mass_BM: sum of each node's distribution; not finite or 0 where nothing could be drawn.
    """
    tokens, (B, N) = proposal.tokens, proposal.tokens.shape
    parents = tree.chain(B, N) if proposal.parents is None else proposal.parents
    matches = tokens == jnp.take_along_axis(drawn_BM, parents, axis=1)  # no draw is -1
    if proposal.eligible is not None:
        matches &= proposal.eligible
    # Nothing can be drawn from such a node, so no child of it is accepted.
    drawable = jnp.isfinite(mass_BM) & (mass_BM > 0)
    matches &= jnp.take_along_axis(drawable, parents, axis=1)
    # Of several children with the same token, the first one counts.
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    earlier = jnp.tril(jnp.ones((N, N), bool), -1)
    matches &= ~jnp.any(twins & matches[:, None] & earlier, axis=2)
    # A node is reached if it matches and so do all above it; at most one per depth is.
    matches = jnp.concatenate([jnp.ones((B, 1), bool), matches], axis=1)
    above = tree.ancestors(parents)
    reached = jnp.all(matches[:, None] | ~above, axis=2)
    depth = jnp.sum(above, axis=2) - 1
    column = jnp.arange(N + 1, dtype=jnp.int32)
    here = reached[:, :, None] & (depth[:, :, None] == column)
    path = jnp.max(jnp.where(here, column[:, None], -1), axis=1)
    count = jnp.sum(reached, axis=1, dtype=jnp.int32) - 1  # draft tokens accepted
    valid = jnp.take_along_axis(tree.along(path, drawable), count[:, None], axis=1)[:, 0]
    # Each node's draw is its child's token, or the token that follows the last node.
    emitted = jnp.where(column < (count + valid)[:, None], tree.along(path, drawn_BM), -1)
    return Verdict(tokens=emitted, num_tokens=count + valid, path=path, valid=valid)
