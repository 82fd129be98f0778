"""Summaries of the records of several systems: time, acceptance, quality, and significance."""

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from spsjax.benchmarks import microbenchmarks, runner, significance
from spsjax.benchmarks.significance import Interval
from spsjax.benchmarks.systems import Role
from spsjax.benchmarks.tasks.base import Example, Task

Scores = Mapping[tuple, Mapping[str, Mapping[str, float]]]
Examples = Sequence[Sequence[dict]]  # the records of one system, by example

PERCENTILES = 50, 90, 99


@dataclasses.dataclass(frozen=True)
class SystemSummary:
    """Figures of one system in one setting, over all examples.

    Intervals are 95% confidence intervals over examples. A figure is None if the system does not
    report its inputs, or if it needs a baseline and there is none.
    """

    # `runner.SYSTEM_FIELDS`.
    setting: str
    system: str
    num_speculative_tokens: int
    role: Role  # role of the system in the comparison
    # Size of the sample.
    num_examples: int
    num_texts: int
    num_tokens: int
    ms_per_token: float  # time per token of whole calls, prompts included, compile time excluded
    ms_per_token_std: float  # standard deviation of `ms_per_token` over texts, weighted by tokens
    latency_ms: dict[int, float]  # time per call by percentile
    compile_seconds: float = 0.0  # total compile time, which else `cold_first_token_ms` includes
    # Time to the first token without compilation: mean over texts of the time of the prompt and of
    # one round.
    first_token_ms: float | None = None
    # The longest one with compilation, or with reading what an earlier process compiled. What other
    # systems compiled before is not compiled again.
    cold_first_token_ms: float | None = None
    block_efficiency: float | None = None  # new tokens per target call
    # Accepted / proposed draft tokens; None without proposed tokens.
    acceptance_rate: float | None = None
    # Acceptance rate per position (`acceptance_by_position`).
    acceptance_by_position: list[float | None] | None = None
    ms_per_round: float | None = None  # time per round of the loop, prompts excluded
    # Cost breakdown of a round, timed separately: medians over examples.
    round_cost: microbenchmarks.RoundCost | None = None
    # `round_cost` in the baseline's passes on the same example: medians of ratios, which do not
    # depend on a machine's drift.
    relative_cost: microbenchmarks.RoundCost | None = None
    # Time of a round / (K draft steps + scoring), median over examples.
    round_over_cost: float | None = None
    # Baseline's time per token over that of this system.
    speedup: float | None = None
    speedup_interval: Interval = None
    # Speed-up of the loop, prompts excluded: block efficiency x the median over examples of the
    # baseline's time per round over that of this system.
    loop_speedup: float | None = None
    # Block efficiency / (K draft steps + 1), in passes of the target: the speed-up if scoring K + 1
    # positions costs no more than scoring one.
    predicted_speedup: float | None = None
    # Whether all tokens equal the baseline's; None if the setting is not greedy.
    same_tokens: bool | None = None
    # Mean and interval per metric of the task.
    scores: dict[str, tuple[float, Interval]] = dataclasses.field(default_factory=dict)
    # Differences from the baseline's means on the same examples, with intervals.
    score_differences: dict[str, tuple[float, Interval]] = dataclasses.field(default_factory=dict)
    # Probability of a difference at least as large if the system were the baseline, per metric and
    # for "1-grams" and "2-grams".
    p_values: dict[str, float] = dataclasses.field(default_factory=dict)


def acceptance_by_position(histogram: Sequence[int]) -> list[float | None]:
    """Returns the acceptance rate per position among the rounds that reach it; None without rounds.

    A round without draft tokens counts as one that accepts none, and a chain that ends early as
    rejected at its end.

    Args:
        histogram: [K+1] number of rounds by number of accepted draft tokens.
    """
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1]
    pairs = itertools.pairwise(reached)
    return [float(after / before) if before else None for before, after in pairs]


def score_examples(
    task: Task, examples: Sequence[Example], records: Sequence[dict], progress=iter
) -> Scores:
    """Returns the scores by system (`runner.SYSTEM_FIELDS`), metric and example."""
    scores: dict[tuple, dict[str, dict[str, float]]] = {}
    answered = list(runner.final_answers(task, examples, records))
    for example, key, texts in progress(answered):
        for metric, value in task.scores(example, texts).items():
            scores.setdefault(key, {}).setdefault(metric, {})[example.name] = value
    return scores


def summarize(records: Sequence[dict], scores: Scores | None = None) -> list[SystemSummary]:
    """Returns one summary per setting and system, in the order of the records.

    Only examples that every system of a setting has completed count. Systems are compared with the
    system of their setting whose role is `Role.BASELINE`.
    """
    scores = scores or {}
    by_system: dict[tuple, dict[str, list[dict]]] = {}
    for record in _merge_repetitions(records):
        examples = by_system.setdefault(runner.system_key(record), {})
        examples.setdefault(record["example"], []).append(record)
    summaries = []
    for setting in dict.fromkeys(key[0] for key in by_system):
        systems = {key: examples for key, examples in by_system.items() if key[0] == setting}
        first, *others = systems.values()
        names = [name for name in first if all(name in examples for examples in others)]
        if not names:
            continue
        chosen = {key: [examples[name] for name in names] for key, examples in systems.items()}
        roles = {key: examples[0][0]["role"] for key, examples in chosen.items()}
        base = next((key for key in chosen if roles[key] == Role.BASELINE), None)
        for key, examples in chosen.items():
            summary = _summarize_system(key, examples, names, scores.get(key, {}))
            if base is not None and key != base:
                pair = scores.get(key, {}), scores.get(base, {})
                summary = _compare(summary, examples, chosen[base], names, *pair)
            summaries.append(summary)
    return share_cold_times(summaries)


def share_cold_times(
    systems: Sequence[SystemSummary], earlier: Sequence[SystemSummary] = ()
) -> list[SystemSummary]:
    """Returns summaries with the longest cold time of their system in any setting.

    Settings of a system share its programs, so that only the first one compiles them. `earlier` are
    summaries of measurements before these, in the same process.
    """
    longest: dict[tuple, float] = {}
    for summary in (*earlier, *systems):
        key = summary.system, summary.num_speculative_tokens
        longest[key] = max(longest.get(key, 0.0), summary.cold_first_token_ms or 0.0)
    return [
        summary
        if summary.cold_first_token_ms is None
        else dataclasses.replace(
            summary, cold_first_token_ms=longest[summary.system, summary.num_speculative_tokens]
        )
        for summary in systems
    ]


def _merge_repetitions(records: Sequence[dict]) -> list[dict]:
    """Returns one record per sample, with the median times of its repetitions."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        key = tuple(record[name] for name in runner.RECORD_KEY if name != "repetition")
        groups.setdefault(key, []).append(record)
    return [_median_record(group) if len(group) > 1 else group[0] for group in groups.values()]


def _median_record(group: Sequence[dict]) -> dict:
    seconds = statistics.median(record["seconds"] for record in group)
    merged = group[0] | {
        "seconds": seconds,
        "compile_seconds": sum(record["compile_seconds"] for record in group),
    }
    if "prompt_seconds" in merged:
        merged["prompt_seconds"] = seconds - statistics.median(map(_loop_seconds, group))
    if (cost := _round_cost(group)) is not None:
        merged["round_cost"] = dataclasses.asdict(cost)
    return merged


def _summarize_system(key: tuple, examples: Examples, names, scores) -> SystemSummary:
    seconds, tokens = _totals(examples)
    records = list(itertools.chain.from_iterable(examples))
    latencies = [1e3 * record["seconds"] for record in records]
    lengths = [max(len(record["tokens"]), 1) for record in records]
    ms_per_token = 1e3 * seconds.sum() / tokens.sum()
    deviations = [
        1e3 * record["seconds"] / length - ms_per_token for record, length in zip(records, lengths)
    ]
    means = {}
    for metric, by_name in scores.items():
        values = [by_name[name] for name in names if name in by_name]
        if values:
            means[metric] = float(np.mean(values)), significance.mean_interval(values)
    summary = SystemSummary(
        *key,
        role=Role(records[0]["role"]),
        num_examples=len(examples),
        num_texts=len(records),
        num_tokens=int(tokens.sum()),
        ms_per_token=float(ms_per_token),
        ms_per_token_std=float(np.sqrt(np.average(np.square(deviations), weights=lengths))),
        latency_ms={level: float(np.percentile(latencies, level)) for level in PERCENTILES},
        compile_seconds=sum(record["compile_seconds"] for record in records),
        scores=means,
    )
    if not sum(record.get("target_calls", 0) for record in records):
        return summary
    return dataclasses.replace(summary, **_loop_figures(examples, summary.num_speculative_tokens))


def _loop_figures(examples: Examples, K: int) -> dict:
    """Returns the figures that are computed from the counts of the loop."""
    records = list(itertools.chain.from_iterable(examples))
    calls = sum(record["target_calls"] for record in records)
    tokens = sum(len(record["tokens"]) for record in records)
    histogram = np.sum([record["accepted_histogram"] for record in records], axis=0)
    proposed = sum(record["proposed_tokens"] for record in records)
    figures = {
        "block_efficiency": float(tokens / calls),
        "ms_per_round": 1e3 * sum(map(_loop_seconds, records)) / calls,
        "first_token_ms": 1e3 * statistics.mean(map(_first_token_seconds, records)),
        "cold_first_token_ms": 1e3
        * max(_first_token_seconds(record) + record["compile_seconds"] for record in records),
    }
    if proposed:
        accepted = np.arange(len(histogram)) @ histogram
        figures["acceptance_rate"] = float(accepted / proposed)
        figures["acceptance_by_position"] = acceptance_by_position(histogram)
    timed = [
        (_seconds_per_round(group), cost) for group in examples if (cost := _round_cost(group))
    ]
    if timed:
        figures["round_cost"] = microbenchmarks.median([cost for _, cost in timed])
        ratios = [seconds / cost.total(K) for seconds, cost in timed]
        figures["round_over_cost"] = float(np.median(ratios))
    return figures


def _compare(
    summary: SystemSummary, examples: Examples, baseline: Examples, names, scores, base_scores
) -> SystemSummary:
    """Returns the summary with its figures relative to the baseline."""
    columns = *_totals(baseline), *_totals(examples)
    p_values, differences = {}, {}
    for metric, by_name in scores.items():
        base_by_name = base_scores.get(metric, {})
        shared = [name for name in names if name in by_name and name in base_by_name]
        values, base_values = ([side[name] for name in shared] for side in (by_name, base_by_name))
        p_values[metric] = significance.paired_p_value(values, base_values)
        deltas = np.subtract(values, base_values)
        interval = significance.bootstrap_interval(np.mean, deltas)
        differences[metric] = float(deltas.mean()), interval
    texts, base_texts = (
        [[record["tokens"] for record in group] for group in side] for side in (examples, baseline)
    )
    for n in (1, 2):
        p_values[f"{n}-grams"] = significance.ngram_p_value(texts, base_texts, n)
    summary = dataclasses.replace(
        summary,
        speedup=float(_speedup(*columns)),
        speedup_interval=significance.bootstrap_interval(_speedup, *columns),
        same_tokens=texts == base_texts if examples[0][0]["greedy"] else None,
        score_differences=differences,
        p_values=p_values,
    )
    if summary.block_efficiency is None or "target_calls" not in baseline[0][0]:
        return summary
    return _compare_loops(summary, examples, baseline)


def _speedup(base_seconds, base_tokens, seconds, tokens, axis=-1):
    base = base_seconds.sum(axis=axis) / base_tokens.sum(axis=axis)
    return base / (seconds.sum(axis=axis) / tokens.sum(axis=axis))


def _compare_loops(summary: SystemSummary, examples: Examples, baseline: Examples) -> SystemSummary:
    """Returns the summary with figures of its loop relative to the baseline's."""
    ratios = [
        _seconds_per_round(base) / _seconds_per_round(group)
        for group, base in zip(examples, baseline)
    ]
    figures = {"loop_speedup": float(summary.block_efficiency * np.median(ratios))}
    pairs = [(_round_cost(group), _round_cost(base)) for group, base in zip(examples, baseline)]
    costs = [
        microbenchmarks.RoundCost(cost.draft_step / base.scoring, cost.scoring / base.scoring)
        for cost, base in pairs
        if cost and base
    ]
    if costs:
        cost = microbenchmarks.median(costs)
        passes = summary.num_speculative_tokens * cost.draft_step + 1
        figures["relative_cost"] = cost
        figures["predicted_speedup"] = summary.block_efficiency / passes
    return dataclasses.replace(summary, **figures)


def _totals(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds and the tokens per example."""
    seconds = [sum(record["seconds"] for record in group) for group in examples]
    tokens = [sum(len(record["tokens"]) for record in group) for group in examples]
    return np.asarray(seconds), np.asarray(tokens, float)


def _loop_seconds(record: dict) -> float:
    """Returns the seconds of a call without its prompt."""
    return record["seconds"] - record["prompt_seconds"]


def _first_token_seconds(record: dict) -> float:
    """Returns the seconds of a call until its first token, as `generation.Stats` defines them."""
    return record["prompt_seconds"] + _loop_seconds(record) / max(record["target_calls"], 1)


def _seconds_per_round(group: Sequence[dict]) -> float:
    """Returns the seconds per round of the loop of one example."""
    return sum(map(_loop_seconds, group)) / sum(record["target_calls"] for record in group)


def _round_cost(group: Sequence[dict]) -> microbenchmarks.RoundCost | None:
    """Returns the median cost breakdown of one example's rounds; None if they were not timed."""
    costs = [record["round_cost"] for record in group if "round_cost" in record]
    costs = [microbenchmarks.RoundCost(**cost) for cost in costs]
    return microbenchmarks.median(costs) if costs else None


def fastest(systems: Sequence[SystemSummary]) -> dict[str, SystemSummary]:
    """Returns the fastest speculative system per setting."""
    return _best([system for system in systems if system.speedup], "speedup")


def largest_k(systems: Sequence[SystemSummary]) -> list[SystemSummary]:
    """Returns the speculative system with the largest K per setting."""
    return list(_best(systems, "num_speculative_tokens").values())


def _best(systems: Sequence[SystemSummary], field: str) -> dict[str, SystemSummary]:
    """Returns the speculative system with the highest value of a field per setting."""
    best: dict[str, SystemSummary] = {}
    for system in systems:
        if system.role == Role.SPECULATIVE:
            known = best.get(system.setting, system)
            best[system.setting] = max(known, system, key=operator.attrgetter(field))
    return best
