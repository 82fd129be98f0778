"""Tests of whole distillations of a draft, of tiny size."""

import pathlib
import shutil

import pytest
from helpers.tiny_training import (
    config,
    draft_run,
    records,
    target_run,
    untrained_target,
    whole_training,
)

import spsjax
from spsjax import InputError, loading
from spsjax.parallel import sharding
from spsjax.training.train_draft import distill_draft


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def draft(texts, base) -> pathlib.Path:
    """The run folder of a draft of the target of `target_run`."""
    return draft_run(texts, base)


@whole_training
def test_trained_pair_samples_speculatively(texts, base, draft):
    models = [spsjax.load(folder / "model") for folder in (target_run(texts, base), draft)]
    out = spsjax.generate(models[0], ["def function"], models[1], 3, max_new_tokens=16)
    assert len(out.tokens[0]) > 0 and out.stats.block_efficiency > 1


@whole_training
def test_draft_run_logs_expected_and_counted_acceptance(draft):
    (_, held_out) = records(draft, "held_out")
    assert 0 < held_out["acceptance"]["mean"] < 1
    assert len(held_out["acceptance"]["by_position"]) == 16
    for group in ("temperature_1", "temperature_0"):
        last = records(draft, group)[-1]
        assert last["step"] == 30 and 0 <= last["counted_acceptance"] <= 1
        assert 1 <= last["block_efficiency"] <= 5
        assert last["greedy_agreement"]["interval"] > 0
        assert ("acceptance" in last) == (group == "temperature_1")


@whole_training
def test_draft_on_a_mesh_equals_one_device(texts, base, tmp_path):
    """On texts of all kinds, of which a cached target needs no pass for two."""
    changes = {
        "target": str(untrained_target(texts, base)),
        "steps": 4,
        "eval_every": 4,
        "mixture": {"corpus": 0.25, "target": 0.25, "draft": 0.5, "samples": 8, "prompt_length": 8},
        "length": 64,  # the whole context
        "target_cache": {"store": "top_k", "k": 16},
        "optimization": {"warmup": 1, "accumulate": 2},
        "compute": {"remat": True},
    }
    held_out = {}
    for name, mesh in (("one", None), ("mesh", sharding.mesh(2, 4))):
        distill_draft(config("draft", texts, **changes), tmp_path / name, mesh)
        held_out[name] = records(tmp_path / name, "held_out")[-1]
    for metric in ("loss", "acceptance"):
        one, many = (held_out[name][metric]["mean"] for name in ("one", "mesh"))
        assert one == pytest.approx(many, abs=2e-3), metric


@whole_training
def test_run_with_another_target_in_the_folder_is_refused(texts, base, draft, tmp_path):
    """A finished run of the same target only writes its model again."""
    target, folder = target_run(texts, base) / "model", tmp_path / "run"
    shutil.copytree(target, tmp_path / "model")
    shutil.copytree(draft, folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace(str(target), str(tmp_path / "model")))
    small = config("draft", texts, target=str(tmp_path / "model"))
    distill_draft(small, folder)
    other = spsjax.load(tmp_path / "model")
    other.params["norm"]["scale"] = other.params["norm"]["scale"] * 1.5
    loading.save(tmp_path / "model", other)
    with pytest.raises(InputError, match=r": expected the stored .*pinned.target='.*, found '"):
        distill_draft(small, folder)
