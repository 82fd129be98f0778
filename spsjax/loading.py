"""Loading and saving of models and drafters: weights on their devices, shapes, tokenizers."""

import contextlib
import dataclasses
import difflib
import pathlib

import jax
import jax.numpy as jnp

from spsjax import draft_shapes, drafters, tokenization
from spsjax.drafters import (
    datastore,
    draft_model,
    early_exit,
    features,
    hybrid,
    learned_stopping,
    pairs,
    stopping,
    suffix,
)
from spsjax.drafters.base import Drafter
from spsjax.errors import InputError, check_flag, check_path, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.hf import feature_weights, head_weights, hub
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.tokenization import Tokenizer
from spsjax.types import PyTree
from spsjax.utils import bfloat16, jsonl

# Drafting methods that need no weights, by the names of their modules.
WEIGHTLESS = "none", "ngram", "suffix", "copy", "lookahead"
# Files of a model folder that `save` writes or removes.
FILES = (
    "config.json",
    "generation_config.json",
    hf_weights.SINGLE,
    head_weights.MEDUSA_FILE,
    *tokenization.NAMES,
)
_SHIPPED = pathlib.Path(__file__).parent / "pretrained"
# Weights of so many bytes stay in a CPU's caches between two passes.
_CACHED_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target, or a draft: what `generate` takes.

    Attributes:
        name: name or folder it was loaded by.
        config: shape of the model.
        params: weights, on their devices.
        tokenizer: tokenizer; None if the folder has none.
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
    def num_bytes(self) -> int:
        """Bytes of weights that one pass reads from the memory of one device.

        An input embedding that is not also the head is left out: a pass reads few of its rows. The
        CPU devices of one process share one memory.
        """
        read = {name: part for name, part in self.params.items() if name != "embed"}
        leaves = jax.tree.leaves(self.params if self.config.tie_embeddings else read)
        total = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        used = {shard.device for leaf in leaves for shard in leaf.addressable_shards}
        return total if jax.default_backend() == "cpu" else total // len(used)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter with the weights that it needs: what `generate` takes.

    Attributes:
        name: name or folder it was loaded by.
        drafter: drafting method.
        params: weights; {} for a method without.
        max_positions: context of a draft model; None: no limit of its own.
        tokenizer: tokenizer of a draft model, which must be the target's; None: unknown.
        rule_params: weights of its rule that ends chains; None: it has none.
    """

    name: str
    drafter: Drafter
    params: PyTree
    max_positions: int | None = None
    tokenizer: Tokenizer | None = None
    rule_params: PyTree = None

    def with_target(self, params: PyTree) -> dict[str, PyTree]:
        """Returns the loop's parameters, with those of the target."""
        rule = {} if self.rule_params is None else {"stop_rule": self.rule_params}
        return {"target": params, "drafter": self.params, **rule}


def default_dtype(config: transformer.Config | None = None) -> jnp.dtype:
    """Returns the compute type that is fastest: bfloat16, except on some CPUs.

    There it is float32 if XLA would convert bfloat16 to it, and for a model (`config`) so small
    that caches hold its weights: fewer bytes then save less than the conversions cost.
    """
    if jax.default_backend() != "cpu":
        return jnp.dtype(jnp.bfloat16)
    small = config is not None and 4 * config.num_weights <= _CACHED_BYTES
    direct = not small and bfloat16.is_multiplied_directly()
    return jnp.dtype(jnp.bfloat16 if direct else jnp.float32)


def load(
    name: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    dtype=None,
    replicate: bool = False,
) -> Model:
    """Loads a model.

    Args:
        name: name of a shipped model ("pystdlib/target", "pystdlib/draft"); or a folder in the
            Hugging Face layout with config.json, model.safetensors or its shards, and a tokenizer;
            or, with the extra `hub`, a repository: "hf://openai-community/gpt2-xl",
            "hf://...@revision".
        mesh: mesh over which the weights are split (`sharding.mesh`); None: the default device.
        dtype: compute type; None: what is fastest (`default_dtype`).
        replicate: with a mesh, whether to keep all weights on every device. This suits a draft so
            small that collectives would cost more than they save.

    Raises:
        InputError: no model of that name, or files that cannot be used.
    """
    compute_type(dtype)
    folder = _folder(name, weights=True)
    if _layout_of(folder):
        raise InputError(
            f"{name}: expected a language model, found a drafter of a target's features, "
            "which load_drafter takes"
        )
    _check_mesh(mesh)
    check_flag("replicate", replicate)
    config = hf_weights.read_config(folder)
    pieces = _tokenizer(folder, config)
    if pieces is not None:
        config = _unpadded(config, pieces)
    where = sharding.param_shardings(mesh, config, replicate)
    params = hf_weights.read_params(folder, config, compute_type(dtype, config), where)
    return Model(str(name), config, params, pieces, mesh)


def load_drafter(
    name: str | pathlib.Path,
    target: Model,
    replicate: bool | None = None,
    tree: draft_shapes.Shape = None,
    stop_rule: stopping.Rule | learned_stopping.LoadedRule | None = None,
    store: datastore.Store | None = None,
) -> LoadedDrafter:
    """Loads a drafter for a target.

    Args:
        name: name of a drafting method that needs no weights: "ngram", "suffix", "copy",
            "lookahead", "early_exit:4" (the target's first 4 layers), "early_exit:FILE" (without
            what scripts/plan_skips.py chose) or "suffix:FILE" (also looks into texts, JSON lines
            with `text`); or whatever `load` takes: a smaller model with the target's tokenizer, or
            a drafter of the target's features (docs/drafters.md). With "suffix+" before the latter
            two, suffix decoding drafts where it expects more.
        target: model to draft for. Its mesh is taken over, and its compute type, too, unless that
            is the default; then the draft also has its default.
        replicate: with a mesh, whether to keep all weights on every device; None: a drafter of
            features whole, and a draft model split.
        tree: shape of the trees that are drafted (`Tree`, `DynamicTree`); None: a chain.
        stop_rule: rule that ends chains early, for draft models, EAGLE and "early_exit": one of
            `drafters.stopping`, or what `learned_stopping.read` returns; None: all have K tokens.
        store: for "suffix", texts in which it also looks, as they are now; None: none.

    Raises:
        InputError: no drafter of that name, or one that does not fit the target, the tree or the
            rule.
    """
    if store is not None:
        if tree is not None or stop_rule is not None:
            raise InputError("store: expected neither a tree nor a stop_rule beside it, found one")
        return _with_store(name, target, store)
    together, with_suffix = str(name).removeprefix("suffix+"), str(name).startswith("suffix+")
    loaded = _load_drafter(together if with_suffix else name, target, replicate, tree)
    loaded = loaded if stop_rule is None else with_stop_rule(loaded, target, stop_rule)
    return _with_suffix(name, loaded) if with_suffix else loaded


def _with_store(name, target: Model, store: datastore.Store) -> LoadedDrafter:
    """Returns suffix decoding that also looks into a store."""
    if name != "suffix" or not isinstance(store, datastore.Store):
        raise InputError(
            f'store: expected a Store, and "suffix" as the drafter, found {short_repr(store)} and '
            f"{short_repr(name)}"
        )
    held = store.sorted()
    if (most := int(held.tokens.max())) >= target.config.vocab_size:
        raise InputError(
            f"store: expected token ids in [0, {target.config.vocab_size}), found {most}"
        )
    loaded = _load_drafter(name, target, None, None)
    most = min(loaded.drafter.max_match, store.max_match)
    drafter = dataclasses.replace(loaded.drafter, max_match=most)
    params = jax.device_put(held, sharding.replicated(target.mesh))
    return dataclasses.replace(loaded, drafter=drafter, params=params)


def _stored(path: str, target: Model) -> datastore.Store:
    """Returns a store of the texts of a file, JSON lines with `text`."""
    if target.tokenizer is None:
        raise InputError(f"suffix:{path}: expected a target with a tokenizer, found none")
    texts = []
    for number, record in jsonl.read(path):
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(
                f"{path}, line {number}: expected an object with a text, found {short_repr(record)}"
            )
        texts += [target.tokenizer.encode(text)] if text else []
    store = datastore.Store(max(sum(len(text) + 1 for text in texts), 2))
    store.extend(texts)
    if not len(store):
        raise InputError(f"{path}: expected texts, found none")
    return store


def _with_suffix(name: str, loaded: LoadedDrafter) -> LoadedDrafter:
    """Returns a drafter that leaves to suffix decoding what that does better."""
    trained = draft_model.Drafter, features.FeatureDrafter
    if not isinstance(loaded.drafter, trained) or loaded.drafter.trees:
        raise InputError(f"{name}: expected a drafter with weights, of chains, found another")
    drafter = hybrid.Drafter(loaded.drafter, suffix.Drafter())
    return dataclasses.replace(loaded, name=str(name), drafter=drafter)


def with_stop_rule(
    loaded: LoadedDrafter, target: Model, stop_rule: stopping.Rule | learned_stopping.LoadedRule
) -> LoadedDrafter:
    """Returns a drafter that ends chains early; raises InputError for one that cannot."""
    inner = getattr(loaded.drafter, "model", loaded.drafter)  # a hybrid's
    if "stop_rule" not in {field.name for field in dataclasses.fields(inner)}:
        raise InputError(
            f"stop_rule: expected None for {loaded.name}, as only draft models, EAGLE and "
            "early_exit end chains early, found a rule"
        )
    weights = None
    if isinstance(stop_rule, learned_stopping.LoadedRule):
        weights = jax.device_put(stop_rule.params, sharding.replicated(target.mesh))
        stop_rule = stop_rule.rule
    drafter = dataclasses.replace(inner, stop_rule=stop_rule)
    if inner is not loaded.drafter:
        drafter = dataclasses.replace(loaded.drafter, model=drafter)
    return dataclasses.replace(loaded, drafter=drafter, rule_params=weights)


def _load_drafter(name, target, replicate, tree) -> LoadedDrafter:
    """Returns a drafter as `load_drafter` does, without a rule that ends chains."""
    if not isinstance(target, Model):
        raise InputError(f"target: expected a loaded model, found {type(target).__name__}")
    if replicate is not None:
        check_flag("replicate", replicate)
    if not isinstance(tree, draft_shapes.Shape):
        raise InputError(f"tree: expected a Tree or a DynamicTree, found {short_repr(tree)}")
    if isinstance(name, str) and name in WEIGHTLESS:
        if tree is not None:
            raise InputError(f"tree: expected none for {name}, which drafts chains, found a tree")
        return LoadedDrafter(name, getattr(drafters, name).Drafter(), {})
    method, _, rest = str(name).partition(":")
    if method == "suffix" and rest:
        if tree is not None:
            raise InputError("tree: expected none for suffix, which drafts chains, found a tree")
        stored = _with_store("suffix", target, _stored(rest, target))
        return dataclasses.replace(stored, name=name)
    if method == "early_exit":
        if tree is not None:
            raise InputError(
                "tree: expected none for early_exit, which drafts chains, found a tree"
            )
        return LoadedDrafter(str(name), early_exit.by_name(rest, target.config), {})
    near = isinstance(name, str) and difflib.get_close_matches(name.lower(), WEIGHTLESS, 1, 0.8)
    if near and not pathlib.Path(name).exists():
        raise InputError(f"name: expected {near[0]!r} or a model, found {short_repr(name)}")
    dtype = target.params["norm"]["scale"].dtype
    folder = _folder(name, weights=True)
    if _layout_of(folder):
        return _load_head(str(name), folder, target, dtype, tree, replicate)
    dtype = None if dtype == default_dtype(target.config) else dtype
    return as_drafter(load(name, target.mesh, dtype, bool(replicate)), target, tree)


def is_feature_drafter(name: str | pathlib.Path) -> bool:
    """Returns whether a name or folder is a drafter of a target's features, which is no model.

    Raises InputError if there is neither.
    """
    return _layout_of(_folder(name, weights=True)) is not None


def _layout_of(folder: pathlib.Path):
    """Returns the module that reads the drafter in a folder; None: it holds a model."""
    if head_weights.method_of(folder):
        return head_weights
    return feature_weights if feature_weights.is_drafter(folder) else None


def _load_head(
    name: str, folder: pathlib.Path, target: Model, dtype, tree: draft_shapes.Shape, replicate
) -> LoadedDrafter:
    """Returns a drafter that continues the target's features."""
    files = _layout_of(folder)
    layout = files.describe(folder, target.config)
    module = getattr(drafters, layout.method)
    drafter = module.Drafter(target=target.config, tree=tree, **layout.fields)
    where = drafter.shardings(target.mesh, replicate)
    params = files.read(layout, drafter.param_shapes(dtype), target.config, where)
    return LoadedDrafter(name, drafter, params, target.config.max_positions)


def save_drafter(
    folder: str | pathlib.Path, drafter: LoadedDrafter, target: Model, dtype="bfloat16"
) -> None:
    """Writes a drafter of the target's features, for `load_drafter` and for vLLM.

    EAGLE-3 is written in the layout of `speculators`, EAGLE-1 and Medusa in that of their authors,
    an MLP speculator in that of the published ones, the others in one of their own. Raises
    InputError for another drafter, or if the folder cannot be written.
    """
    inner = getattr(drafter, "drafter", drafter)
    if not isinstance(drafter, LoadedDrafter) or not isinstance(inner, features.FeatureDrafter):
        raise InputError(
            "drafter: expected a loaded drafter of the target's features, found "
            f"{type(inner).__module__.rpartition('.')[2]}.{type(inner).__name__}"
        )
    if not isinstance(target, Model):
        raise InputError(f"target: expected a loaded model, found {type(target).__name__}")
    shapes = jax.tree.map(jnp.shape, inner.param_shapes(jnp.float32))
    if jax.tree.map(jnp.shape, drafter.params) != shapes:
        raise InputError("drafter: expected the weights of its shape, found others")
    check_path("folder", folder)
    method = type(inner).__module__.rpartition(".")[2]
    fields = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
    about = target.config, target.name, inner.num_speculative_tokens, compute_type(dtype)
    try:
        layer = isinstance(inner, pairs.PairDrafter)
        files = feature_weights if layer else head_weights
        files.save(pathlib.Path(folder), method, fields, drafter.params, *about)
    except OSError as error:
        path = error.filename or folder
        raise InputError(f"{path}: expected a place to write to, found {one_line(error)}") from None


def as_drafter(draft: Model, target: Model, tree=None) -> LoadedDrafter:
    """Returns a loaded model as a drafter for a target; raises InputError if they do not fit."""
    _check_pair(target, draft)
    drafter = draft_model.Drafter(draft.config, vocab_size=target.config.vocab_size, tree=tree)
    context = draft.config.max_positions
    return LoadedDrafter(draft.name, drafter, draft.params, context, draft.tokenizer)


def load_config(name: str | pathlib.Path) -> transformer.Config:
    """Returns only a model's shape, by its name or folder; raises InputError as `load` does."""
    return hf_weights.read_config(_folder(name))


def load_tokenizer(name: str | pathlib.Path) -> Tokenizer | None:
    """Returns only the tokenizer of a model, or None; raises InputError as `load` does."""
    folder = _folder(name)
    return _tokenizer(folder, hf_weights.read_config(folder))


def save(folder: str | pathlib.Path, model: Model, dtype="bfloat16") -> None:
    """Writes a folder in the Hugging Face layout, which `load` and other tools read.

    Raises InputError if `load` would refuse `dtype`, or if the folder cannot be written.
    """
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")
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
    params = sharding.place_params(params, sharding.param_shardings(mesh, config))
    return Model("random", config, params, mesh=mesh)


def _folder(name: str | pathlib.Path, weights: bool = False) -> pathlib.Path:
    """Returns the folder of a model by name; from the hub, with its weights or without."""
    check_path("name", name)
    if str(name).startswith(hub.PREFIX):
        return hub.download(str(name), tokenization.NAMES, weights)
    names = sorted(
        path.parent.relative_to(_SHIPPED).as_posix() for path in _SHIPPED.rglob("config.json")
    )
    try:
        if pathlib.Path(name).is_dir():
            return pathlib.Path(name)
        found = "a file" if pathlib.Path(name).exists() else "neither"
    except OSError as error:  # too long, or not to be read
        found = one_line(error)
    if pathlib.Path(name).as_posix() in names:
        return _SHIPPED / name
    shipped = f"one of {', '.join(names)}" if names else "a shipped one (none is installed)"
    raise InputError(
        f"{short_repr(str(name))}: expected a model folder or {shipped}, found {found}"
    )


def compute_type(dtype, config: transformer.Config | None = None) -> jnp.dtype:
    """Returns the compute type of that name, the default for None; raises InputError otherwise."""
    if dtype is None:
        return default_dtype(config)
    expected = "dtype: expected a floating-point type of 16 bits or more"
    try:
        dtype = jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise InputError(f"{expected}, found {short_repr(dtype)}") from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise InputError(f"{expected}, found {dtype}")
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise InputError(f"{expected} and at most 32 (jax_enable_x64 is off), found {dtype}")
    return dtype


def _check_pair(target: Model, draft: Model) -> None:
    name = f"drafter {draft.name}"
    if target.tokenizer is not None and draft.tokenizer is not None:
        if target.tokenizer != draft.tokenizer:
            raise InputError(f"{name}: expected the target's tokenizer, found another one")
    elif (
        draft.config.vocab_size != target.config.vocab_size
        and draft.config.vocab_rows != target.config.vocab_rows
    ):  # without tokenizers, only their sizes can say that the vocabularies are the same
        raise InputError(
            f"{name}: expected the target's vocabulary of {target.config.vocab_size}, "
            f"found {draft.config.vocab_size}"
        )
    if target.mesh != draft.mesh:
        raise InputError(f"{name}: expected the target's mesh, found another one")


def _check_mesh(mesh) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InputError(f"mesh: expected None or a mesh, found {type(mesh).__name__}")
    if set(mesh.axis_names) != {"data", "model"}:
        raise InputError(f"mesh: expected axes data and model, found {', '.join(mesh.axis_names)}")
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        raise InputError("mesh: expected axes of type Auto (sharding.mesh), found other ones")


def _tokenizer(folder: pathlib.Path, config: transformer.Config) -> Tokenizer | None:
    if not tokenization.exists(folder):
        return None
    found = tokenization.load(folder)
    size = 1 + max(found.pieces, default=-1)
    if size > config.vocab_size:
        raise InputError(
            f"{found.path}: expected at most the model's {config.vocab_size} pieces, found {size}"
        )
    return found


def _unpadded(config: transformer.Config, found: Tokenizer) -> transformer.Config:
    """Returns the config without the padding at the end of the vocabulary."""
    size = max(found.vocab_size, *(id + 1 for id in config.eos_ids), 1)
    if size >= config.vocab_size:
        return config
    return dataclasses.replace(config, vocab_size=size, padded_vocab_size=config.vocab_rows)
