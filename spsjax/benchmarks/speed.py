"""Speed of a pair: systems, prompts, and the lower bound from the memory's bandwidth."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from spsjax.benchmarks import runner, summary, workloads
from spsjax.benchmarks.records import Records
from spsjax.benchmarks.summary import SystemSummary
from spsjax.benchmarks.systems import Role, System, speculative_systems, spsjax_system
from spsjax.drafters import ngram
from spsjax.errors import InputError
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import transformer
from spsjax.planning import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config
from spsjax.utils.progress import Progress
from spsjax.verifiers.base import Verifier

_HEAD_DIM, _MOST_HEADS = 64, 256  # sizes of random models


def config_of_size(num_params: int, max_positions: int = 1024) -> transformer.Config:
    """Returns the narrowest config of 12 layers with at least `num_params` parameters."""

    def config(heads: int) -> transformer.Config:
        width = _HEAD_DIM * heads
        return transformer.Config(
            vocab_size=32_000,
            d_model=width,
            # Llama's ratio of 8 / 3 for a gated feed-forward layer, rounded up to 128.
            d_ff=-(-8 * width // 3 // 128) * 128,
            num_layers=12,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=_HEAD_DIM,
            max_positions=max_positions,
        )

    def count(heads: int) -> int:
        return transformer.num_params(transformer.param_shapes(config(heads)))

    most = count(_MOST_HEADS)
    if num_params > most:
        raise InputError(f"size: expected at most {most:,} parameters, found {num_params:,}")
    # Bisection, because shapes take long to compute and the count grows with the heads.
    heads = range(1, _MOST_HEADS + 1)
    return config(heads[bisect.bisect_left(heads, num_params, key=count)])


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """Result of `speed_benchmark`."""

    machine: dict[str, object]  # description of the machine (`hardware.machine`)
    weights_bytes: int  # bytes of the target's weights that a pass reads (`Model.num_bytes`)
    # Memory bandwidth in bytes per second (`hardware.memory_bandwidth`).
    bandwidth: dict[str, float]
    # Lower bound of the baseline's time per token: weights_bytes over the highest bandwidth.
    lower_bound_ms: float
    # Time per round of the baseline over that lower bound, by setting.
    baseline_over_bound: dict[str, float]
    prompts: list[str]  # names of the prompts
    systems: list[SystemSummary]  # summary per setting and system


def speed_benchmark(
    config,
    target: Model,
    draft: Model | LoadedDrafter | None,
    others: Sequence[System] = (),
    progress: Progress = iter,
    verifier: Verifier | None = None,
) -> SpeedReport:
    """Measures ArS, SpS over K, prompt lookup and other systems on the same prompts.

    `config` is like configs/experiments/benchmark.py. Without a draft, only the target is measured.
    The verifier applies to the drafter.
    """
    for field in ("prompts", "prompt_tokens", "max_new_tokens", "repetitions"):
        if config[field] < 1:
            raise InputError(f"{field}: expected at least 1, found {config[field]}")
    prompts = workloads.prompts_of(config, target)
    systems = [*_systems(config, target, draft, verifier), *others]
    before = hardware.memory_bandwidth()
    sizes = config.max_new_tokens, config.repetitions, config.seed, config.time_rounds
    settings = workloads.sampling_settings(config)
    summaries = compare_speed(systems, prompts, settings, *sizes, progress)
    # The best of two measurements: other processes must not make the lower bound look high.
    after = hardware.memory_bandwidth()
    bandwidth = {name: max(rate, after[name]) for name, rate in before.items()}
    lower_bound_ms = 1e3 * target.num_bytes / max(bandwidth.values())
    return SpeedReport(
        machine=hardware.machine(target),
        weights_bytes=target.num_bytes,
        bandwidth=bandwidth,
        lower_bound_ms=lower_bound_ms,
        baseline_over_bound={
            system.setting: system.ms_per_round / lower_bound_ms
            for system in summaries
            if system.role == Role.BASELINE
        },
        prompts=list(prompts),
        systems=summaries,
    )


def trial(
    config, target: Model, draft: Model | LoadedDrafter, progress: Progress = iter
) -> list[SystemSummary]:
    """Measures every K once on the first `config.trial_prompts` prompts, to find the fastest K."""
    prompts = itertools.islice(workloads.prompts_of(config, target).items(), config.trial_prompts)
    systems, settings = _systems(config, target, draft), workloads.sampling_settings(config)
    sizes = config.max_new_tokens, 1, config.seed
    return compare_speed(systems, dict(prompts), settings, *sizes, progress=progress)


def compare_speed(
    systems: Sequence[System],
    prompts: Mapping[str, list[int]],
    settings: Mapping[str, SamplingParams],
    max_new_tokens: int,
    repetitions: int,
    seed: int = 0,
    time_rounds: bool = False,
    progress: Progress = iter,
    records: Records | None = None,
    stop_at_eos: bool = False,
) -> list[SystemSummary]:
    """Returns a summary per setting and system.

    Of the repetitions per prompt, the median time counts. With `time_rounds`, the costs of a round
    are timed, too. `records` are empty records, which receive the texts of all systems. Without
    `stop_at_eos`, all texts have the same length.
    """
    if not prompts or repetitions < 1:
        raise InputError(
            "prompts, repetitions: expected at least one each, "
            f"found {len(prompts)} and {repetitions}"
        )
    records = Records(runner.RECORD_KEY) if records is None else records
    timed = frozenset(prompts if time_rounds else ())
    options = {"repetitions": repetitions, "timed": timed, "stop_at_eos": stop_at_eos}
    jobs = workloads.of_prompts(prompts, settings, max_new_tokens, seed, **options)
    runner.run_all(systems, jobs, records, progress)
    return summary.summarize(records.records)


def _systems(
    config,
    target: Model,
    draft: Model | LoadedDrafter | None,
    verifier: Verifier | None = None,
) -> list[System]:
    """Returns the systems of a config; the verifier applies to the drafter."""
    counts = config.num_speculative_tokens if draft else ()
    systems = [spsjax_system("ArS", target)]
    field = "num_speculative_tokens"
    systems += speculative_systems(target, draft, counts, field, verifier)
    if draft and config.ngram.num_speculative_tokens:
        lookup = from_config.build_section("ngram", ngram.Drafter, config.ngram)
        K = lookup.num_speculative_tokens
        systems.append(spsjax_system("n-gram", target, lookup, K, role=Role.ALTERNATIVE))
    return systems
