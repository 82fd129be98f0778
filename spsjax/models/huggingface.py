"""Model folders in the Hugging Face layout: `config.json` and safetensors, in and out.

Which tensor is which parameter is data, one table a family. Linear weights are stored [out, in]
there and [in, out] here.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from spsjax import files, sharding
from spsjax.errors import InputError, brief, one_line
from spsjax.models import transformer
from spsjax.types import PyTree

_LAYER = {
    ("attention_norm", "scale"): "input_layernorm",
    ("attention", "query", "kernel"): "self_attn.q_proj",
    ("attention", "key", "kernel"): "self_attn.k_proj",
    ("attention", "value", "kernel"): "self_attn.v_proj",
    ("attention", "position", "kernel"): "self_attn.r_proj",
    ("attention", "content_bias"): "self_attn.content_bias",
    ("attention", "position_bias"): "self_attn.position_bias",
    ("attention", "out", "kernel"): "self_attn.o_proj",
    ("ffn_norm", "scale"): "post_attention_layernorm",
    ("ffn", "gate", "kernel"): "mlp.gate_proj",
    ("ffn", "up", "kernel"): "mlp.up_proj",
    ("ffn", "down", "kernel"): "mlp.down_proj",
}
_OUTSIDE = {
    ("embed", "embedding"): "model.embed_tokens",
    ("norm", "scale"): "model.norm",
    ("head", "kernel"): "lm_head",
}
# A family's `model_type`, and what else tells it from the others. Only this package reads the
# second: no layout of other tools has relative positions.
_FAMILIES = {
    "llama": {"positions": "rotary", "ffn": "swiglu"},
    "chinchilla": {"positions": "relative", "ffn": "gelu"},
}
_ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu_pytorch_tanh"}


def tensor_name(path: tuple) -> str:
    """The tensor that holds the parameter at `path`, e.g. ('layers', 0, 'ffn', 'up', 'kernel')."""
    inside = path[0] == "layers"
    name = f"model.layers.{path[1]}.{_LAYER[path[2:]]}" if inside else _OUTSIDE[path]
    return name if path[-1].endswith("_bias") else f"{name}.weight"


def _leaves(tree: PyTree) -> Iterator[tuple[tuple, object]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(entry.key for entry in path), leaf


def _read_json(path: pathlib.Path) -> dict:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


# What a field of config.json must be, in words and as a predicate; a bool is no int here.
_COUNT = "an integer in [1, 2**31)", lambda x: type(x) is int and 1 <= x < 2**31
_POSITIVE = "a positive number", lambda x: type(x) in (int, float) and 0 < x < 1e30
_FLAG = "true or false", lambda x: type(x) is bool
_TEXT = "a text", lambda x: type(x) is str
_OBJECT = "an object", lambda x: type(x) is dict


class _Fields:
    """The fields of one JSON object, checked as they are read. A null is an absent field."""

    def __init__(self, path: pathlib.Path, raw: dict):
        self.path, self.raw = path, raw

    def get(self, name: str, kind, *default):
        """The value of a field, which must be of that kind; `default` if there is none."""
        value, (expected, is_valid) = self.raw.get(name), kind
        if value is None:
            if not default:
                raise InputError(f"{self.path}: {name}: expected {expected}, found none")
            return default[0]
        if not is_valid(value):
            raise self.error(name, expected, value)
        return value

    def only(self, name: str, kind, supported) -> None:
        """Refuses every value but the one supported, which is also the default."""
        found = self.get(name, kind, supported)
        if found != supported:
            raise self.error(name, json.dumps(supported), found)

    def error(self, name: str, expected: str, found) -> InputError:
        return InputError(f"{self.path}: {name}: expected {expected}, found {brief(found)}")


def read_config(folder: pathlib.Path) -> transformer.Config:
    """The shape of the model in `folder`."""
    path = folder / "config.json"
    if not path.exists():
        raise InputError(f"{folder}: expected a model folder with config.json, found none")
    fields = _Fields(path, _read_json(path))
    family = fields.get("model_type", _TEXT)
    if family not in _FAMILIES:
        raise fields.error("model_type", " or ".join(map(json.dumps, _FAMILIES)), family)
    flags = _FAMILIES[family]
    if fields.raw.get("quantization_config") is not None:
        raise InputError(f"{path}: quantization_config: expected none, found one")
    fields.only("hidden_act", _TEXT, _ACTIVATIONS[flags["ffn"]])
    fields.only("attention_bias", _FLAG, False)
    fields.only("mlp_bias", _FLAG, False)
    theta = fields.get("rope_theta", _POSITIVE, 10_000.0)
    # Older versions of transformers write the first of these, newer ones the second.
    for name in ("rope_scaling", "rope_parameters"):
        rope = _Fields(path, fields.get(name, _OBJECT, {}))
        if any(isinstance(value, dict) for value in rope.raw.values()):
            raise fields.error(name, "one set of parameters for all layers", rope.raw)
        rope.only("rope_type", _TEXT, "default")
        rope.only("type", _TEXT, "default")
        rope.only("partial_rotary_factor", _POSITIVE, 1)
        theta = rope.get("rope_theta", _POSITIVE, theta)
    vocab_size, d_model = fields.get("vocab_size", _COUNT), fields.get("hidden_size", _COUNT)
    heads = fields.get("num_attention_heads", _COUNT)
    head_dim = fields.get("head_dim", _COUNT, None)
    if head_dim is None and d_model % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads={heads}", d_model)
    token = f"a token id in [0, {vocab_size})", lambda x: type(x) is int and 0 <= x < vocab_size
    tokens = (
        f"one or more token ids in [0, {vocab_size})",
        lambda x: all(map(token[1], x if type(x) is list else [x])),
    )
    eos = fields.get("eos_token_id", tokens, [])
    shape = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_ff": fields.get("intermediate_size", _COUNT),
        "num_layers": fields.get("num_hidden_layers", _COUNT),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", _COUNT, heads),
        "head_dim": head_dim or d_model // heads,
        "max_positions": fields.get("max_position_embeddings", _COUNT),
        **flags,
        "rope_theta": float(theta),
        "norm_eps": float(fields.get("rms_norm_eps", _POSITIVE, 1e-6)),
        "tie_embeddings": fields.get("tie_word_embeddings", _FLAG, False),
        "bos_id": fields.get("bos_token_id", token, None),
        "eos_ids": tuple(eos) if isinstance(eos, list) else (eos,),
    }
    try:
        return transformer.Config(**shape)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def family_of(config: transformer.Config) -> str:
    """The `model_type` of a model; raises InputError if its flags are those of no family."""
    for family, flags in _FAMILIES.items():
        if all(getattr(config, name) == flag for name, flag in flags.items()):
            return family
    raise InputError(
        f"model: expected the positions and ffn of {' or '.join(_FAMILIES)}, "
        f"found {config.positions} and {config.ffn}"
    )


def write_config(folder: pathlib.Path, config: transformer.Config, dtype: str) -> None:
    """Writes `config.json`; `transformers` reads a Llama model from it, if it is one."""
    raw = {
        "architectures": [f"{family_of(config).capitalize()}ForCausalLM"],
        "model_type": family_of(config),
        "hidden_act": _ACTIVATIONS[config.ffn],
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
    files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def _shards(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> the file that holds it. A single file goes before shards, as elsewhere."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        raise InputError(f"{folder}: expected model.safetensors or its index, found neither")
    weight_map = _Fields(index, _read_json(index)).get("weight_map", _OBJECT)
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != pathlib.PurePath(file).name:
            raise InputError(f"{index}: {name}: expected a file name, found {brief(file)}")
    return {name: folder / file for name, file in weight_map.items()}


def _open(path: pathlib.Path):
    try:
        if not path.is_file():
            raise InputError(f"{path}: expected a safetensors file, found none")
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: expected a whole safetensors file, found {one_line(error)}"
        ) from None


def _check_names(folder: pathlib.Path, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raises InputError at a tensor that is missing, or that would silently be left out."""
    found, expected = set(found), set(expected)
    for name in sorted(expected - found):
        raise InputError(f"{folder}: expected a tensor {name}, found none")
    for name in sorted(found - expected):
        # A tied head is sometimes stored; old files hold the rotary frequencies, which are fixed.
        if name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq"):
            raise InputError(f"{folder}: expected no tensor {name} (config.json), found one")


def read_params(
    folder: pathlib.Path,
    config: transformer.Config,
    dtype,
    where: Callable[[tuple], jax.sharding.Sharding] | None = None,
) -> PyTree:
    """Parameters in compute type `dtype`; each device's slice alone is read for it.

    Args:
        folder: the model folder.
        config: as `read_config` gives it.
        dtype: type of the parameters in memory.
        where: as `sharding.places` gives it; None: the default device.
    """
    where = where or sharding.places(None, config)
    shards = _shards(folder)
    if config.num_layers > len(shards):
        raise InputError(
            f"{folder}: expected tensors of {config.num_layers} layers (config.json), "
            f"found {len(shards)} tensors in all"
        )
    shapes = transformer.param_shapes(config, dtype)
    _check_names(folder, shards, (tensor_name(path) for path, _ in _leaves(shapes)))
    files = {path: _open(path) for path in set(shards.values())}
    names = {path: set(file.keys()) for path, file in files.items()}

    def read(path, shape):
        path = tuple(entry.key for entry in path)
        name = tensor_name(path)
        shard, file = shards[name], files[shards[name]]
        if name not in names[shard]:
            raise InputError(f"{shard}: expected a tensor {name}, found none")
        expected = shape.shape[::-1] if path[-1] == "kernel" else shape.shape
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != expected:
            raise InputError(
                f"{shard}: {name}: expected shape {list(expected)}, found {stored.get_shape()}"
            )
        if stored.get_dtype() not in ("BF16", "F16", "F32", "F64"):
            raise InputError(
                f"{shard}: {name}: expected floating-point weights of 16 bits or more, "
                f"found {stored.get_dtype()}"
            )
        transpose = path[-1] == "kernel"

        def cut(index):
            part = stored[index[::-1] if transpose else index].astype(dtype)
            return part.T if transpose else part

        return jax.make_array_from_callback(shape.shape, where(path), cut)

    return jax.tree_util.tree_map_with_path(read, shapes)


def save(folder: str | pathlib.Path, config: transformer.Config, params: PyTree, dtype="bfloat16"):
    """Writes `config.json` and `model.safetensors`, each whole or not at all."""
    folder = pathlib.Path(folder)
    family_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in _leaves(params):
        array = np.asarray(jnp.asarray(leaf).astype(dtype))
        tensors[tensor_name(path)] = np.ascontiguousarray(
            array.T if path[-1] == "kernel" else array
        )
    with files.whole(folder / "model.safetensors") as partial:
        safetensors.numpy.save_file(tensors, partial, metadata={"format": "pt"})
    write_config(folder, config, jnp.dtype(dtype).name)
