"""The model of time by context and batch: published figures, limits, and a choice by hand."""

import dataclasses

import jax
import pytest
from helpers.models import tiny_config

from spsjax import InputError
from spsjax.models import transformer
from spsjax.planning import contexts, hardware
from spsjax.planning.contexts import Devices, Method, Reads

# SPiRE (Neelam et al. 2025, arXiv 2504.06419): bodies of 67M and 8.4M parameters, one byte per
# number, 600 products in the time of a byte.
H100 = Devices(hardware.Chip("", flops=600.0, memory=1e15, bandwidth=1.0), number_bytes=1)
TARGET = Reads(8 * (4 * 512 * 1024 + 3 * 512 * 4096), 8 * 2 * 1024, attended=8 * 2 * 1024)
VANILLA = Reads(4 * (4 * 256 * 512 + 3 * 256 * 2048), 4 * 2 * 512, attended=4 * 2 * 512)
TOKENS = {"vanilla": 2.647, "MagicDec": 3.891, "SPiRE": 3.401}
PUBLISHED = {
    (64, 512): {"vanilla": 1.36, "MagicDec": 2.05, "SPiRE": 2.78},
    (1, 512): {"vanilla": 1.70, "MagicDec": 0.84, "SPiRE": 1.79},
    (64, 4096): {"vanilla": 1.33, "MagicDec": 2.50, "SPiRE": 2.99},
}


@pytest.mark.parametrize(("batch", "context"), PUBLISHED)
def test_published_figures_of_spire_are_met(batch, context):
    window = context // 8 + 1
    # Two of eight layers, which also project the memory of every token.
    sizes = {"slots": window, "products": 2 * 2 * 512 * 1024, "attended": TARGET.attended // 4}
    drafts = {
        "vanilla": VANILLA,
        "MagicDec": dataclasses.replace(TARGET, slots=window),
        "SPiRE": Reads(TARGET.weights // 4, TARGET.cache // 4, **sizes),
    }
    for name, expected in PUBLISHED[batch, context].items():
        draft = drafts[name]
        faster = contexts.speedup(H100, TARGET, draft, batch, context, TOKENS[name], 4)
        assert round(faster, 2) == expected, name


def test_reads_of_a_model_are_its_arrays():
    """Matrices but a table that is only looked up, and the cache that is made for it."""
    for fields in ({}, {"tie_embeddings": False}, {"ffn": "gelu"}):
        config = tiny_config(48, num_layers=2, **fields)
        reads = contexts.reads_of(config)
        params = transformer.param_shapes(config)
        matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2)
        assert reads.weights == matrices - (0 if config.tie_embeddings else 48 * config.d_model)
        cache = transformer.empty_cache(config, transformer.init(config, jax.random.key(0)), 1, 10)
        assert 10 * reads.cache == sum(leaf.size for leaf in (*cache.keys, *cache.values))


CHIP = hardware.Chip("", flops=100.0, memory=1000.0, bandwidth=10.0, interconnect=8.0)


def test_pass_takes_its_bytes_or_its_products():
    devices, reads = Devices(CHIP), Reads(weights=50, cache=2, attended=3)
    assert devices.seconds(reads, 1, 5) == (2 * (50 + 5 * 2)) / 10
    # Four rows of three tokens, which attend to five each.
    assert devices.seconds(reads, 4, 5, 3) == max(2 * (50 + 4 * 10), 2 * 12 * (50 + 15) / 10) / 10
    assert devices.seconds(dataclasses.replace(reads, slots=2), 1, 5) == 2 * (50 + 2 * 2) / 10


def test_split_model_adds_the_time_of_its_sums():
    reads = Reads(weights=50, cache=2, num_all_reduces=3, width=4)
    devices = Devices(CHIP, count=2, all_reduce_us=1e6)
    # A ring of two sends every number once: 2 rows of 4 numbers of 2 bytes, 4 bytes per second.
    assert devices.seconds(reads, 2, 5) == (2 * (50 + 20)) / 20 + 3 * (16 / 4 + 1)
    with pytest.raises(InputError, match=r"^devices: expected one"):
        Devices(dataclasses.replace(CHIP, interconnect=None), count=2).seconds(reads, 2, 5)


def test_best_way_changes_from_a_small_model_to_a_small_cache():
    """A small model with a cache of half the size pays at once; a small cache with long texts."""
    target = Reads(weights=1000, cache=10)
    methods = {
        "model": Method(Reads(weights=100, cache=5), 0.8),
        "cache": Method(Reads(weights=1000, cache=10, slots=8), 0.9, own=False),
    }
    devices = Devices(dataclasses.replace(CHIP, flops=1e9, memory=1e9))
    short, long = (contexts.best(devices, target, methods, 8, n) for n in (1, 10_000))
    assert (short.name, long.name) == ("model", "cache")
    tokens = sum(0.9**i for i in range(long.num_speculative_tokens + 1))
    by_hand = tokens / (1 + long.num_speculative_tokens * (1000 + 640) / (1000 + 800_000))
    assert long.speedup == pytest.approx(by_hand)


def test_what_does_not_fit_is_left_out():
    target, devices = Reads(weights=400, cache=10), Devices(CHIP)
    methods = {"model": Method(Reads(weights=90, cache=0), 0.9)}
    assert contexts.best(devices, target, methods, 1, 2).name == ""  # 2 x (400 + 20 + 90)
    assert contexts.best(devices, target, methods, 1, 1).name == "model"
    assert contexts.best(devices, target, methods, 1, 20) is None
    shared = {"cache": dataclasses.replace(methods["model"], own=False)}
    assert contexts.best(devices, target, shared, 1, 2).name == "cache"
