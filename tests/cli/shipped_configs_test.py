"""Tests of the shipped configs: published parameter counts, and options that are valid."""

import dataclasses
import math
import runpy

import jax
import pytest
from helpers import gguf_files
from helpers.bad_input import one_line
from helpers.environment import ROOT
from helpers.golden_folders import GOLDEN
from ml_collections import ConfigDict

from spsjax.cli import config_flags, config_keys, configs
from spsjax.models import transformer
from spsjax.models.hf import config_json
from spsjax.models.transformer import param_shapes
from spsjax.training import config as training_config
from spsjax.training import fit

FOLDER = ROOT / "configs" / "models"
# Billions as a paper states them, or the exact count of the published weights.
COUNTS = {
    "mixture:8": 56_644_096, "mixture:64": 207_753_728, "mixture:draft": 1_966_848,
    "chinchilla_70b": 70.1, "chinchilla_draft_4b": 4.1,
    "gemma:2-2b": 2_614_341_888, "gemma:2-9b": 9_241_705_984, "gemma:2-27b": 27_227_128_320,
    "gemma:3-270m": 268_098_176, "gemma:3-1b": 999_885_952,
    # With the vision tower 4,300,079,472, 12,187,325,040 and 27,432,406,640.
    "gemma:3-4b": 3_880_263_168, "gemma:3-12b": 11_766_034_176, "gemma:3-27b": 27_009_346_304,
    "gemma4:31b": 30.7, "gemma4:26b-a4b": 25.2,
    # Without the layers that predict further tokens.
    "deepseek:v3": 671_026_419_200,
    "glm:4.5": 352_797_829_024, "glm:4.5-air": 106_852_251_264, "glm:4.7-flash": 29_943_393_920,
    "gpt2:small": 124_439_808, "gpt2:medium": 354_823_168, "gpt2:large": 774_030_080,
    "gpt2:xl": 1_557_611_200,
    "llama:2-7b": 6_738_415_616, "llama:2-13b": 13_015_864_320, "llama:2-70b": 68_976_648_192,
    "llama:3-8b": 8_030_261_248, "llama:3-70b": 70_553_706_496,
    "llama:3.1-8b": 8_030_261_248, "llama:3.1-70b": 70_553_706_496,
    "llama:3.1-405b": 405_853_388_800,
    "llama:3.2-1b": 1_235_814_400, "llama:3.2-3b": 3_212_749_824,
    "mistral:7b": 7_241_732_096, "mistral:7b-v0.3": 7_248_023_552,
    "mistral:8x7b": 46_702_792_704,
    "qwen:2.5-0.5b": 494_032_768, "qwen:2.5-1.5b": 1_543_714_304, "qwen:2.5-3b": 3_085_938_688,
    "qwen:2.5-7b": 7_615_616_512, "qwen:2.5-14b": 14_770_033_664,
    "qwen:2.5-32b": 32_763_876_352, "qwen:2.5-72b": 72_706_203_648,
    "qwen:3-0.6b": 596_049_920, "qwen:3-1.7b": 1_720_574_976, "qwen:3-4b": 4_022_468_096,
    "qwen:3-8b": 8_190_735_360, "qwen:3-14b": 14_768_307_200, "qwen:3-32b": 32_762_123_264,
    "qwen:3-30b-a3b": 30_532_122_624,
    # Of the default configs of transformers 5.19, without heads that predict further tokens.
    "qwen:next-80b-a3b": 79_674_391_296,
    "qwen:3.5-9b": 8_953_803_264, "qwen:3.5-35b-a3b": 34_660_610_688,
    "smollm2:135m": 134_515_008, "smollm2:360m": 361_821_120, "smollm2:1.7b": 1_711_376_384,
    "smollm2:draft": 42_472_512,
    "wide_shallow:target": 13_015_864_320, "wide_shallow:draft": 959_481_600,  # as Llama 2
}  # fmt: skip


def test_every_model_config_has_an_expected_count():
    assert set(configs.model_names(FOLDER)) == set(COUNTS)


def size(shapes) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def num_params(config):
    """Returns the count of a deep model, from one of a single layer if all layers are alike."""
    if config.changes:
        return size(param_shapes(config))
    shapes = param_shapes(dataclasses.replace(config, num_layers=1))
    return size(shapes) + (config.num_layers - 1) * size(shapes["layers"])


def test_num_params_extrapolates_the_layers():
    config = configs.model_config("gpt2:small", FOLDER)
    assert size(param_shapes(config)) == num_params(config) == COUNTS["gpt2:small"]


@pytest.mark.parametrize("name", COUNTS)
def test_model_config_has_the_published_count_and_a_family(name):
    """Hence the model can be saved in the Hugging Face layout."""
    config, expected = configs.model_config(name, FOLDER), COUNTS[name]
    count = num_params(config)
    assert count == expected if type(expected) is int else round(count / 1e9, 1) == expected
    family = config_json.family_of(config)
    of_experts = "8x7b" in name or name in ("mixture:8", "mixture:64")
    stem = "mixtral" if of_experts else name.partition(":")[0].partition("_")[0]
    stem = "llama" if name == "mixture:draft" or stem in ("wide", "smollm2") else stem
    assert family.startswith(stem) or (family, name) == ("llama", "mistral:7b-v0.3")


def test_unknown_model_name_lists_the_known_ones():
    with one_line("'llama:2-8b'", "llama:2-7b"):
        configs.model_config("llama:2-8b", FOLDER)
    with one_line("'lama'", "llama:SIZE", "chinchilla_70b"):
        configs.model_config("lama", FOLDER)


def test_model_config_reads_folders_and_gguf_files(tmp_path):
    values = gguf_files.metadata_of(GOLDEN / "qwen3"), gguf_files.tensors_of(GOLDEN / "qwen3")
    path = gguf_files.write(tmp_path / "model.gguf", *values)
    expected = configs.model_config(str(GOLDEN / "qwen3"), FOLDER)
    assert configs.model_config(str(path), FOLDER) == expected


@pytest.mark.parametrize("name", ["distillspec", "wide_shallow"])
def test_comparison_drafts_have_one_size(name):
    folder = FOLDER.parent / "experiments"
    config = runpy.run_path(folder / f"{name}.py")["get_config"]()
    base = runpy.run_path(folder / f"{config.base}.py")["get_config"]()
    sizes = []
    for changes in (config.start, *config.runs.values()):
        run = base.copy_and_resolve_references().lock()
        run.update(config.common)
        run.update(changes)
        shape = transformer.Config(vocab_size=4096, max_positions=512, **run.model)
        sizes.append(num_params(shape))
    assert max(sizes) / min(sizes) < 1.005


EXPERIMENTS = FOLDER.parent / "experiments"
TRAININGS = (
    EXPERIMENTS / "layer_skip.py",
    EXPERIMENTS / "pystdlib_draft.py",
    FOLDER.parent / "drafters" / "eagle3.py",
)
# Those that a script reads with the keys of its own config.
OWN = ("generate", "benchmark", "load", "shapes", "quickstart", "reproduce", "serve", "plan_tree",
       "compare_drafters", "compare_verifiers", "compare_weights", "distillspec", "plan_skips",
       "plan_speedup", "plan_context", "chinchilla_70b")  # fmt: skip


def read(path) -> ConfigDict:
    return runpy.run_path(str(path))["get_config"]()


def with_value(values, key: str, value) -> dict:
    """Returns a copy of nested dicts with a value at a whole key."""
    first, _, rest = key.partition(".")
    return values | {first: with_value(values[first], rest, value) if rest else value}


def wrong(value):
    """Returns a value of another type than that of a config's value."""
    if value == "auto":  # or a number
        return 1.5
    return 7 if isinstance(value, (str, bool, tuple, ConfigDict)) else "x"


@pytest.mark.parametrize("name", OWN)
def test_value_of_a_wrong_type_is_named_by_its_whole_key(name):
    own = read(EXPERIMENTS / f"{name}.py")
    keys = {key: value for key, value in config_flags.keys(own) if value is not None}
    for key, value in keys.items():
        config = ConfigDict(with_value(own.to_dict(), key, wrong(value)))
        with one_line(f"--config.{key}: expected ", f", found {wrong(value)!r}"):
            config_keys.check_types(config, own)


@pytest.mark.parametrize("name", OWN)
def test_unknown_key_of_a_file_is_refused_on_every_level(name):
    """Except in sections whose readers check their keys; the nearest known key is named."""
    own = read(EXPERIMENTS / f"{name}.py")
    for key, _ in config_flags.keys(own):
        config = ConfigDict(with_value(own.to_dict(), f"{key}z", 7))
        if key.rpartition(".")[0].startswith(config_keys._OPEN):
            config_keys.check_unknown(config, own)
            continue
        with one_line(f"--config.{key}z: expected a key", f"Did you mean --config.{key}?"):
            config_keys.check_unknown(config, own)


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: path.stem)
def test_wrong_value_of_a_training_is_named_by_its_whole_key(path):
    values = read(path).to_dict()
    config_class = fit.task_class(values).config_class
    for key, value in config_flags.keys(ConfigDict(values)):
        section = key.partition(".")[0]
        if section in ("model", "drafter") and "." in key:
            continue  # read when the target is known
        for bad in [wrong(value)] + [-1] * (type(value) is int):
            with one_line(f"{key}: expected "):
                training_config.read(config_class, with_value(values, key, bad))
        with one_line(f"{key}z: expected a key of the config", f"Did you mean {key}?"):
            training_config.read(config_class, with_value(values, f"{key}z", value))
