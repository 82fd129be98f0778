"""Mixtures of experts: each token uses a few of many feed-forward networks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from spsjax.models.config import Config
from spsjax.models.feed_forward import FeedForward
from spsjax.models.linear import ACTIVATIONS, INIT, make_linear
from spsjax.models.products import product
from spsjax.models.quantization import Quantized
from spsjax.types import Array

Kernels = tuple[Array, Array, Array]  # gate and up [E, D, F], down [E, F, D]
# Bounds on the rows that an expert multiplies at once. One row is slow (`linear.two_rows`), and
# more than 64 rows do not make the product faster.
_LEAST_ROWS, _MOST_ROWS = 2, 64


class Experts(nnx.Module):
    """Mixture of gated feed-forward networks (Jiang et al. 2024, arXiv 2401.04088, 2.1).

    Only experts that at least one token uses are read, and each multiplies its own tokens only. On
    a mesh, every device runs its experts, or its parts of all experts, for all tokens of its rows.
    Then one sum over the model axis combines the results.
    """

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.config = config
        self.router = make_linear(config.d_model, config.num_experts, False, dtype=dtype, rngs=rngs)
        E, D, F = config.num_experts, config.d_model, config.d_ff
        for name, shape in (("gate", (E, D, F)), ("up", (E, D, F)), ("down", (E, F, D))):
            setattr(self, f"experts_{name}", nnx.Param(INIT(rngs.params(), shape, dtype)))
        if config.router == "sigmoid":
            # At least float32, because rounding can change the choice of experts.
            wide = jnp.promote_types(dtype, jnp.float32)
            self.choice_bias = nnx.Param(jnp.zeros(E, wide))
        if config.shared_d_ff:
            shared = dataclasses.replace(config, d_ff=config.shared_d_ff)
            self.shared = FeedForward(shared, dtype=dtype, rngs=rngs)
            if config.shared_gate:
                self.shared_gate = make_linear(config.d_model, 1, False, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD, stream_BTD=None):
        """Returns the outputs [B, T, D] for normalised inputs, as `FeedForward` does."""
        mixed = self._mixed(x_BTD, *self._chosen(x_BTD))
        return mixed + self._of_all_tokens(x_BTD) if self.config.shared_d_ff else mixed

    def _mixed(self, x_BTD, scores, ids, factors_E: Array | float = 1.0) -> Array:
        """Returns the weighted sum [B, T, D] of each token's experts.

        `scores` and `ids` are those of `_chosen`, and `factors_E` more factors of the weights.
        """
        config = self.config
        best = jnp.take_along_axis(scores, ids, axis=-1)
        if config.renormalize:
            best = best / (jnp.sum(best, axis=-1, keepdims=True) + 1e-20)
        chosen = jax.nn.one_hot(ids, config.num_experts)
        best = best * config.expert_scale
        weights_BTE = jnp.sum(chosen * best[..., None], axis=-2) * factors_E
        weights_BTE = weights_BTE.astype(x_BTD.dtype)
        chosen_BTE = jnp.any(chosen, axis=-2)
        kernels = tuple(
            getattr(self, f"experts_{name}").get_value() for name in ("gate", "up", "down")
        )
        return mixture(config, x_BTD, chosen_BTE, weights_BTE, kernels)

    def _of_all_tokens(self, x_BTD) -> Array:
        """Returns the output of the network that all tokens use."""
        shared = self.shared(x_BTD)
        return (
            shared * jax.nn.sigmoid(self.shared_gate(x_BTD)) if self.config.shared_gate else shared
        )

    def _chosen(self, x_BTD) -> tuple[Array, Array]:
        """Returns the scores of all experts [B, T, E], and the experts of each token.

        Both are computed in float32, because rounding can change the choice of experts.
        """
        config = self.config
        if config.router != "sigmoid":
            scores = jax.nn.softmax(self.router(x_BTD).astype(jnp.float32), axis=-1)
            preferred = scores
        else:
            # DeepSeek-V3 (arXiv 2412.19437, 2.1.2): the bias balances the load, and does not
            # change the weights of the chosen experts.
            bias = self.choice_bias[...]
            x, kernel = (y.astype(bias.dtype) for y in (x_BTD, self.router.kernel[...]))
            scores = jax.nn.sigmoid(product(x, kernel))
            preferred = self._in_best_groups(scores + bias)
        # `argsort`, because the compiler does not split `top_k` by rows and would gather all rows.
        return scores, jnp.argsort(-preferred, axis=-1)[..., : config.experts_per_token]

    def _in_best_groups(self, scores_BTE) -> Array:
        """Returns the scores, with -inf outside of each token's best groups of experts.

        A group is as good as the sum of its two best experts.
        """
        count, kept = self.config.expert_groups, self.config.groups_per_token
        if kept == count:
            return scores_BTE
        by_group = scores_BTE.reshape(*scores_BTE.shape[:-1], count, -1)
        worth = jnp.sum(jnp.sort(by_group, axis=-1)[..., -2:], axis=-1)
        best = jnp.argsort(-worth, axis=-1)[..., :kept]
        is_best = jnp.any(jax.nn.one_hot(best, count), axis=-2)
        return jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(scores_BTE.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixture(
    config: Config, x_BTD: Array, chosen_BTE: Array, weights_BTE: Array, kernels: Kernels
) -> Array:
    """Returns the weighted sum [B, T, D] of each token's experts.

    Args:
        config: config of the model.
        x_BTD: inputs of the experts.
        chosen_BTE: whether a token uses an expert, bool.
        weights_BTE: weight of each expert; 0 for unused experts.
        kernels: weight matrices of all experts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _grouped(config, None, x_BTD, chosen_BTE, weights_BTE, kernels).astype(x_BTD.dtype)
    size = mesh.shape["model"]
    # Devices have whole experts if the axis divides their number, else a part of each expert
    # (`sharding.param_spec`).
    whole = config.num_experts % size == 0
    if not whole and config.d_ff % size:  # the weights are replicated
        return all_experts(config, x_BTD, chosen_BTE, weights_BTE, kernels)

    def run_part(*arguments):
        out = _grouped(config, None if whole else "model", *arguments)
        return jax.lax.psum(out.astype(x_BTD.dtype), "model")

    columns, rows = (P("model"),) * 2 if whole else (P(None, None, "model"), P(None, "model"))
    split = [
        jax.tree.map(functools.partial(_spec, spec), kernel)
        for spec, kernel in zip((columns, columns, rows), kernels)
    ]
    data = "data" if x_BTD.shape[0] % mesh.shape["data"] == 0 else None
    choice = P(data, None, "model" if whole else None)
    # check_vma fails here: it takes the loop's initial zeros as equal on all devices, which the
    # sums after them are not.
    sharded = jax.shard_map(
        run_part,
        in_specs=(P(data), choice, choice, tuple(split)),
        out_specs=P(data),
        check_vma=False,
    )
    return sharded(x_BTD, chosen_BTE, weights_BTE, kernels)


def _spec(spec: P, leaf: Array) -> P:
    """Returns the partition spec of a kernel's leaf, without axes of size 1.

    The scales of a quantised kernel have an input axis of size 1.
    """
    return P(*(None if size == 1 else axis for axis, size in zip(spec, leaf.shape)))


def _grouped(
    config: Config, axis: str | None, x_BTD, chosen_BTE, weights_BTE, kernels: Kernels
) -> Array:
    """Returns the weighted sum [B, T, D] over the local experts, one block of tokens at a time.

    The sum is in float32 or float64. `axis` is the mesh axis that splits each expert; None: experts
    are whole.
    """
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    B, T, D = x_BTD.shape
    E, N = chosen_BTE.shape[-1], B * T
    x_ND = x_BTD.reshape(N, D)
    chosen_EN, weights_EN = (array.reshape(N, E).T for array in (chosen_BTE, weights_BTE))
    # Tokens sorted by expert: those of the first expert, then those of the second, ...
    most = N * min(config.experts_per_token, E)
    (pairs,) = jnp.nonzero(chosen_EN.reshape(-1), size=most, fill_value=0)
    height = _block_rows(config, N)
    tokens = jnp.pad(pairs % N, (0, height))  # the last block may exceed the tokens
    counts_E = jnp.sum(chosen_EN, axis=1)
    blocks_E = -(-counts_E // height)
    starts_E, ends_E = jnp.cumsum(counts_E) - counts_E, jnp.cumsum(blocks_E)

    def add_block(block, sum_ND):
        expert = jnp.searchsorted(ends_E, block, side="right")
        # Tokens of this expert in earlier blocks.
        before = (block - (ends_E[expert] - blocks_E[expert])) * height
        rows = jax.lax.dynamic_slice_in_dim(tokens, starts_E[expert] + before, height)
        is_valid = jnp.arange(height) < counts_E[expert] - before
        weights = weights_EN[expert, rows].astype(x_ND.dtype)[:, None]
        gate, up, down = jax.tree.map(lambda kernel: kernel[expert], kernels)
        x = x_ND[rows]
        inner = ACTIVATIONS[config.ffn](product(x, gate)) * product(x, up) * weights
        out = product(inner, down, wide, axis)
        return sum_ND.at[rows].add(jnp.where(is_valid[:, None], out, 0))

    zeros = jnp.zeros((N, D), wide)
    return jax.lax.fori_loop(0, ends_E[-1], add_block, zeros).reshape(B, T, D)


def _block_rows(config: Config, tokens: int) -> int:
    """Returns the number of tokens per block: a power of two near the mean number per expert."""
    share = tokens * config.experts_per_token // config.num_experts
    return min(max(1 << share.bit_length() - 1 if share else 1, _LEAST_ROWS), _MOST_ROWS)


def all_experts(
    config: Config, x_BTD: Array, chosen_BTE: Array, weights_BTE: Array, kernels: Kernels
) -> Array:
    """Returns the result of `mixture` by running all experts over all tokens; differentiable."""
    gate, up, down = (
        kernel.values().astype(x_BTD.dtype) if isinstance(kernel, Quantized) else kernel
        for kernel in kernels
    )
    gate = jnp.einsum("btd,edf->btef", x_BTD, gate)
    up = jnp.einsum("btd,edf->btef", x_BTD, up)
    inner = ACTIVATIONS[config.ffn](gate) * up * weights_BTE[..., None]
    return jnp.einsum("btef,efd->btd", inner, down)


def _forward(config, *arguments):
    return mixture(config, *arguments), arguments


def _backward(config, arguments, gradient):
    # The loop in `_grouped` has a traced length, and so no gradient.
    x, chosen, weights, kernels = arguments

    def run(x, weights, kernels):
        return all_experts(config, x, chosen, weights, kernels)

    grad_x, grad_weights, grad_kernels = jax.vjp(run, x, weights, kernels)[1](gradient)
    return grad_x, None, grad_weights, grad_kernels


mixture.defvjp(_forward, _backward)
