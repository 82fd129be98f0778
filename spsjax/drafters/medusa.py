"""Medusa: one head per draft token on the target's last state (Cai et al. 2024, 2401.10774).

Head i predicts token t + 2 + i from the hidden state of token t, without the tokens between them.
**Lossless**, as is every drafter. The paper's typical acceptance is a lossy verifier
(`verifiers.typical`).
"""

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.drafters import folders, parallel
from spsjax.drafters.folders import Folder
from spsjax.models import transformer
from spsjax.models.attention import capped
from spsjax.models.config import Config
from spsjax.models.hf.fields import COUNT
from spsjax.models.linear import head_logits, make_linear, two_rows
from spsjax.types import Array, PyTree
from spsjax.utils.fields import flag, integer


class _Block(nnx.Module):
    """Residual block x + SiLU(W x + b); zero weights make it the identity before training."""

    def __init__(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        zeros = nnx.initializers.zeros_init()
        self.linear = nnx.Linear(
            width, width, dtype=dtype, param_dtype=dtype, kernel_init=zeros, rngs=rngs
        )

    def __call__(self, x_BTD: Array) -> Array:
        return x_BTD + nnx.silu(two_rows(self.linear, x_BTD))


class _Head(nnx.Module):
    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width, blocks = drafter.target.d_model, range(drafter.num_blocks)
        self.blocks = nnx.List([_Block(width, dtype=dtype, rngs=rngs) for _ in blocks])
        if drafter.own_heads:
            self.head = make_linear(width, drafter.target.vocab_rows, False, dtype=dtype, rngs=rngs)

    def __call__(self, x_BTD: Array) -> Array:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


class Medusa(nnx.Module):
    """Heads in the order of the tokens that they predict."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        heads = range(drafter.num_heads)
        self.heads = nnx.List([_Head(drafter, dtype=dtype, rngs=rngs) for _ in heads])


@dataclasses.dataclass(frozen=True)
class Drafter(parallel.HeadsDrafter):
    """Drafts with heads that do not depend on each other's tokens. Lossless.

    Attributes:
        own_heads: whether every head has a vocabulary matrix of its own, which is initialised with
            the target's; else all heads use the target's.
        num_blocks: residual blocks per head.
    """

    module = Medusa
    own_heads: bool = flag(True)
    num_blocks: int = integer(1, 1)

    @property
    def shares_head(self) -> bool:
        return not self.own_heads

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        if not self.own_heads:
            return weights
        kernel = transformer.head_kernel(self.target, params["target"]).astype(jnp.float32)
        heads = {i: head | {"head": {"kernel": kernel}} for i, head in weights["heads"].items()}
        return {"heads": heads}

    def outputs(self, params: PyTree, features_BTD: Array, depth: int | Array) -> Array:
        return self.bind(params).heads[depth](features_BTD)

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        if not self.own_heads:
            return super().draft_logits(params, outputs_BTD, depth)
        kernel = self.bind(params).heads[depth].head.kernel[...]
        logits = head_logits(outputs_BTD, kernel)[..., : self.target.vocab_size]
        return capped(logits, self.target.logit_softcap)


class _Layout(folders.Layout[Drafter]):
    """Layout of the authors, with or without vocabulary matrices."""

    file = "medusa_lm_head.safetensors"

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return "medusa_num_heads" in raw

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        folders.check_sizes(folder, target)
        heads = {name.partition(".")[0] for name in folder.stored}
        blocks = folder.fields.get("medusa_num_layers", COUNT, 1)
        has_matrices = f"0.{blocks}.weight" in folder.stored
        return {"num_heads": len(heads), "num_blocks": blocks, "own_heads": has_matrices}

    def name(self, drafter: Drafter, path: tuple, stored: Set[str]) -> str:
        module = drafter.num_blocks if path[2] == "head" else f"{path[3]}.linear"
        return f"{path[1]}.{module}.{folders.kind_of(path)}"

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        return {
            "hidden_size": drafter.target.d_model,
            "vocab_size": drafter.target.vocab_rows,
            "model_type": "medusa",
            "medusa_num_heads": drafter.num_heads,
            "medusa_num_layers": drafter.num_blocks,
            "base_model_name_or_path": target_name,
            "torch_dtype": dtype,
        }


LAYOUT = _Layout()
