"""EAGLE: a decoder layer that predicts the target's next feature (Li et al. 2024, 2401.15077).

EAGLE-1 drafts fixed trees, and EAGLE-2 (2406.16858) drafts dynamic trees. HASS (2408.15766) trains
the same weights with another objective. **Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Callable, Sequence, Set

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.drafters import pair_folders, pairs
from spsjax.drafters.shapes import DynamicTree, Tree
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.linear import make_linear
from spsjax.parallel import sharding
from spsjax.types import Array

# The fixed tree of EAGLE-1: 25 tokens in five levels.
TREE = Tree(
    (0,) * 4 + (1, 1, 1, 2, 2, 3, 3, 4) + (5, 5, 5, 6, 6, 7, 7, 8) + (13, 13, 13) + (21, 21)
)
# The tree of EAGLE-2 for targets of 7 to 8 billion parameters, and of EAGLE-3.
DYNAMIC_TREE = DynamicTree(num_nodes=60, depth=6, width=10)


class Eagle(nnx.Module):
    """Decoder layer without an input norm, on a projection of a token and a feature."""

    def __init__(self, config: Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.fc = make_linear(2 * config.d_model, config.d_model, True, dtype=dtype, rngs=rngs)
        self.layer = FeatureLayer(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        embedded_BTD: Array,
        features_BTD: Array,
        context: Context,
        cached: Sequence[Segment],
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        pair_BTD = jnp.concatenate([embedded_BTD, features_BTD], axis=-1)
        x_BTD = self.fc(sharding.whole_rows(pair_BTD))
        return self.layer(x_BTD, x_BTD, context, cached, earlier)


@dataclasses.dataclass(frozen=True)
class Drafter(pairs.PairDrafter):
    """Drafts with a decoder layer and the target's embedding and head. Lossless."""

    module = Eagle


class _Layout(pair_folders.PairLayout[Drafter]):
    """The authors' layout."""

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return pair_folders.holds_layer(raw, tensors) and not pair_folders.is_eagle3(raw, tensors)

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        layer = self.layer_json(drafter, dtype)
        return layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}


LAYOUT = _Layout()
