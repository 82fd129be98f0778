"""Tests of whole trainings of drafters of the target's features, of tiny size."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers import command_line
from helpers.tiny_training import (
    ONE_STEP,
    head_config,
    records,
    target_run,
    untrained_target,
    whole_training,
)

import spsjax
from spsjax.parallel import sharding
from spsjax.training.train_head import train_head

STEPS = {
    "eagle": 1,
    "hass": 2,
    "eagle3": 3,
    "medusa": 4,
    "blockwise": 4,
    "mlp_speculator": 4,
    "falcon": 2,
}
GREEDY = spsjax.SamplingParams(0.0)


@pytest.fixture(scope="module")
def target(texts, tmp_path_factory) -> pathlib.Path:
    """The model folder of a trained target."""
    return target_run(texts, tmp_path_factory.getbasetemp()) / "model"


@pytest.fixture(scope="module")
def config(texts, target):
    """Builds the config of a method; `evaluated=False` leaves out most of its evaluations."""

    def build(method, evaluated=True, target=target, **changes):
        small = head_config(method, texts, target, **changes)
        small.objective.steps = STEPS.get(method, 4)
        if not evaluated:
            small.draft_eval.update({"temperatures": (), "num_speculative_tokens": 1})
        return small

    return build


@pytest.fixture(scope="module")
def run_of(config, tmp_path_factory):
    """Returns the run folder of a method, which is trained once."""
    folder = tmp_path_factory.mktemp("heads")

    @functools.cache
    def run(method) -> pathlib.Path:
        train_head(config(method), folder / method)
        return folder / method

    return run


def assert_drafts_change_no_greedy_text(model, drafter):
    """Drafts after as many prompts, as long, as an evaluation does, which has compiled it."""
    prompts = np.random.default_rng(0).integers(0, 300, (4, 8)).tolist()
    out, plain = (
        spsjax.generate(model, prompts, each, None, GREEDY, 16, stop_at_eos=False)
        for each in (drafter, None)
    )
    assert all(map(np.array_equal, out.tokens, plain.tokens))


@whole_training
@pytest.mark.parametrize("method", STEPS)
def test_run_logs_acceptance_by_depth_and_saves_a_drafter(run_of, target, method):
    first, last = records(run_of(method), "held_out")
    assert last["loss"]["mean"] < first["loss"]["mean"]
    assert last["acceptance"]["mean"] > first["acceptance"]["mean"]
    names = ["acceptance", *(f"acceptance_{depth}" for depth in range(2, 5))]  # K = 4 is deeper
    assert [name for name in last if name.startswith("acceptance")] == names
    assert 1 < records(run_of(method), "temperature_1")[-1]["block_efficiency"] <= 5
    model = spsjax.load(target)
    drafter = spsjax.load_drafter(run_of(method) / "drafter", model)
    assert_drafts_change_no_greedy_text(model, drafter)
    assert drafter.drafter.num_speculative_tokens == 4


@whole_training
@pytest.mark.parametrize("method", ["falcon", "blockwise"])
def test_interrupted_run_ends_with_the_same_weights(run_of, config, tmp_path, method):
    """Without its last checkpoint a run resumes from the one before.

    Falcon draws noise and glances, and a batch of blockwise heads draws which head it trains.
    """
    again = tmp_path / method
    shutil.copytree(run_of(method), again)
    shutil.rmtree(again / "checkpoints" / "step_30")
    shutil.rmtree(again / "drafter")
    train_head(config(method), again)
    one, other = (folder / "drafter" / "model.safetensors" for folder in (run_of(method), again))
    assert one.read_bytes() == other.read_bytes()


@whole_training
@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_training_begins_with_the_weights_of_a_drafter(run_of, config, target, tmp_path, method):
    """With almost no learning rate they stay as they are."""
    init = str(run_of(method) / "drafter")
    params = train_head(config(method, False, init=init, **ONE_STEP), tmp_path).params
    expected = spsjax.load_drafter(init, spsjax.load(target)).params
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), params, expected)


@whole_training
def test_medusa_2_trains_the_target_too(run_of, config, target, tmp_path):
    """The drafter belongs to the new target, which is near the old one."""
    changed = config("medusa2", False, init=str(run_of("medusa") / "drafter"))
    train_head(changed, tmp_path)
    old, new = spsjax.load(target), spsjax.load(tmp_path / "model")
    moved = jax.tree.map(
        lambda a, b: float(np.abs(np.subtract(a, b)).max()), old.params, new.params
    )
    assert all(change > 0 for change in jax.tree.leaves(moved)), moved
    last, before = (records(run, "held_out")[-1] for run in (tmp_path, run_of("medusa")))
    assert 0 < last["target_divergence"]["mean"] < 0.1
    assert last["acceptance"]["mean"] > before["acceptance"]["mean"]
    drafter = spsjax.load_drafter(tmp_path / "drafter", new)
    assert_drafts_change_no_greedy_text(new, drafter)


@whole_training
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_cached_features_train_like_a_running_target(run_of, config, target, tmp_path, method):
    """Features are stored in float16, drafters in bfloat16."""
    head = train_head(config(method, False, target_cache={"store": "states"}), tmp_path)
    expected = spsjax.load_drafter(run_of(method) / "drafter", spsjax.load(target)).params
    for name in ("fc", "layer"):
        pairs = zip(jax.tree.leaves(head.params[name]), jax.tree.leaves(expected[name]))
        for cached, running in pairs:
            np.testing.assert_allclose(cached, running.astype("float32"), atol=0.05)


@whole_training
def test_head_trains_on_a_mesh_and_on_the_target_s_own_texts(texts, config, tmp_path):
    """It learns what one device learns."""
    target = untrained_target(texts, tmp_path.parent)
    changed = config("eagle3", False, target)
    changed.objective.steps = 2
    changed.mixture.update({"corpus": 0.5, "target": 0.5, "samples": 8, "prompt_length": 4})
    alone = train_head(changed, tmp_path / "alone")
    changed.mesh.update({"data": 2, "model": 4, "replicate": False})
    head = train_head(changed, tmp_path / "mesh", sharding.mesh(2, 4))
    assert not head.params["layer"]["ffn"]["up"]["kernel"].is_fully_replicated
    for one, other in zip(*map(jax.tree.leaves, (head.params, alone.params))):
        np.testing.assert_allclose(one, other, atol=1e-3)
    train = records(tmp_path / "mesh", "train")
    assert train[-1]["loss"] < train[0]["loss"]


@whole_training
def test_generate_drafts_with_a_head_and_shows_no_other_text(run_of, target):
    flags = f"--target={target}", "--prompt=def", "--config.max_new_tokens=6", "--json"
    head = f"--draft={run_of('eagle3')}/drafter"
    greedy = "--config.sampling.temperature=0.0"
    out, plain = (
        json.loads(command_line.succeeds("generate.py", *flags, greedy, each).stdout)
        for each in (head, "--config.drafter=none")
    )
    assert out["tokens"] == plain["tokens"] and out["stats"]["proposed_tokens"] > 0
