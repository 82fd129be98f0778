"""The gated delta rule over chains and trees of tokens (Yang et al. 2024, arXiv 2412.06464).

A token has a key k, a value v, a query q, a strength b and the logarithm g <= 0 of a decay. Its
*update* u corrects what the state S [C, V] of the token before it holds for the key:

    u = b (v - exp(g) S^T k),    new state = exp(g) S + k u^T,    output = (new state)^T q.

From the state S before a block of nodes, the state after node i is a sum over i and its ancestors
j in the block:

    S_i = exp(G_i) S + sum_j exp(G_i - G_j) k_j u_j^T,

where G, the *total decay*, sums g from the first node of a path on. So no node needs a state of its
own: keys, updates and total decays suffice to continue any path, and to commit one (`advance`). The
updates of a block solve a triangular system, as parents come before their children (2.2 there).

A token that is not finite has a total decay of NaN, and so have its descendants. Their outputs are
NaN, and no other node reads them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.types import Array, pytree_dataclass

CHUNK = 64  # tokens per triangular system of a long text


@pytree_dataclass
class Tokens:
    """Inputs of the delta rule, in float32 or float64. H is a multiple of G."""

    query: Array  # [B, G, T, C]
    key: Array  # [B, G, T, C]
    value: Array  # [B, H, T, V]
    decay: Array  # [B, H, T], logarithms
    strength: Array  # [B, H, T]


@pytree_dataclass
class Updates:
    """Contributions of nodes to the state. The first node of a path follows the state."""

    keys: Array  # [B, G, P, C]
    updates: Array  # [B, H, P, V]
    decays: Array  # [B, H, P, 1], total decays


def finite_tokens(tokens: Tokens) -> Tokens:
    """Returns the tokens; one that is not finite has zeros instead, and a decay of NaN."""
    rows = (
        tokens.query,
        tokens.key,
        tokens.value,
        tokens.decay[..., None],
        tokens.strength[..., None],
    )
    finite = jnp.stack([jnp.all(jnp.isfinite(row), axis=(1, 3)) for row in rows]).all(axis=0)

    def clean(row: Array, replacement=0) -> Array:
        shape = len(row), 1, row.shape[2], *[1] * (row.ndim - 3)
        return jnp.where(finite.reshape(shape), row, replacement)

    return Tokens(
        clean(tokens.query),
        clean(tokens.key),
        clean(tokens.value),
        clean(tokens.decay, jnp.nan),
        clean(tokens.strength),
    )


def over_nodes(
    tokens: Tokens,
    visible_BTP: Array,
    state_BHCV: Array | None,
    earlier: Updates | None = None,
    size: Array | int = 0,
) -> tuple[Array, Updates]:
    """Returns the outputs [B, H, T, V] of T new nodes of a block, and their updates.

    Args:
        tokens: the new nodes.
        visible_BTP: ancestors of each new node, itself included, among the P nodes of the block.
        state_BHCV: state before the block; None: zeros.
        earlier: updates of the block's nodes so far, with room for P nodes; None: the new nodes are
            all of the block, so that T = P.
        size: number of earlier nodes.
    """
    T, rule = tokens.key.shape[2], tokens
    now = lax.dynamic_slice_in_dim(visible_BTP, size, T, axis=2) if earlier else visible_BTP
    total = jnp.sum(jnp.where(now[:, None], rule.decay[:, :, None], 0), axis=-1)
    if earlier is not None:
        before = visible_BTP & (jnp.arange(visible_BTP.shape[2]) < size)
        # Decays are at most 1, so that the nearest ancestor has the least total.
        behind = jnp.where(before[:, None], earlier.decays[..., 0][:, :, None], 0)
        total = total + jnp.min(behind, axis=-1)
    finite = jnp.where(jnp.isnan(total), 0, total)
    wanted, out = rule.value, jnp.zeros_like(rule.value)
    if state_BHCV is not None:
        fade = jnp.exp(finite)[..., None]
        wanted = wanted - fade * _product(_heads(rule.key, wanted), state_BHCV)
        out = out + fade * _product(_heads(rule.query, wanted), state_BHCV)
    if earlier is not None:
        decays = earlier.decays[..., 0]
        fade = _fades(before, finite, jnp.where(jnp.isnan(decays), 0, decays))
        wanted = wanted - _product(_scores(rule.key, earlier.keys, wanted) * fade, earlier.updates)
        out = out + _product(_scores(rule.query, earlier.keys, wanted) * fade, earlier.updates)
    strength, fade = rule.strength[..., None], _fades(now, finite, finite)
    updates = strength * wanted
    if T > 1:  # the system's diagonal is 1, and what is above it is not read
        system = strength * _scores(rule.key, rule.key, wanted) * fade
        updates = lax.linalg.triangular_solve(
            system, updates, left_side=True, lower=True, unit_diagonal=True
        )
    out = out + _product(_scores(rule.query, rule.key, wanted) * fade, updates)
    total = total[..., None]
    return jnp.where(jnp.isnan(total), jnp.nan, out), Updates(rule.key, updates, total)


def over_text(tokens: Tokens, state_BHCV: Array | None) -> tuple[Array, Updates]:
    """Returns what `over_nodes` does for a chain of T tokens, with systems of `CHUNK` tokens.

    So time and memory grow with T, and not with its square (3.3 there).
    """
    B, H, T, V = tokens.value.shape
    if T <= CHUNK:
        return over_nodes(tokens, _chain(T), state_BHCV)
    count = -(-T // CHUNK)

    def chunks(array: Array) -> Array:
        """Splits an array [B, H, T, ...] into [count, B, H, CHUNK, ...]; zeros change nothing."""
        padding = [(0, 0)] * array.ndim
        padding[2] = (0, count * CHUNK - T)
        padded = jnp.pad(array, padding)
        shape = *array.shape[:2], count, CHUNK, *array.shape[3:]
        return jnp.moveaxis(padded.reshape(shape), 2, 0)

    def whole(array: Array) -> Array:
        array = jnp.moveaxis(array, 0, 2)
        return array.reshape(*array.shape[:2], count * CHUNK, *array.shape[4:])[:, :, :T]

    def read(carry, chunk: Tokens):
        state, total = carry
        out, new = over_nodes(chunk, _chain(CHUNK), state)
        state = advance(state, new, jnp.ones((B, CHUNK), bool))
        decays = total + new.decays
        return (state, decays[:, :, -1:]), (out, new.updates, decays)

    if state_BHCV is None:
        state_BHCV = jnp.zeros((B, H, tokens.key.shape[-1], V), tokens.value.dtype)
    # A sum over the state's own entries, so that both carries are split alike on a mesh.
    start = state_BHCV, jnp.zeros_like(state_BHCV[:, :, :1, :1])
    _, (out, updates, decays) = lax.scan(read, start, jax.tree.map(chunks, tokens))
    return whole(out), Updates(tokens.key, whole(updates), whole(decays))


def advance(state_BHCV: Array, nodes: Updates, accepted_BP: Array) -> Array:
    """Returns the state after the accepted nodes, which are one path from the block's start."""
    accepted = accepted_BP[:, None, :, None]
    # The last node of the path has the least total decay.
    end = jnp.min(jnp.where(accepted, nodes.decays, 0), axis=2, keepdims=True)
    fade = jnp.where(accepted, jnp.exp(end - jnp.where(accepted, nodes.decays, 0)), 0)
    updates = jnp.where(accepted, nodes.updates, 0) * fade
    keys = _heads(jnp.where(accepted, nodes.keys, 0), updates)
    added = jnp.einsum("bhpc,bhpv->bhcv", keys, updates, precision=lax.Precision.HIGHEST)
    return state_BHCV * jnp.exp(end) + added


def _chain(tokens: int) -> Array:
    return jnp.tril(jnp.ones((1, tokens, tokens), bool))


def _fades(visible: Array, totals_BHT: Array, totals_BHP: Array) -> Array:
    """Returns the decay [B, H, T, P] from each node to each of its descendants, else 0."""
    fades = totals_BHT[..., None] - totals_BHP[:, :, None]
    return jnp.exp(jnp.where(visible[:, None], fades, -jnp.inf))


def _heads(x_BGTC: Array, like_BHTV: Array) -> Array:
    """Returns keys or queries repeated to the number of value heads [B, H, T, C]."""
    return jnp.repeat(x_BGTC, like_BHTV.shape[1] // x_BGTC.shape[1], axis=1)


def _scores(x_BGTC: Array, keys_BGPC: Array, like_BHTV: Array) -> Array:
    """Returns the products [B, H, T, P] of keys or queries with keys."""
    return _heads(_product(x_BGTC, jnp.swapaxes(keys_BGPC, 2, 3)), like_BHTV)


def _product(left: Array, right: Array) -> Array:
    """Returns left @ right. Errors of the state add up over a text, so it is never rounded."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
