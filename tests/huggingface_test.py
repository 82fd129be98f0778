"""Model folders: what is saved is what is loaded, and other tools read and write the same."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from bad_input import one_line
from conftest import spread_params, tiny_config

from spsjax import loading
from spsjax.models import transformer
from spsjax.models.hf import config_json, families
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import sharding
from spsjax.training import step as train_step

GOLDEN = pathlib.Path(__file__).parent / "golden"


def equal(one, other) -> bool:
    """Whether two pytrees of arrays are the same, types included."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(leaves, others)
    )


def edit_config(folder, remove=(), **changes):
    """Changes fields of a saved config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: raw[name] for name in raw if name not in remove}))


def shard(folder, count):
    """Splits model.safetensors into `count` files and an index."""
    single = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(single)
    single.unlink()
    weight_map = {}
    for index in range(count):
        name = f"model-{index + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[index::count])
        safetensors.numpy.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_as_it_was(tmp_path, tie, dtype):
    config = tiny_config(24, num_layers=2, tie_embeddings=tie, bos_id=1, eos_ids=(2,))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), spread_params(config, 0))
    hf_weights.save(tmp_path, config, params, dtype)
    assert hf_weights.read_config(tmp_path) == config
    assert equal(hf_weights.read_params(tmp_path, config, dtype), params)
    assert ("lm_head.weight" in safetensors.numpy.load_file(tmp_path / "model.safetensors")) != tie
    assert not list(tmp_path.glob("*.partial"))


def test_bfloat16_weights_are_widened_exactly(tmp_path):
    config = tiny_config(24)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), rounded)


def test_shards_with_an_index_load_like_one_file(tmp_path):
    config = tiny_config(24, num_layers=2)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    shard(tmp_path, 3)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_saving_over_shards_replaces_them(tmp_path):
    config = tiny_config(24)
    hf_weights.save(tmp_path, config, spread_params(config, 0), "float32")
    shard(tmp_path, 2)
    params = spread_params(config, 1)
    hf_weights.save(tmp_path, config, params, "float32")
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_kernels_are_stored_with_outputs_first(tmp_path):
    config = tiny_config(24, d_ff=40)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    kernel = params["layers"][0]["ffn"]["up"]["kernel"]
    assert np.array_equal(stored["model.layers.0.mlp.up_proj.weight"], kernel.T)
    assert np.array_equal(stored["model.embed_tokens.weight"], params["embed"]["embedding"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500_000, "rope_scaling": {"type": "default"}},
    ],
)
def test_the_rotary_base_is_found_where_old_and_new_files_have_it(tmp_path, changes):
    config = tiny_config(24, rope_theta=5e5)
    config_json.write(tmp_path, config, "float32")
    edit_config(tmp_path, **changes)
    assert hf_weights.read_config(tmp_path) == config


def test_absent_fields_have_the_defaults_of_the_family(tmp_path):
    config = tiny_config(24, num_kv_heads=8, norm_eps=1e-6)
    config_json.write(tmp_path, config, "float32")
    absent = (
        "head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "hidden_act",
    )  # fmt: skip
    edit_config(tmp_path, remove=absent)
    assert hf_weights.read_config(tmp_path) == config


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), ([2, 5], (2, 5)), (0, (0,))])
def test_end_ids_are_none_one_or_many(tmp_path, eos, expected):
    config_json.write(tmp_path, tiny_config(24), "float32")
    edit_config(tmp_path, eos_token_id=eos)
    assert hf_weights.read_config(tmp_path).eos_ids == expected


def test_stored_rotary_frequencies_and_a_tied_head_are_ignored(tmp_path):
    config = tiny_config(24, tie_embeddings=True)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, path)
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def respelt(name, folder, spelling, config=lambda raw: raw, **more):
    """A copy of a golden folder, its tensors under other names and its config.json changed."""
    folder.mkdir()
    tensors = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    tensors = {spelling(key): tensor for key, tensor in tensors.items()} | more
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    return folder


def assert_same_model(folder, name):
    one, other = loading.load(folder), loading.load(GOLDEN / name)
    assert one.config == other.config and equal(one.params, other.params)


def test_gpt2_without_its_prefix_and_with_its_masks(tmp_path):
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32),
        "h.1.attn.masked_bias": np.ones((), np.float32),
    }
    folder = respelt("gpt2", tmp_path / "x", lambda key: key.removeprefix("transformer."), **masks)
    assert_same_model(folder, "gpt2")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("inside", [None, 5])
def test_the_language_model_of_one_that_sees(tmp_path, prefix, inside):
    """Gemma 3 of 4B and more: its text model is within, and ends are outside, or all of them."""

    def wrapped(raw):
        ends = {key: raw.pop(key) for key in ("bos_token_id", "eos_token_id")}
        raw["eos_token_id"] = inside
        return {"model_type": "gemma3", "text_config": raw, "vision_config": {}, **ends}

    folder = respelt(
        "gemma3", tmp_path / "x", lambda key: key.replace("model.", prefix, 1), wrapped,
        **{"vision_tower.vision_model.post_layernorm.bias": np.ones(3, np.float32)},
    )  # fmt: skip
    assert_same_model(folder, "gemma3")


def golden_config(name, tmp_path, **changes):
    """The `Config` of a golden config.json with these changes; a None takes a key away."""
    raw = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return config_json.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2", {"sliding_window": 4, "use_sliding_window": True, "query_pre_attn_scalar": 3}),
        ("llama2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0}),
        ("mistral", {"use_sliding_window": False, "max_window_layers": 1}),
        ("qwen2_windows", {"sliding_window_pattern": 2, "layer_types": None}),
        ("gemma2", {"sliding_window_pattern": 3, "layer_types": None}),
        ("gemma3", {"attn_logit_softcapping": 3.0}),
    ],
)
def test_what_means_nothing_to_a_family_changes_nothing(tmp_path, name, changes):
    assert golden_config(name, tmp_path, **changes) == config_json.read(GOLDEN / name)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("llama2", {"rope_scaling": LINEAR}, {"rope_scaling": ("linear", 2.0)}),
        (  # the older key goes first
            "llama2",
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 7.0}},
            {"rope_scaling": ("linear", 2.0), "rope_theta": 10_000.0},
        ),
        (  # what stands outside goes first
            "llama3",
            {"original_max_position_embeddings": 32},
            {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 32.0)},
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": LINEAR},
            {"rope_scaling": ("linear", 2.0), "rope_theta": 1e6, "rope_theta_local": 1e4},
        ),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}},
            {"rope_scaling": (), "rope_theta": 1e6, "rope_theta_local": 5.0},
        ),
        ("gemma3", {"layer_types": None}, {"windows": (8, 8, 8, 8, 8, 0)}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}, {"windows": (8, 0)}),
        ("gemma2", {"layer_types": None}, {"windows": (8, 0)}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, {"windows": (0, 8)}),
        ("gemma", {"hidden_act": "gelu"}, {}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {}),
    ],
)
def test_spellings_of_older_and_newer_files(tmp_path, name, changes, fields):
    expected = dataclasses.replace(config_json.read(GOLDEN / name), **fields)
    assert golden_config(name, tmp_path, **changes) == expected


def test_layer_types_that_are_none(tmp_path):
    with one_line("layer_types", "sliding_attention"):
        golden_config("gemma2", tmp_path, layer_types=["full_attention", []])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_gemma_without_windows_keeps_their_size(tmp_path, name):
    """`transformers` wants a number there, whether or not a layer has a window."""
    layers = config_json.read(GOLDEN / name).num_layers
    config = golden_config(name, tmp_path, layer_types=["full_attention"] * layers)
    assert config.windows == ()
    config_json.write(tmp_path, config, "float32")
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 4096
    assert config_json.read(tmp_path) == config


def test_a_shape_that_no_config_json_says(tmp_path):
    config = dataclasses.replace(config_json.read(GOLDEN / "mixtral"), windows=(8, 0))
    with one_line("model", "mixtral"):
        hf_weights.save(tmp_path, config, spread_params(config, 0))
    assert not list(tmp_path.iterdir())


def test_a_head_of_gpt2_s_own_is_stored_as_others_are(tmp_path):
    """Its other matrices are stored the other way round."""
    config = dataclasses.replace(config_json.read(GOLDEN / "gpt2"), tie_embeddings=False)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored["lm_head.weight"].shape == (config.vocab_size, config.d_model)
    assert stored["transformer.h.0.mlp.c_fc.weight"].shape == (config.d_model, config.d_ff)
    np.testing.assert_array_equal(stored["lm_head.weight"].T, params["head"]["kernel"])
    assert equal(hf_weights.read_params(tmp_path, config, jnp.float32), params)


def test_a_tensor_under_two_names(tmp_path):
    stray = np.ones((40, 16), np.float32)
    folder = respelt("qwen3", tmp_path / "x", lambda key: key, **{"embed_tokens.weight": stray})
    with one_line("embed_tokens.weight", "once"):
        loading.load(folder)


def test_each_device_reads_its_slice_alone(tmp_path, monkeypatch):
    mesh, read = sharding.mesh(1, 8), []
    config = tiny_config(64, num_layers=1, num_kv_heads=8)
    hf_weights.save(tmp_path, config, spread_params(config, 0), "float32")
    opened = hf_weights.safetensors.safe_open

    class Watched:
        def __init__(self, stored):
            self.stored = stored
            self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

        def __getitem__(self, index):
            found = self.stored[index]
            read.append(found.size / np.prod(self.get_shape()))
            return found

    class File:
        def __init__(self, *args, **options):
            self.file = opened(*args, **options)
            self.keys = self.file.keys

        def get_slice(self, name):
            return Watched(self.file.get_slice(name))

    monkeypatch.setattr(hf_weights.safetensors, "safe_open", File)
    loading.load(tmp_path, mesh)
    assert {1 / 8, 1.0} == {*read}  # a norm is on every device
    assert read.count(1 / 8) == 8 * 9


def test_names_without_their_first_part(tmp_path):
    folder = respelt("qwen3", tmp_path / "x", lambda key: key.removeprefix("model."))
    assert_same_model(folder, "qwen3")


def test_saving_forgets_the_ends_of_another_model(tmp_path):
    config = config_json.read(GOLDEN / "llama2")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    hf_weights.save(tmp_path, config, spread_params(config, 0))
    assert config_json.read(tmp_path).eos_ids == config.eos_ids == (2,)


LIMITED = """
import resource, sys
import jax, jax.numpy as jnp
from spsjax import loading, sharding

def private():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) * 1024

small, large, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = sharding.mesh(1, 8)
loading.load(small, mesh, "bfloat16")  # for all that takes memory but once
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (private() + limit, before[1]))
model = loading.load(large, mesh, "bfloat16")
resource.setrlimit(resource.RLIMIT_DATA, before)
sums = [float(leaf.astype(jnp.float32).sum()) for leaf in jax.tree.leaves(model.params)]
print(sum(sums), sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit and its measure are Linux's")
def test_a_file_larger_than_the_memory_beside_the_model(tmp_path):
    """Half of a float32 file is the bfloat16 model itself, and a quarter of it is left."""
    expected = {}
    for name, width in (("small", 64), ("large", 1024)):
        config = tiny_config(8192, num_layers=4, d_model=width, d_ff=4 * width, head_dim=width // 8)
        shapes = transformer.param_shapes(config)
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), shapes)
        hf_weights.save(tmp_path / name, config, params, "float32")
        expected[name] = 0.5 * sum(leaf.size for leaf in jax.tree.leaves(params))
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    limit = int(0.75 * size)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "small", tmp_path / "large", str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    total, held = map(float, done.stdout.split())
    assert total == expected["large"] and size > limit > held


# Against transformers itself, where the extra `parity` is installed.


@pytest.fixture(scope="module")
def other():
    """The module `transformers`."""
    pytest.importorskip("torch", reason="needs the extra: pip install -e '.[parity]'")
    return pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[parity]'")


@pytest.mark.parametrize("family", sorted({*families.FAMILIES} - {"chinchilla"}))
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(other, tmp_path, family):
    kind = other.models.auto.configuration_auto.CONFIG_MAPPING[family]
    known = families.FAMILIES[family]
    kind(pad_token_id=None).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2}
    path.write_text(json.dumps(raw))
    whole = config_json.read(tmp_path)
    sizes = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads")
    kept = {known.keys.get(field) for field in (*sizes, "max_positions", "experts_per_token")}
    kept |= {"model_type", "bos_token_id", "eos_token_id", "num_experts", "num_local_experts"}
    if family in ("llama", "qwen2", "mistral", "mixtral"):  # a derived value, not a default
        kept |= {"head_dim"}
    path.write_text(json.dumps({key: raw[key] for key in raw if key in kept}))
    assert config_json.read(tmp_path) == whole


TOKENS = np.random.default_rng(0).integers(0, 24, (2, 19)).astype(np.int32)
SHAPES = [
    {"tie_embeddings": True},
    {"tie_embeddings": False, "num_kv_heads": 8, "head_dim": 6, "rope_theta": 5e3},
    {"tie_embeddings": False, "num_layers": 2, "norm_eps": 1e-3, "d_ff": 40},
]


def their_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


@pytest.mark.parametrize("changes", SHAPES)
def test_a_folder_of_transformers_gives_its_logits_here(other, tmp_path, changes):
    config = tiny_config(24, **changes)
    torch_model = other.LlamaForCausalLM(
        other.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=0.3,
        )
    )
    torch_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    read = hf_weights.read_config(tmp_path)
    assert dataclasses.replace(read, bos_id=None, eos_ids=()) == config
    params = hf_weights.read_params(tmp_path, read, jnp.float32)
    ours = train_step.forward(read, params, TOKENS).logits
    assert np.abs(ours - their_logits(torch_model)).max() < 1e-4


@pytest.mark.parametrize("changes", SHAPES)
def test_a_folder_of_ours_gives_our_logits_in_transformers(other, tmp_path, changes):
    config = tiny_config(24, bos_id=1, eos_ids=(2, 3), **changes)
    params = spread_params(config, 0)
    hf_weights.save(tmp_path, config, params, "float32")
    model = other.LlamaForCausalLM.from_pretrained(tmp_path)
    ours = train_step.forward(config, params, TOKENS).logits
    assert np.abs(ours - their_logits(model)).max() < 1e-4 * jnp.abs(ours).max()
    assert model.config.eos_token_id == [2, 3]


def test_every_parameter_has_a_tensor_name_of_its_own():
    config = tiny_config(24, num_layers=3)
    shapes = transformer.param_shapes(config)
    paths = [
        tuple(entry.key for entry in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    names = {families.place("llama", config, path).names for path in paths}
    assert len(names) == len(paths) == 3 + 9 * 3
