"""Comparison of a target with its matrices in int8: bytes, loss, times of passes, acceptance."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import generation, loading
from spsjax.benchmarks import microbenchmarks, report, workloads
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.models import quantization, transformer
from spsjax.planning import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config

_ORIGINAL = "as they are"


def run(config, workdir: pathlib.Path) -> str:
    """Compares a target with itself in int8, and returns the table.

    `config` is like configs/experiments/compare_weights.py.
    """
    sampling = from_config.build_section("sampling", SamplingParams, config.sampling)
    fields = "num_speculative_tokens", "repetitions", "prompts", "prompt_tokens", "max_new_tokens"
    for field in fields:
        check_integer(field, config[field], 1)
    if not isinstance(config.rows, tuple) or not config.rows:
        raise InputError(f"rows: expected a tuple of integers, found {short_repr(config.rows)}")
    for count in config.rows:
        check_integer("rows", count, 1)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    texts = list(workloads.prompts_of(config, target).values())
    if any(len(text) < 2 for text in texts):
        raise InputError("texts: expected at least 2 tokens in each, found fewer")
    configs.begin(f"Weights of {target.name}", config, workdir)
    models = {_ORIGINAL: target}
    models |= {kind: loading.quantized(target, kind) for kind in quantization.KINDS}
    times = pass_times(models, config)
    rows = []
    for name, model in terminal.progress("losses and drafts")(list(models.items())):
        accepted = None if model is target else acceptance(target, name, texts, sampling, config)
        row = {"weights": name, "bytes": model.num_bytes, "nats": loss(model, texts)}
        rows.append(row | {"ms": times[name], "accepted": accepted})
    figures = {"machine": hardware.machine(target), "rows": rows}
    return report.write(workdir, figures, table(rows, config.rows), draw(rows))


def pass_times(models, config) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds per pass, by model and number of tokens."""
    length = config.prompt_tokens + config.max_new_tokens
    timers = {
        (name, count): microbenchmarks.scoring_timer(model, count, SamplingParams(), length)
        for name, model in models.items()
        for count in config.rows
    }
    progress = terminal.progress("times")
    times = microbenchmarks.median_times(timers, config.repetitions, progress)
    return {
        name: {str(count): 1e3 * times[name, count] for count in config.rows} for name in models
    }


def loss(model: loading.Model, texts: list[list[int]]) -> float:
    """Returns the negative log likelihood of the texts in nats per token, without first tokens."""
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
    """Returns the rate at which a target accepts drafts of itself in int8."""
    prompts = [text[: max(len(text) // 2, 1)] for text in texts]
    drafter, sizes = loading.load_drafter(kind, target), (config.max_new_tokens, config.seed)
    drafted = generation.generate(
        target, prompts, drafter, config.num_speculative_tokens, sampling, *sizes
    )
    return drafted.stats.acceptance_rate


def table(rows: list[dict], counts) -> str:
    """Returns a Markdown table."""
    passes = {
        f"{count} tokens, ms": lambda row, count=count: f"{row['ms'][str(count)]:.2f}"
        for count in counts
    }
    columns = {
        "weights": "weights",
        "MB per pass": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "nats per token": report.figure("nats", 4),
        **passes,
        "accepted": report.figure("accepted", 3),
    }
    return report.table(rows, columns)


def draw(rows: list[dict]):
    """Returns a function that draws the loss and the times as bars."""
    labels = {"nats": "nats per token"} | {count: f"{count} tokens, ms" for count in rows[0]["ms"]}
    return plot("plots.bars", {row["weights"]: row | row["ms"] for row in rows}, labels, {})
