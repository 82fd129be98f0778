"""Contenders that continue the same prompts in turn, and what is said of each.

Everything that is compared is measured in one run, interleaved, so that a machine that slows down
slows all down; each prompt is continued with the same seed every time, so that repetitions differ
by noise alone and their median is a clean figure.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from spsjax.errors import InputError
from spsjax.evaluation.samplers import Sample, Sampler
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams

BASELINE = "ArS"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A sampler in one setting, always to the full budget so that all do the same work."""

    sampler: Sampler
    setting: str
    params: SamplingParams
    max_new_tokens: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Its name, its setting and K."""
        return self.sampler.name, self.setting, self.sampler.num_speculative_tokens

    def sample(self, prompt: list[int], seed: int) -> Sample:
        """One continuation."""
        return self.sampler.call(prompt, self.params, self.max_new_tokens, seed, stop_at_eos=False)

    def parts(self, prompt: list[int]) -> microbenchmarks.Parts | None:
        """What a round of it is made of, if that is known."""
        parts = self.sampler.parts
        return parts(prompt, self.params, self.max_new_tokens) if parts else None


@dataclasses.dataclass(frozen=True)
class Line:
    """A contender's figures over all prompts.

    Attributes:
        ms_per_token: whole calls, prompts included, without compile time.
        ms_per_round: of the loop alone.
        speedup: over `BASELINE` in the same setting.
        block_efficiency: tokens a target call.
        acceptance_rate: accepted / proposed draft tokens.
        acceptance_by_position: P(the i-th draft token is accepted | it is reached), a round that
            proposes nothing counting as one that accepts nothing; None where none was reached.
        loop_over_parts: `ms_per_round` / (K draft steps + scoring K + 1 positions).
        predicted_speedup: tokens a call x t_target / (K t_draft + t_target), with what `BASELINE`'s
            pass and a draft step take alone: that scoring K + 1 positions costs no more than one.
        same_text: whether the tokens are `BASELINE`'s, of each prompt, in a greedy setting.
        compile_seconds: of the first call.
    """

    name: str
    setting: str
    num_speculative_tokens: int
    ms_per_token: float
    speedup: float | None = None
    block_efficiency: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: list[float | None] | None = None
    ms_per_round: float | None = None
    loop_over_parts: float | None = None
    parts: microbenchmarks.Parts | None = None
    predicted_speedup: float | None = None
    same_text: bool | None = None
    compile_seconds: float | None = None


def run(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    repetitions: int,
    seed: int = 0,
    parts: bool = False,
    progress: Callable[[Sequence], Iterable] = iter,
) -> list[Line]:
    """Every contender on every prompt, in turn, `repetitions` times after one warm-up.

    With `parts`, those of a contender's round are timed right after it; `progress` wraps the list
    of what is to be done.
    """
    if not prompts or repetitions < 1:
        raise InputError(
            "prompts, repetitions: expected at least one each, "
            f"found {len(prompts)} and {repetitions}"
        )
    samples: dict[tuple, list[Sample]] = {}
    timed: dict[tuple, list[microbenchmarks.Parts]] = {}
    first: dict[tuple, Sample] = {}
    turns = [(-1, 0)] + [(turn, row) for turn in range(repetitions) for row in range(len(prompts))]
    for turn, row, each in progress([(*place, each) for place in turns for each in contenders]):
        key = each.key
        sample = each.sample(prompts[row], seed + row)
        if turn < 0:  # compiles, and is not counted
            first[key] = sample
        else:
            samples.setdefault((*key, row), []).append(sample)
        measured = each.parts(prompts[row]) if parts else None
        if measured and turn >= 0:
            timed.setdefault(key, []).append(measured)
    lines, texts = {}, {}
    for each in contenders:
        rows = [samples[*each.key, row] for row in range(len(prompts))]
        lines[each.key] = _line(each.key, rows, first[each.key], timed.get(each.key))
        texts[each.key] = [list(row[0].tokens) for row in rows]
    for each in contenders:
        key, greedy = each.key, not each.params.temperature
        base = BASELINE, each.setting, 0
        if base in lines:
            same = texts[key] == texts[base] if greedy and key != base else None
            lines[key] = dataclasses.replace(_compared(lines[key], lines[base]), same_text=same)
    return list(lines.values())


def _compared(line: Line, base: Line) -> Line:
    """The line with what can be said of it beside that of the baseline."""
    predicted = None
    if line.parts and base.parts and line.num_speculative_tokens:
        target, drafts = base.parts.scoring, line.num_speculative_tokens * line.parts.draft_step
        predicted = line.block_efficiency * target / (drafts + target)
    speedup = base.ms_per_token / line.ms_per_token
    return dataclasses.replace(line, speedup=speedup, predicted_speedup=predicted)


def _line(
    key: tuple[str, str, int],
    rows: list[list[Sample]],
    first: Sample,
    parts: list[microbenchmarks.Parts] | None,
) -> Line:
    name, setting, K = key
    seconds = sum(statistics.median(sample.seconds for sample in row) for row in rows)
    tokens = sum(len(row[0].tokens) for row in rows)
    line = Line(name, setting, K, 1e3 * seconds / tokens)
    if first.stats is None:
        return line
    stats = [row[0].stats for row in rows]  # counts are the same in every repetition
    calls = sum(one.target_calls for one in stats)
    histogram = np.sum([one.accepted_histogram for one in stats], axis=0)
    proposed = sum(one.proposed_tokens for one in stats)
    loops = sum(
        statistics.median(sample.seconds - sample.stats.prompt_seconds for sample in row)
        for row in rows
    )
    line = dataclasses.replace(
        line,
        block_efficiency=tokens / calls,
        acceptance_rate=float(np.arange(K + 1) @ histogram) / proposed if proposed else None,
        acceptance_by_position=acceptance_by_position(histogram) if K else None,
        ms_per_round=1e3 * loops / calls,
        compile_seconds=first.stats.compile_seconds,
    )
    if not parts:
        return line
    median = microbenchmarks.median(parts)
    over = loops / calls / median.together(K)
    return dataclasses.replace(line, parts=median, loop_over_parts=over)


def acceptance_by_position(histogram: Sequence[int]) -> list[float | None]:
    """[K+1] rounds by how many drafts they accepted -> [K] chances of one that is reached."""
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1]
    pairs = itertools.pairwise(reached)
    return [float(after / before) if before else None for before, after in pairs]
