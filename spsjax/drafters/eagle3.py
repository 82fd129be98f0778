"""EAGLE-3: a decoder layer on features of three layers of the target (Li et al. 2025, 2503.01840).

It is trained to continue its own outputs, so that acceptance falls little in longer drafts.
**Lossless**, as is every drafter.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spsjax.drafters import eagle3_config, features, pair_folders, pairs
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.hf import weights
from spsjax.models.hf.fields import COUNT
from spsjax.models.layers import Norm
from spsjax.models.linear import head_logits, make_linear
from spsjax.parallel import sharding
from spsjax.types import Array
from spsjax.utils.fields import flag, integer

IDS = pair_folders.IDS


class Eagle3(nnx.Module):
    """Decoder layer whose attention reads a token's embedding and a feature, concatenated."""

    def __init__(self, drafter: "Drafter", *, dtype, rngs: nnx.Rngs):
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

    def fuse(self, taps_BTW) -> Array:
        """Returns features [B, T, D] from the concatenated inputs of the target's tapped layers."""
        if self.drafter.fc_norm:
            taps = jnp.split(taps_BTW, len(self.tap_norms), axis=-1)
            taps = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
            taps_BTW = jnp.concatenate(taps, axis=-1)
        return self.fc(sharding.whole_rows(taps_BTW))

    def __call__(self, embedded_BTD, features_BTD, context, cached, earlier):
        """Returns the outputs, and the block's keys and values including those of these pairs."""
        normed = self.feature_norm(features_BTD)
        read = jnp.concatenate([self.embed_norm(embedded_BTD), normed], axis=-1)
        residual = normed if self.drafter.norm_before_residual else features_BTD
        outputs, block = self.layer(residual, read, context, cached, earlier)
        return (self.norm(outputs) if self.drafter.norm_output else outputs), block

    def normed(self, outputs_BTD) -> Array:
        """Returns the normalised outputs [B, T, D], which a head multiplies."""
        return outputs_BTD if self.drafter.norm_output else self.norm(outputs_BTD)


@dataclasses.dataclass(frozen=True)
class Drafter(pairs.PairDrafter):
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

    def __post_init__(self):
        super().__post_init__()
        features.check_taps(self.tap_layers, self.target)
        if self.vocab_size > self.target.vocab_size:
            raise InputError(
                f"vocab_size: expected at most the target's {self.target.vocab_size}, "
                f"found {self.vocab_size}"
            )
        sizes = self.config.d_model, self.vocab_size
        if not self.own_head and sizes != (self.target.d_model, self.target.vocab_size):
            raise InputError(
                "own_head: expected true for a drafter of another width or vocabulary than the "
                "target's, found false"
            )

    @classmethod
    def from_config(cls, options, target):
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
    def module_config(self):
        return self

    @property
    def sharding_config(self):
        return dataclasses.replace(self.config, vocab_size=self.vocab_size)

    def from_target(self, weights, params):
        if not self.own_head or self.config.d_model != self.target.d_model:
            return weights
        # The target's final norm has a learned scale, which the draft's norm begins without. The
        # scale is folded into the initial head, so that both heads give the same logits.
        scale = self.target.norm_offset + params["target"]["norm"]["scale"]
        kernel = scale[:, None] * transformer.head_kernel(self.target, params["target"])
        kernel = kernel[:, params["drafter"][IDS]].astype(jnp.float32)
        return weights | {"head": {"kernel": kernel}}

    def head_weights(self, params):
        # A head of its own is among the layer's weights.
        return () if self.own_head else super().head_weights(params)

    def raw_features(self, output):
        return jnp.concatenate(output.taps, axis=-1)

    def fuse(self, params, raw_BTW):
        return self.bind(params).fuse(raw_BTW.astype(self.dtype(params)))

    def draft_logits(self, params, outputs_BTD, depth=0):
        layer = self.bind(params)
        normed = layer.normed(outputs_BTD)
        if self.own_head:
            return head_logits(normed, layer.head.kernel[...])
        return super().draft_logits(params, normed, depth)

    def draft_ids(self, params):
        return None if self.vocab_size == self.target.vocab_size else params["drafter"][IDS]

    def param_shapes(self, dtype):
        ids = jax.ShapeDtypeStruct((self.vocab_size,), jnp.int32)
        return super().param_shapes(dtype) | {IDS: ids}

    def init_params(self, key, dtype=jnp.float32):
        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)
        return super().init_params(key, dtype) | {IDS: ids}

    def constants_from(self, counts_V):
        """Returns the ids of the corpus's most frequent tokens as the draft vocabulary."""
        frequent = np.argsort(-counts_V, kind="stable")[: self.vocab_size]
        return {IDS: np.sort(frequent).astype(np.int32)}


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers that EAGLE-3 reads: a low, a middle and a high layer.

    They are the authors' choice. For targets of fewer than 12 layers the high layer is the final
    state, because lower layers predict the next token less well.
    """
    if num_layers < 12:
        return num_layers // 3, 2 * num_layers // 3, num_layers
    return 2, num_layers // 2, num_layers - 3


class _Layout(pair_folders.PairLayout):
    """Layouts of the authors and of `speculators`; folders are written in the latter."""

    def recognizes(self, raw, tensors):
        return pair_folders.holds_layer(raw, tensors) and pair_folders.is_eagle3(raw, tensors)

    def drafter_fields(self, folder, target):
        fields = super().drafter_fields(folder, target)
        path, stored = folder.path / "config.json", folder.stored
        config, query = fields["config"], f"{pair_folders.prefix(stored.keys())}self_attn.q_proj"
        width = folder.fields.get("target_hidden_size", COUNT, None) or config.d_model
        fc, head, ids, query = _shapes(
            stored, "fc.weight", "lm_head.weight", "d2t", f"{query}.weight"
        )
        if query and config.d_model != width and query[1:] != [config.d_model + width]:
            raise InputError(
                f"{path}: heads of another width ({config.d_model}) than the target's ({width}) "
                f"are supported if their layer reads {config.d_model + width} numbers, found "
                f"{query[1:]}"
            )
        size = folder.fields.get("draft_vocab_size", COUNT, None)
        rows = (head or ids or [size or target.vocab_size])[0]
        whole = target.vocab_size, target.vocab_rows
        if not ids and rows not in whole:
            raise InputError(
                f"{folder.path}: expected a tensor d2t, the draft's vocabulary, found none"
            )
        if ids and not head:
            raise InputError(
                f"{folder.path}: expected a tensor lm_head.weight beside d2t, found none"
            )
        if size not in (None, rows) and not (size in whole and rows in whole):
            raise folder.fields.error("draft_vocab_size", f"{rows}, the rows of the head", size)
        taps = fc[1] // width if len(fc or ()) == 2 and fc[1] % width == 0 else None
        fields |= eagle3_config.read(path, folder.raw, target.num_layers, taps)
        return fields | {"vocab_size": rows if ids else target.vocab_size, "own_head": bool(head)}

    def tensors(self, drafter, params, dtype):
        tensors = super().tensors(drafter, params, dtype)
        if drafter.own_head:
            ids = np.asarray(params[IDS])
            tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
            tensors["t2d"] = np.isin(np.arange(drafter.target.vocab_rows), ids)
        return tensors

    def to_json(self, drafter, target_name, dtype):
        layer = self.layer_json(drafter, dtype)
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": drafter.num_speculative_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": drafter.vocab_size,
            "target_hidden_size": drafter.target.d_model,
            "eagle_aux_hidden_state_layer_ids": list(drafter.tap_layers),
            **{flag: getattr(drafter, flag) for flag in eagle3_config.FLAGS},
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target_name, "architectures": layer["architectures"]},
            },
        }


def _shapes(stored, *names: str) -> list[list[int] | None]:
    """Returns the shapes of tensors; None: there is no such tensor."""
    files = weights.open_all({stored[name] for name in names if name in stored})
    return [
        files[stored[name]].get_slice(name).get_shape() if name in stored else None
        for name in names
    ]


LAYOUT = _Layout()
