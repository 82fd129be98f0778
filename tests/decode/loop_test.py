"""Tests of the decoding loop: its invariants, its oracle, its transfers and its caches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting, reference
from helpers.calls import Call, assert_same_texts
from helpers.models import logits_of, nearby_model, spread_model

import spsjax
from spsjax import SamplingParams, decode, drafters, generation, sampling
from spsjax.tokenization.base import incremental_text
from spsjax.utils.compilation import jitted

K, NEW = 3, 20
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [9], [1, 2, 1, 2, 1, 2], [30, 31]]
ROW_PARAMS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9003, "min_p": 0.0103},
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
DEFAULTS = dataclasses.asdict(SamplingParams())
MIXED = SamplingParams(**{f: [(DEFAULTS | row)[f] for row in ROW_PARAMS] for f in FIELDS})
GREEDY = SamplingParams(temperature=0.0)
ROLES = {"draft": sampling.DRAFT, "accept": sampling.ACCEPT, "next": sampling.NEXT}
TRANSFERS = re.compile(r"callback|infeed|outfeed|stablehlo\.(send|recv)")


def beginning(target, draft):
    """Returns the arguments of `decode.step.run`: program, parameters, state after the prompts."""
    budgets = [NEW, 1, 7, 0]
    request = Call(target, PROMPTS, draft, K, MIXED, budgets, 0, "rejection", True)
    return request.program, request.params, request.prefill()


@jax.jit
def _uniforms(seed, row, length, role):
    key = jax.random.fold_in(sampling.row_keys(jax.random.key(seed), 4)[row], length)
    return sampling.uniforms(key[None], role, 2 * K)[0]


def numbers(seed):
    """Returns the random numbers of a call of `generate`: row -> function for the oracle."""

    @functools.cache
    def cached(row, length, role):
        return np.asarray(_uniforms(seed, row, length, ROLES[role]), np.float64)

    def number(row, role, length, index):
        uniforms = cached(row, length, role)
        return uniforms[index] if role == "accept" else uniforms[2 * index : 2 * index + 2]

    return lambda row: functools.partial(number, row)


@functools.cache
def pair_of(vocab):
    """Returns target and draft, and both in the oracle's form."""
    target = spread_model(vocab, eos_ids=(7, *range(55, vocab, 24)))
    draft = nearby_model(target)
    return target, draft, logits_of(target), logits_of(draft)


@pytest.mark.parametrize(
    ("name", "vocab"),
    [
        *(("none", 48), ("draft_model", 48), ("ngram", 48)),
        ("draft_model", 300),  # three blocks of tokens, each drawn with a number of its own
    ],
)
def test_generate_with_same_random_numbers_equals_oracle(vocab, name):
    """In rows with other end-of-sequence ids, budgets and sampling parameters; one is empty."""
    target, draft, model, draft_logits = pair_of(vocab)
    ended = 0
    lookup = functools.partial(reference.lookup, K=K)
    other = {"draft_model": draft_logits, "ngram": lookup}
    drafter = {"none": None, "draft_model": draft, "ngram": drafters.ngram.Drafter()}[name]
    proposals = set()
    for seed in range(3):
        budgets = [NEW, 13, 18, seed]
        out = spsjax.generate(target, PROMPTS, drafter, K, MIXED, budgets, seed)
        rounds = []
        for row, prompt in enumerate(PROMPTS):
            options = {"eos_ids": target.config.eos_ids} | ROW_PARAMS[row]
            limits = len(prompt) + budgets[row], numbers(seed)(row)
            if name == "none":
                expected = reference.autoregressive(model, prompt, *limits, **options)
            else:
                options["rounds"] = rounds
                expected = reference.speculative(model, other[name], prompt, K, *limits, **options)
            assert out.tokens[row].tolist() == expected, (seed, row)
            ended += len(expected) < budgets[row]
        offered = sum(proposed for proposed, _ in rounds)
        accepted = [count for _, count in rounds]
        assert out.stats.proposed_tokens == offered
        assert out.stats.acceptance_rate == pytest.approx(sum(accepted) / max(offered, 1))
        if rounds:
            assert out.stats.accepted_histogram == np.bincount(accepted, minlength=K + 1).tolist()
        proposals |= {proposed for proposed, _ in rounds}
    assert ended  # by an end-of-sequence id
    assert proposals == {"none": set(), "draft_model": {K}, "ngram": {0, K}}[name]


def test_stop_tokens_cut_the_text(target, tiny_tokenizer):
    """They end a row as an end of sequence does, and its text ends before them."""
    model = dataclasses.replace(target, tokenizer=tiny_tokenizer)
    options = {"sampling": GREEDY, "max_new_tokens": NEW, "stop_at_eos": False}
    free = spsjax.generate(model, PROMPTS, None, None, **options).tokens
    stop = int(free[0][5])
    out = spsjax.generate(model, PROMPTS, None, None, **options, stop_token_ids=[stop])
    for whole, tokens, prompt, text in zip(free, out.tokens, PROMPTS, out.texts):
        (indices,) = np.nonzero(whole == stop)
        assert tokens.tolist() == whole[: indices[0] + 1 if len(indices) else None].tolist()
        kept = [token for token in tokens.tolist() if token != stop]
        assert text == incremental_text(tiny_tokenizer, prompt, kept)
    pieces = spsjax.stream(model, PROMPTS[0], **options, stop_token_ids=[stop])
    assert "".join(pieces) == out.texts[0]


@pytest.mark.parametrize("ids", [[48], [-1], [True], [2.0], "7", 7, [[7]]])
def test_stop_tokens_that_the_model_lacks_are_refused(target, ids):
    with pytest.raises(
        spsjax.InputError, match=r"^stop_token_ids: expected a list of token ids in "
    ):
        spsjax.generate(target, PROMPTS, stop_token_ids=ids)


def test_draft_equal_to_target_is_always_accepted(target):
    """Every round emits K + 1 tokens, but for the last one of a row, which may be cut off."""
    for params in (MIXED, GREEDY):
        out = spsjax.generate(target, PROMPTS, target, K, params, max_new_tokens=NEW)
        calls = [-(-len(tokens) // (K + 1)) for tokens in out.tokens]
        assert max(calls) == NEW // (K + 1)  # of a row that nothing cuts off
        assert out.stats.acceptance_rate == 1
        assert out.stats.block_efficiency == sum(map(len, out.tokens)) / sum(calls)
        assert out.stats.target_calls == max(calls)
        assert out.stats.accepted_histogram == [0, 0, 0, sum(calls)]


def test_generate_without_drafter_emits_one_token_per_call(target):
    out = spsjax.generate(target, PROMPTS, max_new_tokens=NEW)
    assert out.stats.target_calls == max(map(len, out.tokens)) == NEW
    assert out.stats.block_efficiency == 1 and out.stats.acceptance_rate == 0


def test_two_programs_serve_texts_of_all_lengths(target, draft):
    """With `slots`, what changes is data: prompts of one or several chunks, and budgets."""
    prompt = [(7 * index) % 48 for index in range(70)]
    for length, new in ((70, 20), (3, 80), (64, 5)):
        call = functools.partial(spsjax.generate, target, [prompt[:length]], draft, K, seed=length)
        out = call(max_new_tokens=new, slots=90)
        assert out.tokens[0].tolist() == call(max_new_tokens=new).tokens[0].tolist()
        assert out.stats.compile_seconds == 0 or length == 70


@pytest.mark.slow
def test_depth_of_all_rounds_is_data(target, draft):
    """All depths share programs, and give the tokens of a program for this K alone."""
    call = functools.partial(spsjax.generate, target, PROMPTS, draft, max_new_tokens=NEW)
    less, out = (call(decode.schedule.Fixed(depth, longest=K)) for depth in (1, K))
    assert out.stats.compile_seconds == 0
    assert less.stats.accepted_histogram[1] and not any(less.stats.accepted_histogram[2:])
    expected = call(K)
    assert_same_texts(out.tokens, expected.tokens)
    assert out.stats.accepted_histogram[: K + 1] == expected.stats.accepted_histogram


class Letters:
    """A tokenizer whose ids are bytes, some of which are fractions of a character."""

    def __init__(self):
        self.pieces = b"abcdefghijklmnopqrst uvw" + bytes([0xC3, 0xA9]) * 12

    def encode(self, text):
        return [self.pieces.index(byte) for byte in text.encode()]

    vocab_size = 2**31
    eos_id = None

    def decode(self, ids):
        return bytes(self.pieces[index] for index in ids).decode(errors="replace")


def test_stream_pieces_join_to_the_text(target, draft):
    """Pieces of `stream` join to the text of `generate`, and rounds of `rounds` to its tokens."""
    model, texts = dataclasses.replace(target, tokenizer=Letters()), []
    for seed in range(8):
        options = {"max_new_tokens": NEW, "seed": seed}
        whole = spsjax.generate(model, ["hello "], draft, K, **options)
        pieces = list(spsjax.stream(model, "hello ", draft, K, **options))
        assert "".join(pieces) == whole.texts[0]
        prompt, rounds = generation.rounds(model, "hello ", draft, K, **options)
        rounds = list(rounds)
        assert prompt == model.tokenizer.encode("hello ")
        assert np.concatenate([r.tokens for r in rounds]).tolist() == whole.tokens[0].tolist()
        accepted = np.dot(whole.stats.accepted_histogram, np.arange(K + 1))
        assert sum(r.accepted for r in rounds) == accepted
        assert len(rounds) == whole.stats.target_calls
        texts.append((len(pieces), whole.texts[0]))
    assert max(texts)[0] > 3
    assert any("\u00e9" in text for _, text in texts)  # a character of two tokens


def test_run_transfers_nothing_to_the_host(target, draft):
    """The loop has no callback, infeed, outfeed, send or receive, and runs without any transfer."""
    program, params, state = beginning(target, draft)
    loop, numbers = jitted(decode.step.run, program, donate=1)
    assert not numbers
    most = jax.device_put(np.int32(NEW))
    text = loop.lower((), params, state, most).as_text()
    assert "stablehlo.while" in text and not TRANSFERS.search(text)

    def prints(x):
        jax.debug.print("{}", x)
        return x

    assert TRANSFERS.search(jax.jit(prints).lower(1.0).as_text())
    loop((), params, state, most)
    program, params, state = beginning(target, draft)
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match=r"[Dd]isallow"):
            jnp.sin(np.ones(3)).block_until_ready()
        state = loop((), params, state, most)
        jax.block_until_ready(state)
    assert state.done.all()


@pytest.mark.slow
def test_run_donates_caches_but_no_parameters(target, draft):
    program, params, state = beginning(target, draft)
    caches = jax.tree.leaves((state.cache.keys, state.cache.values, state.drafter.keys))
    size = sum(leaf.nbytes for leaf in caches)
    loop, _ = jitted(decode.step.run, program, donate=1)
    loop = loop.lower((), params, state).compile()
    assert loop.memory_analysis().alias_size_in_bytes >= size
    loop((), params, state)
    assert all(leaf.is_deleted() for leaf in caches)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_drafters_are_attributes_of_their_package():
    for name in drafting.PACKAGE:
        assert issubclass(getattr(drafters, name).Drafter, drafters.base.Drafter)
    with pytest.raises(AttributeError, match="expected a drafter's module, found 'nothing'"):
        drafters.nothing  # noqa: B018


@pytest.mark.slow
def test_generate_in_64_bit_mode_gives_the_same_tokens(target, draft):
    options = {"sampling": MIXED, "max_new_tokens": NEW, "seed": 5}
    expected = spsjax.generate(target, PROMPTS, draft, K, **options).tokens
    with jax.enable_x64(True):
        out = spsjax.generate(target, PROMPTS, draft, K, **options)
    assert_same_texts(out.tokens, expected)


def test_generate_with_other_default_prng_is_unchanged(target, draft):
    """Under `vmap` it gives all rows the numbers of the first, which is done here first."""
    options = {"max_new_tokens": [1, NEW, NEW, NEW], "seed": 5}
    expected = spsjax.generate(target, PROMPTS, draft, K, **options).tokens
    with jax.default_prng_impl("unsafe_rbg"):
        out = spsjax.generate(target, PROMPTS, draft, K, **options)
    assert_same_texts(out.tokens, expected)
