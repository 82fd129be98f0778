"""Weight matrices in int8: half the bytes of bfloat16.

A matrix is rounded to multiples of a step, from -127 to 127 of them; each output channel has its
own step. "int8" multiplies activations as they are. "int8_dynamic" rounds each row of them as well,
so that integers are multiplied.

A quantised model is another model: samples are exact with respect to it, not to the one it was
made of.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, PyTree, pytree_dataclass

KINDS = "int8", "int8_dynamic"
_MOST = 127  # steps


@pytree_dataclass
class Quantized:
    """A matrix in int8, which takes the place of an array among a model's parameters.

    Attributes:
        steps: int8 of the matrix's shape.
        size: float32 size of a step; of the same shape, but 1 along the inputs.
        inputs: axis of the inputs from the end: -2 for a kernel [D, F], -1 for a table [V, D].
        dynamic: whether the activations are rounded, too.
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
        """Type of its values."""
        return self.size.dtype

    def times(self, x: Array, dtype=None, axis: str | None = None) -> Array:
        """Returns the products of x [..., D] with each output channel: [..., F].

        The inputs are constants: a gradient through rounded activations would be wrong.

        Args:
            x: activations; each row [D] of them has its own step.
            dtype: type of the result; None: that of `x`.
            axis: mesh axis over which rows are split inside of `shard_map`, so that the results
                are to be summed over it; None: rows are whole.
        """
        if self.dynamic and x.size == x.shape[-1]:  # one row is slow here in any type (`linear`)
            return self.times(jnp.repeat(x, 2, axis=-2), dtype, axis)[..., :1, :]
        size = jnp.squeeze(self.size, self.inputs)
        numbers = (((x.ndim - 1,), (self.steps.ndim + self.inputs,)), ((), ()))
        if self.dynamic:
            steps, of_x = rounded(x, -1, axis)
            sums = jax.lax.dot_general(steps, self.steps, numbers, preferred_element_type=jnp.int32)
            size = size * of_x
        else:
            steps = self.steps.astype(x.dtype)  # bfloat16 holds whole numbers up to 256 exactly
            wide = jnp.promote_types(x.dtype, jnp.float32)
            sums = jax.lax.dot_general(x, steps, numbers, preferred_element_type=wide)
        return (sums * size).astype(dtype or x.dtype)

    def rows(self, ids: Array, dtype) -> Array:
        """Returns rows of a table, by their numbers."""
        return (self.steps[ids] * self.size[ids]).astype(dtype)

    def values(self) -> Array:
        """Returns the matrix in float32."""
        return self.steps * self.size


def rounded(x: Array, inputs: int, axis: str | None = None) -> tuple[Array, Array]:
    """Returns int8 steps and their float32 size, one along `inputs`; steps times size is about x.

    Where x is not finite, so is the size. `axis` is as for `times`.
    """
    x = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=inputs, keepdims=True)
    most = most if axis is None else jax.lax.pmax(most, axis)
    size = jnp.where(most == 0, 1, most / _MOST)
    return jnp.round(x / size).astype(jnp.int8), size


def check_kind(kind: str | None) -> None:
    """Raises InputError unless it names a kind of quantisation, or is None."""
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise InputError(
            f"quantize: expected None or {' or '.join(KINDS)}, found {short_repr(kind)}"
        )


def inputs_of(path: tuple, tied: bool) -> int | None:
    """Returns the axis of a parameter's inputs; None: it stays as it is.

    All matrices that a pass multiplies are quantised, but for a router's, on which the choice of
    experts depends.

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
    """Returns a parameter as `quantize` does. A `jax.ShapeDtypeStruct` becomes one, too."""
    inputs = inputs_of(path, tied)
    if inputs is None:
        return leaf
    where = _shardings(leaf, inputs)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        steps, size = jax.eval_shape(lambda matrix: rounded(matrix, inputs), leaf)
        steps, size = (
            jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding)
            for part, sharding in zip((steps, size), where)
        )
    else:
        steps, size = jax.jit(rounded, static_argnums=1, out_shardings=where)(leaf, inputs)
    return Quantized(steps, size, inputs, kind == "int8_dynamic")


def _shardings(leaf, inputs: int):
    """Returns the shardings of steps and of their sizes: that of the matrix, but of one input.

    The sizes of a table are whole everywhere, because rows of it are looked up.
    """
    where = leaf.sharding
    if not isinstance(where, NamedSharding):
        return where, where
    spec = [*where.spec, *[None] * (leaf.ndim - len(where.spec))]
    spec = [None] * leaf.ndim if inputs == -1 else spec
    spec[inputs] = None
    return where, NamedSharding(where.mesh, PartitionSpec(*spec))


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
    """Returns whether a node of a tree of parameters is one matrix in int8."""
    return isinstance(node, Quantized)


def kind_of(params: PyTree) -> str | None:
    """Returns the kind of a model's quantisation; None: its matrices are floating-point numbers."""
    matrices = filter(is_matrix, jax.tree.leaves(params, is_leaf=is_matrix))
    return next((KINDS[matrix.dynamic] for matrix in matrices), None)
