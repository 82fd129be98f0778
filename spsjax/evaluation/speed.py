"""Speed of a pair: systems, prompts, and the lower bound that the memory's bandwidth sets."""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from spsjax import request
from spsjax.data import documents
from spsjax.data.documents import Sources
from spsjax.drafters import ngram
from spsjax.errors import InputError
from spsjax.evaluation import runner, samplers, summary
from spsjax.evaluation.journal import Records
from spsjax.evaluation.samplers import Role, System
from spsjax.evaluation.summary import SystemSummary
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.performance import hardware
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer
from spsjax.utils import from_config
from spsjax.verifiers.base import Verifier

_HEAD_DIM, _MOST_HEADS = 64, 256  # of the random models


def held_out_prompts(
    tokenizer: Tokenizer, count: int, length: int, sources: Sources
) -> dict[str, list[int]]:
    """Returns the first `length` tokens of `count` held-out documents, by name.

    The choice is fixed: documents of at least twice that length, in the order of the hashes of
    their names.
    """
    texts = {document.name: document.text for document in documents.held_out(sources)}
    prompts = {}
    for name in sorted(texts, key=_hash):
        tokens = tokenizer.encode(texts[name])
        if len(tokens) >= 2 * length:
            prompts[name] = tokens[:length]
        if len(prompts) >= count:
            break
    else:
        raise InputError(
            f"prompts: expected at most {len(prompts)} (held-out documents of {2 * length} "
            f"tokens), found {count}"
        )
    return prompts


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def random_prompts(vocab_size: int, count: int, length: int) -> dict[str, list[int]]:
    """Returns prompts of random tokens by name, for a model without a tokenizer."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (count, length))
    return {f"random {row}": tokens[row].tolist() for row in range(count)}


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
    # Shapes take long to compute, and the count grows with the heads.
    heads = range(1, _MOST_HEADS + 1)
    return config(heads[bisect.bisect_left(heads, num_params, key=count)])


@dataclasses.dataclass(frozen=True)
class SpeedReport:
    """Result of `speed_benchmark`.

    Attributes:
        machine: description of the machine (`hardware.machine`).
        weights_bytes: size of the target's weights, which a pass reads once (`Model.num_bytes`).
        bandwidth: memory bandwidth in bytes per second (`hardware.memory_bandwidth`).
        lower_bound_ms: weights_bytes / the highest bandwidth: least time per token of the baseline.
        baseline_over_bound: time per round of the baseline over that lower bound, by setting.
        prompts: names of the prompts.
        systems: summary per setting and system.
    """

    machine: dict[str, object]
    weights_bytes: int
    bandwidth: dict[str, float]
    lower_bound_ms: float
    baseline_over_bound: dict[str, float]
    prompts: list[str]
    systems: list[SystemSummary]


def speed_benchmark(
    config,
    target: Model,
    draft: Model | None,
    others: Sequence[System] = (),
    progress: Callable[[Sequence], Iterable] = iter,
    verifier: Verifier | None = None,
) -> SpeedReport:
    """Measures ArS, SpS over K, prompt lookup and other systems on the same prompts.

    Args:
        config: config such as configs/experiments/benchmark.py.
        target: target model.
        draft: draft model; None measures the target alone.
        others: further systems.
        progress: wrapper of the list of jobs, for a progress bar.
        verifier: rule of acceptance for the draft model, as for `generate`.
    """
    for field in ("prompts", "prompt_tokens", "max_new_tokens", "repetitions"):
        if config[field] < 1:
            raise InputError(f"{field}: expected at least 1, found {config[field]}")
    prompts = prompts_of(config, target)
    systems = [*_systems(config, target, draft, verifier), *others]
    before = hardware.memory_bandwidth()
    summaries = compare_speed(
        systems,
        prompts,
        sampling_settings(config),
        config.max_new_tokens,
        config.repetitions,
        config.seed,
        time_rounds=config.time_rounds,
        progress=progress,
    )
    # The best of both ends: a neighbour on the machine must not make the lower bound look high.
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
    config, target: Model, draft: Model, progress: Callable[[Sequence], Iterable] = iter
) -> list[SystemSummary]:
    """Measures what `speed_benchmark` does once, on the first `config.trial_prompts` prompts.

    It shows which K is fastest here, where a benchmark of every K would take long.
    """
    prompts = itertools.islice(prompts_of(config, target).items(), config.trial_prompts)
    return compare_speed(
        _systems(config, target, draft),
        dict(prompts),
        sampling_settings(config),
        config.max_new_tokens,
        repetitions=1,
        seed=config.seed,
        progress=progress,
    )


def compare_speed(
    systems: Sequence[System],
    prompts: Mapping[str, list[int]],
    settings: Mapping[str, SamplingParams],
    max_new_tokens: int,
    repetitions: int,
    seed: int = 0,
    time_rounds: bool = False,
    progress: Callable[[Sequence], Iterable] = iter,
    records: Records | None = None,
    stop_at_eos: bool = False,
) -> list[SystemSummary]:
    """Returns a summary per setting and system.

    Args:
        systems: systems under test.
        prompts: token ids by name.
        settings: sampling parameters by name.
        max_new_tokens: token budget.
        repetitions: number of runs per prompt, of which the median time counts.
        seed: random seed.
        time_rounds: whether the costs of a round are timed too.
        progress: wrapper of the list of jobs, for a progress bar.
        records: empty records, which receive what every system wrote.
        stop_at_eos: whether texts end at an end of sequence; if not, all do the same work.
    """
    if not prompts or repetitions < 1:
        raise InputError(
            "prompts, repetitions: expected at least one each, "
            f"found {len(prompts)} and {repetitions}"
        )
    records = Records(runner.RECORD_KEY) if records is None else records
    timed = frozenset(prompts if time_rounds else ())
    options = {"repetitions": repetitions, "timed": timed, "stop_at_eos": stop_at_eos}
    jobs = workload(prompts, settings, max_new_tokens, seed, **options)
    runner.run_all(systems, jobs, records, progress)
    return summary.summarize(records.records)


def workload(
    prompts: Mapping[str, list[int]],
    settings: Mapping[str, SamplingParams],
    max_new_tokens: int,
    seed: int,
    **options,
) -> runner.Workload:
    """Returns the texts to write: every prompt in every setting."""
    return runner.Workload(
        prompts=[runner.Prompt(name, lambda _, ids=ids: ids) for name, ids in prompts.items()],
        settings=settings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        **{"stop_at_eos": False} | options,
    )


def _systems(
    config, target: Model, draft: Model | None, verifier: Verifier | None = None
) -> list[System]:
    """Returns the systems that a config names; the verifier is that of the draft model."""
    counts = config.num_speculative_tokens if draft else ()
    systems = [samplers.spsjax_system("ArS", target)]
    field = "num_speculative_tokens"
    systems += samplers.speculative_systems(target, draft, counts, field, verifier)
    if draft and config.ngram.num_speculative_tokens:
        lookup = from_config.build("ngram", ngram.Drafter, config.ngram)
        K = lookup.num_speculative_tokens
        systems.append(samplers.spsjax_system("n-gram", target, lookup, K, role=Role.ALTERNATIVE))
    return systems


def prompts_of(config, target: Model) -> dict[str, list[int]]:
    """Returns the prompts of a config by name: its texts, held-out documents, or random tokens."""
    size = config.prompts, config.prompt_tokens
    if target.tokenizer and config.texts:
        return dict(zip(config.texts, request.token_ids(target, config.texts)))
    if target.tokenizer:
        sources = from_config.build("data", Sources, config.data)
        return held_out_prompts(target.tokenizer, *size, sources)
    return random_prompts(target.config.vocab_size, *size)


def sampling_settings(config, names: Sequence[str] | None = None) -> dict[str, SamplingParams]:
    """Returns sampling parameters by name. None: the settings that `config.run_settings` names."""
    names = config.run_settings if names is None else names
    unknown = [name for name in names if name not in config.settings]
    if unknown or not names:
        known, wrong = ", ".join(config.settings), ", ".join(unknown) or "none"
        raise InputError(f"settings: expected some of {known}, found {wrong}")
    return {
        name: from_config.build(f"settings.{name}", SamplingParams, config.settings[name])
        for name in names
    }
