"""Folders of Gemma 4's assistants, and their shape beside a target."""

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from spsjax.drafters import folders
from spsjax.drafters.folders import Folder
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.models.hf import config_json, families, gemma4, weights
from spsjax.models.hf.fields import COUNT, FLAG, NUMBER, OBJECT, TEXT, Fields
from spsjax.types import PyTree

ORDERING = "ordering"  # name of the parameter with the tokens of each centroid


class AssistantLayout(folders.Layout[Any]):
    """Layout of Google's assistants, as transformers reads it."""

    def recognizes(self, raw: dict, tensors: Callable[[], Set[str]]) -> bool:
        return raw.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields = folder.fields
        width = fields.get("backbone_hidden_size", COUNT, 1536)
        if width != target.d_model:
            raise fields.error("backbone_hidden_size", f"the target's {target.d_model}", width)
        fields.only("tie_word_embeddings", FLAG, True)
        text = Fields(folder.path / "config.json", fields.get("text_config", OBJECT), "text_config")
        has_centroids = fields.get("use_ordered_embeddings", FLAG, False)
        count = fields.get("num_centroids", COUNT, 2048) if has_centroids else 0
        top = fields.get("centroid_intermediate_top_k", COUNT, 32)
        if 0 < count < top:
            raise fields.error("centroid_intermediate_top_k", f"at most num_centroids={count}", top)
        return {"config": _layers(text), "num_centroids": count, "top_centroids": top}

    def name(self, drafter: Any, path: tuple, stored: Set[str]) -> str:
        if path[0] == "centroids":
            return "masked_embedding.centroids.weight"
        if path[0] in ("pre_projection", "post_projection"):
            return f"{path[0]}.weight"
        return families.locate("gemma4_text", drafter.config, path).names[0]

    def is_copy(self, name: str, drafter: Any) -> bool:
        # The tied head, and keys and values that no layer needs.
        if name == _ORDERING:
            return bool(drafter.num_centroids)
        unused = ("lm_head.weight", "k_proj.weight", "v_proj.weight", "k_norm.weight")
        return name.endswith(unused)

    def constants(self, folder: Folder, drafter: Any) -> dict[str, np.ndarray]:
        if not drafter.num_centroids:
            return {}
        return {ORDERING: _ordering(folder, drafter.config.vocab_rows)}

    def tensors(self, drafter: Any, params: PyTree, dtype: DTypeLike) -> dict[str, np.ndarray]:
        tensors = super().tensors(drafter, params, dtype)
        if drafter.num_centroids:
            tensors[_ORDERING] = np.asarray(params[ORDERING]).astype(np.int64)
        return tensors

    def to_json(self, drafter: Any, target_name: str, dtype: str) -> dict:
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": drafter.target.d_model,
            "use_ordered_embeddings": bool(drafter.num_centroids),
            "num_centroids": drafter.num_centroids or 2048,
            "centroid_intermediate_top_k": drafter.top_centroids,
            "tie_word_embeddings": True,
            "torch_dtype": dtype,
            "text_config": config_json.to_json(drafter.config, dtype),
        }


_ORDERING = "masked_embedding.token_ordering"


def _layers(text: Fields) -> Config:
    """Returns the shape of an assistant's layers; raises InputError for an unusual one."""
    kind, kinds = text.get("model_type", TEXT, "gemma4_text"), tuple(gemma4.FAMILIES)
    if kind not in kinds:
        raise text.error("model_type", f"one of {', '.join(kinds)}", kind)
    text.only("hidden_size_per_layer_input", NUMBER, 0)
    text.only("enable_moe_block", FLAG, False)
    text.only("final_logit_softcapping", NUMBER, None)
    count = text.get("num_hidden_layers", COUNT)
    shared = text.get("num_kv_shared_layers", NUMBER, 0) or count
    if shared != count:
        raise text.error("num_kv_shared_layers", f"all {count} layers", shared)
    raw = {"model_type": kind, "num_kv_shared_layers": count, "hidden_size_per_layer_input": 0}
    config = config_json.parse(text.path, text.raw | raw, "text_config")
    if 1 in config.windows:  # the token itself, whose key the target does not have yet
        raise text.error("sliding_window", "at least 2 tokens", 1)
    # An assistant has the target's special tokens.
    return dataclasses.replace(config, bos_id=None, eos_ids=())


SIZES = "num_layers", "d_model", "d_ff"  # those that may differ from the target's


def like(target: Config, num_layers: int = 4, **sizes: int) -> Config:
    """Returns the shape of an assistant whose layers read the target's last of either kind."""
    layers = map(target.layer, range(target.num_layers))
    last = {bool(layer.windows): layer for layer in layers if layer.mixer == "attention"}
    kinds = [True] * (num_layers - 1) + [False] if len(last) == 2 else [*last] * num_layers
    read = [last[kind] for kind in kinds]
    heads = ((("head_dim", one.head_dim), ("num_kv_heads", one.num_kv_heads)) for one in read)
    nothing: dict[str, Any] = {"num_experts": 0, "experts_per_token": 0, "shared_d_ff": 0}
    nothing |= {"layer_inputs": 0, "layer_input_rows": 0, "logit_softcap": 0.0, "bos_id": None}
    nothing |= {"router": "softmax"}
    return dataclasses.replace(
        target,
        num_layers=num_layers,
        windows=tuple(sum(one.windows) for one in read),
        changes=tuple((("mixer", "shared"), *own) for own in heads),
        value_is_key=False,
        tie_embeddings=True,
        eos_ids=(),
        **nothing | sizes,
    )


def _ordering(folder: Folder, vocab: int) -> np.ndarray:
    """Returns the tokens of all centroids [V]; raises InputError unless each is there once."""
    if _ORDERING not in folder.stored:
        raise InputError(f"{folder.path}: expected a tensor {_ORDERING}, found none")
    path = folder.stored[_ORDERING]
    tensor = weights.open_all([path])[path].get_slice(_ORDERING)
    if tensor.get_shape() != [vocab] or tensor.get_dtype() not in ("I64", "I32"):
        raise InputError(
            f"{path}: {_ORDERING}: expected {vocab} integers, found {tensor.get_dtype()} "
            f"{tensor.get_shape()}"
        )
    ids = tensor[...]
    if not np.array_equal(np.sort(ids), np.arange(vocab)):
        raise InputError(f"{path}: {_ORDERING}: expected every token once, found other numbers")
    return ids.astype(np.int32)
