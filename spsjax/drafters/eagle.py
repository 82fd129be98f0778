"""EAGLE: a decoder layer that predicts the target's next feature (Li et al. 2024, 2401.15077).

EAGLE-1 drafts fixed trees, and EAGLE-2 (2406.16858) drafts dynamic trees. HASS (2408.15766) trains
the same weights with another objective. **Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from spsjax.drafters import features, pair_folders, pairs
from spsjax.drafters.shapes import DynamicTree, Tree
from spsjax.errors import InputError
from spsjax.models import pure, transformer
from spsjax.models.config import Config
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.linear import make_linear
from spsjax.parallel import sharding
from spsjax.utils.from_config import build

# The fixed tree of EAGLE-1: 25 tokens in five levels.
TREE = Tree(
    (0,) * 4 + (1, 1, 1, 2, 2, 3, 3, 4) + (5, 5, 5, 6, 6, 7, 7, 8) + (13, 13, 13) + (21, 21)
)
# The tree of EAGLE-2 for targets of 7 to 8 billion parameters, and of EAGLE-3.
DYNAMIC_TREE = DynamicTree(num_nodes=60, depth=6, width=10)


class Eagle(nnx.Module):
    """Decoder layer without an input norm, on a projection of a token and a feature."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.fc = make_linear(2 * config.d_model, config.d_model, True, dtype=dtype, rngs=rngs)
        self.layer = FeatureLayer(config, dtype=dtype, rngs=rngs)

    def __call__(self, embedded_BTD, features_BTD, context, cached, earlier):
        pair_BTD = jnp.concatenate([embedded_BTD, features_BTD], axis=-1)
        x_BTD = self.fc(sharding.whole_rows(pair_BTD))
        return self.layer(x_BTD, x_BTD, context, cached, earlier)


@dataclasses.dataclass(frozen=True)
class Drafter(pairs.PairDrafter):
    """Drafts with a decoder layer and the target's embedding and head. Lossless.

    A feature is the target's final hidden state, after its norm.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.config.d_model != self.target.d_model:
            raise InputError(
                f"d_model: expected the target's {self.target.d_model}, found {self.config.d_model}"
            )

    def step_weights(self, params):
        head = "embed" if self.target.tie_embeddings else "head"
        return params["drafter"], params["target"][head]

    def outputs(self, params, tokens_BT, features_BTD, context, cached, earlier):
        weights = params["drafter"]
        dtype = weights["fc"]["kernel"].dtype
        embedded = transformer.embed(self.target, params["target"], tokens_BT).astype(dtype)
        layer = pure.bind(Eagle, self.config, weights, dtype)
        return layer(embedded, features_BTD.astype(dtype), context, cached, earlier)

    def draft_logits(self, params, outputs_BTD, depth=0):
        weights = params["target"]
        outputs = outputs_BTD.astype(weights["norm"]["scale"].dtype)
        return transformer.head(self.target, weights, outputs)

    def param_shapes(self, dtype):
        return pure.param_shapes(Eagle, self.config, dtype)

    def init_params(self, key, dtype=jnp.float32):
        return pure.init(Eagle, self.config, key, dtype)


def from_config(options: Mapping[str, object], target: Config) -> Drafter:
    """Returns the drafter that the section `drafter` of a training config describes."""
    layer, others = features.layer_from_config(options, target)
    return build("drafter", Drafter, others, config=layer, target=target)


class _Layout(pair_folders.PairLayout):
    """The authors' layout."""

    def recognizes(self, raw, tensors):
        return pair_folders.holds_layer(raw, tensors) and not pair_folders.is_eagle3(raw, tensors)

    def to_json(self, drafter, target_name, dtype):
        layer = self.layer_json(drafter, dtype)
        return layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}


LAYOUT = _Layout()
