"""Tests of every model family against `transformers`, by the records of golden/make.py.

With the extra `parity`, `transformers` makes new folders, which are compared too.
"""

import collections
import dataclasses
import functools
import json
import runpy

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import drafting
from helpers.environment import ROOT
from helpers.models import build_model
from helpers.numpy_models import numpy_spread_params

import spsjax
from spsjax import SamplingParams, loading
from spsjax.models import transformer
from spsjax.models.hf import config_json
from spsjax.models.hf import weights as hf_weights
from spsjax.models.hf.families import FAMILIES
from spsjax.parallel import sharding
from spsjax.training import step as train_step

GOLDEN = ROOT / "tests" / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
ALIKE = "llama2", "multi_query", "qwen2"  # other families have all their features
# In float32, spsjax and transformers each differ from float64 by up to 6e-5 in the second case.
TOLERANCE = collections.defaultdict(lambda: 1e-4, qwen3_next=2e-4)
# A family with windows, two kinds of scaling, caps and further norms.
WHOLE = "gemma2"
# Families that a mesh splits in other ways: heads alone; one head of keys; learned positions and
# biases; experts; compressed keys; gated delta nets and a shared expert; such nets with key heads
# that are split, too; inputs of each layer.
SPLIT = (
    *(WHOLE, "multi_query", "gpt2", "mixtral", "deepseek_v3", "qwen3_next", "qwen3_5"),
    "gemma4",
)


def family(name, in_gate):
    """Returns a case that is in the gate, or in the full suite alone."""
    return name if in_gate else pytest.param(name, marks=pytest.mark.slow)


every_family = pytest.mark.parametrize("name", NAMES)
forward = jax.jit(train_step.forward, static_argnums=0)


@functools.cache
def loaded(name: str) -> loading.Model:
    return loading.load(GOLDEN / name, dtype="float32")


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", [family(name, name not in ALIKE) for name in NAMES])
def test_forward_gives_recorded_logits(name):
    model, recorded = loaded(name), expected(name)
    logits = forward(model.config, model.params, recorded["tokens"]).logits
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE[name]


@functools.partial(jax.jit, static_argnums=0)
def step(config, params, cache, start, block):
    output = transformer.apply(config, params, block, cache.at(start))
    return output.logits, cache.at(start).extend(output)


@pytest.mark.parametrize(
    "name",
    [family(name, name in (WHOLE, "gemma4")) for name in NAMES if name not in ALIKE],
)
def test_cached_passes_give_recorded_logits(name):
    """A prompt, single tokens, and a block that starts before the last tokens give the logits.

    A recurrent state cannot go back to that start.
    """
    model, recorded = loaded(name), expected(name)
    tokens, slots = recorded["tokens"], 32
    cache = transformer.empty_cache(model.config, model.params, 2, slots)
    again = 16 if model.config.is_recurrent else 13
    for start, stop in ((0, 5), (5, 10), (10, 11), (11, 16), (again, 18), (18, 19)):
        block = tokens[:, start:stop]
        logits, cache = step(model.config, model.params, cache, np.full(2, start, np.int32), block)
        assert np.abs(logits - recorded["logits"][:, start:stop]).max() < TOLERANCE[name], start


@pytest.mark.slow
def test_speculation_gives_recorded_greedy_tokens():
    """Speculation with a perturbed copy of one layer as the draft gives the greedy tokens."""
    model, recorded = loaded(WHOLE), expected(WHOLE)
    config = dataclasses.replace(model.config, num_layers=1)
    params = {**model.params, "layers": {0: model.params["layers"][0]}}
    noise = numpy_spread_params(config, 1)
    params = jax.tree.map(lambda leaf, other: np.asarray(leaf) + 0.02 * other, params, noise)
    draft = build_model(config, params, None)
    options = {"max_new_tokens": len(recorded["greedy"]), "stop_at_eos": False}
    greedy = SamplingParams(temperature=0.0)
    with drafting.small_programs():
        out = spsjax.generate(model, recorded["tokens"].tolist(), draft, 3, greedy, **options)
    assert out.tokens[0].tolist() == recorded["greedy"].tolist()


@every_family
def test_save_writes_the_tensors_that_were_read(name, tmp_path):
    model = loaded(name)
    stored = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    (dtype,) = {str(tensor.dtype) for tensor in stored.values()}
    hf_weights.save(tmp_path, model.config, model.params, dtype)
    again = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored.keys() - again.keys() <= {"lm_head.weight"} and again.keys() <= stored.keys()
    for key, tensor in again.items():
        np.testing.assert_array_equal(tensor, stored[key], err_msg=key)
    assert config_json.read(tmp_path) == model.config
    family = json.loads((GOLDEN / name / "config.json").read_text())["model_type"]
    assert config_json.family_of(model.config) in (family, "llama") and family in FAMILIES


@pytest.mark.parametrize("name", SPLIT)
def test_forward_on_a_mesh_gives_recorded_logits(name):
    recorded, mesh = expected(name), sharding.mesh(2, 4)
    model = loading.load(GOLDEN / name, mesh, "float32")
    with model.in_mesh():
        logits = forward(model.config, model.params, recorded["tokens"]).logits
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE[name]


@pytest.mark.slow
@every_family
def test_transformers_gives_the_same_logits_today(name, tmp_path):
    pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra parity")
    make = runpy.run_path(str(GOLDEN / "make.py"))
    theirs = make["model"](name)
    theirs.save_pretrained(tmp_path / "theirs")
    recorded = make["expected"](theirs)
    model = loading.load(tmp_path / "theirs", dtype="float32")
    logits = forward(model.config, model.params, recorded["tokens"]).logits
    assert np.abs(logits - recorded["logits"]).max() < TOLERANCE[name]
    # `transformers` reads the folders that spsjax writes.
    hf_weights.save(tmp_path / "ours", model.config, model.params, "float32")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert np.abs(make["expected"](back)["logits"] - recorded["logits"]).max() < TOLERANCE[name]
