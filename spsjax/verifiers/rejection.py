"""Verifiers: which draft tokens stand, and what token follows them.

Acceptance belongs to this file alone. A verifier is a pure function of distributions first
(`ratio`, `residual`) and draws after, so that the exactness tests enumerate the code that runs.

Modified rejection sampling is **lossless** at `lenience=1`: the emitted tokens follow the target's
law exactly, whatever the draft (Chen et al. 2023, arXiv 2302.01318, Algorithm 2 and Theorem 1;
Leviathan et al. 2022, arXiv 2211.17192, appendix A.1). With one-hot distributions it is greedy
verification: a draft token stands if it is the target's choice.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.errors import InputError, short_repr
from spsjax.types import Array, Proposal, Verdict


def ratio(
    draft_tokens: Array, draft_probs: Array, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Numerator and denominator of the acceptance probability min(1, target / (lenience draft)).

    Both at the drafted tokens, for tokens [...] and distributions [..., V] -> [...], [...]. A token
    is accepted if `u * denominator < numerator`: nothing is divided, and u = 0 never accepts a
    token that the target gives no probability.
    """
    index = jnp.maximum(draft_tokens, 0)[..., None]
    target_at = jnp.take_along_axis(target_probs, index, axis=-1)[..., 0]
    draft_at = jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]
    return jnp.where(draft_tokens >= 0, target_at, 0), lenience * draft_at


def residual(draft_probs: Array, target_probs: Array, lenience: float = 1.0) -> Array:
    """Unnormalised max(target - lenience draft, 0): [..., V], [..., V] -> [..., V].

    Where nothing is left (the two agree to rounding) it is the target itself; a rejection there has
    a probability of the order of the rounding. NaN in either argument gives NaN.
    """
    left = jnp.maximum(target_probs - lenience * draft_probs, 0)
    empty = jnp.sum(left, axis=-1, keepdims=True) == 0
    return jnp.where(empty, target_probs, left)


def rejection(
    keys_B: Array, proposal: Proposal, target_probs: Array, lenience: float = 1.0
) -> Verdict:
    """Chen's modified rejection sampling. Lossless at `lenience=1`; lossy below it.

    Args:
        keys_B: one key a row and round.
        proposal: K draft tokens a row.
        target_probs: [B, K+1, V], the distribution that should have been sampled at each node.
        lenience: in (0, 1]; `lenience_bias` gives its cost.
    """
    B, nodes, V = target_probs.shape
    K = nodes - 1
    tokens = proposal.tokens
    draft_probs = jax.nn.one_hot(tokens, V) if proposal.probs is None else proposal.probs
    draft_probs = jnp.where(tokens[..., None] >= 0, draft_probs, 0)
    numerator, denominator = ratio(tokens, draft_probs, target_probs[:, :K], lenience)
    accepted = sampling.uniforms(keys_B, sampling.ACCEPT, K) * denominator < numerator
    count = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, dtype=jnp.int32)
    # After the last draft token nothing was drafted: a draft of zeros makes the bonus a residual.
    draft_probs = jnp.concatenate([draft_probs, jnp.zeros((B, 1, V), draft_probs.dtype)], axis=1)
    node = count[:, None, None]
    left = residual(
        jnp.take_along_axis(draft_probs, node, axis=1)[:, 0],
        jnp.take_along_axis(target_probs, node, axis=1)[:, 0],
        lenience,
    )
    following = sampling.draw(left, sampling.uniforms(keys_B, sampling.NEXT, 2))
    total = jnp.sum(left, axis=-1)
    valid = jnp.isfinite(total) & (total > 0)
    index = jnp.arange(K + 1)
    padded = jnp.concatenate([tokens, jnp.full((B, 1), -1, jnp.int32)], axis=1)
    emitted = jnp.where(index < count[:, None], padded, -1)
    emitted = jnp.where((index == count[:, None]) & valid[:, None], following[:, None], emitted)
    return Verdict(tokens=emitted, num_tokens=count + valid, valid=valid)


def rejection_sample(
    key: Array, draft_tokens: Array, draft_probs: Array, target_probs: Array, lenience: float = 1.0
) -> tuple[Array, Array]:
    """Modified rejection sampling on given distributions (Chen et al. 2023, Algorithm 2).

    Lossless at `lenience=1`, if `draft_tokens[:, k]` was drawn from `draft_probs[:, k]`.

    Args:
        key: one key; row b uses `fold_in(key, b)`, of a threefry key made from `key` where that
            is of another generator.
        draft_tokens: [B, K] int; -1 proposes nothing at that position and after it.
        draft_probs: [B, K, V] float, each summing to 1.
        target_probs: [B, K+1, V] float, each summing to 1.
        lenience: in (0, 1]: accepts with probability min(1, target / (lenience draft)).

    Returns:
        [B, K+1] int32 tokens padded with -1, and [B] int32 how many there are: 1..K+1, or 0 for a
        row with any probability that is not finite.

    Raises:
        InputError: shapes or types that do not fit together, a lenience outside (0, 1]; and,
            unless traced by `jit`, ids outside the vocabulary and distributions that are none.
    """
    check_lenience(lenience)
    _check_key(key)
    tokens = _array("draft_tokens", draft_tokens)
    if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(f"draft_tokens: expected integers [B, K], B >= 1, found {_shape(tokens)}")
    (B, K), V = tokens.shape, (0, *_array("target_probs", target_probs).shape)[-1]
    target_probs = _distributions("target_probs", target_probs, (B, K + 1, V))
    draft_probs = _distributions("draft_probs", draft_probs, (B, K, V), tokens >= 0)
    if not isinstance(tokens, jax.core.Tracer):  # under jit the values are not known
        wrong = np.asarray(tokens)
        wrong = wrong[(wrong < -1) | (wrong >= V)]
        if wrong.size:
            raise InputError(f"draft_tokens: expected ids in [-1, {V}), found {wrong[0]}")
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), draft_probs)
    verdict = rejection(sampling.row_keys(key, B), proposal, target_probs, lenience)
    # What is not proposed may come with anything at all.
    offered = jnp.cumprod(proposal.tokens >= 0, axis=1).astype(bool)
    used = jnp.concatenate([jnp.ones((B, 1), bool), offered], axis=1)
    finite = jnp.all(jnp.isfinite(jnp.sum(draft_probs, axis=-1)) | ~offered, axis=1)
    finite &= jnp.all(jnp.isfinite(jnp.sum(target_probs, axis=-1)) | ~used, axis=1)
    valid = verdict.valid & finite
    return jnp.where(valid[:, None], verdict.tokens, -1), jnp.where(valid, verdict.num_tokens, 0)


def relax_greedy(
    target_probs: Array, logits: Array, draft_tokens: Array, greedy: Array, lenience: float
) -> Array:
    """Lenience for greedy rows, whose one-hot target knows no "nearly". Lossy.

    Gives probability 1 to a draft token whose own probability is at least `lenience` times the
    best one's, before standardising (Leviathan et al. 2022, appendix A.5). [B, K+1, V] -> same.
    """
    index = jnp.maximum(draft_tokens, 0)[..., None]
    drafted = jnp.take_along_axis(logits[:, :-1], index, axis=-1)
    close = drafted >= jnp.max(logits[:, :-1], axis=-1, keepdims=True) + jnp.log(lenience)
    chosen = jnp.arange(logits.shape[-1]) == draft_tokens[..., None]
    chosen &= jnp.isfinite(target_probs[:, :-1])  # a law that is no law stays one
    relaxed = jnp.where(chosen & close & greedy[:, None, None], 1.0, target_probs[:, :-1])
    return jnp.concatenate([relaxed, target_probs[:, -1:]], axis=1)


def lenient_law(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """The law of one token emitted with lenience: [..., V], [..., V] -> [..., V]. Exact.

    Raises:
        InputError: shapes or types that do not fit together, a lenience outside (0, 1].
    """
    check_lenience(lenience)
    target_probs = _distributions("target_probs", target_probs)
    draft_probs = _distributions("draft_probs", draft_probs, target_probs.shape)
    kept = jnp.minimum(draft_probs, target_probs / lenience)
    left = residual(draft_probs, target_probs, lenience)
    rejected = 1 - jnp.sum(kept, axis=-1, keepdims=True)
    return kept + rejected * left / jnp.sum(left, axis=-1, keepdims=True)


def lenience_bias(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """Total variation between a leniently emitted token and the target: [..., V] x2 -> [...].

    0 at `lenience=1`. Exact for sampled rows, since the law of the emitted token is known in closed
    form. Greedy rows have a rule of their own (`relax_greedy`), which this does not describe.
    """
    law = lenient_law(draft_probs, target_probs, lenience)
    target_probs = _distributions("target_probs", target_probs)
    return 0.5 * jnp.sum(jnp.abs(law - target_probs), axis=-1)


def check_lenience(lenience: float) -> None:
    """Raises InputError unless 0 < lenience <= 1."""
    least = np.finfo(np.float32).tiny  # below it, arithmetic makes it zero
    if not isinstance(lenience, numbers.Real) or not least <= lenience <= 1:
        raise InputError(f"lenience: expected a number in (0, 1], found {short_repr(lenience)}")


def _check_key(key) -> None:
    """Raises InputError unless it is one key, of the new style or the old."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    old = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if not new and (dtype, shape) != (old.dtype, old.shape):
        found = type(key).__name__ if dtype is None else f"{dtype} {list(shape)}"
        raise InputError(f"key: expected one key (jax.random.key), found {found}")


def _array(name: str, value):
    """The value as an array, its type as it is: JAX would wrap a large integer."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # lists of several lengths
        raise InputError(f"{name}: expected an array, found {short_repr(value)}") from None


def _distributions(name: str, value, shape: tuple | None = None, relevant=True) -> Array:
    """[..., V] probabilities of that shape, in float32 or more: half precision cannot be summed.

    What is a distribution is checked with a wide margin, where `relevant` and finite.
    """
    probs = _array(name, value)
    fits = probs.ndim and probs.shape[-1] and shape in (None, probs.shape)
    if not fits or not jnp.issubdtype(probs.dtype, jnp.floating):
        expected = "[..., V]" if shape is None else list(shape)
        raise InputError(f"{name}: expected floats {expected}, found {_shape(probs)}")
    probs = jnp.asarray(probs)
    probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))
    if not isinstance(probs, jax.core.Tracer) and not isinstance(relevant, jax.core.Tracer):
        total, least = (np.asarray(f(probs, axis=-1)) for f in (jnp.sum, jnp.min))
        wrong = ((least < 0) | (np.abs(total - 1) > 0.02)) & np.isfinite(total)
        wrong &= np.asarray(relevant)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            raise InputError(
                f"{name}: expected probabilities >= 0 that sum to 1, found a least of "
                f"{least[at]:.4g} and a sum of {total[at]:.4g} at {list(at)}"
            )
    return probs


def _shape(array) -> str:
    return f"{array.dtype} {list(array.shape)}"
