"""Test of samples against the target's distribution: how surprising the target finds them."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.evaluation import text_pass
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Surprise:
    """Excess of the target's surprise at texts over that at its own samples.

    For samples of the target the excess has mean 0 and this variance, whatever the texts. A rule
    that prefers probable tokens has a negative excess, whatever the draft.

    Attributes:
        excess: sum over tokens of -log p(token) minus the entropy of p.
        variance: sum over tokens of the variance of -log p.
        impossible: number of tokens to which the target gives no probability, left out above.
        tokens: number of tokens.
    """

    excess: float
    variance: float
    impossible: int
    tokens: int

    def __add__(self, other: "Surprise") -> "Surprise":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Surprise(*(mine + theirs for mine, theirs in pairs))

    @property
    def score(self) -> float | None:
        """Standard score of the excess; None if nothing was random."""
        return self.excess / self.variance**0.5 if self.variance > 1e-9 else None

    def figures(self) -> dict[str, float | int | None]:
        """Returns what `described` shows, and the excess in nats per token."""
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
    padded, rows, span = text_pass.inputs(target, prompt, tokens, params)
    with target.in_mesh():
        columns = multihost.to_host(_surprise(target.config, target.params, padded, rows))
    excess, variance, possible = (np.asarray(column)[0, span] for column in columns)
    return Surprise(
        float(excess[possible].sum()),
        float(variance[possible].sum()),
        int((~possible).sum()),
        len(tokens),
    )


def of_records(
    target: Model,
    records: Iterable[Mapping],
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
) -> Surprise:
    """Returns the surprise of all texts that a system wrote in one setting."""
    total = Surprise(0.0, 0.0, 0, 0)
    for record in records:
        total += surprise(target, prompts[record["example"]], record["tokens"], params)
    return total


def described(row: Mapping) -> str:
    """Returns a cell of a table: the standard score of a system's texts, or whether they are equal.

    Args:
        row: `Surprise.figures`, and `same_tokens`, which is None unless the texts are greedy.
    """
    if row.get("same_tokens") is not None:
        return "same texts" if row["same_tokens"] else "other texts"
    score = "-" if row.get("surprise") is None else f"{row['surprise']:+.2f}"
    return f"{score}, {row['impossible']} impossible" if row.get("impossible") else score


@functools.partial(jax.jit, static_argnums=0)
def _surprise(config, params, tokens_BT, rows):
    probs = sampling.to_probs(text_pass.logits(config, params, tokens_BT), rows)
    logs = jnp.log(jnp.where(probs > 0, probs, 1))
    entropy = -jnp.sum(probs * logs, axis=-1)
    variance = jnp.sum(probs * jnp.square(logs), axis=-1) - jnp.square(entropy)
    following = jnp.roll(tokens_BT, -1, axis=1)[..., None]
    chosen = jnp.take_along_axis(probs, following, axis=2)[..., 0]
    log = jnp.take_along_axis(logs, following, axis=2)[..., 0]
    return -log - entropy, jnp.maximum(variance, 0), chosen > 0
