"""Token-level intersection: drafts of the tokens that both vocabularies have.

Timor et al. 2025 (arXiv 2502.05202), Algorithm 4.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.drafters import foreign
from spsjax.drafters.choices import Choices
from spsjax.drafters.foreign_tables import Pair
from spsjax.errors import InputError
from spsjax.types import Array, Proposal, PyTree, Round
from spsjax.utils.fields import integer

_TARGET, _DRAFT = "shared_target", "shared_draft"  # names of tables


@dataclasses.dataclass(frozen=True)
class Drafter(foreign.ForeignDrafter):
    """Proposes tokens of both vocabularies from a draft model with another tokenizer. Lossless.

    The draft's distribution is that of the R tokens whose strings both vocabularies have:
    temperature and filters apply to these alone, and the verifier is told the probabilities from
    which a token was drawn. Other tokens of the target have probability 0 in the draft, and come
    from the residual.

    The tables "shared_target" and "shared_draft" have the ids of the shared tokens [R] int32, in
    ascending order of the target's.

    Attributes:
        num_shared: R.
    """

    num_shared: int = integer(1, 1)

    def table_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        ids = jax.ShapeDtypeStruct((self.num_shared,), jnp.int32)
        return {_TARGET: ids, _DRAFT: ids}

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        tables = params["drafter"][foreign.TABLES]

        def choices(logits: Array) -> Choices:
            return Choices(logits[..., tables[_DRAFT]], tables[_TARGET], self.vocab_size)

        def read_as(tokens: Array) -> Array:  # a shared token is one id of the draft
            return tables[foreign.TO_DRAFT][tokens, 0]

        return self.grow(params, state, now, choices, read_as)


def from_pair(pair: Pair) -> tuple[Drafter, dict[str, Any]]:
    """Returns the drafter of a pair and its tables; raises InputError if they share no token."""
    shared = pair.shared
    if not shared:
        raise InputError(
            'vocabulary: expected tokens that both vocabularies have, for "tli", found none. Take '
            '"slem"'
        )
    tables = {
        foreign.TO_DRAFT: pair.to_draft,
        _TARGET: np.asarray([*shared], np.int32),
        _DRAFT: np.asarray([*shared.values()], np.int32),
    }
    longest, sizes = pair.to_draft.shape[1], (pair.config, pair.vocab_size)
    return Drafter(*sizes, longest, pair.begin, num_shared=len(shared)), tables
