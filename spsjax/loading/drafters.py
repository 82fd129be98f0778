"""Loading and saving of drafters, by name or from a folder, for a target."""

import dataclasses
import difflib
import pathlib
import sys
import warnings
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from spsjax import drafters
from spsjax.drafters import (
    base,
    datastore,
    draft_model,
    hybrid,
    shapes,
    sparse_self,
    stopping,
    suffix,
)
from spsjax.drafters.contrib import learned_stopping
from spsjax.errors import InputError, check_flag, check_path, one_line, short_repr
from spsjax.loading import vocabularies
from spsjax.loading.models import (
    Model,
    compute_type,
    default_dtype,
    load,
    load_tokenizer,
    quantized,
)
from spsjax.loading.names import heads_in_target, is_shipped, method_of, path_of
from spsjax.models import quantization
from spsjax.parallel import sharding
from spsjax.tokenization import Tokenizer
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter with the weights that it needs: what `generate` takes.

    Attributes:
        name: name or folder it was loaded by.
        drafter: drafting method.
        params: weights; {} for a method without.
        max_positions: context of a draft model; None: no limit of its own.
        tokenizer: tokenizer of the target that it drafts for, which a draft model has, too, unless
            its vocabulary is foreign; None: unknown.
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
    vocabulary: str | None = None,
) -> LoadedDrafter:
    """Loads a drafter for a target.

    Args:
        name: name of a drafting method that needs no weights: "ngram", "suffix", "copy",
            "lookahead", "early_exit:4" (the target's first 4 layers), "early_exit:FILE" (without
            what scripts/plan.py chose), "sparse_self:256" (the target with a cache of 256
            tokens; "sparse_self:256:chosen": half of them are SnapKV's choice) or "suffix:FILE"
            (also looks into texts, JSON lines with `text`); or "mtp", the head for multi-token
            prediction in the target's own folder ("mtp:FOLDER": in another one); or whatever `load`
            takes: a smaller model, or a drafter of the target's features (docs/methods/index.md);
            or "int8:FOLDER", such a model in int8, or "int8", the
            target in int8 (also "int8_dynamic"); or "window:256:FOLDER", such a model with a cache
            of 256 tokens; or "tli:FOLDER" or "slem:FOLDER" (see `vocabulary`). With "suffix+"
            before a model or a drafter of features, suffix decoding drafts where it expects more.
        target: model to draft for. Its mesh is taken over, and its compute type, too, unless that
            is the default; then the draft also has its default.
        replicate: with a mesh, whether to keep all weights on every device; None: a drafter of
            features whole, and a draft model split.
        tree: shape of the trees that are drafted (`Tree`, `DynamicTree`); None: a chain.
        stop_rule: rule that ends chains early, for drafters that sample them: one of
            `drafters.stopping`, or what `learned_stopping.read` returns; None: all have K tokens.
        store: for "suffix", texts in which it also looks, as they are now; None: none.
        vocabulary: how a model with a tokenizer of its own drafts: "tli", tokens whose strings are
            in both vocabularies; "slem", any text, cut into the target's tokens. None: a model with
            the target's tokenizer drafts its tokens; for another one "tli" is chosen, or "slem" if
            they share few strings, and a warning says so (docs/methods/foreign_vocabularies.md).

    Raises:
        InputError: no drafter of that name, or one that does not fit the target, the tree, the rule
            or the vocabulary.
    """
    vocabularies.check(vocabulary)
    if not isinstance(target, Model):
        raise InputError(f"target: expected a loaded model, found {type(target).__name__}")
    if replicate is not None:
        check_flag("replicate", replicate)
    if store is not None:
        if tree is not None or stop_rule is not None:
            raise InputError("store: expected neither a tree nor a stop_rule beside it, found one")
        vocabularies.refuse(vocabulary, "suffix")
        return _with_store(name, target, store)
    together, with_suffix = str(name).removeprefix("suffix+"), str(name).startswith("suffix+")
    loaded = _load_drafter(together if with_suffix else name, target, replicate, tree, vocabulary)
    loaded = _with_suffix(str(name), loaded) if with_suffix else loaded
    return loaded if stop_rule is None else with_stop_rule(loaded, target, stop_rule)


def as_drafter(
    draft: Model, target: Model, tree=None, vocabulary: str | None = None
) -> LoadedDrafter:
    """Returns a loaded model as a drafter for a target; raises InputError if they do not fit.

    `vocabulary` is that of `load_drafter`; with None, both must have one tokenizer.
    """
    if vocabulary is not None:
        vocabularies.check(vocabulary)
        return _as_foreign(draft, target, vocabulary, tree)
    vocabularies.check_pair(draft, target)
    drafter = draft_model.Drafter(draft.config, vocab_size=target.config.vocab_size, tree=tree)
    context = draft.config.max_positions
    return LoadedDrafter(draft.name, drafter, draft.params, context, draft.tokenizer)


def _as_foreign(draft: Model, target: Model, vocabulary: str | None, tree) -> LoadedDrafter:
    """Returns a model whose tokenizer is not the target's as a drafter; None: by a chosen method.

    It has no limit of positions: a text that is longer than the draft's context is not drafted.
    """
    vocabularies.check_mesh(draft, target)
    drafter, params = vocabularies.drafter_of(draft, target, vocabulary, tree)
    return LoadedDrafter(draft.name, drafter, params, None, target.tokenizer)


def save_drafter(
    folder: str | pathlib.Path, drafter: LoadedDrafter, target: Model, dtype="bfloat16"
) -> None:
    """Writes a drafter of the target's features, for `load_drafter` and for vLLM.

    EAGLE-3 is written in the layout of `speculators`, EAGLE-1, Medusa and DFlash in that of their
    authors, an MLP speculator in that of the published ones, the others in one of their own. Raises
    InputError for another drafter, or if the folder cannot be written.
    """
    inner: Any = getattr(drafter, "drafter", drafter)
    layout = getattr(sys.modules[type(inner).__module__], "LAYOUT", None)
    if not isinstance(drafter, LoadedDrafter) or layout is None:
        raise InputError(
            "drafter: expected a loaded drafter of the target's features, found "
            f"{type(inner).__module__.rpartition('.')[2]}.{type(inner).__name__}"
        )
    if not isinstance(target, Model):
        raise InputError(f"target: expected a loaded model, found {type(target).__name__}")
    expected = jax.tree.map(jnp.shape, inner.param_shapes(jnp.float32))
    if jax.tree.map(jnp.shape, drafter.params) != expected:
        raise InputError("drafter: expected the weights of its shape, found others")
    check_path("folder", folder)
    about = drafter.params, target.name, compute_type(dtype)
    try:
        layout.write(pathlib.Path(folder), inner, *about)
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
    drafter = loaded.drafter
    if isinstance(drafter, base.Wrapper):
        drafter = dataclasses.replace(drafter, drafter=stopping.Drafter(drafter.drafter, rule))
    else:
        drafter = stopping.Drafter(drafter, rule)
    return dataclasses.replace(loaded, drafter=drafter, params=params)


def _load_drafter(name, target, replicate, tree, vocabulary=None) -> LoadedDrafter:
    """Returns a drafter as `load_drafter` does, without a rule that ends chains."""
    if not isinstance(tree, shapes.Shape):
        raise InputError(f"tree: expected a Tree or a DynamicTree, found {short_repr(tree)}")
    method, _, rest = str(name).partition(":")
    methods = drafters.methods_with("from_name")
    if method in methods and (rest or isinstance(name, str)):  # a path may have such a name
        vocabularies.refuse(vocabulary, method)
        return _of_name(method, rest, target, tree)
    if method in vocabularies.methods() and rest:
        if vocabulary is not None:
            raise InputError(f"{name}: expected one method for its vocabulary, found two")
        loaded = _load_drafter(rest, target, replicate, tree, method)
        return dataclasses.replace(loaded, name=str(name))
    if method == "window":
        vocabularies.refuse(vocabulary, method)
        return _with_window(str(name), rest, target, replicate, tree)
    dtype = target.params["norm"]["scale"].dtype
    heads = heads_in_target()
    if method in heads and isinstance(name, str):
        vocabularies.refuse(vocabulary, method)
        folder = path_of(rest or target.name, weights=True)
        return _load_head(name, heads[method], folder, target, dtype, tree, replicate)
    known = (*methods, *heads)
    near = isinstance(name, str) and difflib.get_close_matches(name.lower(), known, 1, 0.8)
    if near and not pathlib.Path(name).exists():
        raise InputError(f"name: expected {near[0]!r} or a model, found {short_repr(name)}")
    default = None if dtype == default_dtype(target.config) else dtype
    if method in quantization.KINDS:
        options = target.mesh, default, bool(replicate), method
        draft = load(rest, *options) if rest else quantized(target, method)
        if replicate and not rest:
            copies = jax.device_put(draft.params, sharding.replicated(target.mesh))
            draft = dataclasses.replace(draft, params=copies)
        return dataclasses.replace(of_model(draft, target, tree, vocabulary), name=str(name))
    folder = path_of(name, weights=True)
    if module := method_of(folder):
        vocabularies.refuse(vocabulary, f"{name}, a drafter of the target's features")
        return _load_head(str(name), module, folder, target, dtype, tree, replicate)
    return of_model(load(name, target.mesh, default, bool(replicate)), target, tree, vocabulary)


def of_model(
    draft: Model, target: Model, tree=None, vocabulary: str | None = None
) -> LoadedDrafter:
    """Returns a model as a drafter, by a chosen method if its tokenizer is not the target's."""
    if vocabulary is None and vocabularies.are_foreign(draft, target):
        return _as_foreign(draft, target, None, tree)
    return as_drafter(draft, target, tree, vocabulary)


def _of_name(method: str, text: str, target: Model, tree: shapes.Shape) -> LoadedDrafter:
    """Returns the drafter that a method's module creates from the text after its name."""
    drafter, params = drafters.methods_with("from_name")[method].from_name(text, target)
    if tree is not None:
        if "tree" not in {field.name for field in dataclasses.fields(drafter)}:
            raise InputError(f"tree: expected none for {method}, which drafts chains, found a tree")
        drafter = dataclasses.replace(drafter, tree=tree, num_speculative_tokens=None)
    params = jax.device_put(params, sharding.replicated(target.mesh))
    return LoadedDrafter(f"{method}:{text}" if text else method, drafter, params)


def _with_window(name: str, rest: str, target: Model, replicate, tree) -> LoadedDrafter:
    """Returns a draft model with a window of the text, from "256:FOLDER"."""
    number, _, folder = rest.partition(":")
    if not folder or folder.startswith(("window:", "suffix+")):
        raise InputError(
            f'{name}: expected "window:", a number of slots, a colon and a draft model (behind '
            '"suffix+" if both are wanted), found another form'
        )
    with warnings.catch_warnings(action="ignore"):  # about a draft that is refused below
        loaded = _load_drafter(folder, target, replicate, tree)
    if type(loaded.drafter).__module__ in {one.__name__ for one in vocabularies.methods().values()}:
        raise InputError(f"{name}: expected a draft with the target's tokenizer, found another one")
    drafter = draft_model.checked(name, loaded.drafter)
    slots = sparse_self.num_slots(name, number, drafter.config)
    config = sparse_self.windowed(drafter.config, slots)
    # Positions that are learned end with the context; others are those within the window.
    context = config.max_positions if config.positions == "learned" else None
    drafter = dataclasses.replace(drafter, config=config)
    return dataclasses.replace(loaded, name=name, drafter=drafter, max_positions=context)


def _load_head(
    name: str,
    module: ModuleType,
    folder: pathlib.Path,
    target: Model,
    dtype,
    tree: shapes.Shape,
    replicate,
) -> LoadedDrafter:
    """Returns the drafter of a method that continues the target's features."""
    if not folder.is_dir():
        raise InputError(f"{name}: expected a folder that holds a head, found a file, {folder}")
    content = module.LAYOUT.open(folder)
    fields = module.LAYOUT.drafter_fields(content, target.config)
    if is_shipped(folder) and target.tokenizer is not None:
        own = folder.parent / "target"
        if load_tokenizer(own) != target.tokenizer:
            raise InputError(
                f"drafter {name}: expected the tokenizer of {own.parent.name}/target, which it was "
                f"trained for, found that of {target.name}"
            )
    drafter = module.Drafter(target=target.config, tree=tree, **fields)
    where = drafter.shardings(target.mesh, replicate)
    params = module.LAYOUT.read(content, drafter, dtype, where)
    if other := module.LAYOUT.difference(content, target.params):
        warnings.warn(
            f"{folder}: {other} differs from the target's and is not used, so that fewer drafts "
            "may be accepted",
            stacklevel=2,
        )
    return LoadedDrafter(name, drafter, params, target.config.max_positions)


def _with_store(name, target: Model, store: datastore.Store) -> LoadedDrafter:
    """Returns suffix decoding that also searches a store."""
    if name != "suffix" or not isinstance(store, datastore.Store):
        raise InputError(
            f'store: expected a Store, and "suffix" as the drafter, found {short_repr(store)} and '
            f"{short_repr(name)}"
        )
    loaded = _of_name(name, "", target, None)
    drafter, texts = suffix.with_store(suffix.Drafter(), store, target.config.vocab_size)
    params = jax.device_put(texts, sharding.replicated(target.mesh))
    return dataclasses.replace(loaded, drafter=drafter, params=params)


def _with_suffix(name: str, loaded: LoadedDrafter) -> LoadedDrafter:
    """Returns a drafter that is replaced by suffix decoding where that is expected to be better."""
    drafter = loaded.drafter
    if not isinstance(drafter, base.TrainableDrafter) or getattr(drafter, "tree", None):
        raise InputError(f"{name}: expected a drafter with weights, of chains, found another")
    drafter = hybrid.Drafter(drafter, suffix.Drafter())
    return dataclasses.replace(loaded, name=str(name), drafter=drafter)
