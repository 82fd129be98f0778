"""Vocabularies of a target and of draft models: equal ones, and methods for those that differ."""

import warnings

import jax
import numpy as np

from spsjax import drafters
from spsjax.drafters import base, foreign, foreign_tables, shapes
from spsjax.errors import InputError, did_you_mean, short_repr
from spsjax.loading.models import Model
from spsjax.parallel import sharding
from spsjax.tokenization.base import difference
from spsjax.types import PyTree

TOKENS, STRINGS = "tli", "slem"
# Share of the smaller vocabulary's strings below which "tli" is not chosen by itself: its drafts
# would lack most of the tokens that texts are made of.
_LEAST_SHARE = 0.1


def methods() -> dict:
    """Returns the modules of the methods for foreign vocabularies, by name."""
    return drafters.methods_with("from_pair")


def check(vocabulary) -> None:
    """Raises InputError unless `vocabulary` is None or the name of a method."""
    if vocabulary is not None and (not isinstance(vocabulary, str) or vocabulary not in methods()):
        known = [*methods()]
        raise InputError(
            f"vocabulary: expected {', '.join(map(repr, known))} or None, "
            f"found {short_repr(vocabulary)}{did_you_mean(str(vocabulary), known)}"
        )


def refuse(vocabulary, name: str) -> None:
    """Raises InputError if a vocabulary is named for a drafter that is no draft model."""
    if vocabulary is not None:
        raise InputError(
            f"vocabulary: expected a draft model for {short_repr(vocabulary)}, found {name}"
        )


def check_pair(draft: Model, target: Model) -> None:
    """Raises InputError unless a draft has the target's tokenizer, or vocabulary, and its mesh."""
    name = f"drafter {draft.name}"
    if target.tokenizer is not None and draft.tokenizer is not None:
        if mismatch := difference(target.tokenizer, draft.tokenizer):
            raise InputError(
                f"{name}: expected the target's texts of all ids that both have, found {mismatch}. "
                "load_drafter takes a draft with another tokenizer"
            )
    elif (
        draft.config.vocab_size != target.config.vocab_size
        and draft.config.vocab_rows != target.config.vocab_rows
    ):  # without tokenizers, only their sizes can say that the vocabularies are the same
        raise InputError(
            f"{name}: expected the target's vocabulary of {target.config.vocab_size}, "
            f"found {draft.config.vocab_size}"
        )
    check_mesh(draft, target)


def check_mesh(draft: Model, target: Model) -> None:
    """Raises InputError unless a draft has the target's mesh."""
    if target.mesh != draft.mesh:
        raise InputError(f"drafter {draft.name}: expected the target's mesh, found another one")


def are_foreign(draft: Model, target: Model) -> bool:
    """Returns whether both models have tokenizers, of which one is not the other's."""
    return difference(target.tokenizer, draft.tokenizer) is not None


def drafter_of(
    draft: Model, target: Model, vocabulary: str | None, tree: shapes.Shape
) -> tuple[base.Drafter, PyTree]:
    """Returns the drafter of a model with another tokenizer, and its parameters.

    If `vocabulary` is None, the method is chosen, and a warning says which. Raises InputError for a
    tree, or if the method cannot be used.
    """
    if tree is not None:
        raise InputError(
            f"tree: expected none for {draft.name}, whose tokenizer is not the target's and which "
            "drafts chains, found a tree"
        )
    try:
        pair = foreign_tables.Pair(draft, target)
        method = _chosen(pair) if vocabulary is None else vocabulary
        drafter, tables = methods()[method].from_pair(pair)
    except InputError as error:
        raise InputError(f"drafter {draft.name}: {error}") from None
    if vocabulary is None:
        warnings.warn(
            f"drafter {draft.name}: its tokenizer is not the target's, and {len(pair.shared)} of "
            f"{len(pair.of_target.ids)} strings of the target are its tokens, so that it drafts "
            f'with vocabulary="{method}"',
            stacklevel=6,
        )
    tables = jax.device_put(jax.tree.map(np.asarray, tables), sharding.replicated(target.mesh))
    return drafter, {foreign.MODEL: draft.params, foreign.TABLES: tables}


def _chosen(pair: foreign_tables.Pair) -> str:
    """Returns the method for a pair: by tokens, unless they share few."""
    return TOKENS if pair.share >= _LEAST_SHARE else STRINGS
