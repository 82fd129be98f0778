"""One training step, whatever is trained: losses come as values of single positions.

Weights and optimiser state are float32, split over the mesh as the weights of a loaded model are;
what is computed with them has a type of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spsjax import loading
from spsjax.errors import InputError, check_number
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.training import losses
from spsjax.types import Array, PyTree

# (params, frozen, batch) -> values of every position [B, T] by name. "loss" is minimised.
Values = Callable[[PyTree, PyTree, PyTree], dict[str, Array]]


_DECAYED = "kernel", "experts_"  # how the names of matrices begin


@dataclasses.dataclass(frozen=True)
class Optimization:
    """AdamW after clipping by the global norm; the rate rises linearly, and falls by a cosine.

    Matrices are decayed; embeddings are not, nor are norms and biases. The schedule's shape is
    Chinchilla's (Hoffmann et al. 2022, arXiv 2203.15556, section 4.1); warm-up and clipping are
    Gopher's (Rae et al. 2021, arXiv 2112.11446, section 3.2), to which it refers; decay and moments
    are nobody's but ours.

    Attributes:
        learning_rate: at its peak.
        steps: of the whole run.
        warmup: the step whose rate is the peak; 0: the first.
        final_rate: the last step's rate, as a share of the peak.
        weight_decay: of weights, times the rate.
        clip: the largest norm of a gradient.
        b1, b2: of AdamW, below 1.
        accumulate: into how many parts a batch is cut, whose gradients are added up.
    """

    learning_rate: float
    steps: int
    warmup: int = 1500
    final_rate: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    accumulate: int = 1

    def __post_init__(self):
        for field, least in (("steps", 1), ("warmup", 0), ("accumulate", 1)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise InputError(f"{field}: expected an integer >= {least}, found {value!r}")
        if self.warmup >= self.steps:
            raise InputError(f"warmup: expected fewer than steps={self.steps}, found {self.warmup}")
        check_number("learning_rate", self.learning_rate, 0, 1e30, above=True)
        check_number("clip", self.clip, 0, 1e30, above=True)
        check_number("weight_decay", self.weight_decay, 0, 1e30)
        for field in ("final_rate", "b1", "b2"):
            check_number(field, getattr(self, field), 0, 1)
        for field in ("b1", "b2"):
            if getattr(self, field) == 1:
                raise InputError(f"{field}: expected a number below 1, found 1")

    def schedule(self) -> optax.Schedule:
        """The rate of each step, of which optax counts the first as 0."""
        peak, warmup = self.learning_rate, max(self.warmup, 1)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(self.steps, warmup + 1), self.final_rate * peak
        )
        return lambda count: rate(count + 1)

    def update(self) -> optax.GradientTransformation:
        """Gradients to changes of the parameters."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(
                self.schedule(),
                self.b1,
                self.b2,
                weight_decay=self.weight_decay,
                mask=lambda params: jax.tree_util.tree_map_with_path(
                    lambda path, _: path[-1].key.startswith(_DECAYED), params
                ),
            ),
        )


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a pass is computed: `dtype`, None for the machine's own; `remat`, time for memory."""

    dtype: Any = None
    remat: bool = False

    def __post_init__(self):
        object.__setattr__(self, "dtype", loading.compute_type(self.dtype or None))
        if type(self.remat) is not bool:
            raise InputError(f"remat: expected True or False, found {self.remat!r}")


def forward(
    config: transformer.Config, params: PyTree, tokens_BT: Array, dtype=None, remat: bool = False
) -> transformer.ModelOutput:
    """Logits [B, T, V] and final hidden states [B, T, D] of whole sequences."""
    return transformer.apply(config, params, tokens_BT, dtype=dtype, remat=remat)


def language_model(config: transformer.Config, compute: Compute) -> Values:
    """Cross entropy of the next token; a batch's `tokens` are [B, T+1]."""

    def values(params, frozen, batch):
        tokens = batch["tokens"]
        logits = forward(config, params, tokens[:, :-1], compute.dtype, compute.remat).logits
        return {"loss": losses.cross_entropy(logits, tokens[:, 1:])}

    return values


def weights(batch: PyTree) -> Array:
    """[B, T]: 1 for positions that count: those whose next token is there, and not of a prompt.

    Of each row, `start`, where a batch has it, is the number of tokens of the prompt, and `stop`
    the number of all tokens that are not padding.
    """
    tokens = batch["tokens"]
    following = jnp.arange(1, tokens.shape[1])
    start = batch.get("start", jnp.zeros(len(tokens), jnp.int32))
    stop = batch.get("stop", jnp.full(len(tokens), tokens.shape[1]))
    counts = (following >= start[:, None]) & (following < stop[:, None])
    return counts.astype(jnp.float32)


def step(values: Values, optimization: Optimization) -> Callable:
    """The jitted `(state, frozen, batch) -> (state, metrics)`.

    Metrics are means over the positions that count, and the gradient's norm before it is clipped.
    The batch is cut into `accumulate` parts, each with rows of every device.
    """
    update, parts = optimization.update(), optimization.accumulate

    def total(params, frozen, batch):
        weights_BT = weights(batch)
        sums = {
            name: jnp.sum(value * weights_BT)
            for name, value in values(params, frozen, batch).items()
        }
        return sums["loss"], sums

    def train_step(state, frozen, batch):
        params = state["params"]
        gradient_of = jax.grad(total, has_aux=True)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, gradient_of(params, frozen, part)), None

        if parts == 1:
            gradient, sums = gradient_of(params, frozen, batch)
        else:
            cut = jax.tree.map(lambda leaf: _cut(leaf, parts), batch)
            first = jax.tree.map(lambda leaf: leaf[0], cut)
            shapes = jax.eval_shape(gradient_of, params, frozen, first)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            (gradient, sums), _ = jax.lax.scan(add, zeros, cut)
        count = jnp.sum(weights(batch))
        gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
        change, optimizer = update.update(gradient, state["optimizer"], params)
        metrics = {name: value / count for name, value in sums.items()}
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        return {"params": optax.apply_updates(params, change), "optimizer": optimizer}, metrics

    return jax.jit(train_step, donate_argnums=0)


@jax.jit
def all_finite(params: PyTree) -> Array:
    """Whether no array holds a NaN or an infinity."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def _cut(leaf: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...]; rows stay on the device that has them."""
    rows = leaf.shape[0] // parts
    return jnp.swapaxes(leaf.reshape(rows, parts, *leaf.shape[1:]), 0, 1)


def shapes(
    config: transformer.Config, optimization: Optimization, mesh: jax.sharding.Mesh | None
) -> PyTree:
    """A state's shapes, each with its place: an optimiser's array is where its parameter's is."""
    where, update = sharding.param_shardings(mesh, config), optimization.update()
    params = transformer.param_shapes(config)
    state = {"params": params, "optimizer": jax.eval_shape(update.init, params)}
    places = jax.tree_util.tree_map_with_path(
        lambda path, _: where(tuple(entry.key for entry in path)), params
    )
    scalar = places["norm"]["scale"]  # whole on every device, as norms are
    optimizer = optax.tree_map_params(
        update,
        lambda _, place: place,
        state["optimizer"],
        places,
        transform_non_params=lambda _: scalar,
    )
    return jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
        state,
        {"params": places, "optimizer": optimizer},
    )


def initial(
    config: transformer.Config,
    optimization: Optimization,
    mesh: jax.sharding.Mesh | None,
    seed: int,
    params: PyTree | None = None,
) -> PyTree:
    """Parameters, random if none are given, and the optimiser's state, made where they belong."""
    places = jax.tree.map(lambda shape: shape.sharding, shapes(config, optimization, mesh))
    if params is None:
        init = functools.partial(transformer.init, config)
        params = jax.jit(init, out_shardings=places["params"])(jax.random.key(seed))
    optimizer = jax.jit(optimization.update().init, out_shardings=places["optimizer"])(params)
    return {"params": params, "optimizer": optimizer}


def check_batch(batch: int, accumulate: int, mesh: jax.sharding.Mesh | None) -> None:
    """Raises InputError unless every part of a batch has as many rows on each device."""
    size = accumulate * (1 if mesh is None else mesh.shape["data"])
    if type(batch) is not int or batch < 1 or batch % size:
        raise InputError(
            f"batch: expected a multiple of {size} (accumulate times the mesh's data axis), "
            f"found {batch}"
        )
