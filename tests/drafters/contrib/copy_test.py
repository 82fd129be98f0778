"""The place from which aggressive decoding copies, compared with a plain loop."""

import copy as copy_of
import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import drafting, reference
from ml_collections import ConfigDict

import spsjax
from spsjax import InputError
from spsjax.cli import configs
from spsjax.drafters.contrib import copy
from spsjax.types import Chunk

SLOTS = 40


@pytest.mark.parametrize(
    ("K", "start", "suffix", "replaces"),
    [(4, 0, 3, False), (2, 3, 1, True), (7, 9, 2, False), (7, 0, 2, True)],
)
def test_place_is_that_of_a_plain_loop(K, start, suffix, replaces):
    """After rounds of random lengths, in prompts with replaced, dropped or inserted tokens."""
    drafter = copy.Drafter(K, start=start, max_suffix=suffix, replaces=replaces)
    rng, rows = np.random.default_rng(K), 200
    prompts = rng.integers(0, 9, (rows, 16))
    sizes = rng.integers(4, 17, rows)
    tokens = np.zeros((rows, SLOTS), np.int32)
    for row, size in enumerate(sizes):
        prompt = prompts[row, :size].tolist()
        edited = [token for token in prompt for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 2]))]
        noisy = [token if rng.random() < 0.9 else int(rng.integers(9)) for token in edited]
        text = [*prompt, *noisy, *rng.integers(0, 9, SLOTS)][:SLOTS]
        tokens[row] = text
    sync, propose = jax.jit(drafter.sync), jax.jit(drafter.propose)
    state = drafter.prefill(None, None, after_prompts(sizes.astype(np.int32)), None)
    lengths, patterns = sizes.astype(np.int32), set()
    for _ in range(6):
        now = drafting.round_of(tokens, lengths)
        proposed = np.asarray(propose(None, state, now).tokens)
        for row, size in enumerate(sizes):
            text = tokens[row, : lengths[row]].tolist()
            place = reference.aggressive_place(text[:size], text[size:], start, suffix, replaces)
            copied = text[place:size][:K] if place >= 0 else []
            assert proposed[row].tolist() == [*copied, *[-1] * (K - len(copied))], text
            patterns.add(len(copied))
        lengths = np.minimum(lengths + rng.integers(1, K + 2, rows), SLOTS).astype(np.int32)
        state = sync(None, state, drafting.round_of(tokens, lengths))
    assert patterns == set(range(K + 1))


@functools.partial(jax.jit, static_argnums=0)
def _proposed(drafter, text, prompt, length):
    """Returns the tokens that are proposed after a round that wrote all behind the prompt."""
    state, now = (
        drafter.prefill(None, None, after_prompts(prompt), None),
        drafting.round_of(text, length),
    )
    state = drafter.sync(None, state, now)
    return drafter.propose(None, state, now).tokens


def after_prompts(lengths) -> Chunk:
    """Returns a chunk of prompts of which the drafter needs the lengths only."""
    return Chunk(None, None, None, lengths, None)


def proposed(drafter, prompt, output):
    text = np.zeros((1, 16), np.int32)
    text[0, : len(prompt) + len(output)] = [*prompt, *output]
    sizes = (np.asarray([size], np.int32) for size in (len(prompt), len(prompt) + len(output)))
    return np.asarray(_proposed(drafter, text, *sizes))[0].tolist()


def test_repeated_tokens_do_not_show_where_to_go_on():
    """The prompt has 1 2 twice; 2 3 occurs once."""
    drafter = copy.Drafter(2, start=99)
    prompt = [1, 2, 4, 1, 2, 3, 5, 6]
    for output, expected in (([1, 2], [-1, -1]), ([1, 2, 3], [5, 6]), ([7, 2], [-1, -1])):
        assert proposed(drafter, prompt, output) == expected


def test_replaced_token_does_not_end_the_copy():
    """The prompt's 2 has become 7, which is nowhere in it: 3 is next."""
    for replaces, expected in ((True, [3, 4]), (False, [-1, -1])):
        assert proposed(copy.Drafter(2, replaces=replaces), [1, 2, 3, 4], [1, 7]) == expected


def test_loaded_drafter_begins_after_what_the_tokenizer_puts_before_a_text():
    target = spsjax.load("pystdlib/target")
    tokenizer = copy_of.copy(target.tokenizer)
    bare = target.tokenizer.encode("a", whole=False)
    assert target.tokenizer.encode("a") == [target.tokenizer.bos_id, *bare]
    assert spsjax.load_drafter("copy", target).drafter == copy.Drafter(start=1)
    tokenizer.encode = lambda text, whole=True: bare if text else []
    without = dataclasses.replace(target, tokenizer=tokenizer)
    assert spsjax.load_drafter("copy", without).drafter == copy.Drafter()
    for start, expected in ((None, 1), (0, 0), (5, 5)):  # scripts do the same, without an option
        options = ConfigDict({"copy": {"start": start, "max_suffix": 2}})
        drafter = configs.load_drafter("copy", "", options, target)
        assert drafter.drafter == copy.Drafter(start=expected, max_suffix=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected an integer >= 0"),
        ({"start": -1}, "start: expected an integer from 0 to 2147483647, found -1"),
        ({"max_suffix": 0}, "max_suffix: expected an integer from 1 to 8, found 0"),
        ({"max_suffix": 9}, "max_suffix: expected an integer from 1 to 8, found 9"),
        ({"start": 2**31}, "start: expected an integer from 0 to 2147483647, found 2147483648"),
        ({"replaces": 1}, "replaces: expected True or False, found 1"),
    ],
)
def test_odd_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        copy.Drafter(**options)
