"""What is measured of a pair: who races, over which prompts, beside which floor."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from spsjax import request
from spsjax.data import documents
from spsjax.data.documents import Sources
from spsjax.drafters import ngram
from spsjax.errors import InputError
from spsjax.evaluation import race, samplers
from spsjax.evaluation.samplers import Sampler
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.performance import microbenchmarks
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer
from spsjax.utils import from_config


def held_out_prompts(
    tokenizer: Tokenizer, count: int, length: int, sources: Sources
) -> dict[str, list[int]]:
    """First `length` tokens of held-out documents, by name: a fixed choice.

    The first `count` in the order of their names' hashes that are twice as long.
    """
    texts = {document.name: document.text for document in documents.held_out(sources)}
    chosen = {}
    for name in sorted(texts, key=_hash):
        tokens = tokenizer.encode(texts[name])
        if len(tokens) >= 2 * length:
            chosen[name] = tokens[:length]
        if len(chosen) >= count:
            break
    else:
        raise InputError(
            f"prompts: expected at most {len(chosen)} (held-out documents of {2 * length} "
            f"tokens), found {count}"
        )
    return chosen


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def random_prompts(vocab_size: int, count: int, length: int) -> dict[str, list[int]]:
    """For a model without a tokenizer: random tokens, by number."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (count, length))
    return {f"random {row}": tokens[row].tolist() for row in range(count)}


def config_of_size(num_params: int, max_positions: int = 1024) -> transformer.Config:
    """12 layers, 32,000 tokens, and the narrowest that makes at least so many parameters."""
    for heads in range(1, 257):
        width = 64 * heads
        config = transformer.Config(
            vocab_size=32_000,
            d_model=width,
            d_ff=-(-8 * width // 3 // 128) * 128,
            num_layers=12,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=64,
            max_positions=max_positions,
        )
        shapes = transformer.param_shapes(config)
        if sum(leaf.size for leaf in jax.tree.leaves(shapes)) >= num_params:
            return config
    raise InputError(f"random: expected at most some billions of parameters, found {num_params:,}")


@dataclasses.dataclass(frozen=True)
class Report:
    """What `compare` found.

    Attributes:
        machine: as `probes.machine` has it.
        weights_bytes: of the target, read once a pass from one memory (`Model.num_bytes`).
        bandwidth: bytes a second, by `probes.memory_bandwidth`.
        floor_ms: weights_bytes / the highest bandwidth: no ArS token can be cheaper.
        ars_over_floor: by setting, a round of ArS over the floor.
        prompts: where the prompts come from.
        lines: one a contender.
    """

    machine: dict[str, object]
    weights_bytes: int
    bandwidth: dict[str, float]
    floor_ms: float
    ars_over_floor: dict[str, float]
    prompts: list[str]
    lines: list[race.Line]


def compare(
    config,
    target: Model,
    draft: Model | None,
    others: Sequence[Sampler] = (),
    progress: Callable[[Sequence], Iterable] = iter,
) -> Report:
    """ArS, SpS over K, prompt lookup and `others`, as configs/experiments/benchmark.py says."""
    for field in ("prompts", "prompt_tokens", "max_new_tokens", "repetitions"):
        if config[field] < 1:
            raise InputError(f"{field}: expected at least 1, found {config[field]}")
    counts = config.num_speculative_tokens if draft else ()
    for count in counts:
        if not isinstance(count, int) or count < 1:
            raise InputError(f"num_speculative_tokens: expected integers >= 1, found {count!r}")
    size = config.prompts, config.prompt_tokens
    if target.tokenizer and config.texts:
        prompts = dict(zip(config.texts, request.token_ids(target, config.texts)))
    elif target.tokenizer:
        sources = from_config.build("data", Sources, config.data)
        prompts = held_out_prompts(target.tokenizer, *size, sources)
    else:
        prompts = random_prompts(target.config.vocab_size, *size)
    entries = [samplers.ours(race.BASELINE, target)]
    entries += [samplers.ours("SpS", target, draft, count) for count in counts]
    if draft and config.ngram.num_speculative_tokens:
        lookup = from_config.build("ngram", ngram.Drafter, config.ngram)
        entries.append(samplers.ours("n-gram", target, lookup, lookup.num_speculative_tokens))
    contenders = [
        race.Contender(each, setting, params, config.max_new_tokens)
        for setting, params in settings(config).items()
        for each in (*entries, *others)
    ]
    before = microbenchmarks.memory_bandwidth()
    lines = race.run(
        contenders, list(prompts.values()), config.repetitions, config.seed, config.parts, progress
    )
    # Best of both ends: a neighbour on the machine must not make the floor look high.
    after = microbenchmarks.memory_bandwidth()
    bandwidth = {name: max(rate, after[name]) for name, rate in before.items()}
    floor_ms = 1e3 * target.num_bytes / max(bandwidth.values())
    return Report(
        machine=microbenchmarks.machine(target),
        weights_bytes=target.num_bytes,
        bandwidth=bandwidth,
        floor_ms=floor_ms,
        ars_over_floor={
            line.setting: line.ms_per_round / floor_ms
            for line in lines
            if line.name == race.BASELINE
        },
        prompts=list(prompts),
        lines=lines,
    )


def settings(config, names: Sequence[str] | None = None) -> dict[str, SamplingParams]:
    """The settings of these names; None: those that `config.what` names."""
    names = config.what if names is None else names
    unknown = [name for name in names if name not in config.settings]
    if unknown or not names:
        known, found = ", ".join(config.settings), ", ".join(unknown) or "none"
        raise InputError(f"settings: expected some of {known}, found {found}")
    return {
        name: from_config.build(f"settings.{name}", SamplingParams, config.settings[name])
        for name in names
    }
