"""Tests of downloads from the Hugging Face Hub, with a library that only notes its calls."""

import sys
import types

import pytest
from helpers.bad_input import one_line

from spsjax.models.hf import hub

INDEX = "model.safetensors.index.json"
CONFIGS = ["config.json", "generation_config.json", INDEX]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A stand-in for huggingface_hub. `calls` has repository, revision and files per call."""
    library = types.SimpleNamespace(calls=[])

    def snapshot_download(repository, *, revision, allow_patterns):
        library.calls.append((repository, revision, sorted(allow_patterns)))
        if repository == "someone/none":
            raise OSError("401 Client Error\nRepository Not Found " + "x" * 5000)
        return str(tmp_path)

    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return library


def test_download_without_weights_fetches_configs_and_tokenizer(library, tmp_path):
    assert hub.download("hf://someone/tiny@v2", ["tokenizer.json"]) == tmp_path
    assert library.calls == [("someone/tiny", "v2", [*CONFIGS, "tokenizer.json"])]


def test_download_with_weights_fetches_single_file_or_shards(library, tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert hub.download("hf://someone/tiny", weights=True) == tmp_path
    assert library.calls[1] == ("someone/tiny", None, sorted([*CONFIGS, "model.safetensors"]))
    (tmp_path / INDEX).write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}'
    )
    hub.download("hf://someone/tiny", weights=True)
    expected = sorted([*CONFIGS, "model.safetensors", "one.safetensors"])
    assert library.calls[3] == ("someone/tiny", None, expected)


def test_download_without_safetensors_is_refused(library):
    with one_line("hf://someone/tiny", "neither", "pickle", "safetensors.torch.save_file"):
        hub.download("hf://someone/tiny", weights=True)


def test_download_that_fails_is_reported_in_one_line(library):
    with one_line("hf://someone/none", "Repository Not Found"):
        hub.download("hf://someone/none")


def test_download_without_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with one_line("huggingface_hub: expected an installed package", "spsjax[hub]"):
        hub.download("hf://someone/tiny")
