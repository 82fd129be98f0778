"""How good a draft is: acceptance as an exact expectation, and as it is counted when it drafts."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spsjax import generation
from spsjax.data import pipeline
from spsjax.errors import InputError, check_number, short_repr
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.training import step as train_step
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Means:
    """What a metric is on some examples.

    Attributes:
        mean: over all positions that count.
        interval: half the width of a 95% confidence interval of it; None of a single text.
            Positions of an example depend on each other, and count as one; examples count as
            independent, which those of one document are not quite.
        by_position: mean over the texts, in each of at most 16 equal stretches of their positions.
    """

    mean: float
    interval: float | None
    by_position: list[float]


def means(values_NT: np.ndarray, weights_NT: np.ndarray, stretches: int = 16) -> Means:
    """Of values [N, T] at the positions whose weight [N, T] is 1; the others are 0."""
    weights_NT = np.asarray(weights_NT, np.float64)
    sums, counts = (values_NT * weights_NT).sum(1), weights_NT.sum(1)
    mean = sums.sum() / counts.sum()
    # A ratio of two sums over texts: the residuals' spread, by the delta method.
    residuals = sums - mean * counts
    spread = np.sqrt((residuals**2).sum() * len(sums) / max(1, len(sums) - 1)) / counts.sum()
    used = np.flatnonzero(weights_NT.any(0))
    by_position = [
        float((values_NT[:, part] * weights_NT[:, part]).sum() / weights_NT[:, part].sum())
        for part in np.array_split(used, min(stretches, len(used)))
    ]
    return Means(float(mean), float(1.96 * spread) if len(sums) > 1 else None, by_position)


def on_examples(
    values: Callable, params: PyTree, frozen: PyTree, table: pipeline.Table, batch: int, place
) -> dict[str, Means]:
    """Every metric of `values` on all rows of a table.

    Args:
        values: jitted `train.Values`.
        params, frozen: as it takes them.
        table: the examples.
        batch: rows at a time.
        place: where they go.
    """
    found, weights = {}, []
    mine = pipeline.local_rows(place, batch)
    for start in range(0, len(table), batch):
        # The last batch is filled up with its last row, which is not counted again.
        rows = np.minimum(np.arange(start, start + batch), len(table) - 1)
        rows_given = min(batch, len(table) - start)
        given = pipeline.put(table[rows[mine]], batch, place)
        fetched = multihost.to_host((values(params, frozen, given), _weights(given)))
        for name, value in fetched[0].items():
            found.setdefault(name, []).append(value[:rows_given])
        weights.append(fetched[1][:rows_given])
    weights = np.concatenate(weights)
    return {name: means(np.concatenate(parts), weights) for name, parts in found.items()}


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How a draft is tried out: prompts of held-out text, continued by speculative sampling.

    Attributes:
        prompts: how many.
        prompt_length, new_tokens: of each.
        num_speculative_tokens: K.
        temperatures: of target and draft, one trial each; 0 is greedy.
    """

    prompts: int = 16
    prompt_length: int = 32
    new_tokens: int = 64
    num_speculative_tokens: int = 4
    temperatures: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self):
        for field in ("prompts", "prompt_length", "new_tokens", "num_speculative_tokens"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InputError(f"trial.{field}: expected an integer >= 1, found {value!r}")
        if not isinstance(self.temperatures, (tuple, list)):
            raise InputError(
                "trial.temperatures: expected a tuple of numbers, "
                f"found {short_repr(self.temperatures)}"
            )
        for temperature in self.temperatures:
            check_number("trial.temperatures", temperature, 0, 1e30)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What a draft did.

    Attributes:
        samples: [N, prompt + new tokens] int32, the texts. What is new was sampled from the target
            exactly, whatever the draft.
        counted: accepted draft tokens, of those that the target decided about.
        block_efficiency: tokens a target call and text.
    """

    samples: np.ndarray
    counted: float
    block_efficiency: float


def by_sampling(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    drafting: Drafting,
    temperature: float,
    seed: int,
) -> Drafted:
    """Continues the prompts with the target's samples, drafted by the draft."""
    out = generation.generate(
        target,
        prompts,
        draft,
        drafting.num_speculative_tokens,
        SamplingParams(temperature=temperature),
        drafting.new_tokens,
        seed,
        stop_at_eos=False,
    )
    histogram = np.asarray(out.stats.accepted_histogram, np.float64)
    accepted = np.arange(len(histogram))
    # A round decides about its accepted tokens, and about one more unless all were accepted.
    decided = accepted + (accepted < len(histogram) - 1)
    samples = [[*prompt, *tokens] for prompt, tokens in zip(prompts, out.tokens)]
    return Drafted(
        np.asarray(samples, np.int32),
        float((histogram @ accepted) / max(1, histogram @ decided)),
        out.stats.block_efficiency,
    )


_weights = jax.jit(train_step.weights)
