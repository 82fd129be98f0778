"""Model folders in the Hugging Face layout: `config.json` and safetensors, in and out.

Which tensor is which parameter is data, one table a family. Linear weights are stored [out, in]
there and [in, out] here.
"""

import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.types import PyTree

_LLAMA_LAYER = {
    ("attention_norm", "scale"): "input_layernorm",
    ("attention", "query", "kernel"): "self_attn.q_proj",
    ("attention", "key", "kernel"): "self_attn.k_proj",
    ("attention", "value", "kernel"): "self_attn.v_proj",
    ("attention", "out", "kernel"): "self_attn.o_proj",
    ("ffn_norm", "scale"): "post_attention_layernorm",
    ("ffn", "gate", "kernel"): "mlp.gate_proj",
    ("ffn", "up", "kernel"): "mlp.up_proj",
    ("ffn", "down", "kernel"): "mlp.down_proj",
}
_LLAMA = {
    ("embed", "embedding"): "model.embed_tokens",
    ("norm", "scale"): "model.norm",
    ("head", "kernel"): "lm_head",
}


def tensor_name(path: tuple) -> str:
    """The tensor that holds the parameter at `path`, e.g. ('layers', 0, 'ffn', 'up', 'kernel')."""
    if path[0] == "layers":
        return f"model.layers.{path[1]}.{_LLAMA_LAYER[path[2:]]}.weight"
    return _LLAMA[path] + ".weight"


def _leaves(tree: PyTree) -> Iterator[tuple[tuple, object]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(entry.key for entry in path), leaf


def read_config(folder: pathlib.Path) -> transformer.Config:
    """The shape of the model in `folder`."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: expected a model folder with config.json, found none"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected JSON, found {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    if raw.get("model_type") != "llama":
        raise InputError(f"{path}: model_type: expected 'llama', found {raw.get('model_type')!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        "rope_type": (kind, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias")), False),
        "mlp_bias": (bool(raw.get("mlp_bias")), False),
    }
    for field, (found, expected) in unsupported.items():
        if found != expected:
            raise InputError(f"{path}: {field}: expected {expected!r}, found {found!r}")
    eos = raw.get("eos_token_id")
    try:
        heads = raw["num_attention_heads"]
        return transformer.Config(
            vocab_size=raw["vocab_size"],
            d_model=raw["hidden_size"],
            d_ff=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_positions=raw["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_embeddings=raw.get("tie_word_embeddings", False),
            bos_id=raw.get("bos_token_id"),
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )
    except KeyError as error:
        raise InputError(f"{path}: expected a key {error}, found none") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None


def write_config(folder: pathlib.Path, config: transformer.Config, dtype: str) -> None:
    """Writes `config.json` so that `transformers` reads it as a Llama model."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _shards(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> the file that holds it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        except (
            json.JSONDecodeError,
            UnicodeDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise InputError(
                f"{index}: expected an object with weight_map, found {error!r}"
            ) from None
    if not single.exists():
        raise InputError(f"{folder}: expected model.safetensors or its index, found neither")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: pathlib.Path):
    try:
        return safetensors.safe_open(path, framework="flax")
    except FileNotFoundError:
        raise InputError(f"{path}: expected a shard that the index names, found no file") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path}: expected a whole safetensors file, found {error}") from None


def read_params(folder: pathlib.Path, config: transformer.Config, dtype, place=None) -> PyTree:
    """Parameters in compute type `dtype`.

    Args:
        folder: the model folder.
        config: as `read_config` gives it.
        dtype: type of the parameters in memory.
        place: `(path, array) -> array` puts one parameter where it belongs; None leaves it on the
            default device.
    """
    shards, files = _shards(folder), {}
    shapes = transformer.param_shapes(config, dtype)

    def read(path, shape):
        path = tuple(entry.key for entry in path)
        name = tensor_name(path)
        if name not in shards:
            raise InputError(f"{folder}: expected a tensor {name}, found none")
        file = files.setdefault(shards[name], None) or _open(shards[name])
        files[shards[name]] = file
        if name not in file.keys():
            raise InputError(f"{shards[name]}: expected a tensor {name}, found none")
        tensor = file.get_tensor(name)
        tensor = tensor.T if path[-1] == "kernel" else tensor
        if tensor.shape != shape.shape:
            raise InputError(
                f"{shards[name]}: {name}: expected shape "
                f"{shape.shape[::-1] if path[-1] == 'kernel' else shape.shape}, found "
                f"{tensor.shape[::-1] if path[-1] == 'kernel' else tensor.shape}"
            )
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise InputError(f"{name}: expected floating-point weights, found {tensor.dtype}")
        tensor = tensor.astype(dtype)
        return tensor if place is None else place(path, tensor)

    return jax.tree_util.tree_map_with_path(read, shapes)


def save(folder: str | pathlib.Path, config: transformer.Config, params: PyTree, dtype="bfloat16"):
    """Writes `config.json` and `model.safetensors`, each whole or not at all."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in _leaves(params):
        array = np.asarray(jnp.asarray(leaf).astype(dtype))
        tensors[tensor_name(path)] = np.ascontiguousarray(
            array.T if path[-1] == "kernel" else array
        )
    partial = folder / "model.safetensors.partial"
    safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})
    write_config(folder, config, dtype)
    partial.replace(folder / "model.safetensors")
