"""The bias of lenient rejection sampling, in closed form."""

import jax.numpy as jnp

from spsjax.types import Array
from spsjax.verifiers import inputs
from spsjax.verifiers.rejection import check_lenience, residual


def lenient_distribution(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """Returns the exact distribution of one token emitted with lenience: [..., V] x2 -> [..., V].

    Raises:
        InputError: shapes or types do not fit together, or lenience is outside (0, 1].
    """
    check_lenience(lenience)
    target_probs = inputs.distributions("target_probs", target_probs)
    draft_probs = inputs.distributions("draft_probs", draft_probs, target_probs.shape)
    kept = jnp.minimum(draft_probs, target_probs / lenience)
    left = residual(draft_probs, target_probs, lenience)
    rejected = 1 - jnp.sum(kept, axis=-1, keepdims=True)
    return kept + rejected * left / jnp.sum(left, axis=-1, keepdims=True)


def lenience_bias(draft_probs: Array, target_probs: Array, lenience: float) -> Array:
    """Returns the total variation of a leniently emitted token: [..., V] x2 -> [...].

    It is the distance to the target's distribution, 0 at `lenience=1`. It is exact for sampled
    rows, where the emitted token's distribution has a closed form. Greedy rows have a rule of their
    own (`rejection.relax_greedy`), which this does not describe.
    """
    emitted = lenient_distribution(draft_probs, target_probs, lenience)
    target_probs = inputs.distributions("target_probs", target_probs)
    return 0.5 * jnp.sum(jnp.abs(emitted - target_probs), axis=-1)
