"""Blockwise parallel decoding: heads with a shared hidden layer (Stern et al. 2018, 1811.03115).

**Lossless** with every lossless verifier. The paper's own acceptance rule is greedy.
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spsjax.drafters import folders, parallel
from spsjax.errors import InputError
from spsjax.models.hf.fields import COUNT
from spsjax.models.linear import make_linear, two_rows
from spsjax.types import Array, PyTree
from spsjax.utils.fields import integer


class Blockwise(nnx.Module):
    """Hidden layer that all heads share, and one output layer per head."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, heads = drafter.target.d_model, range(drafter.num_heads)
        hidden = drafter.num_heads * drafter.d_ff
        make = {"dtype": dtype, "rngs": rngs}
        self.up = make_linear(width, hidden, True, **make)
        self.outs = nnx.List([make_linear(hidden, width, True, **make) for _ in heads])

    def __call__(self, x_BTD: Array, head: int) -> Array:
        def run(x: Array) -> Array:
            return self.outs[head](jax.nn.relu(self.up(x)))

        return x_BTD + two_rows(run, x_BTD)


@dataclasses.dataclass(frozen=True)
class Drafter(parallel.HeadsDrafter):
    """Drafts with heads that share a hidden layer and the target's vocabulary matrix. Lossless.

    Attributes:
        d_ff: number of hidden units per head.
    """

    module = Blockwise
    d_ff: int = integer(512, 1)

    def shardings(
        self, mesh: Mesh | None, replicate: bool | None = None
    ) -> Callable[[tuple], Sharding]:
        if mesh is not None and replicate is False:
            units, devices = self.num_heads * self.d_ff, mesh.shape["model"]
            if units % devices:
                raise InputError(
                    f"num_heads, d_ff: expected {devices}, the mesh's model axis, to divide their "
                    f"product, found {units}"
                )
        return super().shardings(mesh, replicate)

    def outputs(self, params: PyTree, features_BTD: Array, depth: int | Array) -> Array:
        return self.bind(params)(features_BTD, depth)


LAYOUT = folders.OwnLayout[Drafter]("blockwise", {"num_heads": COUNT, "d_ff": COUNT})
