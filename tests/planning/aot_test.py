"""Tests of programs compiled ahead of time for TPUs: their memory, collectives and cycles.

The TPU's own compiler runs without a TPU. `pip install libtpu` installs it.
"""

import collections
import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from helpers import notebooks
from helpers.environment import ROOT
from helpers.models import tiny_config

from spsjax import InputError, Tree
from spsjax.cli import configs
from spsjax.drafters import dflash2, draft_model, sparse_self
from spsjax.parallel import sharding
from spsjax.planning import aot, compile_report, compiled_program, hardware
from spsjax.training import step as train_step
from spsjax.training.optimizer import OptimizerConfig
from spsjax.training.tasks.features import build_drafter

MODELS = ROOT / "configs" / "models"
K = 4
LAYERS = 2  # of all targets: their layers are alike
VOCAB = 4000
# Parameters of Chinchilla and its draft, of half the width, with two layers and with one.
SHORT = LAYERS * (5 + 8) * 4096**2 + VOCAB * 4096
SHORT_DRAFT = (5 + 8) * 3072**2 + VOCAB * 3072
_needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU's compiler is not installed"
)


def ahead_of_time(test):
    """Marks a test that compiles for a TPU."""
    return pytest.mark.aot(_needs_libtpu(test))


def small(name: str, shrink=4, **fields):
    """Returns a model of `configs/models` with two layers of a part of the width.

    It compiles much faster and has the same collectives. With a quarter of the width its cycles say
    little of the whole model.
    """
    whole = configs.model_config(name, MODELS)
    sizes = {field: getattr(whole, field) // shrink for field in ("d_model", "d_ff", "num_heads")}
    heads = min(whole.num_kv_heads, sizes["num_heads"])
    fields = {"num_layers": LAYERS, "num_kv_heads": heads, "vocab_size": VOCAB} | fields
    return dataclasses.replace(whole, **sizes | fields)


def plan_pair(target, draft, topology, K=K, **options) -> aot.PairPlan:
    return aot.plan_pair(target, draft_model.Drafter(draft, K), topology, **options)


def counts(program: compiled_program.CompiledProgram, scope: str) -> dict[str, int]:
    """Returns kind -> number of collectives in scopes that mention `scope`."""
    return collections.Counter(op.kind for op in program.collectives if scope in op.scope)


@pytest.fixture(scope="module")
def chinchilla() -> compile_report.CompileReport:
    """A short Chinchilla and its draft on 8 v5p chips."""
    target, draft = small("chinchilla_70b", 2), small("chinchilla_draft_4b", 2, num_layers=1)
    plan = plan_pair(target, draft, "v5p:2x2x2", prompt_tokens=128, max_new_tokens=512)
    return compile_report.report(plan)


@ahead_of_time
def test_chinchilla_programs_need_little_temporary_memory(chinchilla):
    assert chinchilla.weights == pytest.approx((SHORT + SHORT_DRAFT) * 2 / 8, rel=1e-3)
    for name, program in chinchilla.programs.items():
        assert program.temporary < 0.5e9, name
    # With a copy of every layer's table of distances it would be half of the caches, and with all
    # caches in another layout 1.7 times as much as they are.
    assert chinchilla.programs["ArS"].temporary < 0.35 * chinchilla.caches
    assert chinchilla.programs["SpS"].temporary < 1.2 * chinchilla.caches


@ahead_of_time
def test_programs_update_caches_in_place_and_score_one_token_as_fast(chinchilla):
    """One row alone would be multiplied on the vector unit, which takes twice as long."""
    target, draft = (chinchilla.passes[name].cache for name in ("target", "draft"))
    assert chinchilla.programs["SpS"].aliased >= target + draft
    assert chinchilla.programs["ArS"].aliased >= target
    cycles = {name: chinchilla.programs[name].cycles["score"] for name in ("ArS", "SpS")}
    assert cycles["ArS"] < cycles["SpS"]


@ahead_of_time
def test_pass_has_the_fewest_collectives(chinchilla):
    # The compiler gathers one row of logits by an all-reduce, and several by an all-gather.
    sps = chinchilla.programs["SpS"]
    assert counts(sps, "/score/") == {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    per_step = counts(sps, "/propose/while/")
    assert per_step == {"all-reduce": 2 + 1 + 1}
    assert counts(sps, "/propose/") - per_step == {"all-reduce": 2 + 1 + 1}
    assert counts(sps, "") == counts(sps, "/score/") + counts(sps, "/propose/")
    assert counts(chinchilla.programs["ArS"], "") == {"all-reduce": 2 * LAYERS + 1 + 1}
    for name in ("ArS", "SpS"):  # none moves more than the logits
        for op in chinchilla.programs[name].collectives:
            assert op.num_bytes <= (K + 1) * VOCAB * 4, op


@ahead_of_time
def test_cycles_are_counted_per_phase_of_a_round(chinchilla):
    cycles = chinchilla.programs["SpS"].cycles
    assert set(cycles) <= set(compiled_program.PHASES)
    score, propose = 80 / LAYERS * cycles["score"], 8 * cycles["propose"]  # of all layers
    assert score > propose > cycles["propose, sampling"] > 0
    # Sampling is a small share of a round: the search for a threshold is a loop of few steps.
    sampling = cycles["propose, sampling"] + cycles["verify"]
    assert sampling < 0.11 * (score + propose + sampling)
    assert chinchilla.programs["SpS"].executed["propose"] == K * (2 + 2)


@ahead_of_time
def test_predicted_times_follow_from_lower_bounds(chinchilla):
    passes = chinchilla.passes
    assert passes["target"].memory_seconds == pytest.approx(
        # The weights that project relative positions are read only when the cache is made.
        ((SHORT - LAYERS * 4096 * 4096) * 2 / 8 + passes["target"].cache) / 2765e9,
        rel=1e-3,
    )
    assert passes["target"].seconds < passes["scoring"].seconds < 1.1 * passes["target"].seconds
    loop = K * passes["draft"].seconds + passes["scoring"].seconds
    assert chinchilla.block_efficiency == pytest.approx((1 - 0.8**5) / 0.2)
    assert chinchilla.sps_ms == pytest.approx(1e3 * loop / chinchilla.block_efficiency)


@ahead_of_time
def test_llama_pair_fits_on_eight_v5e_chips():
    # The notebook compiles it, too.
    target = small("llama:3-8b")
    plan = plan_pair(target, target, "v5e:2x4", prompt_tokens=32, max_new_tokens=900)
    report = compile_report.report(plan)
    sps = report.programs["SpS"]
    assert sps.temporary < 0.5e9
    assert sps.aliased >= report.caches
    assert counts(sps, "/score/")["all-reduce"] in (2 * LAYERS + 1, 2 * LAYERS + 2)
    assert set(counts(sps, "")) <= {"all-reduce", "all-gather"}
    assert max(op.num_bytes for op in sps.collectives) <= (K + 1) * VOCAB * 4


@ahead_of_time
def test_tree_on_split_rows_gathers_no_cache_and_no_weights():
    """Trees have the collectives of chains, and move only logits, also where rows are split."""
    target, draft = (small("chinchilla_70b", num_layers=layers) for layers in (LAYERS, 1))
    drafter = draft_model.Drafter(draft, tree=Tree((0, 0, 1, 1, 3)))
    sizes = {"batch": 4, "data": 2, "prompt_tokens": 32, "max_new_tokens": 512}
    plan = aot.plan_pair(target, drafter, "v5p:2x2x4", **sizes)
    sps = plan.compile(["SpS"])["SpS"]
    assert set(counts(sps, "")) <= {"all-reduce", "all-gather"}
    assert counts(sps, "/score/") == {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    for op in sps.collectives:
        assert op.num_bytes <= 2 * 6 * VOCAB * 4, op  # of two rows
    assert sps.aliased >= sum(plan.caches.values())


def plan_head(replicate: bool) -> aot.PairPlan:
    """Plans EAGLE-3 for Llama 3 70B; `replicate`: whether each chip has the whole head."""
    target = small("llama:3-70b")
    drafter = build_drafter({"method": "eagle3", "vocab_size": 2000}, target)
    drafter = dataclasses.replace(drafter, num_speculative_tokens=K)
    sizes = {"prompt_tokens": 32, "max_new_tokens": 900}
    return aot.plan_pair(target, drafter, "v5p:2x2x4", replicate=replicate, **sizes)


@ahead_of_time
def test_head_on_features_needs_few_collectives_and_gathers_no_weights():
    plan = plan_head(replicate=False)
    sps = plan.compile(["SpS"])["SpS"]
    # After the embedding, the attention, the feed-forward layer, and to gather the logits.
    assert counts(sps, "/propose/while/") == {"all-reduce": 4}
    assert counts(sps, "/score/") == {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    # One sum serves the embedding and the fused features; two more follow in the layer.
    assert counts(sps, "/sync/") == {"all-reduce": 3}
    assert set(counts(sps, "")) == {"all-reduce", "all-gather"}
    assert max(op.num_bytes for op in sps.collectives) <= (K + 1) * VOCAB * 4
    assert sps.temporary < 0.05e9
    assert sps.aliased >= sum(plan.caches.values())


@ahead_of_time
def test_step_of_a_whole_head_sums_the_rows_of_the_embedding_alone():
    sps = plan_head(replicate=True).compile(["SpS"])["SpS"]
    assert counts(sps, "/propose/while/") == {"all-reduce": 1}


@ahead_of_time
def test_block_drafter_sums_twice_per_layer_and_gathers_logits_once():
    """DFlash2 for a narrow Qwen3 with a padded vocabulary, which no pass splits anew."""
    target = small("qwen:3-8b", padded_vocab_size=VOCAB + 96, max_positions=2048)
    sizes = {"num_layers": 3, "block_size": 8, "tap_layers": (1, 2)}
    drafter = dflash2.Drafter.from_config(sizes, target)
    plan = aot.plan_pair(target, drafter, "v5e:2x4", prompt_tokens=32, max_new_tokens=900)
    report = compile_report.report(plan)
    sps = report.programs["SpS"]
    # Twice per layer, and once for the embedding and the features. The corrections move nothing.
    drafting = counts(sps, "/propose/") + counts(sps, "/sync/")
    assert drafting == {"all-reduce": 2 * 3 + 1, "all-gather": 1}
    assert counts(sps, "/propose/while/") == {}
    assert counts(sps, "/score/") == {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    assert max(op.num_bytes for op in sps.collectives) <= 8 * (VOCAB + 96) * 4
    assert sps.aliased >= sum(plan.caches.values())
    # A slice of the padding across the layout of gathered logits takes as long as layers.
    assert sps.cycles["score"] < 1.5 * report.programs["ArS"].cycles["score"]
    passes = report.passes
    assert {name: cost.times for name, cost in passes.items()} == dict.fromkeys(passes, 1) | {
        "corrections": 7
    }
    loop = [cost.times * cost.seconds for name, cost in passes.items() if name != "target"]
    assert report.round_ms == pytest.approx(1e3 * sum(loop))
    assert passes["draft"].collectives + passes["features"].collectives == 2 * 3 + 2


@ahead_of_time
def test_target_with_a_small_cache_updates_both_caches_in_place():
    """Two small layers of Llama 3.1 8B, 16 rows of 4,032 tokens, and 512 slots to draft with."""
    target = small("llama:3.1-8b", eos_ids=())
    drafter = dataclasses.replace(sparse_self.by_name("512", target), num_speculative_tokens=K)
    sizes = {"batch": 16, "prompt_tokens": 32, "max_new_tokens": 4_000}
    plan = aot.plan_pair(target, drafter, "v5p:2x2x2", **sizes)
    row = 2 * LAYERS * 128 * 2  # keys and values of one of eight heads, per token
    assert plan.caches["target"] == 16 * 4_096 * row
    assert plan.caches["draft"] == 16 * (512 + 32) * row
    sps = plan.compile(["SpS"])["SpS"]
    assert sps.aliased >= sum(plan.caches.values())
    assert sps.temporary < plan.caches["target"]  # no copy of it
    per_step = {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    assert counts(sps, "/score/") == per_step
    assert counts(sps, "/propose/while/") == per_step


@ahead_of_time
@pytest.mark.smoke
def test_logits_and_no_weights_are_gathered_where_rows_are_split():
    config = tiny_config(1024, d_model=256, num_kv_heads=8)
    sizes = {"batch": 4, "data": 2, "prompt_tokens": 32, "max_new_tokens": 32}
    plan = plan_pair(config, config, "v5e:2x4", **sizes)
    for op in plan.compile(["ArS"])["ArS"].collectives:
        assert op.num_bytes <= 2 * config.vocab_size * 4, op


@ahead_of_time
@pytest.mark.notebook
def test_notebook_plan_a_pod_runs(capsys, monkeypatch):
    # It runs in this file because it needs the programs that this file has compiled.
    notebooks.run("plan_a_pod", capsys, monkeypatch)


@ahead_of_time
def test_pair_that_does_not_fit_is_refused_with_its_excess():
    whole = configs.model_config("chinchilla_70b", MODELS)
    target = dataclasses.replace(whole, num_layers=LAYERS)
    excess = r"found 19.22 \(weights 2.01, caches 17.21\): 2.04 too much$"
    with pytest.raises(InputError, match=r"^v5e:2x2: expected at most 17.18 GB a chip, " + excess):
        plan_pair(target, target, "v5e:2x2", batch=256)
    with pytest.raises(InputError, match=r"^num_heads: .* model axis, 16, found 12$"):
        odd = dataclasses.replace(target, num_heads=12, num_kv_heads=12)
        plan_pair(target, odd, "v5p:2x2x4")
    with pytest.raises(InputError, match=r"^data: expected a divisor of 16 devices and of 2 rows"):
        plan_pair(target, target, "v5p:2x2x4", data=4, batch=2)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("K", 2048, r"in \[1, 2048\), the context, found 2048"),
        ("batch", -1, "an integer >= 1, found -1"),
        ("prompt_tokens", 1.5, "an integer >= 1, found 1.5"),
        ("max_new_tokens", 8000, "within the context of 2048, found 1024 \\+ 8000"),
        ("dtype", "int8", "a floating-point type of 16 bits or more, found int8"),
    ],
)
def test_argument_out_of_range_is_refused_in_one_line(argument, value, message):
    target = configs.model_config("chinchilla_70b", MODELS)
    name = {"K": "num_speculative_tokens"}.get(argument, argument)
    with pytest.raises(InputError, match=f"^{name}: expected .*{message}$"):
        plan_pair(target, target, "v5p:2x2x4", **{argument: value})
    with pytest.raises(InputError, match=r"^draft: expected the target's vocabulary of 32000, "):
        plan_pair(target, dataclasses.replace(target, vocab_size=16_000), "v5p:2x2x4")


def test_assumption_out_of_range_is_refused_before_compiling():
    for argument, value in (("acceptance", 7), ("collective_us", -1)):
        with pytest.raises(InputError, match=f"^{argument}: expected a number .*, found {value}$"):
            compile_report.report(None, **{argument: value})


@ahead_of_time
def test_remat_saves_memory_and_step_gathers_nothing():
    """Recomputing activations takes less than 0.3 of the memory, and a step has no all-gather.

    The TPU's compiler counts here: the CPU's compiler removes the recomputation.
    """
    _, devices = hardware.topology("v5e:2x2")
    mesh, layers, length = sharding.mesh(2, 2, devices), 6, 512
    model = tiny_config(512, num_layers=layers, d_model=128, d_ff=512, head_dim=16)
    optimizer = OptimizerConfig(1e-3, steps=20, warmup=2)
    state = train_step.state_shapes(train_step.model_shapes(model, mesh), optimizer)
    rows = sharding.batch_sharding(mesh)
    tokens = jax.ShapeDtypeStruct((8, length + 1), jnp.int32, sharding=rows)
    values = train_step.language_model_metrics(model, train_step.Precision("bfloat16", True))
    with jax.set_mesh(mesh), compiled_program.uncached():
        step = train_step.make_step(values, optimizer)
        program = step.lower(state, {}, {"tokens": tokens}).compile()
    assert "all-gather(" not in program.as_text()  # weights and activations stay split
    # What a chip would store of the attention alone: the weights of four rows and four heads.
    stored = layers * 4 * 4 * length**2 * 2
    assert program.memory_analysis().temp_size_in_bytes < 0.3 * stored
