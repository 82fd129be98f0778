"""What may be given to `generate`, checked: each mistake is one line that names the argument."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spsjax.drafters import base, draft_model, none
from spsjax.errors import InputError, short_repr
from spsjax.loading import Model
from spsjax.sampling import SamplingParams
from spsjax.types import PyTree


def check_model(model) -> None:
    """Raises InputError unless it is a loaded model."""
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")


def check_sampling(sampling) -> None:
    """Raises InputError unless these are sampling parameters."""
    if not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling: expected SamplingParams, found {type(sampling).__name__}")


def check_seed(seed) -> None:
    """Raises InputError unless it is an integer of 32 bits."""
    if not _is_integer(seed) or not 0 <= seed < 2**32:
        raise InputError(f"seed: expected an integer in [0, 2**32), found {short_repr(seed)}")


def check_lengths(prompts: Sequence[Sequence[int]], budgets: Sequence[int], *models: Model) -> None:
    """Raises InputError unless every prompt and its new tokens fit into every model's context."""
    for model in models:
        context = model.config.max_positions
        for row, (prompt, budget) in enumerate(zip(prompts, budgets)):
            if len(prompt) + budget > context:
                raise InputError(
                    f"prompts[{row}]: expected prompt and new tokens within the context of "
                    f"{context} of {model.name}, found {len(prompt)} + {budget}"
                )


def drafter(model: Model, drafter, num_speculative_tokens) -> tuple[base.Drafter, PyTree]:
    """The drafter as the loop takes it, and its parameters."""
    count, context = num_speculative_tokens, model.config.max_positions
    if count is not None and (not _is_integer(count) or count < 0):
        raise InputError(
            f"num_speculative_tokens: expected an integer >= 0, found {short_repr(count)}"
        )
    if drafter is None:
        if count:
            raise InputError(
                f"num_speculative_tokens: expected 0 or None without a drafter, found {count}"
            )
        return none.Drafter(), {}
    params = {}
    if isinstance(drafter, Model):
        _check_pair(model, drafter)
        params = drafter.params
        drafter = draft_model.Drafter(drafter.config, vocab_size=model.config.vocab_size)
    elif isinstance(drafter, draft_model.Drafter):
        raise InputError(
            "drafter: expected the loaded draft model itself, found a drafter without it"
        )
    if not isinstance(drafter, base.Drafter):
        raise InputError(
            f"drafter: expected None, a loaded model or a drafter, found {type(drafter).__name__}"
        )
    if not dataclasses.is_dataclass(drafter) or type(drafter).__hash__ is None:
        raise InputError(
            "drafter: expected a frozen dataclass, as every drafter is, "
            f"found {type(drafter).__name__}"
        )
    if count is not None:
        drafter = dataclasses.replace(drafter, num_speculative_tokens=int(count))
    count = drafter.num_speculative_tokens
    if not _is_integer(count) or not 0 <= count < context:
        raise InputError(
            f"num_speculative_tokens: expected an integer in [0, {context}), the context, "
            f"found {short_repr(count)}"
        )
    return (drafter, params) if count else (none.Drafter(), {})


def prompts(model: Model, prompts) -> list[list[int]]:
    """Token ids of each prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, (Sequence, np.ndarray)):
        raise InputError(
            f"prompts: expected a list of texts or token-id lists, found {type(prompts).__name__}"
        )
    if not len(prompts):
        raise InputError("prompts: expected at least one, found none")
    return [_encode(model, f"prompts[{row}]", prompt) for row, prompt in enumerate(prompts)]


def budgets(max_new_tokens, batch: int) -> list[int]:
    """New tokens of each row."""
    try:
        budgets = np.asarray(max_new_tokens)
    except ValueError:  # lists of several lengths
        budgets = np.asarray(None)
    if not np.issubdtype(budgets.dtype, np.integer) or (budgets < 0).any():
        raise InputError(
            f"max_new_tokens: expected integers >= 0, found {short_repr(max_new_tokens)}"
        )
    if budgets.ndim and budgets.shape != (batch,):
        raise InputError(
            f"max_new_tokens: expected one value or {batch} (one a row), found {budgets.size}"
        )
    return np.broadcast_to(budgets, (batch,)).tolist()


def _is_integer(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_pair(target: Model, draft: Model) -> None:
    name = f"drafter {draft.name}"
    if target.tokenizer is not None and draft.tokenizer is not None:
        if target.tokenizer != draft.tokenizer:
            raise InputError(f"{name}: expected the target's tokenizer, found another one")
    elif (
        draft.config.vocab_size != target.config.vocab_size
        and draft.config.vocab_rows != target.config.vocab_rows
    ):  # nothing says that they are one
        raise InputError(
            f"{name}: expected the target's vocabulary of {target.config.vocab_size}, "
            f"found {draft.config.vocab_size}"
        )
    if target.mesh != draft.mesh:
        raise InputError(f"{name}: expected the target's mesh, found another one")


def _encode(model: Model, name: str, prompt) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise InputError(f"{name}: expected a text, found an empty one")
        if model.tokenizer is None:
            raise InputError(
                f"{name}: expected token ids ({model.name} has no tokenizer), found text"
            )
        try:
            ids = model.tokenizer.encode(prompt)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if not ids:
            raise InputError(
                f"{name}: expected a text of at least one token, found {short_repr(prompt)}"
            )
        return _checked(model, name, ids)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InputError(
            f"{name}: expected a text or a list of integers, found {type(prompt).__name__}"
        )
    if not ids.size:
        raise InputError(f"{name}: expected at least one token, found none")
    return _checked(model, name, ids.tolist())


def _checked(model: Model, name: str, ids: list[int]) -> list[int]:
    """The ids; raises InputError for one that the model does not have, as a tokenizer may."""
    for token in ids:
        if not 0 <= token < model.config.vocab_size:
            raise InputError(
                f"{name}: expected token ids in [0, {model.config.vocab_size}), found {token}"
            )
    return ids
