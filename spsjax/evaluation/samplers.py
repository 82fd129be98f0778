"""Ways to continue a prompt, all called alike, so that they can be set side by side."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from spsjax import decode, generation
from spsjax.drafters import base
from spsjax.loading import Model
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Sample:
    """One continuation: its tokens; run time, prompt included; `stats` where it is ours."""

    seconds: float
    tokens: Sequence[int]
    stats: generation.Stats | None = None


class Call(Protocol):
    """Continues one prompt."""

    def __call__(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
        stop_at_eos: bool,
    ) -> Sample: ...


class Parts(Protocol):
    """Times the parts of a round of such a call, each alone."""

    def __call__(
        self, prompt: list[int], params: SamplingParams, max_new_tokens: int
    ) -> microbenchmarks.Parts: ...


@dataclasses.dataclass(frozen=True)
class Sampler:
    """One way to continue a prompt.

    Attributes:
        name: as people read it.
        num_speculative_tokens: K; 0 for autoregressive sampling.
        context: tokens that prompt and continuation may have together.
        call: does it.
        parts: what a round of it is made of; None where that is not known.
    """

    name: str
    num_speculative_tokens: int
    context: int
    call: Call
    parts: Parts | None = None


def ours(
    name: str,
    target: Model,
    drafter: Model | base.Drafter | None = None,
    num_speculative_tokens: int = 0,
) -> Sampler:
    """`generate`; without a drafter, autoregressive sampling."""
    K, probed = num_speculative_tokens, {}

    def call(prompt, params, max_new_tokens, seed, stop_at_eos):
        out = generation.generate(
            target,
            [prompt],
            drafter,
            K,
            params,
            max_new_tokens,
            seed,
            stop_at_eos=stop_at_eos,
        )
        return Sample(out.stats.seconds, out.tokens[0].tolist(), out.stats)

    def parts(prompt, params, max_new_tokens):
        length = len(prompt) + max_new_tokens
        key = repr(params), decode.num_slots(length + K + 1)
        if key not in probed:
            probed[key] = microbenchmarks.probe(target, drafter, K, params, length)
        return probed[key]()

    models = [target, drafter] if isinstance(drafter, Model) else [target]
    context = min(model.config.max_positions for model in models)
    known = drafter is None or isinstance(drafter, Model)
    return Sampler(name, K, context, call, parts if known else None)
