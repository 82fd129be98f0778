"""Tests of the core beside the contract: chunks, inserted rows, score sizes, memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.calls import Call, assert_same_texts
from helpers.environment import FAST
from helpers.models import PROMPTS, build_model, logits_of, tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model, numpy_spread_params

import spsjax
from spsjax import InputError, SamplingParams, decode, generation, loading, sampling
from spsjax.drafters import ngram
from spsjax.loading import LoadedDrafter
from spsjax.models import transformer
from spsjax.utils.compilation import compiled
from spsjax.verifiers import match, rejection


def request_of(target, drafter, prompts=PROMPTS, new=8, **changes):
    """Returns a checked request, with changes to its program."""
    params = SamplingParams(temperature=[1.0, 0.0, 0.7][: len(prompts)])
    rule = changes.pop("verifier", None)
    return Call(target, prompts, drafter, None, params, new, 3, rule, False, **changes)


def assert_same_state(state, expected):
    """Asserts that caches hold the same up to what was read, and that features are the same."""
    read = np.asarray(expected.lengths)[:, None] - 1
    for some, other in ((state.cache, expected.cache), (state.drafter, expected.drafter)):
        for actual, right in zip(*map(jax.tree.leaves, (some, other)), strict=True):
            actual, right = np.asarray(actual), np.asarray(right)
            if actual.ndim == 4:  # keys or values
                there = np.arange(actual.shape[2]) < read
                actual, right = (np.moveaxis(array, 1, 2)[there] for array in (actual, right))
            np.testing.assert_allclose(actual, right, rtol=2e-6, atol=1e-5)


def test_logits_of_the_last_tokens_are_those_of_all(target):
    tokens = np.asarray([[3, 5, 7, 2], [1, 4, 4, 9]])
    apply = jax.jit(transformer.apply, static_argnums=0, static_argnames="num_logits")
    whole = apply(target.config, target.params, tokens)
    last = apply(target.config, target.params, tokens, num_logits=2)
    np.testing.assert_allclose(last.logits, whole.logits[:, 2:], atol=1e-5)
    assert last.hidden.shape == whole.hidden.shape


@pytest.mark.parametrize(
    ("name", "size"), [("draft_model", 7), pytest.param("tapped", 12, marks=pytest.mark.slow)]
)
def test_prefill_in_chunks_gives_the_same_state(target, draft, name, size):
    """Chunks give the state of one pass, whether or not they divide the lengths of the prompts."""
    drafter = drafting.build(name, draft, 3)
    whole = request_of(target, drafter)
    chunks = request_of(target, drafter, prefill_tokens=size)
    assert_same_state(chunks.prefill(), whole.prefill())


def test_insert_takes_the_first_row_of_a_padded_state(target):
    """On a mesh a single prompt gets rows that fill it up; they must not reach other rows."""
    request = request_of(target, None)
    state = request.prefill()
    fresh = request_of(target, None, [[11, 12, 11], [1], [2]]).prefill()
    inserted, _ = compiled(decode.rows.insert)(state, jnp.int32(1), fresh)
    assert inserted.lengths.tolist() == [state.lengths[0], 3, state.lengths[2]]
    more = state.tokens.shape[1] + 1 - fresh.tokens.shape[1]
    longer = dataclasses.replace(fresh, tokens=np.pad(fresh.tokens, ((0, 0), (0, more))))
    with pytest.raises(InputError, match=r"^fresh: expected a state of at most \d+ slots"):
        decode.rows.insert(state, 1, longer)
    for row in (-1, len(state.tokens)):
        with pytest.raises(InputError, match=rf"row: expected a row in .*, found {row}$"):
            decode.rows.insert(state, row, state)


@pytest.mark.slow
def test_greedy_tree_with_relative_positions_is_greedy():
    """Nodes of equal position in different branches see Transformer-XL's distances."""
    target = numpy_spread_model(32, positions="relative", ffn="gelu", num_layers=2)
    options = {"sampling": SamplingParams(temperature=0.0), "max_new_tokens": 24}
    drafter = drafting.build("random_tree", numpy_nearby_model(target, distance=0.05), 3)
    with drafting.small_programs():
        out = spsjax.generate(target, PROMPTS, drafter, verifier=match.Verifier(), **options)
        expected = spsjax.generate(target, PROMPTS, **options)
    assert_same_texts(out.tokens, expected.tokens)
    assert out.stats.block_efficiency > 1.2


@pytest.mark.slow
def test_propose_returns_the_first_round_of_generate(target, draft):
    with drafting.small_programs():
        proposal = spsjax.propose(target, PROMPTS[2], draft, 4, seed=5)
        out = spsjax.generate(target, [PROMPTS[2]], draft, 4, max_new_tokens=5, seed=5)
        first = next(generation.rounds(target, PROMPTS[2], draft, 4, seed=5)[1])
    assert proposal.tokens.shape == (1, 4) and proposal.probs.shape == (1, 4, 48)
    assert first.proposed == (proposal.tokens >= 0).sum()
    accepted = first.tokens[: first.accepted].tolist()
    assert first.accepted > 0 and accepted == proposal.tokens[0, : first.accepted].tolist()
    assert out.tokens[0][: first.accepted].tolist() == accepted


def test_first_drafts_after_one_token_are_the_drafts_own(target, draft):
    """A prompt of one token has no last but one: what fills its place is not attended to."""
    proposal = spsjax.propose(target, [9], draft, 2)
    for node, context in enumerate(([9], [9, int(proposal.tokens[0, 0])])):
        expected = reference.to_probs(logits_of(draft)(context))
        np.testing.assert_allclose(proposal.probs[0, node], expected, atol=1e-5)


def test_load_drafter_loads_by_name_or_folder():
    target = spsjax.load("pystdlib/target")
    lookup = spsjax.load_drafter("ngram", target)
    assert isinstance(lookup, LoadedDrafter) and lookup.drafter == ngram.Drafter()
    draft = spsjax.load_drafter("pystdlib/draft", target)
    expected = loading.as_drafter(spsjax.load("pystdlib/draft"), target)
    assert draft.drafter == expected.drafter
    jax.tree.map(np.testing.assert_array_equal, draft.params, expected.params)
    with pytest.raises(InputError, match="no_such_drafter"):
        spsjax.load_drafter("no_such_drafter", target)
    with pytest.raises(InputError, match="target: expected a loaded model, found str"):
        spsjax.load_drafter("ngram", "pystdlib/target")


def test_load_drafter_of_another_vocabulary_is_refused(target):
    with pytest.raises(InputError, match="expected the target's vocabulary"):
        spsjax.load_drafter("pystdlib/draft", target)


CACHE_COPY = re.compile(r"= (\S+) (?:copy|copy-start)\(")


def cache_copies(text: str, caches) -> list[str]:
    """Returns the copies in a program's text that have a cache's shape."""
    shapes = {"{}[{}]".format("f32", ",".join(map(str, leaf.shape))) for leaf in caches}
    copied = [match[1].partition("{")[0] for match in CACHE_COPY.finditer(text)]
    return [shape for shape in copied if shape in shapes]


@pytest.mark.parametrize("name", ["none", pytest.param("random_tree", marks=pytest.mark.slow)])
def test_run_copies_no_cache(monkeypatch, draft, name):
    """Of the optimized loop, without filters, which hold no cache and take long to compile."""
    monkeypatch.setattr(sampling, "to_probs", lambda logits, rows: jax.nn.softmax(logits))
    target = numpy_spread_model(48, num_kv_heads=8)
    drafter, verifier = drafting.build(name, draft, 3), drafting.verifier(name)
    request = request_of(target, drafter, verifier=verifier)
    prefill = functools.partial(decode.prompt.prefill, request.program, request.slots)
    state = jax.eval_shape(prefill, request.params, *request.inputs)
    caches = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    run = jax.jit(functools.partial(decode.step.run, request.program), donate_argnums=1)
    text = run.lower(request.params, state).compile(compiler_options=FAST).as_text()
    assert " while(" in text and not cache_copies(text, caches)


def test_cache_copies_of_a_copying_program_are_found():
    """A write that no read orders copies the whole cache, and `cache_copies` finds that copy."""
    if jax.default_backend() == "gpu":
        pytest.skip("XLA's compiler for GPUs puts such a write after the reads by itself")
    cache = jax.device_put(np.zeros((3, 2, 64, 4), np.float32))

    def broken(cache, row):
        written = jax.lax.dynamic_update_slice(cache, row, (0, 0, 5, 0))
        return written, jnp.sum(cache[:, :, :8]) + jnp.sum(cache)

    row = np.zeros((3, 2, 1, 4), np.float32)
    text = jax.jit(broken, donate_argnums=0).lower(cache, row).compile().as_text()
    assert cache_copies(text, [cache])


def test_prefill_of_a_long_prompt_needs_bounded_memory():
    """However long it is: five chunks' scores, and a second copy of the caches (all: 34 GB)."""
    slots = 32_768
    config = tiny_config(64, num_layers=2, max_positions=slots)
    target = build_model(config, numpy_spread_params(config, 0), None)
    prompt = [1] * (slots - 40)
    request = request_of(target, target, [prompt], new=30)
    prefill = jax.jit(functools.partial(decode.prompt.prefill, request.program, request.slots))
    memory = prefill.lower(request.params, *request.inputs).compile().memory_analysis()
    caches = 2 * 2 * 2 * slots * config.num_kv_heads * config.head_dim * 4  # of two models
    scores = 4 * decode.prompt.PREFILL_SCORES * config.num_heads  # of a chunk, in bytes
    assert memory.temp_size_in_bytes < 5 * scores + caches


def test_rejection_path_is_root_and_accepted_nodes():
    keys = sampling.row_keys(jax.random.key(0), 1)
    proposal = spsjax.Proposal(np.asarray([[1, 2]]), None)
    certain = np.eye(4, dtype=np.float32)[np.asarray([[1, 0, 0]])]
    verdict = jax.jit(rejection.rejection)(keys, proposal, certain)
    assert verdict.path.tolist() == [[0, 1, -1]]
    assert verdict.tokens.tolist() == [[1, 0, -1]]


def test_taps_are_the_inputs_of_their_layers(target):
    tokens, config = np.asarray([[1, 2, 3]]), target.config
    layers = 0, config.num_layers
    apply = jax.jit(transformer.apply, static_argnums=0, static_argnames="tap_layers")
    output = apply(config, target.params, tokens, tap_layers=layers)
    embedded = np.asarray(target.params["embed"]["embedding"])[tokens]
    np.testing.assert_array_equal(output.taps[0], embedded)
    scale, last = np.asarray(target.params["norm"]["scale"]), np.asarray(output.taps[1])
    norm = last / np.sqrt(np.mean(last**2, -1, keepdims=True) + config.norm_eps) * scale
    np.testing.assert_allclose(output.hidden, norm, rtol=1e-5)


def test_last_chunk_stays_within_the_cache(target, draft):
    """A chunk that starts too late would be moved by the write, and then repeats some tokens."""
    prompt = [[(7 * index) % 48 for index in range(27)]]
    drafter = drafting.build("draft_model", draft, 3)
    whole = request_of(target, drafter, prompt, new=1)
    chunks = request_of(target, drafter, prompt, new=1, prefill_tokens=12)
    assert (whole.slots, chunks.inputs[1].shape[1]) == (32, 32)
    assert_same_state(chunks.prefill(), whole.prefill())


def test_drafter_that_is_not_on_the_targets_mesh_is_refused(target, draft):
    mesh = spsjax.sharding.mesh(1, 8)
    split = build_model(target.config, target.params, mesh)
    drafter = loading.as_drafter(draft, target)
    with pytest.raises(InputError, match="expected weights on the target's devices"):
        spsjax.generate(split, PROMPTS, drafter, max_new_tokens=4)


def test_numpy_weights_are_refused_in_one_line(target):
    model = dataclasses.replace(target, params=jax.device_get(target.params))
    with pytest.raises(InputError, match="expected weights as JAX arrays, found ndarray"):
        spsjax.generate(model, PROMPTS, max_new_tokens=4)


def test_block_without_a_cache_serves_every_row(target):
    config, params = target.config, target.params
    tokens = np.asarray([[1, 2], [1, 2]])

    @jax.jit
    def with_and_without(params):
        block = transformer.empty_block(config, params, 2, 4)
        output = transformer.apply(config, params, tokens, block=block)
        return output, transformer.apply(config, params, tokens)

    output, expected = with_and_without(params)
    np.testing.assert_allclose(output.logits, expected.logits, atol=1e-5)
    assert output.block.positions.tolist() == [[0, 1, -1, -1]] * 2


def test_prefill_hides_the_empty_cache_from_the_compiler(target, draft):
    """Otherwise XLA evaluates the empty cache's scores while it compiles, for half a minute."""
    request = request_of(target, draft)
    prefill = jax.jit(functools.partial(decode.prompt.prefill, request.program, request.slots))
    text = prefill.lower(request.params, *request.inputs).as_text()
    assert re.search(r"optimization_barrier %\S+ : tensor<3xi32>", text)
