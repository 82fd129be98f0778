"""Compares a target with its matrices in int8: bytes, loss, times of passes, acceptance.

python scripts/compare_weights.py --output=runs/int8.json

The loss is in nats per token of held-out texts. Passes over some tokens are timed alone, in turn,
in a cache of the length of a text. "accepted" is the rate at which the target, as it is, accepts
what the one in int8 drafts. Every key of the config is a flag;
configs/experiments/compare_weights.py lists them.
"""

import json
import pathlib
import statistics

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from spsjax import generation, loading
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.evaluation import speed
from spsjax.models import quantization, transformer
from spsjax.performance import hardware, microbenchmarks
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compare.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the figures to this file.")

_ORIGINAL = "as they are"


def run():
    config = _CONFIG.value
    config.target = _TARGET.value or config.target
    main.check_writable(_OUTPUT.value)
    sampling = from_config.build("sampling", SamplingParams, config.sampling)
    fields = "num_speculative_tokens", "repetitions", "prompts", "prompt_tokens", "max_new_tokens"
    for field in fields:
        check_integer(field, config[field], 1)
    if not isinstance(config.rows, tuple) or not config.rows:
        raise InputError(f"rows: expected a tuple of integers, found {short_repr(config.rows)}")
    for count in config.rows:
        check_integer("rows", count, 1)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    texts = list(speed.prompts_of(config, target).values())
    if any(len(text) < 2 for text in texts):
        raise InputError("texts: expected at least 2 tokens in each, found fewer")
    models = {_ORIGINAL: target}
    models |= {kind: loading.quantized(target, kind) for kind in quantization.KINDS}
    times = pass_times(models, config)
    rows = []
    for name, model in terminal.progress("losses and drafts")(list(models.items())):
        accepted = None if model is target else acceptance(target, name, texts, sampling, config)
        row = {"weights": name, "bytes": model.num_bytes, "nats": loss(model, texts)}
        rows.append(row | {"ms": times[name], "accepted": accepted})
    header = ["weights", "MB per pass", "nats per token", *(f"{n} tokens, ms" for n in config.rows)]
    terminal.print_table(
        [*header, "accepted"],
        [
            (
                row["weights"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['nats']:.4f}",
                *(f"{row['ms'][str(count)]:.2f}" for count in config.rows),
                "" if row["accepted"] is None else f"{row['accepted']:.3f}",
            )
            for row in rows
        ],
    )
    machine = hardware.machine(target)
    print(f"{target.name} on {machine['device']}, {machine['dtype']}, JAX {machine['jax']}")
    if _OUTPUT.value:
        figures = {"machine": machine, "rows": rows}
        atomic_files.write(_OUTPUT.value, json.dumps(figures, indent=2) + "\n")


def pass_times(models, config) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of a pass over so many tokens, by model and number."""
    length = config.prompt_tokens + config.max_new_tokens
    timers = {
        (name, str(count)): microbenchmarks.round_cost_timer(
            model, None, count - 1, SamplingParams(), length
        )
        for name, model in models.items()
        for count in config.rows
    }
    found = {key: [] for key in timers}
    for _ in terminal.progress("times")(range(config.repetitions)):
        for key, timer in timers.items():
            found[key].append(1e3 * timer().scoring)
    return {
        name: {str(count): statistics.median(found[name, str(count)]) for count in config.rows}
        for name in models
    }


def loss(model: loading.Model, texts: list[list[int]]) -> float:
    """Returns the negative log likelihood of the texts, in nats per token but the first."""
    run = jax.jit(_log_likelihoods, static_argnums=0)
    sums, count = 0.0, 0
    for text in texts:
        with model.in_mesh():
            rows = 1 if model.mesh is None else model.mesh.shape["data"]
            tokens = np.asarray([text] * rows, np.int32)
            sums -= float(run(model.config, model.params, tokens)[0])
        count += len(text) - 1
    return sums / count


def _log_likelihoods(config, params, tokens_BT):
    logits = transformer.apply(config, params, tokens_BT[:, :-1]).logits
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.take_along_axis(log_probs, tokens_BT[:, 1:, None], axis=-1), axis=(1, 2))


def acceptance(target, kind: str, texts, sampling: SamplingParams, config) -> float:
    """Returns the rate at which a target accepts drafts of its own self in int8."""
    prompts = [text[: max(len(text) // 2, 1)] for text in texts]
    drafted = generation.generate(
        target,
        prompts,
        loading.load_drafter(kind, target),
        config.num_speculative_tokens,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    return drafted.stats.acceptance_rate


if __name__ == "__main__":
    main.run(run, _CONFIGS / "compare_weights.py")
