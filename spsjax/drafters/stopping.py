"""Rules that end a chain of draft tokens early, where acceptance of more tokens is unlikely.

**Lossless.** A rule depends only on the draft's distributions and on tokens that stay in the chain.
A rule that drops the token on which it decides is not lossless: then a token would be proposed only
if it is probable, and not as often as the draft's distribution says.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from spsjax.drafters import base
from spsjax.drafters.sample import Drawn, Stops
from spsjax.errors import InputError, short_repr
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
from spsjax.utils import fields, traced
from spsjax.utils.fields import derived, number

# Sizes of scoring passes that are compiled for chains that may end early.
SCORE_SIZES = 1, 2, 4, 7, 15


class Rule(fields.Checked, abc.ABC):
    """Decides after every draft token whether it is the last one. A frozen, hashable dataclass.

    In all functions `params` are the weights of the rule; None: it has none.
    """

    def init(self, batch: int) -> PyTree:
        """Returns the state before the first round; all leaves have a batch axis first."""
        return ()

    def start(self, between: PyTree, batch: int) -> PyTree:
        """Returns the state before the first token of a chain, from the state between rounds."""
        return ()

    @abc.abstractmethod
    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        """Returns [B] bool, whether a row's chain ends with its newest token, and the new state."""

    def update(
        self, between: PyTree, offered_B: Array, accepted_B: Array, most: int | Array
    ) -> PyTree:
        """Returns the state after a round, from the numbers of proposed and accepted tokens.

        `most` is the greatest number that could have been proposed, a scalar or [B].
        """
        return between


class Threshold(Rule):
    """Rule that ends a chain after a token whose certainty is below a bound."""

    threshold: float

    @property
    @abc.abstractmethod
    def bound(self) -> float:
        """Lowest certainty at which the chain continues."""

    @abc.abstractmethod
    def certainty(self, drawn: Drawn) -> Array:
        """Returns the certainty about each row's token [B], at most 1."""

    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        return self.certainty(drawn) < self.bound, state


@dataclasses.dataclass(frozen=True)
class Confidence(Threshold):
    """Ends a chain after a token of low probability, as Hugging Face's assisted generation does.

    Attributes:
        threshold: probability below which the chain ends.
    """

    threshold: float = traced.share(0.4)

    @property
    def bound(self) -> float:
        return self.threshold

    def certainty(self, drawn: Drawn) -> Array:
        logs = jax.nn.log_softmax(drawn.logits.astype(jnp.float32))
        return jnp.exp(jnp.take_along_axis(logs, drawn.index[:, None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True)
class Entropy(Threshold):
    """Ends a chain after a token whose distribution has a high entropy H.

    The condition is sqrt(scale H) > threshold. The defaults are those of SVIP (Zhang et al. 2024,
    arXiv 2411.18462). AdaEDL (arXiv 2410.18351) has a scale of 0.2, and adapts its threshold
    (`Adaptive`).

    Attributes:
        scale: factor of the entropy, in 1/nats.
        threshold: estimated probability of rejection above which the chain ends.
    """

    scale: float = traced.number(0.15, of=number, most=1e6)
    threshold: float = traced.number(0.3, of=number, most=1e6)

    @property
    def bound(self) -> float:
        return 1 - self.threshold

    def certainty(self, drawn: Drawn) -> Array:
        return 1 - jnp.sqrt(self.scale * entropy(drawn.logits))


@dataclasses.dataclass(frozen=True)
class Adaptive(Rule):
    """Adapts the bound of a rule to a desired acceptance rate.

    The controller is that of Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), one per row. If
    the average acceptance rate is below `share`, the bound rises, and chains become shorter. Else
    the bound falls, unless the last chain already had the greatest length. It stays in [0, 1].

    Attributes:
        rule: rule whose bound is adapted; its own bound is the initial one.
        share: desired acceptance rate.
        step: change of the bound per round before smoothing.
        memory: weight of the old average when the acceptance rate is updated.
        inertia: weight of the old bound when the bound is updated.
    """

    rule: Threshold
    share: float = traced.share(0.9)
    step: float = traced.share(0.01)
    memory: float = traced.share(0.5)
    inertia: float = traced.share(0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rule, Threshold):
            raise InputError(f"rule: expected Confidence or Entropy, found {short_repr(self.rule)}")

    def init(self, batch: int) -> PyTree:
        start = (jnp.full(batch, value, jnp.float32) for value in (self.rule.bound, self.share))
        return Adapted(*start)

    def start(self, between: PyTree, batch: int) -> PyTree:
        return between.bound

    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        return self.rule.certainty(drawn) < state, state

    def update(
        self, between: PyTree, offered_B: Array, accepted_B: Array, most: int | Array
    ) -> PyTree:
        # Both the rate and the bound are exponential moving averages, as in the authors' code.
        rate = accepted_B / jnp.maximum(offered_B, 1)
        rate = self.memory * between.rate + (1 - self.memory) * rate
        fall = jnp.where(offered_B < most, self.step, 0.0)
        moved = between.bound + jnp.where(rate < self.share, self.step, -fall)
        moved = self.inertia * between.bound + (1 - self.inertia) * moved
        moved = jnp.clip(moved, 0, 1)
        drafted = offered_B > 0
        return Adapted(
            jnp.where(drafted, moved, between.bound), jnp.where(drafted, rate, between.rate)
        )


@pytree_dataclass
class Adapted:
    """State of `Adaptive` between rounds."""

    bound: Array  # [B]
    rate: Array  # [B], moving average of the acceptance rate


def entropy(logits: Array) -> Array:
    """Returns the entropy of each distribution [..., V], in nats."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    finite = jnp.where(logs > -jnp.inf, logs, 0)
    return -jnp.sum(jnp.exp(logs) * finite, axis=-1)


RULES = {"confidence": Confidence, "entropy": Entropy}


def by_name(text: str) -> Rule:
    """Returns a rule by name: "entropy", "entropy:0.5" with a threshold, "adaptive-entropy".

    Raises InputError for another text.
    """
    plain = text.removeprefix("adaptive-")
    name, colon, number = plain.partition(":")
    try:
        threshold = {"threshold": float(number)} if colon else {}
    except ValueError:
        name = ""
    if name not in RULES:
        raise InputError(
            f"stop_rule: expected {' or '.join(RULES)}, also with a threshold as in entropy:0.5 or "
            f"adaptive-entropy:0.5, or the file of a trained rule, found {short_repr(text)}"
        )
    rule = RULES[name](**threshold)
    return rule if plain == text else Adaptive(rule)


@pytree_dataclass
class WithRule:
    """Weights of a drafter and of the rule that ends its chains."""

    drafter: PyTree
    rule: PyTree


def split(params: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the weights of a drafter, and the weights of its rule or None."""
    return (params.drafter, params.rule) if isinstance(params, WithRule) else (params, None)


@dataclasses.dataclass(frozen=True)
class Drafter(base.Wrapper):
    """Ends the chains of another drafter early, by a rule. Lossless.

    `params["drafter"]` are the other drafter's weights, or `WithRule`. The state is a pair: the
    states of the drafter and of the rule.

    Attributes:
        drafter: drafter that samples chains of K tokens with `sample.grow`.
        rule: rule that ends a chain.
        num_speculative_tokens: K, the most tokens of a chain; None: the drafter's.
    """

    drafter: base.Drafter
    rule: Rule
    num_speculative_tokens: int = derived()

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise InputError(
                "stop_rule: expected a rule of drafters.stopping (load_drafter takes a trained "
                f"one with its weights), found {short_repr(self.rule)}"
            )
        drafts, inner = self.drafter.num_speculative_tokens, self.replace_length()
        chains = inner.score_sizes == (inner.num_speculative_tokens,)
        if isinstance(inner, Drafter) or not chains or not drafts:
            raise refusal(inner)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        K = self.num_speculative_tokens
        return *(size for size in SCORE_SIZES if size < K), K

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return self.drafter.init(_without_rule(params), batch, slots), self.rule.init(batch)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        drafter_state, between = state
        return self.drafter.prefill(_without_rule(params), drafter_state, chunk, output), between

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        drafter_state, between = state
        return self.drafter.sync(_without_rule(params), drafter_state, now), between

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        drafter_state, between = state
        weights, calls = split(params["drafter"])[1], []

        def ends(chain: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
            calls.append(True)
            return self.rule.ends(weights, chain, drawn)

        stops = Stops(self.rule.start(between, len(now.lengths)), ends)
        now = dataclasses.replace(now, stops=stops)
        proposal = self.drafter.propose(_without_rule(params), drafter_state, now)
        if not calls:  # the drafter does not sample with `sample.grow`
            raise refusal(self.drafter)
        return proposal

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        drafter_state, between = state
        offered = jnp.sum(proposal.tokens >= 0, axis=1)
        most = now.wanted(self.num_speculative_tokens)
        between = self.rule.update(between, offered, verdict.num_tokens - verdict.valid, most)
        params = _without_rule(params)
        return self.drafter.commit(params, drafter_state, now, proposal, output, verdict), between


def _without_rule(params: PyTree) -> PyTree:
    return params | {"drafter": split(params["drafter"])[0]}


def refusal(drafter: base.Drafter) -> InputError:
    """Returns the error for a drafter whose proposals cannot end early."""
    name = type(drafter).__module__.rpartition(".")[2]
    return InputError(
        f"stop_rule: expected a drafter that samples chains, as only these end early, found {name}"
    )
