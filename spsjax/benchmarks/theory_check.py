"""Speed-up of the loop that theory predicts from measured acceptance rates and costs."""

import dataclasses
from collections.abc import Sequence

from spsjax.benchmarks.summary import SystemSummary, largest_k
from spsjax.benchmarks.systems import Role
from spsjax.planning import theory


@dataclasses.dataclass(frozen=True)
class LoopCosts:
    """Cost breakdown of a round, in passes of the target over one token."""

    pass_ms: float  # time of that pass
    draft_step: dict[int, float]  # cost per draft token, by K
    scoring: dict[int, float]  # cost of the pass over K + 1 tokens, by K


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted figures of speculative sampling at one K, with the measured ones."""

    num_speculative_tokens: int  # K
    # New tokens per target call predicted from the acceptance rates by position at the largest K:
    # numerator of theorem 3.8.
    block_efficiency: float
    # Speed-up if scoring K + 1 tokens costs what scoring one costs (Leviathan et al. 2022, theorem
    # 3.8).
    predicted_speedup: float
    cost_aware_speedup: float  # speed-up with the measured cost of scoring
    loop_speedup: float  # measured speed-up, prompts excluded
    # Time of a round over the sum of its costs, a ratio that the theory assumes to be 1.
    round_over_cost: float | None = None


def loop_costs(summaries: Sequence[SystemSummary]) -> LoopCosts | None:
    """Returns the costs by K from the summaries of one setting; None if no round was timed."""
    base = next(summary for summary in summaries if summary.role == Role.BASELINE)
    costs = {
        summary.num_speculative_tokens: summary.relative_cost
        for summary in summaries
        if summary.role == Role.SPECULATIVE and summary.relative_cost
    }
    if not costs:
        return None
    return LoopCosts(
        1e3 * base.round_cost.scoring,
        {K: cost.draft_step for K, cost in costs.items()},
        {K: cost.scoring for K, cost in costs.items()},
    )


def acceptance_rates(summaries: Sequence[SystemSummary]) -> list[float | None]:
    """Returns the acceptance rates by position at the largest K of one setting.

    An unreached position has None; the list is empty if nothing was drafted.
    """
    return next((s.acceptance_by_position for s in largest_k(_drafted(summaries))), [])


def predict(
    summaries: Sequence[SystemSummary], rates: Sequence[float | None], costs: LoopCosts
) -> list[Prediction]:
    """Returns a prediction per summary of speculative sampling in one setting."""
    rates = theory.fill_unreached(rates)
    predictions = []
    for summary in _drafted(summaries):
        K = summary.num_speculative_tokens
        draft_step, scoring = costs.draft_step[K], costs.scoring[K]
        predictions.append(
            Prediction(
                K,
                block_efficiency=theory.block_efficiency(rates, K),
                predicted_speedup=theory.speedup(rates, K, draft_step),
                cost_aware_speedup=theory.speedup(rates, K, draft_step, scoring),
                loop_speedup=summary.loop_speedup,
                round_over_cost=summary.round_over_cost,
            )
        )
    return predictions


def _drafted(summaries: Sequence[SystemSummary]) -> list[SystemSummary]:
    return [
        summary
        for summary in summaries
        if summary.role == Role.SPECULATIVE and summary.acceptance_by_position
    ]
