"""Samples of one prompt that share its prefill, against the rows of `generate`."""

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
from helpers import drafting
from helpers.models import build_model

import spsjax
from spsjax import InputError, NonFiniteError, SamplingParams, decode
from spsjax.runtime import pool as pool_module
from spsjax.runtime.loop import Loop
from spsjax.runtime.requests import Submission, Updates
from spsjax.utils import compilation

K, SLOTS, CHUNK, NEW = 2, 64, 8, 12
SAMPLING = SamplingParams(0.9, top_p=0.95)
PROMPT = [3, 4, 5, 3, 4, 5, 3, 1, 2, 3]  # of two chunks
SAMPLES = 3  # of groups: more than the engine has rows


@pytest.fixture(scope="module")
def drafted(target, draft):
    """An engine of two rows with a draft model, which tests share."""
    return engine_of(target, draft)


@pytest.fixture(scope="module")
def plain(target):
    """An engine of two rows without a drafter, which tests share."""
    return engine_of(target)


@pytest.fixture(scope="module")
def texts(target):
    """The tokens of the rows of `generate` without a drafter, with seed 5."""
    return rows_of(target, None)


def engine_of(target, drafter=None):
    with mock.patch.object(pool_module, "row_sizes", lambda most, least: [most]):
        return spsjax.Engine(target, drafter, K, rows=2, slots=SLOTS, chunk=CHUNK, rounds=1)


def rows_of(target, drafter, seed=5):
    with mock.patch.object(decode.sizes, "num_slots", lambda length, roomy=False: SLOTS):
        out = spsjax.generate(target, [PROMPT] * SAMPLES, drafter, K, SAMPLING, NEW, seed)
    return [tokens.tolist() for tokens in out.tokens]


def group_of(engine, seed=5, count=SAMPLES):
    return engine.submit_group(PROMPT, count, SAMPLING, NEW, seed)


def finish(engine):
    while engine.step():
        pass


@contextlib.contextmanager
def chunks_read():
    """Yields a list with an entry per chunk of a prompt that is read."""
    read, chunks = Loop.read_chunk, []

    def counted(loop, *arguments, **options):
        chunks.append(arguments[2])
        return read(loop, *arguments, **options)

    with mock.patch.object(Loop, "read_chunk", counted):
        yield chunks


@pytest.mark.parametrize("kind", ["draft_model", "ngram", "random_tree"])
def test_samples_of_a_group_are_the_rows_of_generate(target, draft, drafted, kind):
    """With requests beside them, more samples than rows, and one reading of the prompt."""
    drafter = draft if kind == "draft_model" else drafting.build(kind, draft, K)
    engine = drafted if kind == "draft_model" else engine_of(target, drafter)
    before = engine.submit([9, 1], SAMPLING, NEW, 1)
    engine.step()
    with chunks_read() as chunks:
        group = group_of(engine)
        after = engine.submit([7], SAMPLING, 1)
        finish(engine)
    assert len(chunks) == math.ceil(len(PROMPT) / CHUNK) + 1  # that of `after`
    assert [sample.tokens for sample in group] == rows_of(target, drafter)
    assert len({tuple(sample.tokens) for sample in group}) > 1
    assert before.tokens == engine.submit([9, 1], SAMPLING, NEW, 1).result()
    assert len(after.tokens) == 1 and engine.num_waiting == 0


def test_groups_of_all_sizes_share_programs(plain, texts):
    """A request is a group of one."""
    finish(plain)
    group_of(plain, count=2)[0].result()
    compiled_at = compilation._newest.ended
    larger = group_of(plain, count=5)
    assert plain.num_waiting == 6 - plain.num_running
    finish(plain)
    assert [sample.tokens for sample in larger[:SAMPLES]] == texts
    assert plain.submit(PROMPT, SAMPLING, NEW, 5).result() == texts[0]
    assert compilation._newest.ended == compiled_at


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelled_samples_leave_the_others_of_their_group(plain, texts, steps):
    """Before and while the prompt is read, and when the first samples have rows."""
    for cancelled in ([0], [1, 2], [0, 1, 2]):
        group = group_of(plain)
        for _ in range(steps):
            plain.step()
        assert plain.num_waiting == (1 if steps == 2 else SAMPLES)
        for index in cancelled:
            group[index].cancel()
        finish(plain)
        for index, sample in enumerate(group):
            length = len(sample.tokens) if index in cancelled else None
            assert sample.done and sample.tokens == texts[index][:length]
            assert sample.cancelled or len(sample.tokens) == len(texts[index])
        assert plain._queue._reading is None
    assert plain.submit(PROMPT, SAMPLING, NEW, 5).result() == texts[0]


def test_error_of_the_loop_ends_samples_that_run_and_not_those_that_wait(plain, texts):
    """The prompt is read again for them."""
    group = group_of(plain)
    while plain.num_waiting > 1:
        plain.step()
    with mock.patch.object(Loop, "run", lambda *_: 1 / 0):
        plain.step()
    for sample in group[:2]:
        with pytest.raises(ZeroDivisionError):
            sample.result()
    with chunks_read() as chunks:
        assert group[2].result() == texts[2]
    assert len(chunks) == 2


@pytest.mark.parametrize("function", ["read_chunk", "insert"])
def test_error_of_a_prompt_ends_its_group_alone(plain, texts, function):
    group, other = group_of(plain), group_of(plain, count=1)
    with mock.patch.object(Loop, function, lambda *_, **__: 1 / 0):
        while not group[0].done:
            plain.step()
    for sample in group:
        with pytest.raises(ZeroDivisionError):
            sample.result()
    assert other[0].result() == texts[0]


def test_prompt_that_the_model_cannot_read_ends_each_sample(target, plain):
    embedding = np.array(target.params["embed"]["embedding"])
    embedding[PROMPT[-2]] = np.nan
    params = target.params | {"embed": {"embedding": embedding}}
    engine = engine_of(build_model(target.config, params, None))
    for sample in group_of(engine):
        with pytest.raises(NonFiniteError, match=r"^position 10: expected finite logits"):
            sample.result()


def test_prompt_is_read_again_for_the_rest_of_a_group(plain, texts):
    """As it must be when weights change; so are the texts of samples that run, which go on."""
    with chunks_read() as chunks:
        group = group_of(plain)
        for read_so_far in (1, 3):  # chunks of a prompt of two
            while len(chunks) < read_so_far:
                plain.step()
            running = plain.num_running
            plain._queue.read_again()
        finish(plain)
    assert [sample.tokens for sample in group] == texts
    assert len(chunks) == 1 + 2 + 2 + 2 * running


@pytest.mark.parametrize("count", [0, 1.5, "two", None])
def test_number_of_samples_that_cannot_be_is_refused(plain, count):
    with pytest.raises(InputError, match=r"^count: expected an integer from 1 to 2147483647"):
        plain.submit_group(PROMPT, count)


def test_groups_reach_other_processes():
    group = Submission(PROMPT, SAMPLES, SAMPLING, NEW, 5, [4])
    updates = Updates((group,), (3, 1), False)
    assert updates.of_first_process() == updates
