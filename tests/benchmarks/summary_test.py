"""Summaries of records whose figures are known."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from spsjax import SamplingParams
from spsjax.benchmarks import summary
from spsjax.benchmarks.systems import Role
from spsjax.benchmarks.tasks import base


@dataclasses.dataclass(frozen=True)
class Known(base.Task):
    """Task of eight prompts whose records the tests make up."""

    settings: ClassVar = {"warm": SamplingParams()}
    max_new_tokens = 9

    def examples(self):
        for name in "abcdefgh":
            yield base.Example(name, (name,), group="late" if name > "d" else "early")

    def scores(self, example, answers):
        return {"length": float(len(answers[0]))}


def record(system, example, tokens, seconds, **more):
    """Returns a record; the system "ArS" is the baseline."""
    role = Role.BASELINE if system == "ArS" else Role.SPECULATIVE
    fields = {
        "setting": "warm", "system": system, "num_speculative_tokens": 0, "example": example,
        "turn": 0, "sample": 0, "repetition": 0, "group": "", "role": str(role), "greedy": False,
        "tokens": tokens, "seconds": seconds, "compile_seconds": 0.0,
    }  # fmt: skip
    return fields | more


def test_summarize_finds_systems_of_other_distributions():
    records = [
        record(name, example, [token] * 10, seconds, text="x" * length)
        for number, example in enumerate("abcdefgh")
        for name, token, length, seconds in (("ArS", 1, 2, 1.0), ("other", 2, 3, 1.0 + number))
    ]
    scores = summary.score_examples(Known(), list(Known().examples()), records)
    ars, other = summary.summarize(records, scores)
    assert not ars.score_differences and not ars.p_values and ars.ms_per_token_std == 0
    assert other.score_differences == {"length": (1.0, (1.0, 1.0))}
    assert other.p_values["length"] == pytest.approx(2 / 256)
    assert other.p_values["1-grams"] == pytest.approx(2 / 256)
    low, high = other.speedup_interval
    assert other.speedup == pytest.approx(1 / 4.5) and low < other.speedup < high
    assert other.ms_per_token_std == pytest.approx(100 * np.std(range(8)))
    assert other.latency_ms == pytest.approx({50: 4500, 90: 7300, 99: 7930})


def test_summarize_without_baseline_compares_nothing():
    records = [record(name, "a", [7], 1.0) for name in ("one", "other")]
    assert all(system.speedup is None for system in summary.summarize(records))
    records.append(record("ArS", "a", [7], 3.0))
    speedups = [system.speedup for system in summary.summarize(records)]
    assert speedups == [3.0, 3.0, None]


def test_summarize_counts_only_examples_that_all_completed():
    records = [record("ArS", name, [7], 1.0) for name in "ab"]
    records.append(record("SpS", "b", [7], 1.0))
    assert [system.num_examples for system in summary.summarize(records)] == [1, 1]


def test_summarize_weights_spread_by_tokens():
    """A short text has little weight in the standard deviation."""
    records = [record("ArS", example, [7] * n, 1.0) for example, n in (("a", 1), ("b", 9))]
    (system,) = summary.summarize(records)
    assert system.ms_per_token == pytest.approx(200)
    variance = (800**2 + 9 * (1000 / 9 - 200) ** 2) / 10
    assert system.ms_per_token_std**2 == pytest.approx(variance)


def test_summarize_merges_repetitions_by_medians():
    """The times of a sample are the medians of its repetitions; compile times add up."""
    times = ((0, 9.0, 1.0), (1, 4.0, 2.0), (2, 5.0, 3.0))
    records = [
        record("ArS", "a", [7] * 2, seconds, repetition=repetition, prompt_seconds=prompt,
               target_calls=2, proposed_tokens=0, accepted_histogram=[2], compile_seconds=1.0,
               round_cost={"draft_step": 0.0, "scoring": seconds / 10})
        for repetition, seconds, prompt in times
    ]  # fmt: skip
    (system,) = summary.summarize(records)
    assert system.ms_per_token == pytest.approx(5e3 / 2) and system.num_texts == 1
    assert system.ms_per_round == pytest.approx(1e3)  # loops of 8, 2 and 2 s, of two rounds each
    assert system.round_cost.scoring == pytest.approx(0.5)
    assert system.compile_seconds == 3
    assert system.first_token_ms == pytest.approx(3e3 + 1e3)  # the prompt and one round
    assert system.cold_first_token_ms == pytest.approx(4e3 + 3e3)


def test_summarize_shares_cold_times_between_settings():
    """Only the first setting of a system compiles its programs, or a measurement before it."""
    counts = {"prompt_seconds": 1.0, "target_calls": 1, "accepted_histogram": [1]}
    counts["proposed_tokens"] = 0
    records = [
        record("ArS", example, [7], seconds, **counts | {"setting": setting, "compile_seconds": c})
        for setting, seconds, c in (("warm", 2.0, 5.0), ("greedy", 3.0, 0.0))
        for example in "ab"
    ]
    systems = summary.summarize(records)
    assert [system.first_token_ms for system in systems] == [2e3, 3e3]
    assert [system.cold_first_token_ms for system in systems] == [7e3, 7e3]
    earlier = [dataclasses.replace(systems[0], cold_first_token_ms=9e3)]
    shared = summary.share_cold_times(systems, earlier)
    assert [system.cold_first_token_ms for system in shared] == [9e3, 9e3]


def test_summarize_compares_loops_at_the_same_examples():
    """A machine that slows down at some examples changes no ratio to the baseline."""
    records = [
        record(name, example, [7] * 30, 5.0 + calls * round_seconds * slow,
               num_speculative_tokens=K, prompt_seconds=5.0, target_calls=calls,
               proposed_tokens=K * calls, accepted_histogram=[0, 0, calls][: K + 1],
               round_cost={"draft_step": draft_step * slow, "scoring": scoring * slow})
        for example, slow in (("a", 1), ("b", 100), ("c", 3))
        for name, K, calls, round_seconds, draft_step, scoring in (
            ("ArS", 0, 30, 1.1, 0.0, 1.0), ("SpS", 2, 10, 2.2, 0.2, 1.6),
        )
    ]  # fmt: skip
    ars, sps = summary.summarize(records)
    assert sps.block_efficiency == 3 and sps.loop_speedup == pytest.approx(3 * 1.1 / 2.2)
    assert sps.relative_cost.draft_step == pytest.approx(0.2)
    assert sps.relative_cost.scoring == pytest.approx(1.6)
    assert sps.predicted_speedup == pytest.approx(3 / (2 * 0.2 + 1))
    assert ars.round_over_cost == pytest.approx(1.1)
    assert sps.round_over_cost == pytest.approx(2.2 / (2 * 0.2 + 1.6))
    assert ars.relative_cost is ars.loop_speedup is ars.predicted_speedup is None


def test_acceptance_by_position_counts_reached_positions():
    """Of 10 rounds 4 accepted no token, 3 one, 0 two, 3 three; a position may not be reached."""
    assert summary.acceptance_by_position([4, 3, 0, 3]) == [0.6, 0.5, 1.0]
    assert summary.acceptance_by_position([5, 0, 0]) == [0.0, None]
