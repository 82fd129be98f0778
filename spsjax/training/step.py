"""Training step of any model: its per-token metrics are averaged, and "loss" is minimised.

Weights and optimizer state are float32 and sharded like the weights of a loaded model. The compute
type of a forward pass is a separate choice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spsjax import loading
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import losses
from spsjax.training.optimizer import OptimizerConfig
from spsjax.types import Array, PyTree
from spsjax.utils import program_cache
from spsjax.utils.fields import Checked, flag

# (params, frozen, batch) -> metrics by name, each [B, T]. The step minimises the one named "loss".
PerTokenMetrics = Callable[[PyTree, PyTree, PyTree], dict[str, Array]]


@dataclasses.dataclass(frozen=True)
class Precision(Checked):
    """Numerical options of a forward pass."""

    dtype: Any = ""  # compute type; empty: float32 on CPUs, bfloat16 on accelerators
    remat: bool = flag(False)  # whether the gradient recomputes activations, which saves memory

    def __post_init__(self):
        super().__post_init__()
        # Not the default of decoding: a resumed run must not depend on the version of XLA.
        default = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        object.__setattr__(self, "dtype", loading.compute_type(self.dtype or default))


def forward(
    config: transformer.Config, params: PyTree, tokens_BT: Array, dtype=None, remat: bool = False
) -> transformer.ModelOutput:
    """Returns logits [B, T, V] and final hidden states [B, T, D] of whole sequences."""
    return transformer.apply(config, params, tokens_BT, dtype=dtype, remat=remat)


def language_model_metrics(config: transformer.Config, precision: Precision) -> PerTokenMetrics:
    """Returns the cross entropy of the next token as a metrics function.

    The `tokens` of its batches are [B, T+1].
    """

    def metrics(params, frozen, batch):
        tokens = batch["tokens"]
        logits = forward(config, params, tokens[:, :-1], precision.dtype, precision.remat).logits
        return {"loss": losses.cross_entropy(logits, tokens[:, 1:])}

    return metrics


def loss_mask(batch: PyTree) -> Array:
    """Returns [B, T] float32: 1 where the next token counts, 0 in prompts and in padding.

    Args:
        batch: `tokens` [B, T+1], and optionally `start` [B], the number of prompt tokens per row,
            `stop` [B], the number of tokens per row before the padding, and `mask` [B, T+1], 1 for
            tokens that count.
    """
    tokens = batch["tokens"]
    label_index = jnp.arange(1, tokens.shape[1])
    start = batch.get("start", jnp.zeros(len(tokens), jnp.int32))
    stop = batch.get("stop", jnp.full(len(tokens), tokens.shape[1]))
    counts = (label_index >= start[:, None]) & (label_index < stop[:, None])
    if "mask" in batch:
        counts &= batch["mask"][:, 1:] > 0
    return counts.astype(jnp.float32)


def text_key(tokens_BT: Array, role: int) -> Array:
    """Returns a random key that the texts of a batch determine, so that a resumed run repeats it.

    `role` differs between uses of the key.
    """
    weights = jnp.arange(1, 1 + tokens_BT.size, dtype=jnp.uint32).reshape(tokens_BT.shape)
    number = jnp.sum(tokens_BT.astype(jnp.uint32) * weights)
    return jax.random.fold_in(jax.random.key(number), role)


def make_step(metrics_of: PerTokenMetrics, optimizer: OptimizerConfig) -> jax.stages.Wrapped:
    """Returns the jitted `(state, frozen, batch) -> (state, metrics)`, which consumes the state.

    Its metrics are means over the positions of `loss_mask`, and the gradient's norm before it is
    clipped. The batch is split into `accumulate` microbatches.
    """
    transformation = optimizer.transformation()

    def total_loss(params, frozen, batch):
        mask_BT = loss_mask(batch)
        sums = {
            name: jnp.sum(value * mask_BT)
            for name, value in metrics_of(params, frozen, batch).items()
        }
        return sums["loss"], sums

    gradient_of = jax.grad(total_loss, has_aux=True)

    def train_step(state, frozen, batch):
        params = state["params"]
        if optimizer.accumulate == 1:
            gradient, sums = gradient_of(params, frozen, batch)
        else:
            gradient, sums = _accumulated(gradient_of, params, frozen, batch, optimizer.accumulate)
        # Sums are divided once, by the count of the whole batch: microbatches may differ in theirs.
        # In a batch of questions no token may count. Then the gradient is 0, not a NaN.
        count = jnp.maximum(jnp.sum(loss_mask(batch)), 1.0)
        gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
        update, optimizer_state = transformation.update(gradient, state["optimizer"], params)
        metrics = {name: value / count for name, value in sums.items()}
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        return {
            "params": optax.apply_updates(params, update),
            "optimizer": optimizer_state,
        }, metrics

    program_cache.use()
    return jax.jit(train_step, donate_argnums=0)


def _accumulated(gradient_of, params, frozen, batch, accumulate: int):
    """Returns gradient and metric sums of a batch, one microbatch at a time."""
    microbatches = jax.tree.map(lambda leaf: _split_rows(leaf, accumulate), batch)
    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    shapes = jax.eval_shape(gradient_of, params, frozen, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(sums, microbatch):
        return jax.tree.map(jnp.add, sums, gradient_of(params, frozen, microbatch)), None

    sums, _ = jax.lax.scan(add, zeros, microbatches)
    return sums


def _split_rows(leaf: Array, count: int) -> Array:
    """Reshapes [B, ...] to [count, B / count, ...].

    Rows are distributed cyclically, so that a row stays on its device and every device has rows of
    every microbatch.
    """
    rows = leaf.shape[0] // count
    return jnp.swapaxes(leaf.reshape(rows, count, *leaf.shape[1:]), 0, 1)


@jax.jit
def all_finite(params: PyTree) -> Array:
    """Returns whether no array holds a NaN or an infinity."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def model_shapes(config: transformer.Config, mesh: Mesh | None) -> PyTree:
    """Returns the shapes of a transformer's parameters with their shardings."""
    shapes = transformer.param_shapes(config)
    return sharding.shard_shapes(shapes, sharding.param_shardings(mesh, config))


def state_shapes(param_shapes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """Returns the shapes of a training state with their shardings.

    The moments of a parameter are sharded like the parameter; scalars are replicated.
    """
    transformation = optimizer.transformation()
    where = jax.tree.leaves(param_shapes)[0].sharding
    everywhere = sharding.replicated(getattr(where, "mesh", None))
    optimizer_shapes = optax.tree_map_params(
        transformation,
        lambda shape, param: shape.update(sharding=param.sharding),
        jax.eval_shape(transformation.init, param_shapes),
        param_shapes,
        transform_non_params=lambda shape: shape.update(sharding=everywhere),
    )
    return {"params": param_shapes, "optimizer": optimizer_shapes}


def random_params(
    init: Callable[..., PyTree], param_shapes: PyTree, seed: int, *arguments: PyTree
) -> PyTree:
    """Returns random parameters `init(key, *arguments)`, created directly in their shardings."""
    program_cache.use()
    shardings = jax.tree.map(lambda shape: shape.sharding, param_shapes)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed), *arguments)


def init_state(params: PyTree, shapes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """Returns the training state of the first step, which holds `params` without a copy."""
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes["optimizer"])
    init = jax.jit(optimizer.transformation().init, out_shardings=shardings)
    return {"params": params, "optimizer": init(params)}


def check_batch(batch: int, accumulate: int, mesh: Mesh | None) -> None:
    """Raises InputError unless every microbatch has equally many rows on each device."""
    size = accumulate * (1 if mesh is None else mesh.shape["data"])
    if type(batch) is not int or batch < 1 or batch % size:
        raise InputError(
            f"batch: expected a multiple of {size} (accumulate times the mesh's data axis), "
            f"found {batch}"
        )
