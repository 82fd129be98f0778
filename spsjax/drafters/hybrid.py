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


@pytree_dataclass
class State:
    """State between rounds.

    Attributes:
        model: the model's own.
        found: [B, K] int32, what was looked up for the next round; -1: nothing.
        score: [B] float32, how many of these are expected to be accepted.
        expected: [B] float32, draft tokens of the model that are accepted, as of its last rounds.
        rule: state of the model's rule that ends chains.
    """

    model: PyTree
    found: Array
    score: Array
    expected: Array
    rule: PyTree


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Proposes what was looked up if that is expected to be longer than the model's draft.

    Lossless: committed tokens and past rounds decide, and what was looked up are point masses. The
    look-up's expectation is `Proposal.expected`; the model's is a moving average of the draft
    tokens that were accepted. A model that does not draft does not run: it reads what it missed
    before its next draft.

    Attributes:
        model: drafter of chains with weights.
        lookup: drafter of chains without weights or state that says what it expects: `suffix`.
        num_speculative_tokens: K, the most tokens that are looked up; None: as `lookup` has it, but
            no more than the model can draft.
        model_tokens: the most tokens that the model drafts; None: as `model` has it.
        memory: share of the average that stays in every round of the model.
        waits: whether the loop calls `catch_up`, as it does when it chooses K in every round.
    """

    model: base.Drafter
    lookup: base.Drafter
    num_speculative_tokens: int | None = None
    model_tokens: int | None = None
    memory: float = traced.number(0.8)
    waits: bool = False

    def __post_init__(self):
        for name in ("model", "lookup"):
            drafter = getattr(self, name)
            if not isinstance(drafter, base.Drafter) or drafter.trees:
                raise InputError(f"{name}: expected a drafter of chains, found another")
        own = [getattr(type(self.lookup), name) for name in ("init", "prefill", "commit")]
        if own != [base.Drafter.init, base.Drafter.prefill, base.Drafter.commit]:
            raise InputError(f"lookup: {_LOOKUP}")
        check_number("memory", self.memory, 0, 1)
        K, most = self.num_speculative_tokens, self.model_tokens
        if K is None:
            K = self.lookup.num_speculative_tokens
            K = min(K, self.max_steps or K)
        most = self.model.num_speculative_tokens if most is None else most
        check_integer("num_speculative_tokens", K, 0)
        check_integer("model_tokens", most, 0)
        if K and not self.model.num_speculative_tokens:
            raise InputError("model: expected a drafter with K >= 1, found one that drafts nothing")
        # The model's buffers have room for whatever a round commits. It may rest between rounds.
        model = dataclasses.replace(self.model.paced(), num_speculative_tokens=K)
        lookup = dataclasses.replace(self.lookup, num_speculative_tokens=K)
        for name, value in (("model", model), ("lookup", lookup), ("model_tokens", most)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "num_speculative_tokens", K)

    def paced(self):
        return dataclasses.replace(super().paced(), waits=True)

    @property
    def max_steps(self):
        return self.model.max_steps

    @property
    def varies(self):
        return True

    @property
    def tap_layers(self):
        return self.model.tap_layers

    @property
    def score_sizes(self):
        most = min(self.model_tokens, self.num_speculative_tokens)
        return *self.lookup.score_sizes, *self.model.score_sizes, most

    def init(self, params, batch, slots):
        K = self.num_speculative_tokens
        return State(
            self.model.init(params, batch, slots),
            jnp.full((batch, K), -1, jnp.int32),
            jnp.zeros(batch),
            jnp.full(batch, min(self.model_tokens, K) / 2),
            self.model.init_rule(batch),
        )

    def prefill(self, params, state, *chunk):
        return dataclasses.replace(state, model=self.model.prefill(params, state.model, *chunk))

    def ready(self, params, state, *prompts):
        return dataclasses.replace(state, model=self.model.ready(params, state.model, *prompts))

    def catch_up(self, params, state, tokens_BS, lengths_B, depths_B):
        depths = jnp.where(looks_up(state, depths_B), 0, depths_B)
        model = self.model.catch_up(params, state.model, tokens_BS, lengths_B, depths)
        return dataclasses.replace(state, model=model)

    def propose(self, params, state, now):
        K = self.num_speculative_tokens
        depth, looks = jnp.arange(1, K + 1), looks_up(state, now.wanted(K))
        wanted = jnp.where(looks, 0, now.wanted(self.model_tokens))
        own = dataclasses.replace(now, depths=wanted, rule=state.rule)

        def draft():
            return self.model.propose(params, state.model, own)

        shapes = jax.eval_shape(draft)
        proposal, drafted = lax.cond(jnp.any(wanted > 0), draft, lambda: base.nothing(shapes))
        tokens = jnp.where(depth <= wanted[:, None], proposal.tokens, -1)
        tokens = jnp.where(looks[:, None], state.found, tokens)
        probs = proposal.probs
        if probs is not None:
            points = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
            probs = jnp.where(looks[:, None, None], points, probs)
        # What the target's first layers have begun is of the model's tokens alone.
        proposal = dataclasses.replace(proposal, tokens=tokens, probs=probs, begun=None)
        return proposal, (drafted, wanted)

    def commit(self, params, state, drafted, tokens_BS, lengths_B, proposal, output, verdict):
        drafted, wanted = drafted
        model = self.model.commit(
            params, state.model, drafted, tokens_BS, lengths_B, proposal, output, verdict
        )
        accepted = verdict.num_tokens - verdict.valid
        average = self.memory * state.expected + (1 - self.memory) * accepted
        modelled = (wanted > 0) & (proposal.tokens[:, 0] >= 0)
        expected = jnp.where(modelled, average, state.expected)
        now = Round(tokens_BS, lengths_B, None, None, None)
        found, _ = self.lookup.propose({"drafter": {}}, (), now)
        if found.expected is None:
            raise InputError(f"lookup: {_LOOKUP}")
        rule = state.rule
        if self.model.stop_rule is not None:
            offered = jnp.where(modelled, jnp.sum(proposal.tokens >= 0, axis=1), 0)
            rule = self.model.stop_rule.update(rule, offered, accepted, wanted)
        state = State(model, found.tokens, found.expected, expected, rule)
        if self.waits:
            return state
        depths = jnp.full_like(lengths_B, self.num_speculative_tokens)
        return self.catch_up(params, state, tokens_BS, lengths_B, depths)


def looks_up(state: State, depths_B: Array) -> Array:
    """Returns [B]: whether a row that is drafted so deep takes what was looked up for it."""
    score = jnp.minimum(state.score, depths_B)
    return (state.found[:, 0] >= 0) & (score >= state.expected)
