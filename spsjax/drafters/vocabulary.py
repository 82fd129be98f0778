"""Draft vocabularies: drafters whose own head gives some of the target's tokens only."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spsjax.drafters.features import FeatureDrafter
from spsjax.errors import InputError
from spsjax.types import Array, PyTree

IDS = "ids"  # name of the parameter


class OwnVocabulary(FeatureDrafter):
    """Part of a drafter of features: a draft vocabulary, in ascending order of the target's ids.

    If `constants` has its name, `params["drafter"]["ids"]` are the target's ids of the draft
    vocabulary. Other tokens get probability 0.

    Attributes:
        vocab_size: R, size of the draft vocabulary.
    """

    vocab_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size > self.target.vocab_size:
            raise InputError(
                f"vocab_size: expected at most the target's {self.target.vocab_size}, "
                f"found {self.vocab_size}"
            )

    def draft_ids(self, params: PyTree) -> Array | None:
        return None if self.vocab_size == self.target.vocab_size else params["drafter"][IDS]

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        ids = jax.ShapeDtypeStruct((self.vocab_size,), jnp.int32)
        return super().param_shapes(dtype) | dict.fromkeys(self.constants, ids)

    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)
        return super().init_params(key, dtype) | dict.fromkeys(self.constants, ids)

    def constants_from(self, counts_V: np.ndarray) -> PyTree:
        """Returns the ids of the corpus's most frequent tokens as the draft vocabulary."""
        frequent = np.argsort(-counts_V, kind="stable")[: self.vocab_size]
        return dict.fromkeys(self.constants, np.sort(frequent).astype(np.int32))
