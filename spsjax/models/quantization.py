"""Quantisation of weight matrices to int8, with half the bytes of bfloat16.

A matrix is rounded to integers in [-127, 127] times a scale per output channel. "int8" multiplies
them with unquantised activations. "int8_dynamic" also quantises each row of activations, and
multiplies integers.

A quantised model is another model. Samples are exact with respect to it, not to the original.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, PyTree, pytree_dataclass

KINDS = "int8", "int8_dynamic"
_MOST = 127  # greatest integer


@pytree_dataclass
class Quantized:
    """Matrix in int8, in place of an array among a model's parameters.

    Attributes:
        steps: int8 integers, with the shape of the matrix.
        size: float32 scales, with the shape of the matrix except for a size of 1 along the inputs.
        inputs: axis of the inputs from the end: -2 for a kernel [D, F], -1 for a table [V, D].
        dynamic: whether activations are also quantised.
    """

    steps: Array
    size: Array
    inputs: int = dataclasses.field(metadata={"static": True})
    dynamic: bool = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.steps.shape

    @property
    def dtype(self):
        """Type of the dequantised values."""
        return self.size.dtype

    def times(self, x: Array, dtype=None, axis: str | None = None) -> Array:
        """Returns the products of x [..., D] with each output channel: [..., F].

        The products have no correct gradient, because rounding has none.

        Args:
            x: activations; each row [D] has its own scale.
            dtype: type of the result; None: type of `x`.
            axis: mesh axis over which rows are split inside of `shard_map`, so that the caller has
                to sum the results over it; None: rows are whole.
        """
        if self.dynamic and x.size == x.shape[-1]:  # one row is slow in any type (`linear`)
            return self.times(jnp.repeat(x, 2, axis=-2), dtype, axis)[..., :1, :]
        size = jnp.squeeze(self.size, self.inputs)
        dimensions = (((x.ndim - 1,), (self.steps.ndim + self.inputs,)), ((), ()))
        if self.dynamic:
            steps, x_size = rounded(x, -1, axis)
            sums = jax.lax.dot_general(
                steps, self.steps, dimensions, preferred_element_type=jnp.int32
            )
            size = size * x_size
        else:
            steps = self.steps.astype(x.dtype)  # exact: bfloat16 has all integers up to 256
            wide = jnp.promote_types(x.dtype, jnp.float32)
            sums = jax.lax.dot_general(x, steps, dimensions, preferred_element_type=wide)
        return (sums * size).astype(dtype or x.dtype)

    def rows(self, ids: Array, dtype) -> Array:
        """Returns dequantised rows of a table, by index."""
        return (self.steps[ids] * self.size[ids]).astype(dtype)

    def values(self) -> Array:
        """Returns the dequantised matrix in float32."""
        return self.steps * self.size


def rounded(x: Array, inputs: int, axis: str | None = None) -> tuple[Array, Array]:
    """Returns int8 steps and float32 scales, whose product approximates x.

    There is one scale along the axis `inputs`. It is not finite where x is not. `axis` has the
    meaning of `Quantized.times`.
    """
    x = x.astype(jnp.float32)
    greatest = jnp.max(jnp.abs(x), axis=inputs, keepdims=True)
    greatest = greatest if axis is None else jax.lax.pmax(greatest, axis)
    size = jnp.where(greatest == 0, 1, greatest / _MOST)
    return jnp.round(x / size).astype(jnp.int8), size


def check_kind(kind: str | None) -> None:
    """Raises InputError unless `kind` is a kind of quantisation or None."""
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise InputError(
            f"quantize: expected None or {' or '.join(KINDS)}, found {short_repr(kind)}"
        )


def inputs_of(path: tuple, tied: bool) -> int | None:
    """Returns the axis of a parameter's inputs; None: the parameter is not quantised.

    All matrices that a pass multiplies are quantised, except those of routers, because small errors
    there change the choice of experts.

    Args:
        path: path of the parameter.
        tied: whether the embedding is the head.
    """
    owner, name = ("", *path)[-2:]
    if owner == "router":
        return None
    if name == "kernel" or name.startswith("experts_"):
        return -2
    return -1 if tied and owner == "embed" else None


def quantized_leaf(path: tuple, leaf, kind: str, tied: bool):
    """Returns one quantised parameter; a `jax.ShapeDtypeStruct` gives quantised shapes."""
    inputs = inputs_of(path, tied)
    if inputs is None:
        return leaf
    shardings = _shardings(leaf, inputs)
    steps: Any
    size: Any
    if isinstance(leaf, jax.ShapeDtypeStruct):
        steps, size = jax.eval_shape(lambda matrix: rounded(matrix, inputs), leaf)
        steps, size = (
            jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for shape, sharding in zip((steps, size), shardings)
        )
    else:
        steps, size = jax.jit(rounded, static_argnums=1, out_shardings=shardings)(leaf, inputs)
    return Quantized(steps, size, inputs, kind == "int8_dynamic")


def _shardings(leaf, inputs: int):
    """Returns the shardings of a quantized matrix and of its scales.

    The scales of an embedding table are replicated, because its rows are looked up.
    """
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding, sharding
    spec = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
    spec = [None] * leaf.ndim if inputs == -1 else spec
    spec[inputs] = None
    return sharding, NamedSharding(sharding.mesh, PartitionSpec(*spec))


def quantize(params: PyTree, kind: str, tied: bool) -> PyTree:
    """Returns a transformer's parameters with its matrices in int8.

    Args:
        params: parameters of `models.transformer`.
        kind: one of `KINDS`.
        tied: whether the embedding is the head.
    """

    def convert(path, leaf):
        return quantized_leaf(tuple(entry.key for entry in path), leaf, kind, tied)

    return jax.tree_util.tree_map_with_path(convert, params)


def is_matrix(node) -> bool:
    """Returns whether a node of a pytree of parameters is a matrix in int8."""
    return isinstance(node, Quantized)


def kind_of(params: PyTree) -> str | None:
    """Returns the kind of a model's quantisation; None: the model is not quantised."""
    matrices = filter(is_matrix, jax.tree.leaves(params, is_leaf=is_matrix))
    return next((KINDS[matrix.dynamic] for matrix in matrices), None)
