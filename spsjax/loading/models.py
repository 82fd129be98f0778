"""Loading and saving of models: weights on their devices, shapes, tokenizers."""

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from spsjax import tokenization
from spsjax.drafters import medusa
from spsjax.errors import InputError, check_flag, check_path, one_line, short_repr
from spsjax.loading import sources
from spsjax.loading.names import method_of, path_of
from spsjax.models import quantization, transformer
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.tokenization import Tokenizer
from spsjax.types import PyTree
from spsjax.utils import bfloat16, program_cache

# Files of a model folder that `save` writes or removes.
FILES = (
    "config.json",
    "generation_config.json",
    hf_weights.SINGLE,
    medusa.LAYOUT.file,
    *tokenization.NAMES,
)
# Weights of at most this size stay in a CPU's caches between two passes.
_CACHED_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target, or a draft: what `generate` takes.

    Attributes:
        name: name, folder or file it was loaded by.
        config: shape of the model.
        params: weights, on their devices.
        tokenizer: tokenizer; None if there is none.
        mesh: mesh over which the weights are split; None: one device.
    """

    name: str
    config: transformer.Config
    params: PyTree
    tokenizer: Tokenizer | None = None
    mesh: jax.sharding.Mesh | None = None

    def in_mesh(self) -> contextlib.AbstractContextManager:
        """Returns the context in which its programs are traced and run."""
        return sharding.use_mesh(self.mesh)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids at which a text ends: those of the config, and the tokenizer's end of sequence.

        Chat templates end a turn by the latter, which some configs lack: without it, an answer
        would run on through turns of its own.
        """
        own = None if self.tokenizer is None else self.tokenizer.eos_id
        more = () if own is None or own in self.config.eos_ids else (own,)
        return self.config.eos_ids + more

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one pass reads from the memory of one device.

        An input embedding that is not also the head is left out: a pass reads few of its rows. Of a
        mixture, the experts of one token count. The CPU devices of one process share one memory.
        """
        config, total, devices = self.config, 0.0, set()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            names = [getattr(entry, "key", "") for entry in path]
            if names[0] == "embed" and not config.tie_embeddings:
                continue
            experts = any(str(name).startswith("experts_") for name in names)
            share = config.experts_per_token / config.num_experts if experts else 1
            total += share * sum(shard.data.nbytes for shard in leaf.addressable_shards)
            devices |= {shard.device for shard in leaf.addressable_shards}
        return round(total if jax.default_backend() == "cpu" else total / len(devices))


def default_dtype(config: transformer.Config | None = None) -> jnp.dtype:
    """Returns the fastest compute type: bfloat16, except on some CPUs.

    On a CPU it is float32 if XLA would convert bfloat16, and for a model whose weights fit into
    caches: fewer bytes then save less than the conversions cost.
    """
    if jax.default_backend() != "cpu":
        return jnp.dtype(jnp.bfloat16)
    small = config is not None and 4 * config.num_weights <= _CACHED_BYTES
    direct = not small and bfloat16.is_multiplied_directly()
    return jnp.dtype(jnp.bfloat16 if direct else jnp.float32)


def compute_type(dtype, config: transformer.Config | None = None) -> jnp.dtype:
    """Returns a compute type by name, the default for None; raises InputError for another."""
    if dtype is None:
        return default_dtype(config)
    expected = "dtype: expected a floating-point type of 16 bits or more"
    try:
        dtype = jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise InputError(f"{expected}, found {short_repr(dtype)}") from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise InputError(f"{expected}, found {dtype}")
    options: Any = jax.config  # some versions leave the options out of its type
    if dtype == jnp.float64 and not options.jax_enable_x64:
        raise InputError(f"{expected} and at most 32 (jax_enable_x64 is off), found {dtype}")
    return dtype


def load(
    name: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype=None,
    replicate: bool = False,
    quantize: str | None = None,
) -> Model:
    """Loads a model.

    Args:
        name: name of a shipped model ("pystdlib/target", "pystdlib/draft", "pycode/target"); or a
            folder in the Hugging Face layout with config.json, model.safetensors or its shards, and
            a tokenizer; or a GGUF file of llama.cpp, whose weights are dequantised; or, with the
            extra `hub`, a repository: "hf://openai-community/gpt2-xl", "hf://...@revision"; or a
            public model that was downloaded: "smollm2" (docs/guides/models.md).
        mesh: mesh over which the weights are split (`sharding.mesh`); None: the default device.
        dtype: compute type; None: what is fastest (`default_dtype`).
        replicate: with a mesh, whether to keep all weights on every device. This suits a draft so
            small that collectives would cost more than they save.
        quantize: "int8" or "int8_dynamic" rounds the matrices to int8 (`models.quantization`); what
            is sampled exactly is then the rounded model's distribution. None: they stay as they
            are.

    Raises:
        InputError: no model of that name, or files that cannot be used.
    """
    program_cache.use()
    compute_type(dtype)
    quantization.check_kind(quantize)
    path = path_of(name, weights=True)
    if method_of(path):
        raise InputError(
            f"{name}: expected a language model, found a drafter of a target's features, "
            "which load_drafter takes"
        )
    _check_mesh(mesh)
    check_flag("replicate", replicate)
    source = sources.of(path)
    config = source.config()
    tokenizer = _tokenizer(source, config)
    if tokenizer is not None:
        config = _unpadded(config, tokenizer)
    where = sharding.param_shardings(mesh, config, replicate)
    convert = None
    if quantize is not None:
        convert = functools.partial(
            quantization.quantized_leaf, kind=quantize, tied=config.tie_embeddings
        )
    params = source.params(config, compute_type(dtype, config), where, convert)
    return Model(str(name), config, params, tokenizer, mesh)


def quantized(model: Model, kind: str) -> Model:
    """Returns a model with its matrices in int8; `kind` is as for `load`.

    Raises InputError for another kind, or if they are in int8 already.
    """
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")
    if kind is None:
        raise InputError(f"quantize: expected {' or '.join(quantization.KINDS)}, found None")
    quantization.check_kind(kind)
    _check_float("quantize", model)
    params = quantization.quantize(model.params, kind, model.config.tie_embeddings)
    return dataclasses.replace(model, params=params)


def _check_float(argument: str, model: Model) -> None:
    if kind := quantization.kind_of(model.params):
        raise InputError(f"{argument}: {model.name}: expected floating-point weights, found {kind}")


def load_config(name: str | pathlib.Path) -> transformer.Config:
    """Returns only a model's shape, by name, folder or file; raises InputError as `load` does."""
    return sources.of(path_of(name)).config()


def load_tokenizer(name: str | pathlib.Path) -> Tokenizer | None:
    """Returns only the tokenizer of a model, or None; raises InputError as `load` does."""
    source = sources.of(path_of(name))
    return _tokenizer(source, source.config())


def save(folder: str | pathlib.Path, model: Model, dtype="bfloat16") -> None:
    """Writes a folder in the Hugging Face layout, which `load` and other tools read.

    Raises InputError if `load` would refuse `dtype`, or if the folder cannot be written.
    """
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")
    _check_float("model", model)
    check_path("folder", folder)
    folder, dtype = pathlib.Path(folder), compute_type(dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hf_weights.save(folder, model.config, model.params, dtype)
        if model.tokenizer is not None:
            model.tokenizer.save(folder)
        else:
            for name in tokenization.NAMES:  # left there by another model
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        path = error.filename or folder
        raise InputError(f"{path}: expected a place to write to, found {one_line(error)}") from None


def random(config: transformer.Config, seed: int = 0, mesh=None, dtype=None) -> Model:
    """Returns a model with random weights and without a tokenizer, for timing and for tests."""
    _check_mesh(mesh)
    params = transformer.init(config, jax.random.key(seed), compute_type(dtype, config))
    params = sharding.shard_params(params, sharding.param_shardings(mesh, config))
    return Model("random", config, params, mesh=mesh)


def _check_mesh(mesh) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InputError(f"mesh: expected None or a mesh, found {type(mesh).__name__}")
    if set(mesh.axis_names) - {"slots"} != {"data", "model"}:
        raise InputError(
            f"mesh: expected axes data and model, or data, model and slots, "
            f"found {', '.join(mesh.axis_names)}"
        )
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        raise InputError("mesh: expected axes of type Auto (sharding.mesh), found other ones")


def _tokenizer(source: sources.Source, config: transformer.Config) -> Tokenizer | None:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        return None
    size = 1 + max(tokenizer.pieces, default=-1)
    if size > config.vocab_size:
        wanted = f"at most the model's {config.vocab_size} pieces"
        raise InputError(f"{tokenizer.path}: expected {wanted}, found {size}")
    return tokenizer


def _unpadded(config: transformer.Config, tokenizer: Tokenizer) -> transformer.Config:
    """Returns the config without the padding at the end of the vocabulary."""
    size = max(tokenizer.vocab_size, *(id + 1 for id in config.eos_ids), 1)
    if size >= config.vocab_size:
        return config
    return dataclasses.replace(config, vocab_size=size, padded_vocab_size=config.vocab_rows)
