"""Weights of 8 bits: products, whole models, meshes and drafters, and what cannot be rounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.calls import Call
from helpers.models import build_model, tiny_config
from helpers.numpy_models import numpy_params

import spsjax
from spsjax import decode, loading
from spsjax.models import quantization, transformer
from spsjax.models.quantization import Quantized
from spsjax.parallel import sharding
from spsjax.planning import roofline
from spsjax.runtime import costs


@functools.partial(jax.jit, static_argnums=(1, 2))
def made(matrix, inputs=-2, dynamic=False):
    return Quantized(*quantization.rounded(matrix, inputs), inputs, dynamic)


@functools.partial(jax.jit, static_argnums=(2, 3))
def times(matrix, x, inputs=-2, dynamic=False):
    """Returns the product with a matrix after rounding it."""
    return made(matrix, inputs, dynamic).times(x)


values_of = jax.jit(Quantized.values)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens):
    return transformer.apply(config, params, tokens).logits


def random_model(tied, num_experts) -> loading.Model:
    more = {"num_experts": num_experts, "experts_per_token": min(num_experts, 2)}
    config = tiny_config(48, tie_embeddings=tied, **more)
    return build_model(config, numpy_params(config, 0), None)


def cases(num_experts):
    """Returns kinds of rounding, tied heads or not, and experts or none: each of them once."""
    chosen = ("int8", False, 0), ("int8_dynamic", True, num_experts)
    return pytest.mark.parametrize(("kind", "tied", "num_experts"), chosen)


def numpy_rounded(x, axis):
    """Returns steps and their size, in float64."""
    size = np.abs(x.astype(np.float64)).max(axis=axis, keepdims=True) / 127
    size = np.where(size == 0, 1, size)
    return np.rint(x / size), size


@pytest.mark.parametrize("inputs", (-2, -1))
@pytest.mark.parametrize("dynamic", (False, True))
def test_products_are_those_of_numpy(inputs, dynamic):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 32)).astype(np.float32)
    matrix = (rng.normal(size=(32, 24)) * rng.uniform(0.01, 10, 24)).astype(np.float32)
    matrix[:, 3] = 0
    steps, size = numpy_rounded(matrix, 0)
    read, of_x = numpy_rounded(x, -1) if dynamic else (x.astype(np.float64), 1)
    expected = (read @ steps) * of_x * size
    actual = times(matrix if inputs == -2 else matrix.T, x, inputs, dynamic)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5 * np.abs(expected).max())


def test_a_value_is_at_most_half_a_step_off():
    matrix = np.random.default_rng(1).normal(size=(4, 16, 8)).astype(np.float32)
    held = made(matrix)
    assert held.steps.dtype == jnp.int8 and held.size.shape == (4, 1, 8)
    nothing = made(np.zeros((4, 3), np.float32))
    assert (np.asarray(nothing.size) == 1).all()  # nothing is divided by 0
    off = np.abs(np.asarray(values_of(held)) - matrix)
    assert (off <= 0.501 * np.asarray(held.size)).all() and off.max() > 0


@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("dynamic", (False, True))
def test_what_is_not_finite_stays_so(bad, dynamic):
    """A row of activations spoils its own results, and a column of weights its own."""
    x, matrix = np.ones((3, 8), np.float32), np.ones((8, 4), np.float32)
    x[1, 2] = bad
    actual = np.asarray(times(matrix, x, -2, dynamic))
    assert (~np.isfinite(actual)).all(axis=1).tolist() == [False, True, False]
    matrix[3, 0] = bad
    actual = np.asarray(times(matrix, np.ones((3, 8), np.float32), -2, dynamic))
    assert (~np.isfinite(actual)).all(axis=0).tolist() == [True, False, False, False]


@cases(4)
def test_a_quantised_model_is_that_of_its_rounded_weights(kind, tied, num_experts):
    model = random_model(tied, num_experts)
    small = loading.quantized(model, kind)
    assert isinstance(small.params["embed"]["embedding"], Quantized) == tied
    if num_experts:
        assert not isinstance(small.params["layers"][0]["ffn"]["router"]["kernel"], Quantized)
    values = jax.tree.map(
        lambda leaf: np.asarray(values_of(leaf)) if isinstance(leaf, Quantized) else leaf,
        small.params,
        is_leaf=quantization.is_matrix,
    )
    tokens = np.arange(12)[None]
    actual, expected, original = (
        np.asarray(logits_of(model.config, params, tokens))
        for params in (small.params, values, model.params)
    )
    scale = expected.std()
    tolerance = 1e-4 if kind == "int8" else 0.05
    np.testing.assert_allclose(actual, expected, atol=tolerance * scale, rtol=1e-4)
    assert 1e-4 * scale < np.abs(actual - original).max() < 0.3 * scale
    matrices = [leaf.size for leaf in jax.tree.leaves(small.params) if leaf.dtype == jnp.int8]
    assert sum(matrices) > 0.7 * transformer.num_params(model.params)


def test_int8_takes_half_the_bytes_of_bfloat16():
    config = tiny_config(512, d_model=128, d_ff=256, tie_embeddings=False)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), numpy_params(config, 0))
    half = build_model(config, params, None)
    assert loading.quantized(half, "int8").num_bytes < 0.54 * half.num_bytes


def test_load_rounds_while_it_reads(tmp_path, target):
    loading.save(tmp_path, target, "float32")
    read = loading.load(tmp_path, dtype="float32", quantize="int8")
    whole = loading.quantized(loading.load(tmp_path, dtype="float32"), "int8")
    jax.tree.map(np.testing.assert_array_equal, read.params, whole.params)


@pytest.mark.parametrize("name", ("int8", "int8_dynamic", "int8:FOLDER"))
def test_rounded_weights_draft_for_their_own_model(name, target, tmp_path):
    loading.save(tmp_path, target, "float32")
    drafter = spsjax.load_drafter(name.replace("FOLDER", str(tmp_path)), target)
    kind = name.partition(":")[0]
    assert quantization.kind_of(drafter.params) == kind
    expected = loading.quantized(target, kind).params
    jax.tree.map(np.testing.assert_array_equal, drafter.params, expected)


@cases(6)
def test_a_mesh_gives_the_logits_of_one_device(kind, tied, num_experts):
    model = random_model(tied, num_experts)
    mesh = sharding.mesh(2, 4)
    where = sharding.param_shardings(mesh, model.config)
    placed = sharding.shard_params(model.params, where)
    split = loading.quantized(dataclasses.replace(model, params=placed, mesh=mesh), kind)
    expected = loading.quantized(model, kind)
    described = roofline.abstract_params(model.config, mesh, jnp.float32, quantize=kind)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), described)
    assert shapes == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), split.params
    )
    tokens = np.arange(24).reshape(2, 12)
    alone = np.asarray(logits_of(model.config, expected.params, tokens))
    with split.in_mesh():
        actual = logits_of(model.config, split.params, tokens)
    np.testing.assert_allclose(actual, alone, atol=2e-5 * alone.std(), rtol=2e-5)


def test_costs_are_measured_for_each_kind(target, draft, monkeypatch):
    measured = []
    monkeypatch.setattr(
        costs, "measure", lambda *_: measured.append(1) or decode.schedule.only(0, 7)
    )
    costs._COSTS.clear()
    models = [loading.quantized(target, kind) for kind in quantization.KINDS]
    for small in (*models, models[0]):
        call = Call(small, [[3, 4]], draft, "auto")
        costs.of(call.loop, call.batch)
    costs._COSTS.clear()
    assert len(measured) == 2


def test_what_cannot_be_done_is_refused(target, tmp_path):
    small = loading.quantized(target, "int8")
    with pytest.raises(spsjax.InputError, match=r"quantize: .*found int8"):
        loading.quantized(small, "int8")
    with pytest.raises(spsjax.InputError, match=r"model: .*found int8"):
        loading.save(tmp_path / "new", small)
    assert not (tmp_path / "new").exists()
    with pytest.raises(spsjax.InputError, match=r"^model: expected a loaded model, found str"):
        loading.quantized("pystdlib/target", "int8")
    with pytest.raises(spsjax.InputError, match=r"^quantize: expected int8 .*found None"):
        loading.quantized(target, None)
    for wrong in ("int4", 8, True, ["int8"]):
        with pytest.raises(spsjax.InputError, match="quantize: expected None or int8"):
            loading.load("pystdlib/target", quantize=wrong)
