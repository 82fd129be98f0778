"""Speed-up of the loop as theory expects it of measured acceptance and costs."""

import dataclasses
from collections.abc import Sequence

from spsjax.evaluation import race, summary
from spsjax.performance import theory


@dataclasses.dataclass(frozen=True)
class Costs:
    """What parts of a round cost, in passes of the target over one token.

    Attributes:
        pass_ms: that pass.
        draft_step: by K, a token of the draft where it drafts K.
        scoring: by K, the pass over K + 1 tokens.
    """

    pass_ms: float
    draft_step: dict[int, float]
    scoring: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the theory makes of acceptance and costs, beside what was measured.

    Attributes:
        num_speculative_tokens: K.
        tokens_per_call: from acceptance by position at the largest K, theorem 3.8's numerator.
        speedup: of the loop, with the costs as they were measured.
        free: the same if scoring K + 1 tokens cost what one costs (Leviathan et al., theorem 3.8).
        measured: of the loop: prompts apart, and end of sequence and full budget included.
        loop_over_parts: a round / what it is made of: what theory leaves out.
    """

    num_speculative_tokens: int
    tokens_per_call: float
    speedup: float
    free: float
    measured: float
    loop_over_parts: float | None = None


def costs_of(rows: Sequence[summary.Row]) -> Costs | None:
    """The costs at every K of rows of one setting; None where no parts were timed."""
    base = next(row for row in rows if row.sampler == race.BASELINE)
    costs = {row.num_speculative_tokens: row.costs for row in rows if row.costs}
    if not costs:
        return None
    return Costs(
        1e3 * base.parts.scoring,
        {K: each.draft_step for K, each in costs.items()},
        {K: each.scoring for K, each in costs.items()},
    )


def rates_of(rows: Sequence[summary.Row]) -> list[float | None]:
    """Acceptance by position at the largest K of rows of one setting; [] where none drafted.

    None of a position that was never reached.
    """
    ours = [row for row in rows if row.sampler == "SpS" and row.acceptance_by_position]
    if not ours:
        return []
    return max(ours, key=lambda row: row.num_speculative_tokens).acceptance_by_position


def filled(rates: Sequence[float | None]) -> list[float]:
    """A position that was never reached is taken to be as the one before it."""
    found: list[float] = []
    for rate in rates:
        found.append(found[-1] if rate is None else rate)
    return found


def predict(
    rows: Sequence[summary.Row], rates: Sequence[float | None], costs: Costs
) -> list[Predicted]:
    """What is expected of each row of speculative sampling, of one setting with its baseline."""
    rates = filled(rates)
    ours = [row for row in rows if row.sampler == "SpS" and row.acceptance_by_position]
    found = []
    for row in ours:
        K = row.num_speculative_tokens
        found.append(
            Predicted(
                K,
                tokens_per_call=theory.block_efficiency(rates, K),
                speedup=theory.speedup(rates, K, costs.draft_step[K], costs.scoring[K]),
                free=theory.speedup(rates, K, costs.draft_step[K]),
                measured=row.loop_speedup,
                loop_over_parts=row.loop_over_parts,
            )
        )
    return found
