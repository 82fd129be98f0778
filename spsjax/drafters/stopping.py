"""Rules that end a chain of draft tokens early, where the next ones are hardly accepted.

**Lossless.** A rule sees the draft's distributions and tokens that are kept for verification, and
nothing else. A rule that drops the token by which it decides is not lossless: then a token is
proposed only if it is probable, and not as often as the draft's distribution says.
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp

from spsjax.errors import InputError, check_number, short_repr
from spsjax.growth import Drawn, Stops
from spsjax.types import Array, PyTree, Round, pytree_dataclass
from spsjax.utils import traced


class Rule(abc.ABC):
    """Decides after every draft token whether it is the last one. A frozen, hashable dataclass.

    In all functions `params` are the rule's own weights; None: it has none.
    """

    def init(self, batch: int) -> PyTree:
        """Returns the state before the first round; all leaves have a batch axis first."""
        return ()

    def start(self, between: PyTree, batch: int) -> PyTree:
        """Returns the state of a chain before its first token, from the state between rounds."""
        return ()

    @abc.abstractmethod
    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        """Returns [B] bool, whether a row's chain ends with its newest token, and the new state."""

    def note(self, drawn: Drawn) -> PyTree:
        """Returns what a log keeps of a token, for training: arrays [B, ...], or None."""
        return None

    def update(
        self, between: PyTree, offered_B: Array, accepted_B: Array, most: int | Array
    ) -> PyTree:
        """Returns the state after a round, from its numbers of offered and accepted tokens.

        At most `most` could have been offered, one number or [B].
        """
        return between


class Threshold(Rule):
    """Ends a chain after a token whose certainty is below a bound."""

    threshold: float

    @property
    @abc.abstractmethod
    def bound(self) -> float:
        """The bound."""

    @abc.abstractmethod
    def certainty(self, drawn: Drawn) -> Array:
        """Returns [B], at most 1."""

    def ends(self, params, state, drawn):
        return self.certainty(drawn) < self.bound, state


@dataclasses.dataclass(frozen=True)
class Confidence(Threshold):
    """Ends a chain after a token of low probability, as Hugging Face's assisted generation does.

    Attributes:
        threshold: probability below which the chain ends.
    """

    threshold: float = traced.number(0.4)

    def __post_init__(self):
        check_number("threshold", self.threshold, 0, 1)

    @property
    def bound(self):
        return self.threshold

    def certainty(self, drawn):
        logs = jax.nn.log_softmax(drawn.logits.astype(jnp.float32))
        return jnp.exp(jnp.take_along_axis(logs, drawn.tokens[:, None], axis=1)[:, 0])


@dataclasses.dataclass(frozen=True)
class Entropy(Threshold):
    """Ends a chain after a token whose distribution has a high entropy H.

    It ends where sqrt(scale H) > threshold. The defaults are those of SVIP (Zhang et al. 2024,
    arXiv 2411.18462). AdaEDL (arXiv 2410.18351) has a scale of 0.2, and adapts its threshold
    (`Adaptive`).

    Attributes:
        scale: factor of the entropy, in 1/nats.
        threshold: bound on the probability to be rejected.
    """

    scale: float = traced.number(0.15)
    threshold: float = traced.number(0.3)

    def __post_init__(self):
        check_number("scale", self.scale, 0, 1e6)
        check_number("threshold", self.threshold, 0, 1e6)

    @property
    def bound(self):
        return 1 - self.threshold

    def certainty(self, drawn):
        return 1 - jnp.sqrt(self.scale * entropy(drawn.logits))


@dataclasses.dataclass(frozen=True)
class Adaptive(Rule):
    """Moves the bound of a rule so that a given share of the draft tokens is accepted.

    The controller is that of Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), for each row.
    Where less than the share was accepted lately, the bound rises, and chains become shorter. Where
    it was accepted, the bound falls, unless the last chain was as long as it could be. It stays in
    [0, 1].

    Attributes:
        rule: rule whose bound moves, from its own at first.
        share: share of the draft tokens that should be accepted.
        step: step of the bound.
        memory: share of the average of acceptance that stays in every round.
        inertia: share of the bound that stays in every round.
    """

    rule: Threshold
    share: float = traced.number(0.9)
    step: float = traced.number(0.01)
    memory: float = traced.number(0.5)
    inertia: float = traced.number(0.9)

    def __post_init__(self):
        if not isinstance(self.rule, Threshold):
            raise InputError(f"rule: expected Confidence or Entropy, found {short_repr(self.rule)}")
        for field in ("share", "step", "memory", "inertia"):
            check_number(field, getattr(self, field), 0, 1)

    def init(self, batch):
        start = (jnp.full(batch, value, jnp.float32) for value in (self.rule.bound, self.share))
        return Adapted(*start)

    def start(self, between, batch):
        return between.bound

    def ends(self, params, state, drawn):
        return self.rule.certainty(drawn) < state, state

    def update(self, between, offered_B, accepted_B, most):
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
    rate: Array  # [B], average share of accepted tokens


def entropy(logits: Array) -> Array:
    """Returns the entropy of each distribution [..., V], in nats."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    finite = jnp.where(logs > -jnp.inf, logs, 0)
    return -jnp.sum(jnp.exp(logs) * finite, axis=-1)


RULES = {"confidence": Confidence, "entropy": Entropy}


def by_name(text: str) -> Rule:
    """Returns the rule of a name: "entropy", "entropy:0.5" with a threshold, "adaptive-entropy".

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
            f"adaptive-entropy:0.5, or a file of train_stop_rule.py, found {short_repr(text)}"
        )
    rule = RULES[name](**threshold)
    return rule if plain == text else Adaptive(rule)


def check(rule, tree) -> None:
    """Raises InputError unless `rule` is a rule or None, and only chains have one."""
    if rule is not None and not isinstance(rule, Rule):
        raise InputError(
            "stop_rule: expected a rule of drafters.stopping or None (load_drafter takes a trained "
            f"one with its weights), found {short_repr(rule)}"
        )
    if rule is not None and tree is not None:
        raise InputError(
            "stop_rule: expected None with a tree, as only chains end early, found one"
        )


def bound(rule: Rule | None, params: PyTree, now: Round) -> Stops | None:
    """Returns a rule with its weights and state of this round, as `growth.grow` takes it."""
    if rule is None:
        return None
    ends = functools.partial(rule.ends, params.get("stop_rule"))
    return Stops(rule.start(now.rule, len(now.lengths)), ends, rule.note)


def score_sizes(rule: Rule | None, num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the sizes of smaller scoring passes that chains of a rule are worth."""
    if rule is None:
        return ()
    return tuple(size for size in (1, 2, 4, 7, 15) if size < num_speculative_tokens)
