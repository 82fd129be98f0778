"""Bias of lenient rejection sampling in closed form."""

import jax.numpy as jnp

from spsjax.types import Array
from spsjax.verifiers import inputs
from spsjax.verifiers.rejection import check_lenience, residual


def lenient_distribution(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """Returns the exact distribution of a token emitted with lenience: 2 x [..., V] -> [..., V].

    Raises:
        InputError: shapes or types do not fit together, or lenience is outside (0, 1].
    """
    check_lenience(lenience)
    target_probs = inputs.distributions("target_probs", target_probs)
    draft_probs = inputs.distributions("draft_probs", draft_probs, target_probs.shape)
    accepted = jnp.minimum(draft_probs, target_probs / lenience)
    next_probs = residual(draft_probs, target_probs, lenience)
    rejected = 1 - jnp.sum(accepted, axis=-1, keepdims=True)
    return accepted + rejected * next_probs / jnp.sum(next_probs, axis=-1, keepdims=True)


def lenience_bias(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """Returns the bias of a token that is emitted with lenience: 2 x [..., V] -> [...].

    The bias is the total variation distance to the target's distribution, 0 at `lenience=1`. It is
    exact for sampled rows. It does not describe greedy rows, which have a rule of their own
    (`rejection.relax_greedy`).
    """
    emitted = lenient_distribution(draft_probs, target_probs, lenience)
    target_probs = inputs.distributions("target_probs", target_probs)
    return 0.5 * jnp.sum(jnp.abs(emitted - target_probs), axis=-1)
