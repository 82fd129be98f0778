"""Tests of loading and saving models: names, the Hub, dtypes, meshes."""

import dataclasses
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.models import spread_params

import spsjax
from spsjax import loading
from spsjax.parallel import sharding
from spsjax.utils import bfloat16


@pytest.mark.parametrize("name", ["no/such/model", "/", "x" * 5000, "a/.."])
def test_load_of_unknown_name_is_refused(name, monkeypatch, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with one_line("expected a model folder"):
        spsjax.load(name)
    with one_line("name", "list"):
        spsjax.load([name])


@pytest.mark.parametrize("path", ["", "a\0b", pathlib.Path("a\0b")])
def test_path_that_no_file_can_have_is_refused(model_folder, monkeypatch, path):
    """An empty path would be the current folder, which here holds a model."""
    model = loading.load(model_folder)
    monkeypatch.chdir(model_folder)
    before = {file: file.read_bytes() for file in model_folder.iterdir()}
    for name, call in (
        ("name", lambda: loading.load(path)),
        ("name", lambda: loading.load_drafter(path, model)),
        ("folder", lambda: loading.save(path, model)),
    ):
        with one_line(f"{name}: expected a path, found {str(path)!r}"):
            call()
    assert {file: file.read_bytes() for file in model_folder.iterdir()} == before


def test_path_with_a_byte_that_is_no_text_is_accepted(model_folder, tmp_path):
    """Python writes the byte as a surrogate."""
    loading.save(tmp_path / "a\udcff", loading.load(model_folder))
    assert loading.load(tmp_path / "a\udcff").config.num_layers == 2


def test_load_of_empty_folder_or_file_is_refused(tmp_path):
    with one_line(str(tmp_path), "config.json"):
        spsjax.load(tmp_path)
    (tmp_path / "file").write_text("text")
    with one_line("file", "found a file"):
        spsjax.load(tmp_path / "file")


def test_load_from_hub_downloads_only_needed_files(model_folder, monkeypatch):
    hub = types.SimpleNamespace(calls=[])

    def snapshot_download(repository, *, revision, allow_patterns):
        weights = [name for name in allow_patterns if name.endswith(".safetensors")]
        hub.calls.append((repository, revision, weights))
        assert {"config.json", "model.safetensors.index.json", "merges.txt"} <= {*allow_patterns}

        return str(model_folder)

    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert loading.load("hf://someone/tiny").config == loading.load(model_folder).config
    assert loading.load_config("hf://someone/tiny@v2").vocab_size == 64
    assert loading.load_tokenizer("hf://someone/tiny") is None
    # Only `load` downloads weights.
    first, second = (("someone/tiny", None, names) for names in ([], ["model.safetensors"]))
    assert hub.calls == [first, second, ("someone/tiny", "v2", []), first]


@pytest.mark.parametrize("dtype", ["foo", 3, "float8_e4m3fn", "complex64", "float64"])
def test_load_as_unusable_dtype_is_refused(model_folder, dtype):
    with one_line("dtype", "floating-point"):
        loading.load(model_folder, dtype=dtype)


@pytest.mark.parametrize("direct", [False, True])
def test_default_dtype_is_what_is_fastest_on_the_cpu(model_folder, monkeypatch, direct):
    """bfloat16 pays for weights beyond the caches, if it is not converted to float32."""
    monkeypatch.setattr(bfloat16, "is_multiplied_directly", lambda: direct)

    def dtype_of(params) -> str:
        return str(params["norm"]["scale"].dtype)

    assert dtype_of(loading.load(model_folder).params) == "float32"
    monkeypatch.setattr(loading.models, "_CACHED_BYTES", 4096)
    best = "bfloat16" if direct else "float32"
    target = loading.load(model_folder)
    assert dtype_of(target.params) == best
    # Beside a target in its default type a draft has its own default, and else the target's type.
    assert dtype_of(loading.load_drafter(model_folder, target).params) == best
    half = loading.load(model_folder, dtype="float16")
    assert dtype_of(loading.load_drafter(model_folder, half).params) == "float16"


def test_load_on_mesh_of_another_kind_is_refused(model_folder):
    for mesh, parts in (
        ("2x4", ("mesh", "str")),
        (jax.make_mesh((8,), ("rows",)), ("mesh", "data and model", "rows")),
        (sharding.mesh(1, 5), ("num_heads", "5", "8")),
    ):
        with one_line(*parts):
            loading.load(model_folder, mesh=mesh)
    for shape in ((1, 9), (0, 1)):
        with one_line("mesh", f"{shape[0]} x {shape[1]}"):
            sharding.mesh(*shape)


def test_saved_model_loads_unchanged(model_folder, tiny_tokenizer, tmp_path):
    model = dataclasses.replace(loading.load(model_folder), tokenizer=tiny_tokenizer)
    config = dataclasses.replace(model.config, vocab_size=300)
    model = dataclasses.replace(model, config=config, params=spread_params(config, 1))
    loading.save(tmp_path / "saved", model, "float32")
    again = loading.load(tmp_path / "saved")
    assert (again.config, again.tokenizer) == (model.config, tiny_tokenizer)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    modes = {path.stat().st_mode for path in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1  # the weights are as readable as the config
    # A model without a tokenizer removes the tokenizer of the folder.
    loading.save(tmp_path / "saved", dataclasses.replace(model, tokenizer=None))
    assert loading.load(tmp_path / "saved").tokenizer is None


@pytest.mark.parametrize("dtype", ["int8", "nonsense"])
def test_save_as_unusable_dtype_leaves_the_file_unchanged(model_folder, dtype):
    before = (model_folder / "model.safetensors").read_bytes()
    with one_line("dtype", dtype):
        loading.save(model_folder, loading.load(model_folder), dtype)
    assert (model_folder / "model.safetensors").read_bytes() == before


def test_save_of_no_model_or_to_no_folder_is_refused(model_folder):
    with one_line("config.json", "File exists"):
        loading.save(model_folder / "config.json", loading.load(model_folder))
    with one_line("model", "NoneType"):
        loading.save(model_folder, None)
