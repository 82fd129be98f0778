"""Standalone verification of draft tokens and distributions, with checked inputs."""

import jax.numpy as jnp

from spsjax import sampling, tree
from spsjax.errors import InputError, check_flag, short_repr
from spsjax.types import Array, Independent, Proposal
from spsjax.utils.compilation import compiled
from spsjax.verifiers import block, by_name, inputs, rejection, verdicts
from spsjax.verifiers.base import Verifier

TREE_RULES = "match", "recursive", "traversal", "kseq"


def rejection_sample(
    key: Array, draft_tokens: Array, draft_probs: Array, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Verifies a chain by modified rejection sampling (Chen et al. 2023, Algorithm 2).

    Lossless at `lenience=1`, if `draft_tokens[:, k]` was drawn from `draft_probs[:, k]`.

    Args:
        key: one key; row b uses `fold_in(key, b)`. A key of another generator than threefry is
            converted to a threefry key first.
        draft_tokens: tokens [B, K] int; -1: no token at this position and after it.
        draft_probs: distributions of the draft [B, K, V] float.
        target_probs: distributions of the target [B, K+1, V] float.
        lenience: number in (0, 1]; acceptance is min(1, target / (lenience draft)), lossy below 1.

    Returns:
        Tokens [B, K+1] int32, padded with -1, and their number [B] int32: 1..K+1, or 0 for a row
        with a probability that is not finite.

    Raises:
        InputError: shapes or types do not fit together, or lenience is outside (0, 1]. Outside of
            `jit`, also if ids are outside the vocabulary or distributions do not sum to 1.
    """
    rule = rejection.Verifier(lenience)
    chain = _chain(key, draft_tokens, draft_probs, target_probs)
    return compiled(_verify, rule)(key, *chain)[0][:2]


def block_verify(
    key: Array, draft_tokens: Array, draft_probs: Array, target_probs: Array
) -> tuple[Array, Array]:
    """Verifies a chain as a whole (Sun et al. 2024, arXiv 2403.10444, Algorithm 2). Lossless.

    The expected number of tokens is at least that of `rejection_sample`. Arguments, results and
    errors are the same.
    """
    rule = block.Verifier()
    chain = _chain(key, draft_tokens, draft_probs, target_probs)
    return compiled(_verify, rule)(key, *chain)[0][:2]


def tree_verify(
    key: Array,
    tokens: Array,
    parents: Array,
    draft_probs: Array | None,
    target_probs: Array,
    method: str = "match",
    replacement: bool = False,
) -> tuple[Array, Array, Array]:
    """Verifies a tree of draft tokens. Lossless if the arguments say how the tokens were drawn.

    Node 0 is the last committed token, and node 1 + n is `tokens[:, n]`. The children of a node
    come in the order in which they were drawn.

    Args:
        key: one key, as in `rejection_sample`.
        tokens: draft tokens [B, N] int; -1: no token, and nothing below it can be accepted. The
            decision to omit a token must not depend on the token. Of siblings without replacement,
            only the last ones may be omitted.
        parents: parent of each token [B, N] int, a node with a smaller number.
        draft_probs: distributions of the draft [B, P, V] float; the children of node p were drawn
            from `draft_probs[:, p]`, and nodes from P on have no children. None: tokens were chosen
            deterministically. "match" ignores the values.
        target_probs: distribution of the target at every node [B, N+1, V] float.
        method: rule. "match" and "recursive" fit all trees. "traversal" needs `draft_probs`. "kseq"
            needs `draft_probs` and `replacement=True`.
        replacement: whether the children of a node were drawn independently of each other; else
            each was drawn without the tokens of its earlier siblings.

    Returns:
        Tokens [B, K+1] int32, padded with -1; their number [B] int32, as in `rejection_sample`; and
        the path [B, K+1] int32: the root and the accepted nodes, padded with -1. K is the greatest
        depth of a node, or N under `jit`, where the depth is unknown.

    Raises:
        InputError: an error of `rejection_sample`, parents that are not a tree, a method that does
            not fit the draft, or equal siblings that were drawn without replacement.
    """
    rule = _rule_for_trees(method, draft_probs, replacement)
    inputs.check_key(key)
    tokens, V = inputs.draft_tokens("tokens", tokens, target_probs, "N")
    if method == "match":
        draft_probs = None
    B, N = tokens.shape
    P = N + 1 if draft_probs is None else inputs.num_nodes(draft_probs)
    parents = inputs.parents(parents, tokens, P)
    scored = tree.reached(jnp.asarray(parents), jnp.asarray(tokens) >= 0)
    target_probs = inputs.distributions("target_probs", target_probs, (B, N + 1, V), scored)
    tokens = jnp.where(scored[:, 1:], tokens, -1)  # also omits tokens below an omitted one
    if draft_probs is not None:
        has_children = (parents[..., None] == jnp.arange(P)) & scored[:, 1:, None]
        has_children = jnp.any(has_children, axis=1)
        draft_probs = inputs.distributions("draft_probs", draft_probs, (B, P, V), has_children)
        if not replacement:
            inputs.check_distinct(tokens, parents)
    columns = inputs.depth(parents) + 1
    parents, tokens = (jnp.asarray(array, jnp.int32) for array in (parents, tokens))
    proposal = (Independent if replacement else Proposal)(tokens, draft_probs, parents)
    (tokens, number, path), _ = compiled(_verify, rule)(key, proposal, target_probs)
    return tokens[:, :columns], number, path[:, :columns]


def _rule_for_trees(method: str, draft_probs: Array | None, replacement: bool) -> Verifier:
    """Returns the verifier of a method; raises InputError if it does not fit the draft."""
    if method not in TREE_RULES:
        raise InputError(f"method: expected {', '.join(TREE_RULES)}, found {short_repr(method)}")
    check_flag("replacement", replacement)
    if method in ("traversal", "kseq") and draft_probs is None:
        raise InputError(
            f'draft_probs: expected distributions for {method}, found None. Use method="match"'
        )
    if method == "kseq" and not replacement:
        raise InputError("replacement: expected True for kseq, found False")
    return by_name(method)


def _chain(
    key: Array, tokens: Array, draft_probs: Array, target_probs: Array
) -> tuple[Proposal, Array]:
    """Returns the proposal and the target's probabilities of a chain, after all checks."""
    inputs.check_key(key)
    tokens, V = inputs.draft_tokens("draft_tokens", tokens, target_probs, "K")
    B, K = tokens.shape
    target_probs = inputs.distributions("target_probs", target_probs, (B, K + 1, V))
    draft_probs = inputs.distributions("draft_probs", draft_probs, (B, K, V), tokens >= 0)
    return Proposal(jnp.asarray(tokens, jnp.int32), draft_probs), target_probs


def _verify(
    rule: Verifier, key: Array, proposal: Proposal, target_probs_BMV: Array
) -> tuple[Array, Array, Array]:
    """Returns tokens, their number and the path; rows with non-finite probabilities get no tokens.

    The distributions at omitted nodes are ignored.
    """
    verdict = rule.verify(sampling.row_keys(key, len(target_probs_BMV)), proposal, target_probs_BMV)
    parents, target = verdicts.parents_of(proposal), jnp.sum(target_probs_BMV, axis=-1)
    used = tree.reached(parents, proposal.tokens >= 0)  # the nodes that could be accepted
    finite = jnp.all(jnp.isfinite(target) | ~used, axis=1)
    if proposal.probs is not None:
        draft = jnp.sum(proposal.probs, axis=-1)
        drawn_from = parents[..., None] == jnp.arange(draft.shape[1])
        drawn_from = jnp.any(drawn_from & used[:, 1:, None], axis=1)
        finite &= jnp.all(jnp.isfinite(draft) | ~drawn_from, axis=1)
    valid = (verdict.valid & finite)[:, None]
    tokens, path = (jnp.where(valid, array, -1) for array in (verdict.tokens, verdict.path))
    return tokens, jnp.where(valid[:, 0], verdict.num_tokens, 0), path
