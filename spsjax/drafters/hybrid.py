"""Two drafters in one: a look-up where it expects to do better, a model elsewhere.

Oliaro et al. 2024 (arXiv 2411.04975) combine suffix decoding with a drafter like EAGLE this way.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.drafters import base
from spsjax.errors import InputError, check_integer, check_number
from spsjax.types import Array, PyTree, Round, pytree_dataclass
from spsjax.utils import traced

_LOOKUP = (
    "expected a drafter without a state, such as suffix, whose proposals say how many of their "
    "tokens they expect to be accepted, found another"
)
_CHAINS = "expected a drafter of chains, found another"
_WITH_STATE = "init", "prefill", "sync", "commit"  # what such a drafter does not have


@pytree_dataclass
class State:
    """State between rounds.

    Attributes:
        model: the model's own.
        found: [B, K] int32, what was looked up for this round; -1: nothing.
        score: [B] float32, how many of these are expected to be accepted.
        expected: [B] float32, draft tokens of the model that are accepted, as of its last rounds.
    """

    model: PyTree
    found: Array
    score: Array
    expected: Array


@dataclasses.dataclass(frozen=True)
class Drafter(base.Wrapper):
    """Proposes what was looked up if that is expected to be longer than the model's draft.

    Lossless: committed tokens and past rounds decide, and what was looked up are point masses. The
    look-up's expectation is `aux` of its proposal, [B]; the model's is a moving average of the
    draft tokens that were accepted. A model that does not draft does not run: it reads what it
    missed before its next draft.

    Attributes:
        drafter: drafter of chains with weights, the model.
        lookup: drafter of chains without weights or state that says what it expects: `suffix`.
        num_speculative_tokens: K, the most tokens that are looked up; None: as `lookup` has it, but
            no more than the model can draft.
        model_tokens: the most tokens that the model drafts; None: as the model has it.
        memory: share of the average that stays in every round of the model.
    """

    drafter: base.Drafter
    lookup: base.Drafter
    num_speculative_tokens: int | None = None
    model_tokens: int | None = None
    memory: float = traced.number(0.8)

    def __post_init__(self):
        for name in ("drafter", "lookup"):
            drafter = getattr(self, name)
            known = isinstance(drafter, base.Drafter)
            if not known or base.num_nodes(drafter) != drafter.num_speculative_tokens:
                raise InputError(f"{name}: {_CHAINS}")
        methods = (getattr(type(self.lookup), name) for name in _WITH_STATE)
        if any(method is not getattr(base.Drafter, method.__name__) for method in methods):
            raise InputError(f"lookup: {_LOOKUP}")
        check_number("memory", self.memory, 0, 1)
        K, most = self.num_speculative_tokens, self.model_tokens
        if K is None:
            K = self.lookup.num_speculative_tokens
            K = min(K, base.max_steps(self.drafter) or K)
        most = self.drafter.num_speculative_tokens if most is None else most
        check_integer("num_speculative_tokens", K, 0)
        check_integer("model_tokens", most, 0)
        if K and not self.drafter.num_speculative_tokens:
            raise InputError("drafter: expected one with K >= 1, found one that drafts nothing")
        # The model's buffers have room for whatever a round commits.
        model = dataclasses.replace(self.drafter, num_speculative_tokens=K)
        lookup = dataclasses.replace(self.lookup, num_speculative_tokens=K)
        for name, value in (("drafter", model), ("lookup", lookup), ("model_tokens", most)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "num_speculative_tokens", K)

    @property
    def score_sizes(self):
        K = self.num_speculative_tokens
        sizes = {*self.lookup.score_sizes, *self.drafter.score_sizes, min(self.model_tokens, K)}
        return *sorted(size for size in sizes if size < K), K

    def init(self, params, batch, slots):
        K = self.num_speculative_tokens
        return State(
            self.drafter.init(params, batch, slots),
            jnp.full((batch, K), -1, jnp.int32),
            jnp.zeros(batch),
            jnp.full(batch, min(self.model_tokens, K) / 2),
        )

    def prefill(self, params, state, chunk, output):
        model = self.drafter.prefill(params, state.model, chunk, output)
        return dataclasses.replace(state, model=model)

    def sync(self, params, state, now):
        found = self.lookup.propose({"drafter": {}}, (), now)
        if getattr(found.aux, "shape", None) != now.lengths.shape:
            raise InputError(f"lookup: {_LOOKUP}")
        if found.parents is not None:
            raise InputError(f"lookup: {_CHAINS}")
        state = dataclasses.replace(state, found=found.tokens, score=found.aux)
        model = self.drafter.sync(params, state.model, self._of_model(state, now))
        return dataclasses.replace(state, model=model)

    def propose(self, params, state, now):
        K, own = self.num_speculative_tokens, self._of_model(state, now)
        looks = looks_up(state, now.wanted(K))[:, None]

        def draft():
            return self.drafter.propose(params, state.model, own)

        nothing = base.nothing(jax.eval_shape(draft))
        if nothing.parents is not None:
            raise InputError(f"drafter: {_CHAINS}")
        proposal = lax.cond(jnp.any(own.depths > 0), draft, lambda: nothing)
        tokens = jnp.where(jnp.arange(1, K + 1) <= own.depths[:, None], proposal.tokens, -1)
        tokens, probs = jnp.where(looks, state.found, tokens), proposal.probs
        if probs is not None:
            points = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
            probs = jnp.where(looks[..., None], points, probs)
        return dataclasses.replace(proposal, tokens=tokens, probs=probs)

    def commit(self, params, state, now, proposal, output, verdict):
        own = self._of_model(state, now)
        tokens = jnp.where(own.depths[:, None] > 0, proposal.tokens, -1)
        drafted = jnp.any(tokens >= 0, axis=1)  # by the model
        accepted = verdict.num_tokens - verdict.valid
        average = self.memory * state.expected + (1 - self.memory) * accepted
        proposal = dataclasses.replace(proposal, tokens=tokens)
        model = self.drafter.commit(params, state.model, own, proposal, output, verdict)
        expected = jnp.where(drafted, average, state.expected)
        return dataclasses.replace(state, model=model, expected=expected)

    def _of_model(self, state: State, now: Round) -> Round:
        """Returns the round of the model, which drafts nothing where something was looked up."""
        looks = looks_up(state, now.wanted(self.num_speculative_tokens))
        return dataclasses.replace(now, depths=jnp.where(looks, 0, now.wanted(self.model_tokens)))


def looks_up(state: State, depths_B: Array) -> Array:
    """Returns [B]: whether a row that is drafted so deep takes what was looked up for it."""
    score = jnp.minimum(state.score, depths_B)
    return (state.found[:, 0] >= 0) & (score >= state.expected)
