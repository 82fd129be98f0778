"""Loaded models: weights on their devices, a shape, and a tokenizer."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from spsjax import sharding
from spsjax.errors import InputError
from spsjax.models import huggingface, transformer
from spsjax.tokenizer import Tokenizer
from spsjax.types import PyTree

_SHIPPED = pathlib.Path(__file__).parent / "pretrained"


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target, or a draft: what `generate` takes."""

    name: str
    config: transformer.Config
    params: PyTree
    tokenizer: Tokenizer | None = None
    mesh: jax.sharding.Mesh | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one pass over the model reads."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))


def default_dtype() -> jnp.dtype:
    """The one place where the compute type is chosen: float32 on the CPU, bfloat16 elsewhere.

    On a CPU, bfloat16 products of few rows are emulated, at up to ten times the time.
    """
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def load(
    name: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype=None,
    replicate: bool = False,
) -> Model:
    """Loads a model.

    Args:
        name: a shipped name ("pystdlib/target", "pystdlib/draft"), or a folder in the Hugging Face
            layout: config.json, model.safetensors or its shards, tokenizer.model.
        mesh: where the weights go (`sharding.mesh`); None: the default device.
        dtype: compute type; None: float32 on the CPU, bfloat16 on an accelerator.
        replicate: with a mesh, keeps all weights on every device: for a draft so small that
            collectives would cost more than they save.

    Raises:
        InputError: no such name or folder, or files that are not what they should be.
    """
    folder = pathlib.Path(name)
    shipped = _SHIPPED / str(name)
    if not folder.is_dir():
        if not (shipped / "config.json").is_file():
            names = sorted(
                path.parent.relative_to(_SHIPPED).as_posix()
                for path in _SHIPPED.rglob("config.json")
            )
            raise InputError(
                f"{name}: expected a model folder or one of {', '.join(names)}, found neither"
            )
        folder = shipped
    try:
        dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise InputError(f"dtype: expected a floating-point type, found {dtype!r}") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"dtype: expected a floating-point type, found {dtype}")
    config = huggingface.read_config(folder)
    place = None if mesh is None else sharding.placer(mesh, config, replicate)
    params = huggingface.read_params(folder, config, dtype, place)
    tokenizer = folder / "tokenizer.model"
    return Model(
        name=str(name),
        config=config,
        params=params,
        tokenizer=Tokenizer(tokenizer) if tokenizer.exists() else None,
        mesh=mesh,
    )


def random(config: transformer.Config, seed: int = 0, mesh=None, dtype=None) -> Model:
    """A model of random weights and no tokenizer, for timing and for tests."""
    params = transformer.init(config, jax.random.key(seed), dtype or default_dtype())
    if mesh is not None:
        place = sharding.placer(mesh, config, replicate=False)
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: place(tuple(entry.key for entry in path), leaf), params
        )
    return Model("random", config, params, mesh=mesh)
