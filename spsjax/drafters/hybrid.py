"""Hybrid of two drafters: a look-up where it expects more accepted tokens, else a model.

Oliaro et al. 2024 (arXiv 2411.04975) combine suffix decoding with a drafter such as EAGLE this way.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.drafters import base
from spsjax.errors import InputError, check_integer
from spsjax.types import (
    Array,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.utils import traced
from spsjax.utils.fields import derived

_LOOKUP = (
    "expected a drafter without a state, such as suffix, whose proposals say how many of their "
    "tokens they expect to be accepted, found another"
)
_CHAINS = "expected a drafter of chains, found another"
_WITH_STATE = "init", "prefill", "sync", "commit"  # methods that a drafter without state inherits


@pytree_dataclass
class State:
    """State between rounds.

    Attributes:
        model: state of the model.
        lookup_tokens: [B, K] int32, tokens of the look-up for this round; -1: no token.
        score: [B] float32, number of these tokens that the look-up expects to be accepted.
        expected: [B] float32, moving average of the model's accepted tokens per round.
    """

    model: PyTree
    lookup_tokens: Array
    score: Array
    expected: Array


@dataclasses.dataclass(frozen=True)
class Drafter(base.Wrapper):
    """Proposes the tokens of a look-up if it expects at least as many accepted as the model.

    Lossless: the choice depends on committed tokens and past rounds only, and tokens of the look-up
    are point masses. The look-up reports its expectation as `aux` [B] of its proposal. The model's
    expectation is a moving average of its accepted tokens. The model does not run in rounds in
    which no row needs it, and processes the missed tokens before its next draft.

    Attributes:
        drafter: model, a drafter of chains with weights.
        lookup: drafter of chains without weights or state, which reports an expectation: `suffix`.
        num_speculative_tokens: K, the most tokens of a look-up; None: K of `lookup`, but no more
            than the model can draft.
        model_tokens: the most tokens of the model's draft; None: K of the model.
        memory: weight of the old average when the model's average is updated.
    """

    drafter: base.Drafter
    lookup: base.Drafter
    num_speculative_tokens: int = derived()
    model_tokens: int = derived()
    memory: float = traced.share(0.8)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drafter", "lookup"):
            drafter = getattr(self, name)
            known = isinstance(drafter, base.Drafter)
            if not known or base.num_nodes(drafter) != drafter.num_speculative_tokens:
                raise InputError(f"{name}: {_CHAINS}")
        methods = (getattr(type(self.lookup), name) for name in _WITH_STATE)
        if any(method is not getattr(base.Drafter, method.__name__) for method in methods):
            raise InputError(f"lookup: {_LOOKUP}")
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
    def score_sizes(self) -> tuple[int, ...]:
        K = self.num_speculative_tokens
        sizes = {*self.lookup.score_sizes, *self.drafter.score_sizes, min(self.model_tokens, K)}
        return *sorted(size for size in sizes if size < K), K

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        K = self.num_speculative_tokens
        return State(
            self.drafter.init(params, batch, slots),
            jnp.full((batch, K), -1, jnp.int32),
            jnp.zeros(batch),
            jnp.full(batch, min(self.model_tokens, K) / 2),
        )

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        model = self.drafter.prefill(params, state.model, chunk, output)
        return dataclasses.replace(state, model=model)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        # The look-up runs here, not in `propose`: the model needs to know its rows before it syncs.
        lookup = self.lookup.propose({"drafter": {}}, (), now)
        if getattr(lookup.aux, "shape", None) != now.lengths.shape:
            raise InputError(f"lookup: {_LOOKUP}")
        if lookup.parents is not None:
            raise InputError(f"lookup: {_CHAINS}")
        state = dataclasses.replace(state, lookup_tokens=lookup.tokens, score=lookup.aux)
        model = self.drafter.sync(
            params, state.model, dataclasses.replace(now, depths=self._model_depths(state, now))
        )
        return dataclasses.replace(state, model=model)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, depths = self.num_speculative_tokens, self._model_depths(state, now)
        model_round = dataclasses.replace(now, depths=depths)
        use_lookup = looks_up(state, now.wanted(K))[:, None]

        def draft() -> Proposal:
            return self.drafter.propose(params, state.model, model_round)

        no_tokens = base.no_tokens(jax.eval_shape(draft))
        if no_tokens.parents is not None:
            raise InputError(f"drafter: {_CHAINS}")
        proposal = lax.cond(jnp.any(depths > 0), draft, lambda: no_tokens)
        tokens = jnp.where(jnp.arange(1, K + 1) <= depths[:, None], proposal.tokens, -1)
        tokens, probs = jnp.where(use_lookup, state.lookup_tokens, tokens), proposal.probs
        if probs is not None:
            points = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
            probs = jnp.where(use_lookup[..., None], points, probs)
        # A look-up has no estimates per token.
        return dataclasses.replace(proposal, tokens=tokens, probs=probs, confidence=None)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        depths = self._model_depths(state, now)
        model_round = dataclasses.replace(now, depths=depths)
        tokens = jnp.where(depths[:, None] > 0, proposal.tokens, -1)
        by_model = jnp.any(tokens >= 0, axis=1)
        accepted = verdict.num_tokens - verdict.valid  # without the residual or bonus token
        average = self.memory * state.expected + (1 - self.memory) * accepted
        proposal = dataclasses.replace(proposal, tokens=tokens)
        model = self.drafter.commit(params, state.model, model_round, proposal, output, verdict)
        expected = jnp.where(by_model, average, state.expected)
        return dataclasses.replace(state, model=model, expected=expected)

    def _model_depths(self, state: State, now: Round) -> Array:
        """Returns the model's draft lengths [B], 0 in rows that use the look-up."""
        use_lookup = looks_up(state, now.wanted(self.num_speculative_tokens))
        return jnp.where(use_lookup, 0, now.wanted(self.model_tokens))


def looks_up(state: State, depths_B: Array) -> Array:
    """Returns whether each row [B] uses the look-up if the draft length is `depths_B`."""
    score = jnp.minimum(state.score, depths_B)
    return (state.lookup_tokens[:, 0] >= 0) & (score >= state.expected)
