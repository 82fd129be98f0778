"""Rows of a decoding state: put in, reordered, stopped."""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax.decode.state import DecodeState
from spsjax.errors import InputError
from spsjax.models import caches as kv
from spsjax.types import Array


def insert(
    state: DecodeState, row: Array, fresh: DecodeState, key: Array | None = None
) -> DecodeState:
    """Returns the state with the first row of `fresh` in row `row`, in [0, B).

    Both come from `prompt.prefill` of one program. The row keeps the schedule's history of the text
    before, because requests are alike. With a `key`, which is in place of that of `fresh`, several
    rows can sample from one prompt.

    Raises:
        InputError: `fresh` has more slots, or, unless traced by `jit`, there is no such row.
    """
    if not isinstance(row, jax.core.Tracer) and not 0 <= row < len(state.tokens):
        raise InputError(f"row: expected a row in [0, {len(state.tokens)}), found {row}")
    if (size := fresh.tokens.shape[1]) > (slots := state.tokens.shape[1]):
        raise InputError(f"fresh: expected a state of at most {slots} slots, found {size}")
    if key is not None:
        fresh = dataclasses.replace(fresh, keys=key[None])
    return dataclasses.replace(kv.insert_row(state, row, fresh), history=state.history)


def take(state: DecodeState, rows_B: Array) -> DecodeState:
    """Returns a state of some rows of another; where `rows_B` is -1, a row that is done."""
    taken, nothing = kv.take_rows(state, jnp.maximum(rows_B, 0)), rows_B < 0
    done, failed = taken.done | nothing, taken.failed & ~nothing
    return dataclasses.replace(taken, done=done, failed=failed)


def stop(state: DecodeState, row: Array) -> DecodeState:
    """Returns the state with a row that is done, and has not failed."""
    done, failed = state.done.at[row].set(True), state.failed.at[row].set(False)
    return dataclasses.replace(state, done=done, failed=failed)
