"""Device meshes and Megatron's sharding rules (Shoeybi et al. 2019, arXiv 1909.08053).

The mesh axis `data` splits the rows of a batch, and the axis `model` splits the weights. Query,
key, value, gate and up are column-parallel. Out and down are row-parallel, and the compiler inserts
one all-reduce after each of them, so two per layer. Embedding and head are split by vocabulary.
A bias is split like the output that it is added to.

A third axis, `slots`, splits the slots of caches of all tokens, for few rows of long texts. All
other arrays are replicated over it.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from spsjax.errors import InputError, check_integer, short_repr
from spsjax.types import Array, PyTree

# Module or parameter -> partition spec. Other parameters (norms) are replicated.
_RULES = {
    "embed": P("model", None),  # embedding [V_model, D]
    "fc": P("model", None),  # a drafter's projection of features [nD_model, D]
    "head": P(None, "model"),  # [D, V_model]
    "query": P(None, "model"),  # [D, HC_model]
    "query_up": P(None, "model"),
    "key": P(None, "model"),  # [D, GC_model]
    "value": P(None, "model"),
    "position": P(None, "model"),  # [D, HC_model]
    "content_bias": P("model", None),  # [H_model, C]
    "position_bias": P("model", None),
    "key_up": P("model"),  # [H_model, C, R]
    "value_up": P("model"),
    "out": P("model", None),  # [HC_model, D]
    "strength": P(None, "model"),  # of a gated delta net: [D, H_model]
    "decay": P(None, "model"),
    "query_taps": P(None, "model"),  # [taps, GC_model]
    "key_taps": P(None, "model"),
    "value_taps": P(None, "model"),  # [taps, HV_model]
    "decay_rate": P("model"),  # [H_model]
    "decay_bias": P("model"),
    "gate": P(None, "model"),  # [D, F_model]
    "up": P(None, "model"),
    "down": P("model", None),  # [F_model, D]
    "input_table": P(None, "model"),  # inputs of all layers [V, LI_model]; those within a layer are
    "input_projection": P(None, "model"),  # replicated, as a sum would cost more than it saves
    "experts_gate": P(None, None, "model"),  # [E, D, F_model] or [E_model, D, F]
    "experts_up": P(None, None, "model"),
    "experts_down": P(None, "model", None),
}
_EXPERTS = "experts_gate", "experts_up", "experts_down"
_INPUTS = "input_table", "input_projection"
# Parameters of a gated delta net that are split by key heads, whole or as groups of value heads.
_KEY_HEADS = "query", "key", "value", "query_taps", "key_taps", "value_taps"


def mesh(data: int = 1, model: int = 1, devices: Sequence | None = None, *, slots: int = 1) -> Mesh:
    """Returns a mesh of the first `data * model * slots` devices.

    Args:
        data: size of the axis that splits batches.
        model: size of the axis that splits weights.
        devices: devices to choose from; None: all devices.
        slots: size of the axis that splits the slots of caches, a power of two; 1: no such axis.

    Raises:
        InputError: a size is not a positive integer, there are too few devices, or `devices` holds
            something else.
    """
    devices = jax.devices() if devices is None else devices
    is_list = isinstance(devices, (Sequence, np.ndarray))
    if not is_list or not all(hasattr(device, "device_kind") for device in devices):
        raise InputError(f"devices: expected a list of devices, found {short_repr(devices)}")
    check_integer("slots", slots, 1)
    if slots & (slots - 1):
        raise InputError(f"slots: expected a power of two, as sizes of caches are, found {slots}")
    axes = {"data": data, "model": model} | ({} if slots == 1 else {"slots": slots})
    product = " x ".join(map(short_repr, axes.values()))
    if not all(type(size) is int and size >= 1 for size in axes.values()):
        raise InputError(f"mesh: expected integers >= 1, found {product}")
    if (count := math.prod(axes.values())) > len(devices):
        text = f"mesh: expected at most {len(devices)} devices, found {product}"
        if any(device.platform == "cpu" for device in devices):  # CPUs can emulate a mesh
            flag = f"--xla_force_host_platform_device_count={count}"
            text += f". Set smaller axes, or XLA_FLAGS={flag} for as many CPU devices"
        raise InputError(text)
    grid = np.asarray(devices[:count]).reshape(*axes.values())
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Returns the context in which programs on the mesh are traced and run."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def check_divides(mesh: Mesh, config) -> None:
    """Raises InputError if the model axis of the mesh does not divide the model's sizes."""
    size = mesh.shape["model"]
    for layer in map(config.layer, range(max(len(config.changes), 1))):
        # Whole experts are distributed over the mesh, so their width need not be divisible.
        whole_experts = layer.num_experts and layer.num_experts % size == 0
        beside = ("shared_d_ff",) if layer.num_experts else ()
        for field in ("num_heads", *beside) if whole_experts else ("num_heads", "d_ff", *beside):
            if getattr(layer, field) % size:
                raise InputError(
                    f"{field}: expected a multiple of the mesh's model axis, {size}, "
                    f"found {getattr(layer, field)}"
                )


def param_spec(path: tuple, mesh: Mesh, config) -> P:
    """Returns the partition spec of the parameter at `path`.

    Key-value heads and vocabularies are replicated if the mesh does not divide them. If the mesh
    divides the number of experts, each device holds whole experts. Otherwise every expert's weights
    are split.
    """
    if path[0] == "layers":
        config = config.layer(path[1])
    (owner, leaf), size = ("", *path)[-2:], mesh.shape["model"]
    shared = _KEY_HEADS if config.mixer == "delta" else ("key", "value")
    if not {owner, leaf}.isdisjoint(shared) and config.num_kv_heads % size:
        return P()
    if owner in ("embed", "head") and config.vocab_rows % size:
        return P()
    if owner in _INPUTS and config.num_layers * config.layer_inputs % size:
        return P()
    if leaf in _EXPERTS and config.num_experts % size == 0:
        return P("model")
    rule = _RULES.get(owner, _RULES.get(leaf, P()))
    return P(rule[-1]) if leaf == "bias" and owner in _RULES else rule


def param_shardings(
    mesh: Mesh | None, config, replicate: bool = False
) -> Callable[[tuple], Sharding]:
    """Returns a function from a parameter's path to its sharding.

    Args:
        mesh: mesh of the model; None: the default device.
        config: model config (`models.config.Config`).
        replicate: whether every device has all parameters.

    Raises:
        InputError: the mesh does not divide the model.
    """
    if mesh is None:
        return lambda path: SingleDeviceSharding(jax.local_devices()[0])
    if not replicate:
        check_divides(mesh, config)
    return lambda path: NamedSharding(mesh, P() if replicate else param_spec(path, mesh, config))


def shard_params(params: PyTree, sharding_of: Callable[[tuple], Sharding]) -> PyTree:
    """Returns the parameters on their devices, with the shardings of `param_shardings`."""

    def put(path, leaf):
        return jax.device_put(leaf, sharding_of(tuple(entry.key for entry in path)))

    return jax.tree_util.tree_map_with_path(put, params)


def shard_shapes(shapes: PyTree, sharding_of: Callable[[tuple], Sharding]) -> PyTree:
    """Returns the shapes of parameters with the shardings of `param_shardings`."""

    def with_sharding(path, leaf):
        sharding = sharding_of(tuple(entry.key for entry in path))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, shapes)


def model_axis() -> int:
    """Returns the size of the model axis of the current mesh, or 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("model", 1)


def slots_axis() -> int:
    """Returns the size of the slots axis of the current mesh, or 1 without such an axis."""
    return jax.sharding.get_abstract_mesh().shape.get("slots", 1)


def split_rows(logits: Array) -> Array:
    """Constrains logits [B, ..., V] to be split by rows; the vocabulary may also be split.

    Logits are gathered after the product with the head. Without the constraint, the compiler may
    gather the weights of the head instead. Without a mesh, the function does nothing.
    """
    return _constrained(logits, P("data", *[P.UNCONSTRAINED] * (logits.ndim - 1)))


def gather_vocab(logits: Array) -> Array:
    """Gathers logits [B, ..., V] that are split by vocabulary, with one all-gather.

    Sampling reduces over the vocabulary about forty times. Each reduction of split logits would
    need a collective, and gathered logits need none. Without a mesh, the function does nothing.
    """
    return whole_rows(logits)


def whole_rows(x: Array) -> Array:
    """Constrains activations [B, ...] to be split by rows only.

    The compiler would otherwise split the input of a row-parallel kernel like the kernel, and with
    it all activations that it was computed from. Without a mesh, the function does nothing.
    """
    return _constrained(x, P("data"))


def whole_heads(rows_BGSC: Array, split: bool = False) -> Array:
    """Constrains keys or values to have whole heads on every device if a mesh cannot split them.

    If `split`, slots are split over the slots axis.
    """
    divides = rows_BGSC.shape[1] % model_axis() == 0
    if divides and not split:
        return rows_BGSC
    heads = P.UNCONSTRAINED if divides else None
    return _constrained(rows_BGSC, P("data", heads, "slots") if split else P("data"))


def gather_slots(sums: Array) -> Array:
    """Gathers arrays [N, B, ...] whose entry n was computed by device n of the slots axis.

    Without a mesh, the function does nothing.
    """
    return _constrained(sums, P(None, "data", *[P.UNCONSTRAINED] * (sums.ndim - 2)))


def _constrained(array: Array, spec: P) -> Array:
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, spec)


def batch_sharding(mesh: Mesh | None) -> Sharding:
    """Returns the sharding of arrays with a leading batch axis."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, P("data"))


def replicated(mesh: Mesh | None) -> Sharding:
    """Returns the sharding of arrays that are replicated on all devices."""
    return batch_sharding(None) if mesh is None else NamedSharding(mesh, P())
