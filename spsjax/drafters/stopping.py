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
from spsjax.types import Array, PyTree


class Rule(abc.ABC):
    """Decides after every draft token whether it is the last one. A frozen, hashable dataclass.

    In all functions `params` are the rule's own weights; None: it has none.
    """

    def start(self, batch: int) -> PyTree:
        """Returns the state before the first token of a chain."""
        return ()

    @abc.abstractmethod
    def ends(self, params: PyTree, state: PyTree, drawn: Drawn) -> tuple[Array, PyTree]:
        """Returns [B] bool, whether a row's chain ends with its newest token, and the new state."""

    def note(self, drawn: Drawn) -> PyTree:
        """Returns what a log keeps of a token, for training: arrays [B, ...], or None."""
        return None


@dataclasses.dataclass(frozen=True)
class Confidence(Rule):
    """Ends a chain after a token of low probability, as Hugging Face's assisted generation does.

    Attributes:
        threshold: probability below which the chain ends.
    """

    threshold: float = 0.4

    def __post_init__(self):
        check_number("threshold", self.threshold, 0, 1)

    def ends(self, params, state, drawn):
        logs = jax.nn.log_softmax(drawn.logits.astype(jnp.float32))
        chosen = jnp.take_along_axis(logs, drawn.tokens[:, None], axis=1)[:, 0]
        return jnp.exp(chosen) < self.threshold, state


@dataclasses.dataclass(frozen=True)
class Entropy(Rule):
    """Ends a chain after a token whose distribution has a high entropy H.

    It ends where sqrt(scale H) > threshold. The defaults are those of SVIP (Zhang et al. 2024,
    arXiv 2411.18462). AdaEDL (arXiv 2410.18351) has a scale of 0.2, and adapts its threshold; here
    it is fixed.

    Attributes:
        scale: factor of the entropy, in 1/nats.
        threshold: bound on the probability to be rejected.
    """

    scale: float = 0.15
    threshold: float = 0.3

    def __post_init__(self):
        check_number("scale", self.scale, 0, 1e6)
        check_number("threshold", self.threshold, 0, 1e6)

    def ends(self, params, state, drawn):
        return jnp.sqrt(self.scale * entropy(drawn.logits)) > self.threshold, state


def entropy(logits: Array) -> Array:
    """Returns the entropy of each distribution [..., V], in nats."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    finite = jnp.where(logs > -jnp.inf, logs, 0)
    return -jnp.sum(jnp.exp(logs) * finite, axis=-1)


RULES = {"confidence": Confidence, "entropy": Entropy}


def by_name(text: str) -> Rule:
    """Returns the rule of a name, with its threshold if it has one: "entropy" or "entropy:0.5".

    Raises InputError for another text.
    """
    name, colon, number = text.partition(":")
    try:
        threshold = {"threshold": float(number)} if colon else {}
    except ValueError:
        name = ""
    if name not in RULES:
        raise InputError(
            f"stop_rule: expected {' or '.join(RULES)}, also with a threshold as in entropy:0.5, "
            f"or a file of train_stop_rule.py, found {short_repr(text)}"
        )
    return RULES[name](**threshold)


def check(rule, tree) -> None:
    """Raises InputError unless `rule` is a rule or None, and only chains have one."""
    if rule is not None and not isinstance(rule, Rule):
        raise InputError(
            "stop_rule: expected a rule of drafters.stopping, what learned_stopping.read returns, "
            f"or None, found {short_repr(rule)}"
        )
    if rule is not None and tree is not None:
        raise InputError(
            "stop_rule: expected None with a tree, as only chains end early, found one"
        )


def bound(rule: Rule | None, params: PyTree, batch: int) -> Stops | None:
    """Returns a rule with its weights, of the loop's parameters, as `growth.grow` takes it."""
    if rule is None:
        return None
    ends = functools.partial(rule.ends, params.get("stop_rule"))
    return Stops(rule.start(batch), ends, rule.note)


def score_sizes(rule: Rule | None, num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the sizes of smaller scoring passes that chains of a rule are worth."""
    if rule is None:
        return ()
    return tuple(size for size in (1, 2, 4, 8, 16) if size < num_speculative_tokens)
