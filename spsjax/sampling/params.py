"""Sampling parameters, of a call and of rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, pytree_dataclass


@pytree_dataclass
class RowParams:
    """`SamplingParams` as arrays, with one value per row."""

    temperature: Array  # [B] float32; 0: greedy
    top_k: Array  # [B] int32; 0: off
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: one value per field, or a sequence with one value per row.

    Attributes:
        temperature: divisor of the logits; 0 takes the most probable token, and the filters below
            then do nothing.
        top_k: number of most probable tokens to keep; 0 keeps all.
        top_p: mass that the smallest set of most probable tokens must reach to be kept
            (Holtzman et al. 2019, arXiv 1904.09751).
        min_p: lowest probability to keep, relative to the most probable token's.

    The filters apply in this order, each to the renormalised result of the previous one. Ties go to
    the lower id, and at least one token is always kept.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float | Sequence[float] = 1.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0

    def __post_init__(self):
        ranges = {
            "temperature": (lambda x: (x >= 0) & (x < 1e38), "a finite number >= 0"),
            "top_k": (lambda x: (x >= 0) & (x < 2**63) & (x == np.floor(x)), "an integer >= 0"),
            "top_p": (lambda x: (x > 0) & (x <= 1), "a number in (0, 1]"),
            "min_p": (lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]"),
        }
        for field, (in_range, expected) in ranges.items():
            value = getattr(self, field)
            try:
                numbers = np.asarray(value)
            except (TypeError, ValueError):
                numbers = np.asarray(None)
            if numbers.ndim > 1 or numbers.dtype.kind not in "iuf" or not np.all(in_range(numbers)):
                raise InputError(f"{field}: expected {expected}, found {short_repr(value)}")

    def of_one_row(self) -> "SamplingParams":
        """Returns the parameters of one row as single values; raises InputError for more rows."""
        self.rows(1)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SamplingParams(**{name: np.ravel(value)[0].item() for name, value in values.items()})

    def rows(self, batch: int) -> RowParams:
        """Returns NumPy arrays with one value per row; raises InputError for another length."""
        columns: dict[str, Any] = {}
        for field, dtype in (
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("min_p", np.float32),
        ):
            value = np.asarray(getattr(self, field))
            if value.ndim and value.shape != (batch,):
                raise InputError(
                    f"{field}: expected one value or {batch} (one per row), found {value.size}"
                )
            if dtype == np.int32:
                value = np.minimum(value, np.iinfo(np.int32).max)
            columns[field] = np.broadcast_to(value, (batch,)).astype(dtype)
        # Division by a denormal float32 overflows. A temperature this low is greedy in effect.
        tiny = columns["temperature"] < np.finfo(np.float32).tiny
        columns["temperature"] = np.where(tiny, np.float32(0), columns["temperature"])
        return RowParams(**columns)
