"""Tests of sharding: eight devices give the tokens of one, with the fewest collectives.

The collectives are those of Megatron's rules (arXiv 1909.08053).
"""

import collections
import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting
from helpers.bad_input import one_line
from helpers.calls import Call
from helpers.models import tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

import spsjax
from spsjax import decode
from spsjax.drafters import ngram
from spsjax.drafters.shapes import Tree
from spsjax.models import transformer
from spsjax.models.caches import dense
from spsjax.parallel import sharding
from spsjax.planning import hlo
from spsjax.types import Proposal
from spsjax.utils import compilation

MESHES = [(1, 8), (2, 4)]
# Rows have different lengths, and their number does not divide the mesh's data axis.
PROMPTS = [[1, 2, 3, 1, 2], [7], list(range(40))]
MIXED = spsjax.SamplingParams(
    temperature=[0.0, 1.0, 0.7], top_k=[0, 0, 9], top_p=[1.0, 0.9, 1.0], min_p=[0.0, 0.0, 0.02]
)
K = 4


def on(mesh, model, replicate=False):
    """Returns a copy of a model on the mesh."""
    params = sharding.shard_params(
        model.params, sharding.param_shardings(mesh, model.config, replicate)
    )
    return dataclasses.replace(model, params=params, mesh=mesh)


BUDGETS, SEED = [20, 12, 16], 3


def texts(target, draft):
    return spsjax.generate(target, PROMPTS, draft, 2, MIXED, BUDGETS, SEED)


def assert_same_texts(out, expected):
    assert all(map(np.array_equal, out.tokens, expected.tokens))
    assert out.stats.accepted_histogram == expected.stats.accepted_histogram


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(drafting.small_programs, id="", marks=pytest.mark.smoke),
        pytest.param(contextlib.nullcontext, id="filters", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_give_the_tokens_of_one(programs):
    """With a target that is split over all devices, and a draft that lies whole on each of them."""
    target, mesh = numpy_spread_model(48, num_kv_heads=8), sharding.mesh(2, 4)
    draft = numpy_nearby_model(target)
    split = on(mesh, target), on(mesh, draft, replicate=True)
    compilation.clear()  # of programs of the other case
    with programs():
        assert_same_texts(texts(*split), texts(target, draft))


@pytest.mark.slow
def test_eight_parts_of_a_layer_give_the_tokens_of_one_device():
    """Without a draft, and with a vocabulary that they do not divide."""
    target = numpy_spread_model(49, num_kv_heads=2)
    with drafting.small_programs():
        assert_same_texts(texts(on(sharding.mesh(1, 8), target), None), texts(target, None))


SPLIT = {
    "draft model": {"num_kv_heads": 2},
    "heads that stay whole": {"num_kv_heads": 1, "windows": (24, 0), "attention_softcap": 5.0},
    "relative positions": {"num_kv_heads": 4, "positions": "relative", "biases": "all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPLIT)
def test_generate_with_split_slots_equals_one_device(kind):
    """Four devices hold different slots of each cache, and two different heads."""
    target = numpy_spread_model(48, num_layers=2, **SPLIT[kind])
    draft, mesh = numpy_nearby_model(target), sharding.mesh(1, 2, slots=4)
    pair = on(mesh, target), on(mesh, draft)
    if kind != "draft model":  # a drafter without a cache
        draft = ngram.Drafter()
        pair = pair[0], draft
    with drafting.small_programs():
        assert_same_texts(texts(*pair), texts(target, draft))


@pytest.mark.slow
def test_drafters_of_other_caches_run_beside_split_slots():
    """Greedy texts of a tree, and of the target with a small cache, are those of one device."""
    one = numpy_spread_model(48, num_layers=2, num_kv_heads=2)
    many = on(sharding.mesh(1, 2, slots=4), one)

    def tokens(target, drafter):
        greedy = spsjax.SamplingParams(temperature=0)
        with drafting.small_programs():
            out = spsjax.generate(target, PROMPTS, drafter, None, greedy, 24)
        return [row.tolist() for row in out.tokens]

    expected = tokens(one, None)
    assert tokens(many, spsjax.loading.as_drafter(many, many, Tree.branching(2, 2))) == expected
    assert tokens(many, spsjax.load_drafter("sparse_self:40:chosen", many)) == expected


@pytest.mark.slow
def test_split_slots_take_one_collective_per_layer():
    """A scoring pass gathers sums of attention once per layer, and no part of a cache."""
    programs = Programs((1, 2), 2, True, "sharded draft", slots=4)
    model = programs.model
    layers, width = model.config.num_layers, model.config.head_dim + 2
    operations = collectives(programs.scoring)
    block = (4, K + 1, model.config.d_model)
    assert operations.pop("all-reduce") == [block] * (2 * layers + 1)
    sums = [shape for shape in operations.pop("all-gather") if shape[-1] == width]
    assert len(sums) == layers and {shape[0] for shape in sums} == {4}
    assert not operations
    gathers = {shape[-1] for shape in collectives(programs.loop)["all-gather"]}
    assert gathers == {width, model.config.vocab_size}


@pytest.mark.parametrize("slots", (0, 3, True, 2.0, "2", np.asarray([1, 2])))
def test_axis_of_slots_is_a_power_of_two(slots):
    with one_line("slots: expected"):
        sharding.mesh(1, 1, slots=slots)


@pytest.mark.parametrize(("rows", "slots"), ((3, 32), (20, 32), (20, 64)))
def test_write_to_split_slots_is_that_of_one_device(rows, slots):
    """Rows of a write lie on one device, on two, or on more, or are more than one device holds."""
    mesh, chance = sharding.mesh(1, 2, slots=4), np.random.default_rng(0)
    buffer = chance.random((2, 2, slots, 3), np.float32)
    new = chance.random((2, 2, rows, 3), np.float32)
    split, whole = jax.jit(dense._write_split), jax.jit(dense._write_rows)
    for start in range(slots - rows + 1):
        starts = np.asarray([start, (start * 5) % (slots - rows + 1)], np.int32)
        with jax.set_mesh(mesh):
            written = split(buffer, new, starts)
        np.testing.assert_array_equal(written, whole(buffer, new, starts))


@pytest.mark.parametrize("shape", MESHES)
def test_every_device_holds_its_share_of_the_weights(shape):
    mesh = sharding.mesh(*shape)
    model = on(mesh, numpy_spread_model(48, num_kv_heads=8))
    split = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model.params) if leaf.ndim > 1
    ]
    assert len(split) == 9
    for leaf in split:
        assert leaf.addressable_shards[0].data.size * shape[1] == leaf.size
    fewer_heads = on(mesh, numpy_spread_model(48, num_kv_heads=2)).params["layers"][0]["attention"]
    assert fewer_heads["key"]["kernel"].is_fully_replicated
    assert not fewer_heads["query"]["kernel"].is_fully_replicated


@pytest.mark.parametrize("rows", [0, 50_304])
def test_vocabulary_that_the_mesh_does_not_divide_is_whole(rows):
    """GPT-2's 50,257 tokens are on every device, unless they are padded to rows that divide."""
    mesh = sharding.mesh(1, 8)
    config = tiny_config(50_257, padded_vocab_size=rows)
    sharding_of = sharding.param_shardings(mesh, config)
    share = rows // 8 if rows else 50_257
    count = config.vocab_rows
    embedding = sharding_of(("embed", "embedding")).shard_shape((count, 32))
    head = sharding_of(("head", "kernel")).shard_shape((32, count))
    assert embedding == (share, 32) and head == (32, share)


def test_padding_of_a_split_vocabulary_is_dropped_after_the_gather():
    """Logits of 48 tokens in 56 rows move once; without the gather, chips also shift them."""
    model = on(sharding.mesh(1, 8), numpy_spread_model(48, padded_vocab_size=56))
    with model.in_mesh():
        hidden = jax.ShapeDtypeStruct((2, K + 1, model.config.d_model), np.float32)
        head = jax.jit(functools.partial(transformer.head, model.config))
        text = head.lower(model.params, hidden).compile().as_text()
    assert {kind: len(shapes) for kind, shapes in collectives(text).items()} == {"all-gather": 1}


@pytest.mark.parametrize("field", ["d_ff", "num_heads"])
def test_width_that_the_mesh_does_not_divide_is_refused(field):
    """Feed-forward width and heads must be multiples of the mesh's model axis."""
    mesh = sharding.mesh(1, 8)
    with one_line(f"{field}: expected a multiple of the mesh's model axis, 8", "found 12"):
        sharding.param_shardings(mesh, tiny_config(48, **{field: 12}))
    # Whole experts are not split, and copies neither.
    experts = {"num_experts": 8, "experts_per_token": 2}
    assert sharding.param_shardings(mesh, tiny_config(48, d_ff=12, **experts))
    assert sharding.param_shardings(mesh, tiny_config(48, **{field: 12}), replicate=True)
    with one_line("d_ff"):
        sharding.param_shardings(mesh, tiny_config(48, d_ff=12, **experts | {"num_experts": 6}))


# Collectives of compiled programs.


def collectives(text: str, scope: str = "") -> dict[str, list[tuple[int, ...]]]:
    """Returns operation -> shapes of its results on one device, in scopes that mention `scope`."""
    by_kind = collections.defaultdict(list)
    for op in hlo.collectives(text):
        if scope in op.scope:
            by_kind[op.kind] += op.shapes
    return by_kind


class Programs:
    """A scoring pass and the loop of `generate`, compiled when they are asked for."""

    def __init__(self, shape, num_kv_heads, tie, kind, slots=1):
        self.mesh = sharding.mesh(*shape, slots=slots)
        sizes = {"num_kv_heads": num_kv_heads, "tie_embeddings": tie}
        self.model = on(self.mesh, numpy_spread_model(96, num_layers=2, **sizes))
        draft = on(self.mesh, numpy_spread_model(96, **sizes), kind == "replicated draft")
        self.request = Call(self.model, [[1, 2, 3]] * 4, draft)
        with jax.set_mesh(self.mesh):
            prefill = compilation.compiled(
                decode.prompt.prefill, self.request.program, self.request.slots
            )
            self.state, _ = prefill(self.request.params, *self.request.inputs)

    @functools.cached_property
    def scoring(self) -> str:
        """The HLO of the scoring pass."""

        def score(params, state, drafts):
            output = decode.step.score(self.request.program, params, state, Proposal(drafts, None))
            return output.logits, output.block

        drafts = jax.device_put(np.zeros((4, K), np.int32), sharding.batch_sharding(self.mesh))
        return self._compile(jax.jit(score), drafts)

    @functools.cached_property
    def loop(self) -> str:
        """The HLO of the loop."""

        def run(params, state):
            return decode.step.run(self.request.program, params, state)

        return self._compile(jax.jit(run, donate_argnums=1))

    def _compile(self, function, *more) -> str:
        with jax.set_mesh(self.mesh):
            lowered = function.lower(self.request.params, self.state, *more)
            return lowered.compile().as_text()


CASES = [((2, 4), 4, False, "replicated draft"), ((1, 8), 2, True, "sharded draft")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    """A case of CASES, and its programs."""
    return request.param, Programs(*request.param)


@pytest.mark.slow
def test_score_reduces_twice_per_layer_and_once_to_embed(case):
    """A scoring pass reduces twice per layer and once for the embedding, and gathers the logits."""
    (shape, *_), programs = case
    model, operations = programs.model, collectives(programs.scoring)
    block = (4 // shape[0], K + 1, model.config.d_model)
    assert operations.pop("all-reduce") == [block] * (2 * model.config.num_layers + 1)
    assert operations.pop("all-gather") == [(*block[:2], model.config.vocab_size)]  # the logits
    assert not operations  # neither weights nor caches nor anything else moves


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [8, 6], ids=["whole experts", "split experts"])
def test_experts_reduce_no_more_often_than_a_dense_ffn(num_experts):
    mesh = sharding.mesh(2, 4)
    more = {"num_experts": num_experts, "experts_per_token": 2, "num_kv_heads": 8}
    model = on(mesh, numpy_spread_model(48, num_layers=2, **more))
    config, rows = model.config, sharding.batch_sharding(mesh)

    def score(params, block, lengths):
        cache = transformer.empty_cache(config, params, 4, 32).at(lengths)
        return transformer.apply(config, params, block, cache).logits

    with model.in_mesh():
        inputs = [jax.device_put(np.zeros(shape, np.int32), rows) for shape in ((4, K + 1), (4,))]
        operations = collectives(jax.jit(score).lower(model.params, *inputs).compile().as_text())
    reduced = operations.pop("all-reduce")
    assert reduced == [(2, K + 1, config.d_model)] * (2 * config.num_layers + 1)
    assert not operations


@pytest.mark.slow
def test_run_gathers_only_logits(case):
    (shape, _, _, kind), programs = case
    model, operations = programs.model, collectives(programs.loop)
    rows, vocab = 4 // shape[0], model.config.vocab_size
    gathered = {(rows, K + 1, vocab)}
    if kind == "sharded draft":
        gathered.add((rows, vocab))  # one draft token per pass
    gathers = {tuple(size for size in dims if size > 1) for dims in operations.pop("all-gather")}
    assert gathers == gathered
    # Beside the models' passes, sampling and verification too, only flags are reduced: does any
    # row need a filter or a round?
    widths = {reduced[-1:] for reduced in operations.pop("all-reduce")}
    assert widths == {(model.config.d_model,), ()} if shape[0] > 1 else {(model.config.d_model,)}
    assert not operations


def test_mesh_of_too_many_devices_says_how_to_get_them():
    with one_line("at most 8 devices, found 4 x 4", "xla_force_host_platform_device_count=16"):
        sharding.mesh(data=4, model=4)


@pytest.mark.parametrize("value", [5, [5], "cpu"])
def test_mesh_of_what_are_not_devices_is_refused(value):
    with one_line("devices: expected a list of devices", repr(value)):
        sharding.mesh(devices=value)
