"""EAGLE-3: a decoder layer on features of three layers of the target (Li et al. 2025, 2503.01840).

It is trained to continue its own outputs, so that acceptance falls little in longer drafts.
**Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from spsjax.drafters import (
    eagle3_config,
    features,
    pair_folders,
    pairs,
    speculators_folders,
    vocabulary,
)
from spsjax.drafters.folders import Folder
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.hf.fields import COUNT
from spsjax.models.linear import head_logits, make_linear
from spsjax.models.norm import Norm
from spsjax.parallel import sharding
from spsjax.types import Array, ModelOutput, PyTree
from spsjax.utils.fields import flag, integer

IDS = vocabulary.IDS


class Eagle3(nnx.Module):
    """Decoder layer whose attention reads a token's embedding and a feature, concatenated."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.drafter, config, width = drafter, drafter.config, drafter.target.d_model
        count = len(drafter.tap_layers)
        self.fc = make_linear(count * width, config.d_model, False, dtype=dtype, rngs=rngs)
        if drafter.fc_norm:
            self.tap_norms = nnx.List([Norm(config, width, dtype=dtype) for _ in range(count)])
        self.embed_norm = Norm(config, width, dtype=dtype)
        self.feature_norm = Norm(config, config.d_model, dtype=dtype)
        self.layer = FeatureLayer(config, width + config.d_model, dtype=dtype, rngs=rngs)
        self.norm = Norm(config, config.d_model, dtype=dtype)
        if drafter.own_head:
            self.head = make_linear(
                config.d_model, drafter.vocab_size, False, dtype=dtype, rngs=rngs
            )

    def fuse(self, taps_BTW: Array) -> Array:
        """Returns features [B, T, D] from the concatenated inputs of the target's tapped layers."""
        if self.drafter.fc_norm:
            taps = jnp.split(taps_BTW, len(self.tap_norms), axis=-1)
            taps = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
            taps_BTW = jnp.concatenate(taps, axis=-1)
        return self.fc(sharding.whole_rows(taps_BTW))

    def __call__(
        self,
        embedded_BTD: Array,
        features_BTD: Array,
        context: Context,
        cached: Sequence[Segment],
        earlier: KeysValues | None,
    ) -> tuple[Array, KeysValues]:
        """Returns the outputs, and the block's keys and values including those of these pairs."""
        normed = self.feature_norm(features_BTD)
        read = jnp.concatenate([self.embed_norm(embedded_BTD), normed], axis=-1)
        residual = normed if self.drafter.norm_before_residual else features_BTD
        outputs, block = self.layer(residual, read, context, cached, earlier)
        return (self.norm(outputs) if self.drafter.norm_output else outputs), block

    def normed(self, outputs_BTD: Array) -> Array:
        """Returns the normalised outputs [B, T, D], which a head multiplies."""
        return outputs_BTD if self.drafter.norm_output else self.norm(outputs_BTD)


@dataclasses.dataclass(frozen=True)
class Drafter(vocabulary.OwnVocabulary, pairs.PairDrafter):
    """Drafts with a head of its own, often over the most frequent tokens only. Lossless.

    `params["drafter"]["ids"]` are the target's ids of the draft vocabulary, in ascending order.

    Attributes:
        vocab_size: R, size of the draft vocabulary; other tokens get probability 0.
        tap_layers: layers of the target whose inputs are read.
        norm_before_residual: whether the residual stream begins with the normalised feature.
        fc_norm: whether each tapped layer's input is normalised (EAGLE-3.1, 2605.09992).
        norm_output: whether the normalised output is the next pair's feature (EAGLE-3.1).
        own_head: whether the drafter has a vocabulary matrix of its own; else it uses the target's,
            with all tokens.
    """

    vocab_size: int = integer(32_000, 1)
    tap_layers: tuple[int, ...] = (2, 16, 29)
    norm_before_residual: bool = flag(False)
    fc_norm: bool = flag(False)
    norm_output: bool = flag(False)
    own_head: bool = flag(True)

    module = Eagle3
    own_width = True
    constants = (IDS,)
    fusing = "fc", "tap_norms"

    def __post_init__(self) -> None:
        super().__post_init__()
        features.check_taps(self.tap_layers, self.target)
        sizes = self.config.d_model, self.vocab_size
        if not self.own_head and sizes != (self.target.d_model, self.target.vocab_size):
            raise InputError(
                "own_head: expected true for a drafter of another width or vocabulary than the "
                "target's, found false"
            )

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns the drafter that the section `drafter` of a training config describes.

        Without `tap_layers` the drafter reads the default layers. A `vocab_size` of 0 means the
        target's.
        """
        taps = options.get("tap_layers") or default_tap_layers(target.num_layers)
        taps = tuple(taps) if isinstance(taps, list) else taps
        vocab_size = options.get("vocab_size") or target.vocab_size
        others = {**options, "tap_layers": taps, "vocab_size": vocab_size}
        return super().from_config(others, target)

    @property
    def module_config(self) -> Hashable:
        return self

    @property
    def sharding_config(self) -> Config:
        return dataclasses.replace(self.config, vocab_size=self.vocab_size)

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        if not self.own_head or self.config.d_model != self.target.d_model:
            return weights
        # The target's final norm has a learned scale, which the draft's norm begins without. The
        # scale is folded into the initial head, so that both heads give the same logits.
        scale = self.target.norm_offset + params["target"]["norm"]["scale"]
        kernel = scale[:, None] * transformer.head_kernel(self.target, params["target"])
        kernel = kernel[:, params["drafter"][IDS]].astype(jnp.float32)
        return weights | {"head": {"kernel": kernel}}

    def head_weights(self, params: PyTree) -> PyTree:
        # A head of its own is among the layer's weights.
        return () if self.own_head else super().head_weights(params)

    def raw_features(self, output: ModelOutput) -> Array:
        return jnp.concatenate(output.taps, axis=-1)

    def fuse(self, params: PyTree, raw_BTW: Array) -> Array:
        return self.bind(params).fuse(raw_BTW.astype(self.dtype(params)))

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        layer = self.bind(params)
        normed = layer.normed(outputs_BTD)
        if self.own_head:
            return head_logits(normed, layer.head.kernel[...])
        return super().draft_logits(params, normed, depth)


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers that EAGLE-3 reads: a low, a middle and a high layer.

    They are the authors' choice. For targets of fewer than 12 layers the high layer is the final
    state, because lower layers predict the next token less well.
    """
    if num_layers < 12:
        return num_layers // 3, 2 * num_layers // 3, num_layers
    return 2, num_layers // 2, num_layers - 3


class _Layout(pair_folders.PairLayout[Drafter]):
    """Layouts of the authors and of `speculators`; folders are written in the latter."""

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return pair_folders.holds_layer(raw, tensors) and pair_folders.is_eagle3(raw, tensors)

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields = super().drafter_fields(folder, target)
        path, stored = folder.path / "config.json", folder.stored
        config, query = fields["config"], f"{pair_folders.prefix(stored.keys())}self_attn.q_proj"
        width = folder.fields.get("target_hidden_size", COUNT, None) or config.d_model
        fc, query = speculators_folders.shapes(stored, "fc.weight", f"{query}.weight")
        if query and config.d_model != width and query[1:] != [config.d_model + width]:
            raise InputError(
                f"{path}: heads of another width ({config.d_model}) than the target's ({width}) "
                f"are supported if their layer reads {config.d_model + width} numbers, found "
                f"{query[1:]}"
            )
        size, has_head = speculators_folders.vocabulary_of(folder, target)
        taps = fc[1] // width if fc and len(fc) == 2 and fc[1] % width == 0 else None
        fields |= eagle3_config.read(path, folder.raw, target.num_layers, taps)
        return fields | {"vocab_size": size, "own_head": has_head}

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        layer = self.layer_json(drafter, dtype)
        about = "eagle3", drafter, target_name, layer["architectures"]
        return {
            "architectures": ["Eagle3Speculator"],
            speculators_folders.KEY: "eagle3",
            "draft_vocab_size": drafter.vocab_size,
            "target_hidden_size": drafter.target.d_model,
            "eagle_aux_hidden_state_layer_ids": list(drafter.tap_layers),
            **{flag: getattr(drafter, flag) for flag in eagle3_config.FLAGS},
            "transformer_layer_config": layer,
            "speculators_config": speculators_folders.proposals(*about),
        }


LAYOUT = _Layout()
