"""Loading and saving of drafters, by name or from a folder, for a target."""

import dataclasses
import difflib
import pathlib
import warnings

import jax
import jax.numpy as jnp

from spsjax import drafters
from spsjax.drafters import (
    base,
    datastore,
    draft_model,
    features,
    hybrid,
    pairs,
    shapes,
    sparse_self,
    stopping,
    suffix,
)
from spsjax.drafters.contrib import early_exit, learned_stopping
from spsjax.errors import InputError, check_flag, check_path, one_line, short_repr
from spsjax.loading.models import (
    Model,
    compute_type,
    default_dtype,
    load,
    load_tokenizer,
    quantized,
)
from spsjax.loading.names import folder_of, is_shipped, layout_of
from spsjax.models import quantization
from spsjax.models.hf import feature_weights, head_weights
from spsjax.parallel import sharding
from spsjax.tokenization import Tokenizer
from spsjax.tokenization.base import difference
from spsjax.types import PyTree
from spsjax.utils import jsonl

# Drafting methods that need no weights, by the names of their modules.
WEIGHTLESS = "none", "ngram", "suffix", "copy", "lookahead"


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter with the weights that it needs: what `generate` takes.

    Attributes:
        name: name or folder it was loaded by.
        drafter: drafting method.
        params: weights; {} for a method without.
        max_positions: context of a draft model; None: no limit of its own.
        tokenizer: tokenizer of a draft model, which must be the target's; None: unknown.
    """

    name: str
    drafter: base.Drafter
    params: PyTree
    max_positions: int | None = None
    tokenizer: Tokenizer | None = None

    def with_target(self, params: PyTree) -> dict[str, PyTree]:
        """Returns the loop's parameters, with those of the target."""
        return {"target": params, "drafter": self.params}


def load_drafter(
    name: str | pathlib.Path,
    target: Model,
    replicate: bool | None = None,
    tree: shapes.Shape = None,
    stop_rule: stopping.Rule | learned_stopping.LoadedRule | None = None,
    store: datastore.Store | None = None,
) -> LoadedDrafter:
    """Loads a drafter for a target.

    Args:
        name: name of a drafting method that needs no weights: "ngram", "suffix", "copy",
            "lookahead", "early_exit:4" (the target's first 4 layers), "early_exit:FILE" (without
            what scripts/plan_skips.py chose), "sparse_self:256" (the target with a cache of 256
            tokens; "sparse_self:256:chosen": half of them are SnapKV's choice) or "suffix:FILE"
            (also looks into texts, JSON lines with `text`); or whatever `load` takes: a smaller
            model with the target's tokenizer, or a drafter of the target's features
            (docs/drafters.md); or "int8:FOLDER", such a model in int8, or "int8", the target in
            int8 (also "int8_dynamic"); or "window:256:FOLDER", such a model with a cache of 256
            tokens. With "suffix+" before a model or a drafter of features, suffix decoding drafts
            where it expects more.
        target: model to draft for. Its mesh is taken over, and its compute type, too, unless that
            is the default; then the draft also has its default.
        replicate: with a mesh, whether to keep all weights on every device; None: a drafter of
            features whole, and a draft model split.
        tree: shape of the trees that are drafted (`Tree`, `DynamicTree`); None: a chain.
        stop_rule: rule that ends chains early, for draft models, EAGLE, SPiRE, "early_exit" and
            "sparse_self": one of `drafters.stopping`, or what `learned_stopping.read` returns;
            None: all have K tokens.
        store: for "suffix", texts in which it also looks, as they are now; None: none.

    Raises:
        InputError: no drafter of that name, or one that does not fit the target, the tree or the
            rule.
    """
    if not isinstance(target, Model):
        raise InputError(f"target: expected a loaded model, found {type(target).__name__}")
    if replicate is not None:
        check_flag("replicate", replicate)
    if store is not None:
        if tree is not None or stop_rule is not None:
            raise InputError("store: expected neither a tree nor a stop_rule beside it, found one")
        return _with_store(name, target, store)
    together, with_suffix = str(name).removeprefix("suffix+"), str(name).startswith("suffix+")
    loaded = _load_drafter(together if with_suffix else name, target, replicate, tree)
    loaded = _with_suffix(name, loaded) if with_suffix else loaded
    return loaded if stop_rule is None else with_stop_rule(loaded, target, stop_rule)


def as_drafter(draft: Model, target: Model, tree=None) -> LoadedDrafter:
    """Returns a loaded model as a drafter for a target; raises InputError if they do not fit."""
    _check_pair(target, draft)
    drafter = draft_model.Drafter(draft.config, vocab_size=target.config.vocab_size, tree=tree)
    context = draft.config.max_positions
    return LoadedDrafter(draft.name, drafter, draft.params, context, draft.tokenizer)


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


def with_stop_rule(
    loaded: LoadedDrafter, target: Model, stop_rule: stopping.Rule | learned_stopping.LoadedRule
) -> LoadedDrafter:
    """Returns a drafter that ends chains early; raises InputError for one that cannot."""
    params, rule = loaded.params, stop_rule
    if isinstance(rule, learned_stopping.LoadedRule):
        weights = jax.device_put(rule.params, sharding.replicated(target.mesh))
        params, rule = stopping.WithRule(params, weights), rule.rule
    if isinstance(loaded.drafter, hybrid.Drafter):
        model = stopping.Drafter(loaded.drafter.model, rule)
        drafter = dataclasses.replace(loaded.drafter, model=model)
    else:
        drafter = stopping.Drafter(loaded.drafter, rule)
    return dataclasses.replace(loaded, drafter=drafter, params=params)


def _load_drafter(name, target, replicate, tree) -> LoadedDrafter:
    """Returns a drafter as `load_drafter` does, without a rule that ends chains."""
    if not isinstance(tree, shapes.Shape):
        raise InputError(f"tree: expected a Tree or a DynamicTree, found {short_repr(tree)}")
    if isinstance(name, str) and name in WEIGHTLESS:
        if tree is not None:
            raise InputError(f"tree: expected none for {name}, which drafts chains, found a tree")
        options = {}
        if name == "copy" and target.tokenizer is not None:
            options["start"] = len(target.tokenizer.encode(""))
        return LoadedDrafter(name, getattr(drafters, name).Drafter(**options), {})
    method, _, rest = str(name).partition(":")
    if method == "suffix" and rest:
        if tree is not None:
            raise InputError("tree: expected none for suffix, which drafts chains, found a tree")
        stored = _with_store("suffix", target, _stored(rest, target))
        return dataclasses.replace(stored, name=name)
    if method == "sparse_self":
        drafter = sparse_self.by_name(rest, target.config)
        return LoadedDrafter(str(name), dataclasses.replace(drafter, **_of_tree(tree)), {})
    if method == "window":
        return _with_window(str(name), rest, target, replicate, tree)
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
    default = None if dtype == default_dtype(target.config) else dtype
    if method in quantization.KINDS:
        options = target.mesh, default, bool(replicate), method
        draft = load(rest, *options) if rest else quantized(target, method)
        if replicate and not rest:
            copies = jax.device_put(draft.params, sharding.replicated(target.mesh))
            draft = dataclasses.replace(draft, params=copies)
        return dataclasses.replace(as_drafter(draft, target, tree), name=str(name))
    folder = folder_of(name, weights=True)
    if layout_of(folder):
        return _load_head(str(name), folder, target, dtype, tree, replicate)
    return as_drafter(load(name, target.mesh, default, bool(replicate)), target, tree)


def _of_tree(tree: shapes.Shape) -> dict:
    """Returns the fields of a drafter of trees, whose K is their depth."""
    return {} if tree is None else {"tree": tree, "num_speculative_tokens": None}


def _with_window(name: str, rest: str, target: Model, replicate, tree) -> LoadedDrafter:
    """Returns a draft model that sees a window of the text: "256:FOLDER"."""
    number, _, folder = rest.partition(":")
    if not folder or folder.startswith(("window:", "suffix+")):
        raise InputError(
            f'{name}: expected "window:", a number of slots, a colon and a draft model (behind '
            '"suffix+" if both are wanted), found another form'
        )
    loaded = _load_drafter(folder, target, replicate, tree)
    drafter = loaded.drafter
    if not isinstance(drafter, draft_model.Drafter):
        raise InputError(f"{name}: expected a draft model behind the number, found another drafter")
    slots = sparse_self.num_slots(name, number, drafter.config)
    config = sparse_self.windowed(drafter.config, slots)
    # Positions that are learned end with the context; others are those within the window.
    context = config.max_positions if config.positions == "learned" else None
    drafter = dataclasses.replace(drafter, config=config)
    return dataclasses.replace(loaded, name=name, drafter=drafter, max_positions=context)


def _load_head(
    name: str, folder: pathlib.Path, target: Model, dtype, tree: shapes.Shape, replicate
) -> LoadedDrafter:
    """Returns a drafter that continues the target's features."""
    files = layout_of(folder)
    layout = files.describe(folder, target.config)
    if is_shipped(folder) and target.tokenizer is not None:
        own = folder.parent / "target"
        if load_tokenizer(own) != target.tokenizer:
            raise InputError(
                f"drafter {name}: expected the tokenizer of {own.parent.name}/target, which it was "
                f"trained for, found that of {target.name}"
            )
    module = getattr(drafters, layout.method)
    drafter = module.Drafter(target=target.config, tree=tree, **layout.fields)
    where = drafter.shardings(target.mesh, replicate)
    params = files.read(layout, drafter.param_shapes(dtype), target.config, where)
    embedding = target.params["embed"]["embedding"]
    local = files is feature_weights and getattr(embedding, "is_fully_addressable", False)
    if local and feature_weights.reads_other_embedding(layout, embedding):
        warnings.warn(
            f"{folder}: embed_tokens differs from the target's and is not used, so that fewer "
            "drafts may be accepted",
            stacklevel=2,
        )
    return LoadedDrafter(name, drafter, params, target.config.max_positions)


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
        try:
            texts += [target.tokenizer.encode(text)] if text else []
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    store = datastore.Store(max(sum(len(text) + 1 for text in texts), 2))
    store.extend(texts)
    if not len(store):
        raise InputError(f"{path}: expected texts, found none")
    return store


def _with_suffix(name: str, loaded: LoadedDrafter) -> LoadedDrafter:
    """Returns a drafter that leaves to suffix decoding what that does better."""
    trained = draft_model.Drafter, features.FeatureDrafter
    if not isinstance(loaded.drafter, trained) or not base.drafts_chains(loaded.drafter):
        raise InputError(f"{name}: expected a drafter with weights, of chains, found another")
    drafter = hybrid.Drafter(loaded.drafter, suffix.Drafter())
    return dataclasses.replace(loaded, name=str(name), drafter=drafter)


def _check_pair(target: Model, draft: Model) -> None:
    name = f"drafter {draft.name}"
    if target.tokenizer is not None and draft.tokenizer is not None:
        if found := difference(target.tokenizer, draft.tokenizer):
            raise InputError(
                f"{name}: expected the target's texts of all ids that both have, found {found}"
            )
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
