"""One mesh, and Megatron's rules on it (Shoeybi et al. 2019, arXiv 1909.08053).

Axes: `data` splits the rows of a batch, `model` splits the weights. Column-parallel query, key,
value, gate and up; row-parallel out and down, each followed by the one all-reduce that the compiler
puts there: two a layer. Embedding and head are split by vocabulary, a bias as what it is added to.
"""

import contextlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, PyTree

# Parameter -> how its axes are split. What is not named here (norms) is on every device.
_RULES = {
    "embed": P("model", None),  # embedding [V_model, D]
    "head": P(None, "model"),  # [D, V_model]
    "query": P(None, "model"),  # [D, HC_model]
    "key": P(None, "model"),  # [D, GC_model]
    "value": P(None, "model"),
    "position": P(None, "model"),  # [D, HC_model]
    "content_bias": P("model", None),  # [H_model, C]
    "position_bias": P("model", None),
    "out": P("model", None),  # [HC_model, D]
    "gate": P(None, "model"),  # [D, F_model]
    "up": P(None, "model"),
    "down": P("model", None),  # [F_model, D]
    "experts_gate": P(None, None, "model"),  # [E, D, F_model]; or [E_model, D, F], see `param_spec`
    "experts_up": P(None, None, "model"),
    "experts_down": P(None, "model", None),
}
_EXPERTS = "experts_gate", "experts_up", "experts_down"


def mesh(data: int = 1, model: int = 1, devices: Sequence | None = None) -> Mesh:
    """A mesh of the first `data * model` devices; raises InputError if there are fewer."""
    devices = jax.devices() if devices is None else devices
    sizes = data, model
    if not all(type(size) is int and size >= 1 for size in sizes):
        raise InputError(
            f"mesh: expected integers >= 1, found {short_repr(data)} x {short_repr(model)}"
        )
    if data * model > len(devices):
        raise InputError(f"mesh: expected at most {len(devices)} devices, found {data} x {model}")
    grid = np.asarray(devices[: data * model]).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context in which programs on the mesh are traced and run."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def check_divides(mesh: Mesh, config) -> None:
    """Raises InputError where the mesh does not divide the model."""
    size = mesh.shape["model"]
    whole = config.num_experts and config.num_experts % size == 0  # experts are split, not they
    for field in ("num_heads",) if whole else ("num_heads", "d_ff"):
        if getattr(config, field) % size:
            raise InputError(
                f"{field}: expected a multiple of the mesh's model axis, {size}, "
                f"found {getattr(config, field)}"
            )


def param_spec(path: tuple, mesh: Mesh, config) -> P:
    """How the parameter at `path` is split.

    Key-value heads and vocabularies that the mesh does not divide are on every device; experts that
    it does divide are split as they are, and else each of them inside.
    """
    (owner, leaf), size = path[-2:], mesh.shape["model"]
    if owner in ("key", "value") and config.num_kv_heads % size:
        return P()
    if owner in ("embed", "head") and config.vocab_rows % size:
        return P()
    if leaf in _EXPERTS and config.num_experts % size == 0:
        return P("model")
    rule = _RULES.get(owner, _RULES.get(leaf, P()))
    return P(rule[-1]) if leaf == "bias" and owner in _RULES else rule


def param_shardings(
    mesh: Mesh | None, config, replicate: bool = False
) -> Callable[[tuple], Sharding]:
    """`path -> sharding`: which slice of that parameter each device holds; or all of it.

    Raises InputError where the mesh does not divide the model.
    """
    if mesh is None:
        return lambda path: SingleDeviceSharding(jax.local_devices()[0])
    if not replicate:
        check_divides(mesh, config)
    return lambda path: NamedSharding(mesh, P() if replicate else param_spec(path, mesh, config))


def place_params(params: PyTree, where: Callable[[tuple], Sharding]) -> PyTree:
    """The parameters where they belong."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(leaf, where(tuple(entry.key for entry in path))), params
    )


def model_axis() -> int:
    """Size of the model axis of the mesh in use; 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("model", 1)


def shard_batch(array: Array) -> Array:
    """Under a mesh: each device has its rows of `array` whole. A no-op without one."""
    return _constrained(array, P("data"))


def whole_heads(rows_BGSC: Array) -> Array:
    """Under a mesh: keeps key-value heads that it cannot split whole on every device."""
    return rows_BGSC if rows_BGSC.shape[1] % model_axis() == 0 else shard_batch(rows_BGSC)


def gather_vocab(logits: Array) -> Array:
    """Under a mesh: one all-gather of logits [B, ..., V] that are split by vocabulary.

    Sampling reduces over the vocabulary some forty times, and is cheap: once gathered, it needs no
    collective. Said in two steps, lest the compiler gather the head's weights instead.
    """
    if logits.shape[-1] % model_axis() == 0:
        logits = _constrained(logits, P("data", *[None] * (logits.ndim - 2), "model"))
    return shard_batch(logits)


def _constrained(array: Array, how: P) -> Array:
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, how)


def batch_sharding(mesh: Mesh | None) -> Sharding:
    """Where arrays with a leading batch axis go."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, P("data"))
