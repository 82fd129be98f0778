"""Reinforcement learning with exact samples: GRPO on a toy reward, and a draft that follows.

python scripts/grpo.py --workdir=runs/grpo

Each step samples a group of texts per prompt from the target (`spsjax.rollout`), moves the target
towards the texts with more reward than their group (Shao et al. 2024, arXiv 2402.03300, equation 3
without the KL term), and gives the engine the new weights (`Engine.set_weights`). The engine's
programs stay as they are. It does so without a draft, with a frozen one, and with one that learns
from the same texts (`training.online.OnlineTrainer`). Needs the extra `train`. Every key of the
config is a flag: configs/experiments/grpo.py lists them.
"""

import functools
import pathlib
import time

import _environment  # must be first: names a package that is missing
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax.benchmarks import report
from spsjax.cli import configs, main, measurements, terminal
from spsjax.cli.measurements import rollouts
from spsjax.errors import InputError, check_integer
from spsjax.models import transformer
from spsjax.planning import hardware
from spsjax.training.online import OnlineTrainer
from spsjax.utils import extras

with extras.needed("train"):
    import optax

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.", required=True)

ARMS = "plain", "frozen", "refreshed"


def reward(text: str) -> float:
    """Returns the share of lower-case letters."""
    return sum(map(str.islower, text)) / max(len(text), 1)


def as_batch(groups: list[spsjax.Group], width: int) -> dict[str, np.ndarray]:
    """Returns the samples [N, T] of a step, their probabilities when sampled, and advantages."""
    rows = [(group, sample) for group in groups for sample in group.samples]
    rewards = np.array([reward(sample.text) for _, sample in rows]).reshape(len(groups), -1)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    batch = {
        "tokens": np.zeros((len(rows), width), np.int32),
        "old": np.zeros((len(rows), width), np.float32),
        "mask": np.zeros((len(rows), width), np.float32),
        "advantages": (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).ravel(),
        "reward": rewards.mean(),
    }
    for row, (group, sample) in enumerate(rows):
        start, end = len(group.prompt), len(group.prompt) + len(sample.tokens)
        batch["tokens"][row, :end] = [*group.prompt, *sample.tokens]
        batch["old"][row, start:end] = sample.logprobs.raw
        batch["mask"][row, start:end] = 1
    return batch


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def update(config, optimizer, clip, params, state, batch):
    """Returns weights and the optimizer's state after one step of GRPO."""

    def loss(params):
        logits = transformer.apply(config, params, batch["tokens"][:, :-1]).logits
        labels = batch["tokens"][:, 1:, None]
        new = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=-1)[..., 0]
        ratio = jnp.exp(new - batch["old"][:, 1:])
        gain = jnp.stack([ratio, jnp.clip(ratio, 1 - clip, 1 + clip)])
        gain = jnp.min(gain * batch["advantages"][:, None], axis=0)
        return -jnp.sum(gain * batch["mask"][:, 1:]) / jnp.sum(batch["mask"])

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def train(config, target, draft, arm: str) -> list[dict]:
    """Returns rewards, accepted draft tokens per round and seconds of each step of one run."""
    K = config.num_speculative_tokens
    prompts = [target.tokenizer.encode(prompt) for prompt in config.prompts]
    width = max(map(len, prompts)) + config.max_new_tokens
    engine = spsjax.Engine(
        target, draft, K, rows=config.rows, slots=width + K + 1, stop_at_eos=False, logprobs=0
    )
    engine.warm_up(prompts[0])
    learner = None
    if arm == "refreshed":
        options = config.drafter.to_dict()
        steps = options.pop("steps")
        learner = OnlineTrainer(engine, length=width, seed=config.seed, **options)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), target.params)
    state, rows = optimizer.init(params), []
    for step in terminal.progress(arm)(range(config.steps)):
        clock = [time.perf_counter()]
        seed = config.seed + step
        sampled = spsjax.rollout(
            engine, prompts, config.samples, max_new_tokens=config.max_new_tokens, seed=seed
        )
        groups = sorted(sampled, key=lambda group: group.index)
        clock.append(time.perf_counter())
        batch = as_batch(groups, width)
        params, state = update(target.config, optimizer, config.clip, params, state, batch)
        engine.set_weights(target=jax.block_until_ready(params))
        clock.append(time.perf_counter())
        if learner is not None:
            for group in groups:
                for sample in group.samples:
                    learner.add(group.prompt, sample.tokens)
            learner.learn(steps)
            learner.publish()
        clock.append(time.perf_counter())
        counts = sum(np.array(one.accepted_histogram) for group in groups for one in group.samples)
        accepted = float(counts @ np.arange(len(counts)) / counts.sum())
        sampling, trained, learnt = np.diff(clock).tolist()
        rows.append({"arm": arm, "step": step, "reward": float(batch["reward"])})
        rows[-1] |= {"accepted": accepted, "sampling": sampling, "target": trained, "draft": learnt}
    return rows


def seconds(row: dict) -> float:
    """Returns the seconds of a whole step."""
    return row["sampling"] + row["target"] + row["draft"]


def summary(rows: list[dict]) -> dict:
    """Returns one row of the table: medians of seconds, and means of a run's two ends."""
    quarter = max(len(rows) // 4, 1)
    ends = rows[:quarter], rows[-quarter:]
    result = {"arm": rows[0]["arm"]}
    for name in ("reward", "accepted"):
        result[name] = [float(np.mean([row[name] for row in end])) for end in ends]
    for name in ("sampling", "target", "draft"):  # the first step compiles
        result[name] = float(np.median([row[name] for row in rows[1:] or rows]))
    return result


def run():
    config = _CONFIG.value
    for arm in config.arms or ("none",):
        if arm not in ARMS:
            raise InputError(f"arms: expected some of {', '.join(ARMS)}, found {arm}")
    for name in ("steps", "samples", "max_new_tokens"):
        check_integer(name, config[name], 1, 2**31 - 1)
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=True)
    main.check_one_process()
    workdir = pathlib.Path(_WORKDIR.value)
    main.check_folder(workdir)
    target = spsjax.load(config.target, dtype=config.dtype)
    draft = spsjax.load(config.draft, dtype=config.dtype)
    runs = {
        arm: train(config, target, None if arm == "plain" else draft, arm) for arm in config.arms
    }
    table = [summary(rows) for rows in runs.values()]
    for row in table:
        plain = next((one for one in table if one["arm"] == "plain"), row)
        row["speedup"] = plain["sampling"] / row["sampling"]
        row["step_speedup"] = seconds(plain) / seconds(row)
    steps = [row for rows in runs.values() for row in rows]
    text = rollouts.table(table)
    figures = {"machine": hardware.machine(target), "arms": table, "steps": steps}
    report.write(workdir, figures, text, measurements.plot("plots.arms", steps))
    print(text)
    print(f"The figures are in {workdir}")


if __name__ == "__main__":
    main.run(run, _environment.EXPERIMENTS / "grpo.py")
