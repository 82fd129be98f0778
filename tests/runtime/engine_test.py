"""Requests in the rows of one loop against `generate` alone: arrivals, cancellations, errors."""

import dataclasses
import threading
from unittest import mock

import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model
from helpers.numpy_models import numpy_spread_model

import spsjax
from spsjax import InputError, NonFiniteError, SamplingParams, decode
from spsjax.drafters import base
from spsjax.parallel import sharding
from spsjax.runtime import costs, low_acceptance
from spsjax.runtime import pool as pool_module
from spsjax.runtime.loop import Loop
from spsjax.tokenization.base import incremental_text
from spsjax.utils import compilation

GREEDY = SamplingParams(temperature=0.0)
K = 2
SLOTS = 96  # of the shared engine, and of the calls it is compared with, which so share programs


@pytest.fixture(scope="module")
def engine(target, draft):
    """An engine that tests share. Its loop has two rows, as the calls to compare it with."""
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(target, draft, K, rows=2, slots=SLOTS, chunk=16, rounds=2)


def alone(target, draft, prompt, sampling=SamplingParams(), count=20, seed=0, **options):
    """Returns the tokens of `generate`: with a draft beside an empty row, else in a single row."""
    prompts, counts = ([prompt], [count]) if draft is None else ([prompt, [0]], [count, 0])
    with mock.patch.object(decode.sizes, "num_slots", lambda length: SLOTS):
        out = spsjax.generate(target, prompts, draft, K, sampling, counts, seed, **options)
    return out.tokens[0].tolist()


@pytest.fixture(scope="module")
def lasting(target) -> list[int]:
    """A prompt of which the greedy text has no end for 70 tokens."""
    prompts = ([token] for token in range(1, 48))
    return next(one for one in prompts if len(alone(target, None, one, GREEDY, 70)) == 70)


@pytest.mark.smoke
def test_requests_that_come_and_go_get_what_they_get_alone(engine, target, draft):
    """Random lengths, budgets, sampling, seeds and times of arrival, more than there are rows."""
    rng, expected, requests = np.random.default_rng(0), [], []
    for seed in range(12):
        prompt = rng.integers(0, target.config.vocab_size, rng.integers(1, 60)).tolist()
        sampling = [GREEDY, SamplingParams(), SamplingParams(0.7, top_p=0.9)][seed % 3]
        count = int(rng.integers(0, 30))
        requests.append(engine.submit(prompt, sampling, count, seed))
        expected.append(alone(target, draft, prompt, sampling, count, seed))
        for _ in range(rng.integers(0, 4)):
            engine.step()
    while engine.step():
        pass
    for request, tokens in zip(requests, expected, strict=True):
        assert request.done and request.error is None
        assert request.tokens == tokens
        assert sum(request.accepted_histogram) == request.rounds


def test_costs_are_measured_on_the_first_prompt(target, draft, monkeypatch):
    """In all rows, with its sampling parameters, and in buffers as large as the engine's."""
    calls = []

    def costs_of(loop, batch):
        calls.append((loop, batch))
        return f"costs of {len(batch.prompts)} rows"

    monkeypatch.setattr(costs, "of", costs_of)
    engine = spsjax.Engine(target, draft, "auto", rows=2, slots=SLOTS, rounds=1)
    for prompt in ([1, 2, 3], [4]):
        engine.submit(prompt, GREEDY, 3)
    engine._update()
    for rows in (1, 2, 1):
        assert engine._pool.costs_of(rows) == f"costs of {rows} rows"
    assert [batch.prompts for _, batch in calls] == [[[1, 2, 3]], [[1, 2, 3]] * 2]
    for loop, batch in calls:
        assert loop.program.schedule and loop.slots == engine.slots
        assert not batch.arrays[0].temperature.any()


@pytest.mark.slow
def test_engine_with_auto_serves_the_target_s_greedy_tokens(target, draft, monkeypatch):
    """Also where all rounds skip drafting, and with a list of one value for many rows."""
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", K)  # of which few depths are compiled
    monkeypatch.setattr(pool_module, "row_sizes", lambda most, least: [most])
    options = {"rows": 2, "slots": SLOTS, "rounds": 1}
    prompts = [[1, 2, 3], [4], [5, 6]]
    never = lambda loop, _: decode.schedule.only(0, loop.program.drafter.num_speculative_tokens)  # noqa: E731
    for costs_of in (costs.of, never):
        monkeypatch.setattr(costs, "of", costs_of)
        engine = spsjax.Engine(target, draft, "auto", **options)
        one = SamplingParams(temperature=[0.0])
        for some in (prompts[:1], prompts):
            requests = [engine.submit(prompt, one, 6) for prompt in some]
            for request in requests:
                assert request.result() == alone(target, None, request.prompt, GREEDY, 6)


@pytest.mark.slow
def test_engine_that_cuts_drafts_serves_the_targets_greedy_tokens(target, monkeypatch):
    """All rows are scored as deep as their estimates together make worth while; rows differ."""
    wanted = {(1, 2, 3): 24, (4,): 9}
    expected = {ids: alone(target, None, list(ids), GREEDY, wanted[ids]) for ids in wanted}
    monkeypatch.setattr(base, "SCHEDULED_TOKENS", K)
    monkeypatch.setattr(pool_module, "row_sizes", lambda most, least: [most])
    times = np.zeros(K + 1, np.float32), np.asarray([1, 1.2, 1.35], np.float32)
    known = decode.schedule.Costs(*times, np.full(K, -1, np.float32))
    monkeypatch.setattr(costs, "of", lambda loop, batch: known)
    counts = []
    monkeypatch.setattr(low_acceptance, "count", lambda setup, *counted: counts.append(counted))
    drafter = drafting.build("draft_model", target, K)  # all that is scored is accepted
    engine = spsjax.Engine(target, drafter, "confidence", rows=2, slots=SLOTS, chunk=16, rounds=1)
    requests = {ids: engine.submit(list(ids), GREEDY, count) for ids, count in wanted.items()}
    for ids, request in requests.items():
        assert request.result() == expected[ids]
    # Some drafts are scored as a whole, some in part.
    rounds = sum(request.rounds for request in requests.values())
    assert 0 < sum(proposed for proposed, _ in counts) < K * rounds
    assert sum(histogram[K] for _, histogram in counts) > 0


@pytest.mark.slow
def test_engine_answers_before_all_is_compiled(target, draft, lasting, monkeypatch):
    """The largest loop drafts nothing at first; a text that has begun goes on when it drafts."""
    monkeypatch.setattr(pool_module, "row_sizes", lambda most, least: [most])
    rule = decode.schedule.Fixed(K, longest=K)
    engine = spsjax.Engine(target, draft, rule, rows=2, slots=SLOTS, chunk=16, rounds=1)
    engine.begin([1, 2, 3])
    request = engine.submit(lasting, GREEDY, 40)
    while len(request.tokens) < 5:
        engine.step()
    assert request.accepted_histogram[0] == request.rounds == len(request.tokens)
    engine.compile_rest()
    assert request.result() == alone(target, None, lasting, GREEDY, 40)
    assert sum(request.accepted_histogram[1:]) > 0


def test_loop_has_as_many_rows_as_requests_need(target, lasting):
    """It grows at once, and shrinks after some steps. Each row keeps its text, wherever it is."""
    engine = plain_engine(target, 2)
    rows, requests = [], [engine.submit(lasting, GREEDY, 70)]
    engine.step()
    rows.append(len(engine._pool.state.done))
    requests += [engine.submit(prompt, GREEDY, 12) for prompt in ([5, 6], [7])]
    while engine.step():
        rows.append(len(engine._pool.state.done))
    for request, count in zip(requests, (70, 12, 12), strict=True):
        assert request.tokens == alone(target, None, request.prompt, GREEDY, count)
    assert rows[:2] == [1, 2] and rows[-1] == 1 and set(rows) == {1, 2}


def test_rows_are_filled_again(engine, lasting):
    """More requests run than there are rows, and none waits for all others."""
    requests = [engine.submit(lasting, GREEDY, 4 + seed, seed) for seed in range(6)]
    while not requests[0].done:
        engine.step()
    assert not requests[-1].done
    assert [len(request.result()) for request in requests] == list(range(4, 10))


def test_long_prompt_does_not_stall_others(engine, lasting):
    """It is read a chunk at a time, and others get tokens in between."""
    first = engine.submit(lasting, GREEDY, 70)
    while not first.tokens:
        engine.step()
    long = engine.submit([1 + i % 40 for i in range(64)], GREEDY, 2)
    counts = []
    while not long.tokens:
        engine.step()
        counts.append(len(first.tokens))
    assert len(counts) >= 4 and np.all(np.diff(counts[:4]) > 0)
    first.cancel()
    long.result()


def test_cancelled_requests_free_their_rows(engine, target, draft):
    waits = [engine.submit([seed + 1], GREEDY, 50) for seed in range(6)]
    engine.step()
    for request in waits:
        request.cancel()
    last = engine.submit([7, 8], SamplingParams(), 12, 5)
    assert last.result() == alone(target, draft, [7, 8], count=12, seed=5)
    while engine.step():
        pass
    assert all(request.done and len(request.tokens) < 50 for request in waits)
    for request in waits:
        whole = alone(target, draft, request.prompt, GREEDY, 50)
        assert request.tokens == whole[: len(request.tokens)]


def test_stop_tokens_end_one_request_and_free_its_row(engine, target, draft):
    """Whatever a run of the loop has drafted beyond them is dropped."""
    prompts = [[3, 4, 5], [9, 1], [2, 2]]
    whole = [alone(target, draft, prompt, count=30, seed=4) for prompt in prompts]
    stops = [tokens[4] for tokens in whole]
    requests = [
        engine.submit(prompt, SamplingParams(), 30, 4, stop_token_ids=[stop])
        for prompt, stop in zip(prompts, stops)
    ]
    free = engine.submit(prompts[0], SamplingParams(), 30, 4)
    for request, tokens, stop in zip(requests, whole, stops):
        assert request.result() == tokens[: tokens.index(stop) + 1]
    assert free.result() == whole[0]
    with pytest.raises(InputError, match=r"^stop_token_ids: expected"):
        engine.submit([1], max_new_tokens=3, stop_token_ids=[48])


def plain_engine(target, rows):
    """Returns an engine without a drafter; its programs are those of others of as many rows."""
    return spsjax.Engine(target, rows=rows, slots=SLOTS, chunk=16, rounds=2)


def test_error_in_a_row_leaves_the_others_alone(target):
    """The model cannot read one token, which only one prompt has. Its row is used again."""
    expected = alone(target, None, [5, 6], GREEDY)
    other = next(token for token in range(1, 48) if token not in {4, 5, 6, *expected})
    embedding = np.array(target.params["embed"]["embedding"])
    embedding[other] = np.nan
    broken = build_model(target.config, target.params | {"embed": {"embedding": embedding}}, None)
    engine = plain_engine(broken, 2)
    healthy, failing = engine.submit([5, 6], GREEDY, 20), engine.submit([4, other], GREEDY, 20)
    with pytest.raises(NonFiniteError, match=r"^position 2: expected finite logits"):
        failing.result()
    again = engine.submit([5, 6], GREEDY, 20)
    assert healthy.result() == again.result() == expected
    assert failing.done and failing.tokens == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ("lookahead", "relative", "spire", "tapped"))
def test_every_kind_of_state_keeps_its_rows_apart(target, draft, name, monkeypatch):
    """A request that arrives late, beside others, gets what it gets alone.

    The states are arrays, a window, features, and a table of distances that has no rows.
    The loop always has two rows, as many as the call that it is compared with.
    """
    monkeypatch.setattr(pool_module, "row_sizes", lambda most, least: [most])
    monkeypatch.setattr(decode.sizes, "num_slots", lambda length, roomy=False: 64)
    if name == "relative":
        target, name = numpy_spread_model(48, positions="relative", ffn="gelu"), "none"
    drafter = drafting.build(name, draft, 3)
    fixed = {"verifier": drafting.verifier(name)}
    engine = spsjax.Engine(target, drafter, rows=2, slots=64, chunk=8, rounds=1, **fixed)
    requests = []
    for seed, prompt in enumerate([[3, 4, 5, 3, 4, 5, 3, 1, 2, 3], [9], [1, 2, 1, 2, 1]]):
        requests.append(engine.submit(prompt, GREEDY if seed == 1 else SamplingParams(), 9, seed))
        engine.step()
    for seed, request in enumerate(requests):
        sampling = GREEDY if seed == 1 else SamplingParams()
        prompts = [request.prompt, [0]]
        out = spsjax.generate(target, prompts, drafter, None, sampling, [9, 0], seed, **fixed)
        assert request.result() == out.tokens[0].tolist()


def test_threads_share_an_engine(engine, target, draft):
    results = {}

    def ask(seed):
        results[seed] = engine.submit([seed, 2], SamplingParams(), 15, seed).result()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {s: alone(target, draft, [s, 2], count=15, seed=s) for s in range(6)}


@pytest.mark.slow
def test_requests_on_a_mesh(target, draft):
    mesh = sharding.mesh(data=2, model=4)
    models = [build_model(model.config, model.params, mesh) for model in (target, draft)]
    engine = spsjax.Engine(*models, 3, rows=3, slots=64, chunk=8)
    assert engine.rows == 4
    requests = [engine.submit([seed] * (seed + 1), GREEDY, 10) for seed in range(6)]
    for request in requests:
        assert request.result() == alone(target, draft, request.prompt, GREEDY, 10)


def test_text_comes_in_pieces(target, lasting, tiny_tokenizer):
    model = dataclasses.replace(target, tokenizer=tiny_tokenizer)
    pieces = list(plain_engine(model, 1).submit(lasting, GREEDY, 30))
    tokens = alone(model, None, lasting, GREEDY, 30)
    expected = incremental_text(tiny_tokenizer, lasting, tokens, model.eos_ids)
    assert len(pieces) > 1 and "".join(pieces) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows: expected an integer from 1 to 2147483647, found 0"),
        ({"chunk": 1.5}, "chunk: expected an integer from 1 to 2147483647, found 1.5"),
        ({"rows": 10**12}, "rows: expected an integer from 1 to 2147483647"),
        ({"slots": 10**15}, "slots: expected an integer from 1 to 2147483647"),
        ({"rows": 10**7}, "rows, slots: expected weights and caches of at most .* 10000000 rows"),
        ({"slots": 10**10 // 8}, "rows, slots: expected weights and caches of at most .* GiB"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected an integer"),
        ({"slots": "many"}, "slots: expected an integer from 1"),
    ],
)
def test_arguments_that_cannot_be_used(target, arguments, message):
    with pytest.raises(InputError, match=f"^{message}"):
        spsjax.Engine(target, **arguments)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: expected at least one token"),
        ([1], {"max_new_tokens": 96}, r"prompt: expected prompt, new tokens and 3 more within the"),
        ([1], {"max_new_tokens": -3}, "max_new_tokens: "),
        ([1], {"seed": -1}, "seed: "),
        ([1], {"sampling": 1.0}, "sampling: "),
        (
            [1],
            {"sampling": SamplingParams([]), "max_new_tokens": 3},
            "temperature: expected one value or 1 ",
        ),
        ([1], {"sampling": SamplingParams(1, 0, [0.5, 1]), "max_new_tokens": 3}, "top_p: expected"),
    ],
)
def test_requests_that_cannot_be_run(engine, prompt, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        engine.submit(prompt, **options)


def test_text_without_a_tokenizer_is_an_error(engine):
    request = engine.submit([1, 2], GREEDY, 3)
    with pytest.raises(InputError, match=r"^tiny: expected a model with a tokenizer"):
        list(request)
    request.cancel()


def test_error_of_the_loop_ends_what_runs_and_not_what_waits(target, lasting, monkeypatch):
    engine = plain_engine(target, 1)
    first, second = engine.submit(lasting, GREEDY, 40), engine.submit([2], GREEDY, 5)
    engine.step()
    assert not first.done
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", lambda *_: 1 / 0)
        assert engine.step()
    with pytest.raises(ZeroDivisionError):
        first.result()
    assert second.result() == alone(target, None, [2], GREEDY, 5)


@pytest.mark.slow
def test_warm_engine_compiles_nothing_more(target, draft):
    """While the loop shrinks, grows to four rows and shrinks again; rows keep their texts."""
    engine = spsjax.Engine(target, draft, K, rows=4, slots=SLOTS, rounds=1, stop_at_eos=False)
    steps = []
    engine.warm_up([1, 2, 3], progress=lambda *step: steps.append(step))
    assert steps == [(step, 7) for step in range(8)]  # three sizes, four widths of chunks
    compiled_at = getattr(compilation._newest, "ended", 0)
    requests, counts, rows = [], (90, 6, 6, 90, 0, 12, 90), []
    for seeds in ([0], range(1, 6), [6]):
        for seed in seeds:
            requests.append(engine.submit([seed, 4], SamplingParams(), counts[seed], seed))
        while engine.step() and not (seeds == [0] and rows[-1:] == [1]):
            rows.append(len(engine._pool.state.done))
    assert compilation._newest.ended == compiled_at
    sizes = [size for before, size in zip([0, *rows], rows) if size != before]
    assert sizes == [4, 1, 4, 2, 1]
    for seed, (request, count) in enumerate(zip(requests, counts, strict=True)):
        expected = alone(target, draft, [seed, 4], count=count, seed=seed, stop_at_eos=False)
        assert request.tokens == expected and len(expected) == count


def test_a_closed_engine_ends_its_requests_and_takes_no_more(target):
    engine = plain_engine(target, 1)
    requests = [engine.submit([1, 2], max_new_tokens=30) for _ in range(2)]
    engine.step()
    engine.close()
    assert all(one.done and one.cancelled for one in requests)
    with pytest.raises(InputError, match=r"^submit: expected an open engine"):
        engine.submit([1, 2], max_new_tokens=5)
    with pytest.raises(InputError, match=r"^prompt: expected at least one token"):
        plain_engine(target, 1).warm_up([])
