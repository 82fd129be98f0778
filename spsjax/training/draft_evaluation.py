"""Evaluation of a draft: its expected acceptance rate, and its acceptance while drafting."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spsjax import generation
from spsjax.errors import InputError, check_number, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.sampling import SamplingParams
from spsjax.utils.fields import Checked, integer


@dataclasses.dataclass(frozen=True)
class DraftEvalConfig(Checked):
    """Options of an evaluation by speculative sampling after prompts of held-out text."""

    prompts: int = integer(16, 1)  # number of prompts
    prompt_length: int = integer(32, 1)  # tokens per prompt
    new_tokens: int = integer(64, 1)  # new tokens per prompt
    num_speculative_tokens: int = integer(4, 1)  # number of draft tokens per round, K
    # Sampling temperatures of target and draft, with one evaluation each. 0 is greedy.
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.temperatures, (tuple, list)):
            raise InputError(
                f"temperatures: expected a tuple of numbers, found {short_repr(self.temperatures)}"
            )
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0, 1e30)

    def check_fits(self, context: int, length: int, first: int = 0) -> None:
        """Raises InputError if prompts or samples are too long or too short.

        `context` is the target's, `length` that of a held-out example; the `first` tokens per text
        do not count.
        """
        if self.prompt_length + self.new_tokens <= first:
            raise InputError(
                f"draft_eval.new_tokens: expected texts of more than {first} tokens, of which the "
                f"first do not count, found {self.prompt_length} + {self.new_tokens}"
            )
        room = context - self.prompt_length
        for field, most, reason in (
            ("prompt_length", min(length, context - 1), ""),
            ("new_tokens", room, f", in a context of {context}"),
            ("num_speculative_tokens", context - 1, f", below the context of {context}"),
        ):
            value = getattr(self, field)
            if value > most:
                raise InputError(
                    f"draft_eval.{field}: expected at most {most}{reason}, found {value}"
                )


@dataclasses.dataclass(frozen=True)
class DraftEvalResult:
    """Result of an evaluation by speculative sampling.

    Attributes:
        samples: [N, prompt + new tokens] int32 texts. Their new tokens are exact samples of the
            target, whatever the draft.
        counted_acceptance: share of draft tokens accepted, among those that the target decided on.
        block_efficiency: tokens per target call and text.
    """

    samples: np.ndarray
    counted_acceptance: float
    block_efficiency: float


def sample_with_draft(
    target: Model,
    draft: Model | LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    options: DraftEvalConfig,
    temperature: float,
    seed: int,
) -> DraftEvalResult:
    """Continues prompts by speculative sampling and counts the accepted draft tokens."""
    sampling = SamplingParams(temperature=temperature)
    sizes = options.num_speculative_tokens, sampling, options.new_tokens, seed
    out = generation.generate(target, prompts, draft, *sizes, stop_at_eos=False)
    histogram = np.asarray(out.stats.accepted_histogram, np.float64)
    accepted = np.arange(len(histogram))
    # A round decides on its accepted tokens, and on one more unless all were accepted.
    decided = accepted + (accepted < len(histogram) - 1)
    samples = [[*prompt, *tokens] for prompt, tokens in zip(prompts, out.tokens)]
    return DraftEvalResult(
        np.asarray(samples, np.int32),
        float((histogram @ accepted) / max(1, histogram @ decided)),
        out.stats.block_efficiency,
    )
