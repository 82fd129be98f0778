"""Rules that end a chain of draft tokens early, where the next ones are hardly accepted.

**Lossless.** A rule sees the draft's distributions and tokens that are kept for verification, and
nothing else. A rule that drops the token by which it decides is not lossless: then a token is
proposed only if it is probable, and not as often as the draft's distribution says.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from spsjax.errors import InputError, check_number, short_repr
from spsjax.types import Array


class Rule(abc.ABC):
    """Decides after every draft token whether it is the last one. A frozen, hashable dataclass."""

    @abc.abstractmethod
    def __call__(self, logits_BV: Array, tokens_B: Array) -> Array:
        """Returns [B] bool: whether a row's chain ends with its token.

        Args:
            logits_BV: the draft's logits of the token, before temperature and filters.
            tokens_B: the token, which was drawn and stays in the chain.
        """


@dataclasses.dataclass(frozen=True)
class Confidence(Rule):
    """Ends a chain after a token of low probability, as Hugging Face's assisted generation does.

    Attributes:
        threshold: probability below which the chain ends.
    """

    threshold: float = 0.4

    def __post_init__(self):
        check_number("threshold", self.threshold, 0, 1)

    def __call__(self, logits_BV, tokens_B):
        logs = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
        chosen = jnp.take_along_axis(logs, tokens_B[:, None], axis=1)[:, 0]
        return jnp.exp(chosen) < self.threshold


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

    def __call__(self, logits_BV, tokens_B):
        logs = jax.nn.log_softmax(logits_BV.astype(jnp.float32))
        finite = jnp.where(logs > -jnp.inf, logs, 0)
        entropy = -jnp.sum(jnp.exp(logs) * finite, axis=-1)
        return jnp.sqrt(self.scale * entropy) > self.threshold


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
            f"found {short_repr(text)}"
        )
    return RULES[name](**threshold)


def check(rule, tree) -> None:
    """Raises InputError unless `rule` is a rule or None, and only chains have one."""
    if rule is not None and not isinstance(rule, Rule):
        raise InputError(
            f"stop_rule: expected a rule of drafters.stopping or None, found {short_repr(rule)}"
        )
    if rule is not None and tree is not None:
        raise InputError(
            "stop_rule: expected None with a tree, as only chains end early, found one"
        )


def score_sizes(rule: Rule | None, num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the sizes of smaller scoring passes that chains of a rule are worth."""
    if rule is None:
        return ()
    return tuple(size for size in (1, 2, 4, 8, 16) if size < num_speculative_tokens)
