"""Training of a target on text, and distillation of a draft from a target.

One loop for both: what differs is the loss, a function of parameters and a batch. Weights and
optimiser state are float32; a run is resumed from its newest checkpoint, and the schedule is
constant until its last fifth, so that a run can be made longer up to then.
"""

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from spsjax import cache as kv
from spsjax import data, files, losses
from spsjax.errors import InputError, NonFiniteError, brief, one_line
from spsjax.models import transformer
from spsjax.types import Array, PyTree


def schedule(peak: float, steps: int, warmup: int) -> optax.Schedule:
    """Linear warm-up, a plateau, and a linear decay to zero over the last fifth."""
    decay = steps // 5
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [warmup, steps - decay],
    )


def optimizer(config) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; norms and embeddings are not decayed."""
    rate = schedule(config.learning_rate, config.steps, config.warmup)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(
                lambda path, _: path[-1].key == "kernel", params
            ),
        ),
    )


def forward(
    config: transformer.Config, params: PyTree, tokens_BT: Array
) -> transformer.ModelOutput:
    """Logits [B, T, V] and final hidden states [B, T, D] of whole sequences."""
    length = tokens_BT.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    mask = kv.causal_mask(positions[:1], length)
    return transformer.apply(config, params, tokens_BT, positions, mask)


def language_model_loss(config: transformer.Config) -> Callable:
    """Mean cross entropy of the next token: `(params, batch [B, T+1]) -> (loss, metrics)`."""

    def loss(params, batch):
        logits = forward(config, params, batch[:, :-1]).logits
        value = losses.cross_entropy(logits, batch[:, 1:]).mean()
        return value, {"loss": value}

    return loss


def target_states(
    config: transformer.Config,
    params: PyTree,
    examples: np.ndarray,
    folder: str | pathlib.Path,
    batch: int = 2,
) -> np.ndarray:
    """The final hidden states of a frozen target on every example, computed once.

    A draft sees each example many times, and the states are narrower than the logits, which the
    head alone gives again. Half precision: 1 KiB a token at 512 features.

    Args:
        config: the target's shape.
        params: its parameters; their type is the compute type.
        examples: [N, T+1] int32; the last token of each is a label only.
        folder: where the states are kept, under a name made of what they depend on; found there,
            they are not computed again.
        batch: examples in one pass.

    Returns:
        [N, T, D] float16, read from the file as needed.

    Raises:
        InputError: the file is there, and damaged.
    """
    folder = pathlib.Path(folder)
    path = folder / f"states-{_fingerprint(config, params, examples)}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        step = jax.jit(lambda rows: forward(config, params, rows).hidden.astype(jnp.float16))
        shape = (len(examples), examples.shape[1] - 1, config.d_model)
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        with files.whole(path) as partial, open(partial, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for start in tqdm(range(0, len(examples), batch), desc="target", unit="batch"):
                file.write(np.asarray(step(examples[start : start + batch, :-1])).tobytes())
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path}: expected states, or no such file, found {one_line(error)}"
        ) from None


def _fingerprint(config: transformer.Config, params: PyTree, examples: np.ndarray) -> str:
    digest = hashlib.sha256(repr(config).encode())
    for leaf in (examples, *jax.tree.leaves(params)):
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def distillation_loss(
    config: transformer.Config,
    target_config: transformer.Config,
    target: PyTree,
    objective: str,
    temperatures: Sequence[float] = (1.0,),
) -> Callable:
    """Mean divergence of the draft from a frozen target, on the same positions.

    A batch is a pair: tokens [B, T+1], and the target's final states [B, T, D] on them. The
    divergence is averaged over `temperatures`, by which the logits of both are divided: one below
    1 weighs the tokens that a sharpened target, or a greedy one, would emit.
    """
    divergence = losses.DIVERGENCES[objective]
    if not temperatures or not all(temperature > 0 for temperature in temperatures):
        raise InputError(
            f"temperatures: expected one or more numbers above 0, found {brief(temperatures)}"
        )

    def loss(params, batch):
        tokens, states = batch
        target_logits = transformer.head(target_config, target, states.astype(jnp.float32))
        logits = forward(config, params, tokens[:, :-1]).logits
        agree = jnp.argmax(logits, -1) == jnp.argmax(target_logits, -1)
        value = sum(divergence(target_logits / t, logits / t).mean() for t in temperatures)
        value /= len(temperatures)
        return value, {
            "loss": value,
            "acceptance": losses.acceptance(target_logits, logits).mean(),
            "greedy_agreement": agree.mean(),
            "cross_entropy": losses.cross_entropy(logits, tokens[:, 1:]).mean(),
        }

    return loss


def evaluate(loss: Callable, params: PyTree, examples: PyTree, batch: int) -> dict[str, float]:
    """Mean of each metric over the examples, a partial last batch left out."""
    step = jax.jit(lambda params, rows: loss(params, rows)[1])
    starts = range(0, data.count(examples) - batch + 1, batch)
    metrics = [
        jax.device_get(step(params, data.take(examples, slice(start, start + batch))))
        for start in starts
    ]
    return {name: float(np.mean([each[name] for each in metrics])) for name in metrics[0]}


def check(config) -> None:
    """Raises InputError where a number of steps or examples is below 1, or processes are many."""
    if jax.process_count() > 1:
        raise InputError(f"training: expected one process, found {jax.process_count()}")
    for field in ("steps", "batch", "length", "checkpoint_every", "eval_every"):
        if config.get(field, 1) < 1:
            raise InputError(f"{field}: expected at least 1, found {config[field]}")


def fit(
    config,
    params: PyTree,
    loss: Callable,
    examples: PyTree,
    held_out: PyTree,
    workdir: str | pathlib.Path,
) -> tuple[PyTree, dict[str, float]]:
    """Minimises `loss`; returns the parameters and the held-out metrics at the end.

    Args:
        config: `steps`, `batch`, `learning_rate`, `warmup`, `weight_decay`, `seed`,
            `checkpoint_every`, `eval_every`.
        params: initial parameters.
        loss: `(params, batch) -> (scalar, metrics)`.
        examples: training examples, as the loss takes them in batches: an array, or a tuple of
            arrays, whose first axis counts the N examples.
        held_out: M examples of other documents.
        workdir: checkpoints, `log.jsonl` and at last `metrics.json` go here; a run found here is
            resumed.
    """
    check(config)
    if data.count(held_out) < config.batch:
        raise InputError(
            f"batch: expected at most {data.count(held_out)}, the held-out examples, "
            f"found {config.batch}"
        )
    workdir = pathlib.Path(workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    update = optimizer(config)
    # A copy, since every step takes over the buffers of the one before.
    state = {"params": jax.tree.map(jnp.copy, params), "optimizer": update.init(params)}

    def train_step(state, batch):
        (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"], batch)
        change, optimizer_state = update.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], change)
        return {"params": params, "optimizer": optimizer_state}, metrics

    train_step = jax.jit(train_step, donate_argnums=0)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(workdir / "checkpoints", options=options) as manager:
        start = manager.latest_step() or 0
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        batches = data.batches(examples, config.batch, config.seed, start)
        tokens = config.batch * (jax.tree.leaves(examples)[0].shape[1] - 1)
        bar = tqdm(range(start, config.steps), initial=start, total=config.steps, unit="step")
        clock = time.perf_counter()
        for step in bar:
            state, metrics = train_step(state, next(batches))
            if (step + 1) % 10 == 0:
                seconds, clock = time.perf_counter() - clock, time.perf_counter()
                values = {name: float(value) for name, value in metrics.items()}
                if not np.isfinite(values["loss"]):
                    raise NonFiniteError(
                        f"step {step + 1}: expected a finite loss, found {values['loss']}"
                    )
                bar.set_postfix({name: f"{value:.3f}" for name, value in values.items()})
                _log(workdir, step=step + 1, tokens_per_second=10 * tokens / seconds, **values)
            if (step + 1) % config.eval_every == 0:
                some = data.take(held_out, slice(8 * config.batch))
                result = evaluate(loss, state["params"], some, config.batch)
                _log(workdir, step=step + 1, held_out=result)
                clock = time.perf_counter()
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                manager.save(step + 1, args=ocp.args.StandardSave(state))
    metrics = evaluate(loss, state["params"], held_out, config.batch)
    files.write(workdir / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    return state["params"], metrics


def _log(workdir: pathlib.Path, **record) -> None:
    with open(workdir / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
