"""Differences between greedy texts that only rounding may cause."""

import dataclasses
from collections.abc import Mapping, Sequence

from spsjax import generation
from spsjax.benchmarks import acceptance_analysis
from spsjax.loading import Model
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Flips:
    """Differences between two ways to write the same greedy texts."""

    compared: str  # the two ways
    texts: int  # number of texts
    differ: int  # number of those that differ
    # Tokens of all texts, up to and with the first that differs: how often a difference could have
    # begun.
    tokens: int
    # Difference between the two highest logits of the first model where each text begins to differ.
    # Above what rounding can change, it would be a mistake.
    margins: list[float]


def compare(
    pairs: Mapping[str, tuple[Model, Model]],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    num_speculative_tokens: int = 4,
) -> list[Flips]:
    """Compares speculative with autoregressive sampling per compute type, and the types.

    `pairs` are target and draft by compute type. The first target computes all margins.
    """

    def texts(pair, K):
        target, draft = pair
        options = K, SamplingParams(temperature=0.0), new_tokens
        out = generation.generate(
            target, prompts, draft if K else None, *options, stop_at_eos=False
        )
        return [tokens.tolist() for tokens in out.tokens]

    plain = {name: texts(pair, 0) for name, pair in pairs.items()}
    ways = {
        f"{name}: SpS and ArS": (plain[name], texts(pair, num_speculative_tokens))
        for name, pair in pairs.items()
    }
    first, *others = pairs
    ways |= {f"ArS: {first} and {name}": (plain[first], plain[name]) for name in others}
    reference = pairs[first][0]
    return [_flips(name, reference, prompts, *both, new_tokens) for name, both in ways.items()]


def _flips(name, reference: Model, prompts, one, other, new_tokens: int) -> Flips:
    divergences = [
        acceptance_analysis.divergence(reference, prompt, a, b)
        for prompt, a, b in zip(prompts, one, other)
    ]
    divergences = [first for first in divergences if first is not None]
    equal = len(prompts) - len(divergences)
    tokens = sum(first.position + 1 for first in divergences) + new_tokens * equal
    margins = [first.margin for first in divergences]
    return Flips(name, len(prompts), len(divergences), tokens, margins)
