"""Schedules by confidence for tests that enumerate a row's draws, and their biased variants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spsjax.decode import confidence, schedule

# A pass that scores one token costs nearly as much as one of two, so that both of them, one of
# them or none is worth scoring, depending on the estimates.
COSTS = schedule.Costs(
    np.zeros(3, np.float32), np.asarray([1, 1.66, 2], np.float32), np.float32(-1)
)


@dataclasses.dataclass(frozen=True)
class Alone(confidence.Confident):
    """Decides about each row as if there were no other, as the rows of a test are cases."""

    def kept(self, costs, state, asked_B, confidence_BK):
        def kept(*row):
            one = jax.tree.map(lambda leaf: leaf[None], row)
            return self.kept_of_row(costs, *one)[0]

        return jax.vmap(kept)(state, asked_B, confidence_BK)

    def kept_of_row(self, *arguments):
        return super().kept(*arguments)


@dataclasses.dataclass(frozen=True)
class Hindsight(Alone):
    """Takes the best depth by all estimates, those included that depend on dropped tokens."""

    def kept_of_row(self, costs, state, asked_B, confidence_BK):
        survival = jnp.cumprod(self.corrected(state, confidence_BK), axis=1)
        tokens = 1 + jnp.pad(jnp.cumsum(survival, axis=1), ((0, 0), (1, 0)))
        return jnp.argmax(tokens / costs.score, axis=1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Late(confidence.Surviving):
    """Drops a token by the survival of the next one, which knows the token."""

    def kept(self, costs, state, asked_B, confidence_BK):
        survival = jnp.cumprod(confidence_BK, axis=1)
        following = jnp.concatenate([survival[:, 1:], survival[:, -1:]], axis=1)
        return jnp.sum(following >= self.least, axis=1, dtype=jnp.int32)


# Drafter, schedule, biased variant.
CASES = [
    pytest.param("draft_model", Alone(), Hindsight(), id="confident"),
    pytest.param("dspark", confidence.Surviving(0.27), Late(0.27), id="surviving"),
]
