"""Look-ups in a store: matches by brute force, counts, eviction, and what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafting
from helpers.calls import assert_same_texts
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import InputError, SamplingParams
from spsjax.drafters import datastore, stopping, suffix
from spsjax.parallel import sharding

PROMPTS = [[3, 4, 5, 3], [9], [1, 2, 1, 2]]


@pytest.fixture(scope="module")
def target():
    return numpy_spread_model(48)


CAPACITY, SLOTS = 2048, 8


@functools.partial(jax.jit, static_argnums=0)
def _proposed(drafter, store, tokens, lengths):
    return drafter.propose({"drafter": store}, (), drafting.round_of(tokens, lengths))


def proposed(target, stored, text):
    """Returns the proposal after a text with a store of some texts."""
    store = datastore.Store(CAPACITY)
    store.extend(stored)
    loaded = spsjax.load_drafter("suffix", target, store=store)
    tokens = np.asarray([[*text, *[0] * (SLOTS - len(text))]], np.int32)
    proposal = _proposed(loaded.drafter, loaded.params, tokens, np.asarray([len(text)], np.int32))
    return jax.tree.map(np.asarray, proposal)


def occurrences(texts, ending):
    """Returns (text, index) of every place at which a sequence of tokens ends."""
    size = len(ending)
    return [
        (text, end)
        for text in texts
        for end in range(size - 1, len(text))
        if text[end + 1 - size : end + 1] == ending
    ]


@pytest.mark.parametrize("most", (1, 4, 7))
def test_matches_are_those_of_a_plain_search(most):
    rng = np.random.default_rng(most)
    texts = [rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(12)]
    store = datastore.Store(160, max_match=most)
    store.extend(texts)
    arrays = jax.tree.map(jnp.asarray, store.sorted())
    assert sorted(np.asarray(arrays.order).tolist()) == list(range(160))

    @jax.jit
    def search(recent, length):
        return datastore.longest_match(arrays, recent), *datastore.matches(arrays, recent, length)

    rng, compared = np.random.default_rng(9), 0
    for _ in range(60):
        query = rng.integers(0, 4, rng.integers(1, 9)).tolist()  # 3 is in no text
        recent = ([*query[::-1], *[-1] * most])[:most]
        lengths = [
            p for p in range(1, most + 1) if p <= len(query) and occurrences(texts, query[-p:])
        ]
        longest = max(lengths, default=0)
        actual = search(jnp.asarray(recent), jnp.asarray(max(longest, 1)))
        assert actual[0] == longest
        if not longest:
            continue
        begin, end, shorter = map(int, actual[1:])
        counts = {p: len(occurrences(texts, query[-p:])) for p in lengths}
        assert end - begin == counts[longest]
        ends = np.asarray(arrays.order)[begin:end]
        tokens = np.asarray(arrays.tokens)
        for index in ends:
            assert tokens[index + 1 - longest : index + 1].tolist() == query[-longest:]
        more = [p for p in lengths if counts[p] > counts[longest]]
        assert shorter == max(more, default=0)
        compared += 1
    assert compared > 20


def test_proposal_continues_as_the_stored_texts_mostly_did(target):
    """After 5, 6 came 7 twice and 8 once; after 7 came 9 both times."""
    stored = [5, 6, 7, 9], [5, 6, 7, 9, 1], [5, 6, 8]
    proposal = proposed(target, stored, [1, 2, 5, 6])
    np.testing.assert_array_equal(proposal.tokens[0, :3], [7, 9, -1])
    np.testing.assert_allclose(proposal.aux, [2 / 3 + 2 / 3], rtol=1e-6)
    # Nothing is known after a text's end, and nothing of what no text has.
    for last in ([8], [3]):
        assert (proposed(target, stored, last).tokens == -1).all()


def test_the_higher_score_of_own_text_and_store_counts(target):
    proposal = proposed(target, [[5, 6, 7, 9], [5, 6, 8, 9]], [5, 6, 1, 2, 3, 5, 6])
    np.testing.assert_array_equal(proposal.tokens[0, :2], [1, 2])  # 2 of 2, not 1/2 + 1/2


def test_many_matches_are_sampled_over_all_of_them(target):
    """Of 200 occurrences the first half is followed by 7, the second by 8: about half of each."""
    proposal = proposed(target, [[1, 5, 7]] * 80 + [[2, 5, 8]] * 120, [5])
    assert proposal.tokens[0, 0] == 8
    assert abs(float(proposal.aux[0]) - 0.6) < 0.04


def test_known_answer_is_proposed(target):
    """The text after its prompt."""
    answer = [9, 4, 4, 30, 2]
    proposal = proposed(target, [[1, 2, 1, 2, *answer], [9, 9]], [1, 2, 1, 2])
    np.testing.assert_array_equal(proposal.tokens[0, :4], answer[:4])


def test_a_full_store_forgets_the_oldest_texts():
    store = datastore.Store(10)
    store.extend([[1, 2, 3], [4, 5, 6], [7, 8]])
    assert len(store) == 2
    assert store.sorted().tokens.tolist() == [4, 5, 6, -1, 7, 8, -1, -1, -1, -1]
    store.add(range(20, 50))
    assert store.sorted().tokens.tolist() == [*range(41, 50), -1]
    store.add([])
    assert len(store) == 1


@pytest.mark.slow
def test_text_is_the_targets_and_a_known_answer_takes_few_calls():
    """On a mesh, every device of which holds the store."""
    model = numpy_spread_model(48, mesh=sharding.mesh(2, 4))
    options = {"sampling": SamplingParams(0.0), "max_new_tokens": 24}
    plain = spsjax.generate(model, PROMPTS, **options)
    empty = spsjax.load_drafter("suffix", model, store=datastore.Store(256))
    store = datastore.Store(256)
    store.extend([[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain.tokens)])
    full = spsjax.load_drafter("suffix", model, store=store)
    first, second = (spsjax.generate(model, PROMPTS, each, 6, **options) for each in (empty, full))
    for out in (first, second):
        assert_same_texts(out.tokens, plain.tokens)
    assert second.stats.block_efficiency > 2 * first.stats.block_efficiency


def test_what_is_no_store_or_no_text_is_refused(target):
    store = datastore.Store(16)
    for bad in (["a"], [1.5], [[1]], [-1], [2**31], [[1], [2, 3]], 5):
        with pytest.raises(InputError, match=r"^tokens: expected token ids"):
            store.add(bad)
    with pytest.raises(InputError, match=r"^capacity: expected"):
        datastore.Store(1)
    with pytest.raises(InputError, match=r"^max_match: expected"):
        datastore.Store(8, 0)
    with pytest.raises(InputError, match=r"^texts: expected several texts, found 5"):
        store.extend(5)
    foreign = datastore.Store(16)
    foreign.add([1, 48])
    with pytest.raises(InputError, match=r"^store: expected token ids in \[0, 48\), found 48"):
        spsjax.load_drafter("suffix", target, store=foreign)
    for name, held in (("ngram", store), ("suffix", [[1, 2]])):
        with pytest.raises(InputError, match=r"^store: expected a Store"):
            spsjax.load_drafter(name, target, store=held)
    assert suffix.Drafter().max_match == 64
    assert spsjax.load_drafter("suffix", target, store=store).params.max_match == 16
    with pytest.raises(InputError, match=r"^store: expected neither a tree nor a stop_rule"):
        spsjax.load_drafter("suffix", target, stop_rule=stopping.Entropy(), store=store)
    with pytest.raises(InputError, match=r"^store: expected neither a tree nor a stop_rule"):
        spsjax.load_drafter("suffix", target, tree=spsjax.Tree((0, 0)), store=store)
    with pytest.raises(InputError, match=r"^target: expected a loaded model, found str"):
        spsjax.load_drafter("suffix", "pystdlib/target", store=store)
    with pytest.raises(InputError, match=r"^replicate: expected True or False"):
        spsjax.load_drafter("suffix", target, replicate=3, store=store)


def test_file_is_a_store_of_its_texts(tmp_path, target):
    path = tmp_path / "texts.jsonl"
    texts = ["import os\nimport sys\n", "", "def main():\n    pass\n"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = spsjax.load("pystdlib/target")
    loaded = spsjax.load_drafter(f"suffix:{path}", model)
    store = datastore.Store(len(loaded.params.tokens))
    store.extend(model.tokenizer.encode(text) for text in texts if text)
    np.testing.assert_array_equal(loaded.params.tokens, store.sorted().tokens)
    assert loaded.drafter == spsjax.load_drafter("suffix", model, store=store).drafter
    with pytest.raises(InputError, match=r"^suffix:.*: expected a target with a tokenizer"):
        spsjax.load_drafter(f"suffix:{path}", target)
    with pytest.raises(InputError, match=r"^suffix\+suffix:.*: expected a drafter with weights"):
        spsjax.load_drafter(f"suffix+suffix:{path}", model)
    with pytest.raises(InputError, match=r"^tree: expected none for suffix"):
        spsjax.load_drafter(f"suffix:{path}", model, tree=spsjax.Tree((0, 0)))
    path.write_text('{"text": "a"}\n[1]\n')
    with pytest.raises(InputError, match=r"line 2: expected an object with a text, found \[1\]"):
        spsjax.load_drafter(f"suffix:{path}", model)
    for text, expected in (
        ('{"text": ""}\n', "expected texts, found none"),
        ("x", "JSON lines"),
        ('{"text": "\\ud800"}\n', "line 1: text: expected valid Unicode"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=expected):
            spsjax.load_drafter(f"suffix:{path}", model)
