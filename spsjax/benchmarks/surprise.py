"""Test of samples against the target's distribution, by their surprise for the target."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from spsjax import sampling
from spsjax.benchmarks import text_pass
from spsjax.benchmarks.systems import Role
from spsjax.loading import Model
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Surprise:
    """Excess of the target's surprise at texts over that at its own samples.

    For samples of the target the excess has mean 0 and this variance, whatever the texts. A rule
    that prefers probable tokens has a negative excess, whatever the draft.
    """

    excess: float  # sum over tokens of -log p(token) minus the entropy of p
    variance: float  # sum over tokens of the variance of -log p
    impossible: int  # number of tokens to which the target gives no probability, left out above
    tokens: int  # number of tokens

    def __add__(self, other: "Surprise") -> "Surprise":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Surprise(*(mine + theirs for mine, theirs in pairs))

    @property
    def score(self) -> float | None:
        """Standard score of the excess; None if nothing was random."""
        return self.excess / self.variance**0.5 if self.variance > 1e-9 else None

    def figures(self) -> dict[str, float | int | None]:
        """Returns the figures for `described`, and the excess in nats per token."""
        possible = self.tokens - self.impossible
        return {
            "surprise": self.score,
            "excess": self.excess / possible if possible else None,
            "impossible": self.impossible,
            "tokens": self.tokens,
        }


def surprise(
    target: Model, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams
) -> Surprise:
    """Returns the surprise of `tokens` after a prompt, by one pass of the target over the text."""
    columns = functools.partial(_surprise, target.config, target.params)
    excess, variance, possible = text_pass.of_tokens(columns, target, prompt, tokens, params)
    excess, variance = (float(column[possible].sum()) for column in (excess, variance))
    return Surprise(excess, variance, int((~possible).sum()), len(tokens))


def by_system(
    target: Model,
    records: Iterable[Mapping],
    prompts: Mapping[str, Sequence[int]],
    settings: Mapping[str, SamplingParams],
) -> dict[tuple[str, str], Surprise]:
    """Returns the surprise of all texts by setting and system, without the baseline's.

    Repetitions of a text, of which only the times differ, do not count.
    """
    totals: dict[tuple[str, str], Surprise] = {}
    for record in records:
        if record["repetition"] or record["role"] == Role.BASELINE:
            continue
        key = record["setting"], record["system"]
        text = prompts[record["example"]], record["tokens"]
        one = surprise(target, *text, settings[record["setting"]])
        totals[key] = totals[key] + one if key in totals else one
    return totals


def described(row: Mapping) -> str:
    """Returns a cell of a table: the standard score of a system's texts, or whether they are equal.

    The row has `Surprise.figures` and `same_tokens`, which is None unless the texts are greedy.
    """
    if row.get("same_tokens") is not None:
        return "same texts" if row["same_tokens"] else "other texts"
    score = "-" if row.get("surprise") is None else f"{row['surprise']:+.2f}"
    return f"{score}, {row['impossible']} impossible" if row.get("impossible") else score


@functools.partial(jax.jit, static_argnums=0)
def _surprise(config, params, tokens_BT, rows):
    probs = sampling.to_probs(text_pass.logits(config, params, tokens_BT), rows)[0]
    logs = jnp.log(jnp.where(probs > 0, probs, 1))
    entropy = -jnp.sum(probs * logs, axis=-1)
    variance = jnp.sum(probs * jnp.square(logs), axis=-1) - jnp.square(entropy)
    following = jnp.roll(tokens_BT[0], -1)[:, None]
    chosen, log = (jnp.take_along_axis(of, following, axis=1)[:, 0] for of in (probs, logs))
    return -log - entropy, jnp.maximum(variance, 0), chosen > 0
