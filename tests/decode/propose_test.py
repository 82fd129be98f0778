"""Proposals after `propose`: tokens that a row does not want, or that may not be accepted."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax import decode
from spsjax.drafters import base
from spsjax.types import Proposal, Round
from spsjax.verifiers import match

K = 2
TOKENS, PARENTS = (5, 6, 7, 8, 4, 3), (0, 0, 1, 3, 2, 4)  # at depths 1, 1, 2, 3, 2, 4
ELIGIBLE = True, False, True, True, True, False


@dataclasses.dataclass(frozen=True)
class Fixed(base.Drafter):
    """A drafter that proposes the same tokens in every row."""

    tokens: tuple[int, ...]
    eligible: tuple[bool, ...]
    parents: tuple[int, ...] | None = None
    num_speculative_tokens: int = K

    @property
    def score_sizes(self):
        return (len(self.tokens),)

    def propose(self, params, state, now):
        def rows(values):
            return None if values is None else jnp.tile(jnp.asarray(values), (len(now.lengths), 1))

        fields = self.tokens, None, self.parents, self.eligible
        return Proposal(*map(rows, fields))


def proposed(drafter, depths):
    """Returns tokens and eligible nodes of rows that want these depths; None: one row, all."""
    rows = 1 if depths is None else len(depths)
    state = types.SimpleNamespace(drafter=None)
    tokens, lengths = jnp.zeros((rows, 4), int), jnp.ones(rows, int)
    program = decode.Program(types.SimpleNamespace(vocab_size=9), drafter, match.Verifier())

    def propose(depths):
        now = Round(tokens, lengths, None, None, None, depths)
        return decode.step.propose(program, {}, state, now)

    proposal = jax.jit(propose)(None if depths is None else np.asarray(depths))
    eligible = proposal.eligible
    return proposal.tokens.tolist(), None if eligible is None else eligible.tolist()


def test_propose_of_a_tree_lets_only_whole_paths_up_to_k_be_accepted():
    """A node is not eligible below depth K, or if one above it is not."""
    tokens, eligible = proposed(Fixed(TOKENS, ELIGIBLE, PARENTS), None)
    assert tokens == [[*TOKENS]]
    assert eligible == [[True, False, True, False, False, False]]


def test_propose_of_a_tree_drops_what_a_row_does_not_want():
    """Nodes that may not be accepted stay at any depth, because they are there to be scored."""
    tokens, eligible = proposed(Fixed(TOKENS, ELIGIBLE, PARENTS), (2, 1, 0))
    assert tokens == [[5, 6, 7, -1, 4, 3], [5, 6, -1, -1, -1, 3], [-1, 6, -1, -1, -1, 3]]
    assert eligible == [[True, False, True] + 3 * [False], [True] + 5 * [False], 6 * [False]]


@pytest.mark.parametrize(
    ("depths", "expected"), [(None, (5, -1)), ((2,), (5, -1)), ((0,), (-1, -1))]
)
def test_propose_of_a_chain_drops_tokens_that_are_not_eligible(depths, expected):
    tokens, eligible = proposed(Fixed((5, 6), (True, False)), depths)
    assert tokens == [[*expected]] and eligible is None


def test_propose_for_rows_that_all_skip_drafting_is_nothing():
    tokens, eligible = proposed(Fixed(TOKENS, ELIGIBLE, PARENTS), (0, 0))
    assert np.all(np.asarray(tokens) == -1) and not np.any(eligible)
