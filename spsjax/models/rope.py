"""Rotary positions (RoFormer; Su et al. 2021, arXiv 2104.09864) and their scalings.

`Config.rope_scaling` is one of:
  * ("linear", factor) divides all frequencies.
  * ("proportional", share, factor) rotates a share of the dimensions, those with the highest
    frequencies, and divides these frequencies (Gemma 4).
  * ("llama3", factor, low, high, original) divides frequencies with wavelengths above
    `original / low`, keeps those with wavelengths below `original / high`, and interpolates between
    these bounds.
  * ("yarn", factor, fast, slow, original, attention, truncate) divides frequencies with less than
    `slow` turns in the original context, keeps those with more than `fast` turns, and interpolates
    between these bounds (YaRN; Peng et al. 2023, arXiv 2309.00071, 3.2 to 3.4).
  * ("dynamic", factor, original) raises the base at positions beyond the original context. Decoded
    tokens get the frequencies of `transformers`. The tokens of a long prompt do not: `transformers`
    rotates all of them by the length of the prompt.
  * ("longrope", attention, original, whole, short, long) divides each frequency by a factor of its
    own (Ding et al. 2024, arXiv 2402.13753). The short factors apply up to the original context.
`attention` is a factor of cosine and sine.
"""

import math

import jax.numpy as jnp
import numpy as np

from spsjax.types import Array


def angles(
    positions_BT: Array, head_dim: int, theta: float, scaling: tuple = ()
) -> tuple[Array, Array]:
    """Returns cosine and sine [B, T, 1, C/2] of the angles by which tokens are rotated."""
    positions = positions_BT[:, :, None, None]
    kind = scaling[0] if scaling else None
    if kind == "dynamic":
        turned = positions * _of_position(positions, head_dim, theta, *scaling[1:])
    else:
        turned = positions * frequencies(head_dim, theta, scaling)
    attention = {"yarn": 5, "longrope": 1}.get(kind or "")
    factor = 1.0 if attention is None else scaling[attention]
    if factor == 1.0:
        return jnp.cos(turned), jnp.sin(turned)
    return jnp.cos(turned) * factor, jnp.sin(turned) * factor


def frequencies(head_dim: int, theta: float, scaling: tuple = ()) -> np.ndarray:
    """Returns the frequencies [C/2] float32 of positions within the context."""
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    kind, *values = scaling or (None,)
    if kind == "linear":
        plain = plain / values[0]
    elif kind == "proportional":
        share, factor = values
        plain[int(share * head_dim // 2) :] = 0
        plain = plain / factor
    elif kind == "llama3":
        factor, low, high, original = values
        turns = original * plain / (2 * np.pi)
        plain = _mixed(plain, factor, np.clip((turns - low) / (high - low), 0, 1))
    elif kind == "yarn":
        factor, fast, slow, original, _, truncate = values

        def index(turns: float) -> float:
            """Returns the index of the frequency with a number of turns in the original context."""
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(fast), index(slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = max(high - low, 0.001)
        plain = _mixed(plain, factor, 1 - np.clip((np.arange(len(plain)) - low) / width, 0, 1))
    elif kind == "longrope":
        plain = plain / np.asarray(values[3])
    return plain.astype(np.float32)


def _mixed(plain: np.ndarray, factor: float, share: np.ndarray) -> np.ndarray:
    """Returns the mean of original frequencies, with weight `share`, and divided ones."""
    return plain * (share + (1 - share) / factor)


def _of_position(positions: Array, head_dim: int, theta: float, factor: float, original: float):
    """Returns the frequencies of each position, with the base for a text of that length."""
    length = jnp.maximum(positions + 1, original)
    stretch = factor * length / original - (factor - 1)
    base = math.log(theta) + jnp.log(stretch) * head_dim / (head_dim - 2)
    return jnp.exp(-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim * base)


def rotate(x_BTHC: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotates the first entries of each head, two per angle, in float32 or float64.

    The first half of them is rotated against the second half. If `interleaved`, entries 2i are
    rotated against entries 2i + 1, and the result has the former in its first half, which changes
    no product of two rotated heads.
    """
    wide, size = jnp.promote_types(x_BTHC.dtype, jnp.float32), 2 * cos.shape[-1]
    x, rest = x_BTHC[..., :size].astype(wide), x_BTHC[..., size:]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    rotated = [half.astype(x_BTHC.dtype) for half in rotated]
    return jnp.concatenate([*rotated, rest] if rest.size else rotated, axis=-1)
