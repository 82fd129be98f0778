"""What the records of several samplers say: time, tokens a call, quality, and if they differ."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from spsjax.evaluation import race, runner, significance
from spsjax.evaluation.tasks.base import Example, Task
from spsjax.performance import microbenchmarks

Interval = tuple[float, float] | None  # None: of too few examples
Scores = Mapping[tuple, Mapping[str, Mapping[str, float]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One sampler in one setting, over all examples. Intervals are of 95%, over examples.

    Attributes:
        ms_per_token: whole calls, prompts included.
        spread_ms: its standard deviation over texts, each weighed by its tokens.
        latency_ms: of a call, by percentile: 50, 90, 99.
        tokens_per_call: new tokens a target call; None where the sampler does not say.
        acceptance: accepted / proposed draft tokens; None where none was proposed.
        acceptance_by_position: as `race.acceptance_by_position` has it.
        ms_per_round: of the loop, prompts apart.
        parts: what a round is made of, each alone: medians over examples; None where not timed.
        loop_over_parts: a round / (K draft steps + scoring), median over examples.
        costs: `parts` in passes of the first sampler at the same example: medians of ratios, which
            a machine that drifts leaves as they are.
        speedup, speedup_interval: over the first sampler; None for itself.
        loop_speedup: the same of the loop, prompts apart: tokens a call x the median over examples
            of the first sampler's round / this one's.
        metrics: of the task: mean and interval.
        differences: of those means from the first sampler's, on the same examples, and intervals.
        chances: p values of being the first sampler: of each metric, "1-grams" and "2-grams".
    """

    setting: str
    sampler: str
    num_speculative_tokens: int
    examples: int
    texts: int
    tokens: int
    ms_per_token: float
    spread_ms: float
    latency_ms: dict[int, float]
    tokens_per_call: float | None = None
    acceptance: float | None = None
    acceptance_by_position: list[float | None] | None = None
    ms_per_round: float | None = None
    parts: microbenchmarks.Parts | None = None
    loop_over_parts: float | None = None
    costs: microbenchmarks.Parts | None = None
    speedup: float | None = None
    speedup_interval: Interval | None = None
    loop_speedup: float | None = None
    metrics: dict[str, tuple[float, Interval]] = dataclasses.field(default_factory=dict)
    differences: dict[str, tuple[float, Interval]] = dataclasses.field(default_factory=dict)
    chances: dict[str, float] = dataclasses.field(default_factory=dict)


def scores_of(
    task: Task, examples: Sequence[Example], records: Sequence[dict], progress=iter
) -> Scores:
    """Who (`side_by_side.WHO`) -> metric -> example -> value."""
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for example, who, texts in progress(list(runner.answers(task, examples, records))):
        for metric, value in task.scores(example, texts).items():
            found.setdefault(who, {}).setdefault(metric, {})[example.name] = value
    return found


def rows(records: Sequence[dict], scores: Scores) -> list[Row]:
    """A row for each setting and sampler; the first sampler of a setting is the baseline.

    Only examples that every sampler of the setting has done count.
    """
    by_who: dict[tuple, dict[str, list[dict]]] = {}
    for record in records:
        examples = by_who.setdefault(runner.who(record), {})
        examples.setdefault(record["example"], []).append(record)
    found = []
    for setting in dict.fromkeys(who[0] for who in by_who):
        mine = {who: examples for who, examples in by_who.items() if who[0] == setting}
        base, first = next(iter(mine.items()))
        names = [name for name in first if all(name in each for each in mine.values())]
        for who, examples in mine.items() if names else ():
            part = [examples[name] for name in names]
            row = _row(who, part, names, scores.get(who, {}))
            if who != base:
                base_part = [first[name] for name in names]
                pair = scores.get(who, {}), scores.get(base, {})
                row = _against(row, part, base_part, names, *pair)
                if row.tokens_per_call and "target_calls" in base_part[0][0]:
                    row = _beside(row, part, base_part)
            found.append(row)
    return found


def _per_token(part: Sequence[Sequence[dict]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens of each example."""
    seconds = [sum(record["seconds"] for record in records) for records in part]
    tokens = [sum(len(record["tokens"]) for record in records) for records in part]
    return np.asarray(seconds), np.asarray(tokens, float)


def _row(who: tuple, part: Sequence[Sequence[dict]], names, scores) -> Row:
    seconds, tokens = _per_token(part)
    records = [record for each in part for record in each]
    latencies = [1e3 * record["seconds"] for record in records]
    lengths = [max(len(record["tokens"]), 1) for record in records]
    ms_per_token = 1e3 * seconds.sum() / tokens.sum()
    apart = [
        1e3 * record["seconds"] / length - ms_per_token for record, length in zip(records, lengths)
    ]
    metrics = {}
    for metric, by_name in scores.items():
        values = [by_name[name] for name in names if name in by_name]
        if values:
            metrics[metric] = float(np.mean(values)), significance.interval_of_mean(values)
    row = Row(
        *who,
        examples=len(part),
        texts=len(records),
        tokens=int(tokens.sum()),
        ms_per_token=float(ms_per_token),
        spread_ms=float(np.sqrt(np.average(np.square(apart), weights=lengths))),
        latency_ms={level: float(np.percentile(latencies, level)) for level in (50, 90, 99)},
        metrics=metrics,
    )
    calls = sum(record.get("target_calls", 0) for record in records)
    if not calls:
        return row
    histogram = np.sum([record["accepted"] for record in records], axis=0)
    proposed = sum(record["proposed"] for record in records)
    loops = sum(map(_loop, records))
    positions = race.acceptance_by_position(histogram) if proposed else None
    timed = [(_round(each), parts) for each in part if (parts := _parts(each))]
    over = [loop / parts.together(row.num_speculative_tokens) for loop, parts in timed]
    return dataclasses.replace(
        row,
        tokens_per_call=float(tokens.sum() / calls),
        acceptance=float(np.arange(len(histogram)) @ histogram / proposed) if proposed else None,
        acceptance_by_position=positions,
        ms_per_round=1e3 * loops / calls,
        parts=microbenchmarks.median([parts for _, parts in timed]) if timed else None,
        loop_over_parts=float(np.median(over)) if timed else None,
    )


def _loop(record: dict) -> float:
    """Its seconds, prompt apart."""
    return record["seconds"] - record["prompt_seconds"]


def _round(records: Sequence[dict]) -> float:
    """Seconds a round of the loop, of one example."""
    return sum(map(_loop, records)) / sum(record["target_calls"] for record in records)


def _parts(records: Sequence[dict]) -> microbenchmarks.Parts | None:
    """What a round of one example is made of."""
    timed = [microbenchmarks.Parts(**record["parts"]) for record in records if "parts" in record]
    return microbenchmarks.median(timed) if timed else None


def _beside(row: Row, part, base_part) -> Row:
    """The row with its loop's figures in those of the baseline, at the same examples."""
    pairs = list(zip(part, base_part))
    rounds = [_round(base) / _round(ours) for ours, base in pairs]
    timed = [(_parts(ours), _parts(base)) for ours, base in pairs]
    costs = [
        microbenchmarks.Parts(ours.draft_step / base.scoring, ours.scoring / base.scoring)
        for ours, base in timed
        if ours and base
    ]
    return dataclasses.replace(
        row,
        loop_speedup=float(row.tokens_per_call * np.median(rounds)),
        costs=microbenchmarks.median(costs) if costs else None,
    )


def _against(row: Row, part, base_part, names, scores, base_scores) -> Row:
    """The row with what sets it apart from the baseline, or does not."""
    (seconds, tokens), (base_seconds, base_tokens) = _per_token(part), _per_token(base_part)

    def speedup(base_seconds, base_tokens, seconds, tokens):
        return (base_seconds.sum() / base_tokens.sum()) / (seconds.sum() / tokens.sum())

    columns = base_seconds, base_tokens, seconds, tokens
    chances, differences = {}, {}
    for metric, by_name in scores.items():
        others = base_scores.get(metric, {})
        both = [name for name in names if name in by_name and name in others]
        one, other = ([values[name] for name in both] for values in (by_name, others))
        chances[metric] = significance.chance_of_difference(one, other)
        apart = np.subtract(one, other)
        differences[metric] = float(apart.mean()), significance.interval(np.mean, apart)
    texts = [
        [[record["tokens"] for record in records] for records in each] for each in (part, base_part)
    ]
    for n in (1, 2):
        chances[f"{n}-grams"] = significance.chance_of_ngrams(*texts, n)
    return dataclasses.replace(
        row,
        speedup=float(speedup(*columns)),
        speedup_interval=significance.interval(speedup, *columns),
        differences=differences,
        chances=chances,
    )
