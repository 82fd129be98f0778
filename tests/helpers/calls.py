"""Calls of `generate` in parts, for tests of the loop that runs them, and what they return."""

import dataclasses

import numpy as np

from spsjax import SamplingParams
from spsjax.runtime.loop import Loop
from spsjax.runtime.setup import Setup


class Call:
    """A checked call of `generate`, whose arguments it takes, with its batch and its loop."""

    def __init__(
        self,
        model,
        prompts,
        drafter,
        num_speculative_tokens=None,
        params=SamplingParams(),
        max_new_tokens=8,
        seed=0,
        verifier=None,
        stop_at_eos=True,
        **changes,
    ):
        """`changes` are fields of the program that differ."""
        setup = Setup(model, drafter, num_speculative_tokens, verifier, stop_at_eos)
        self.setup = setup
        self.batch = setup.batch(prompts, params, max_new_tokens, seed)
        self.loop: Loop = setup.loop_for(self.batch, "test")
        self.loop.program = dataclasses.replace(self.loop.program, **changes)

    @property
    def program(self):
        return self.loop.program

    @property
    def params(self):
        return self.loop.params

    @property
    def slots(self):
        return self.loop.slots

    @property
    def inputs(self):
        """Arrays for `decode.prompt.prefill`."""
        return self.loop.inputs(self.batch)

    def prefill(self, costs=None):
        """Returns the state after the prompts."""
        return self.loop.read(self.batch, costs)


def padded(prompts, width, seed=None):
    """Returns prompts in the first tokens of rows [B, width], and their lengths [B], as int32.

    The tokens behind them are 0, or random ones below 48 if there is a seed.
    """
    most = 1 if seed is None else 48
    tokens = np.random.default_rng(seed).integers(0, most, (len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.asarray([len(prompt) for prompt in prompts], np.int32)


def assert_same_texts(texts, expected):
    """Asserts that the rows of two calls have the same tokens."""
    for row, (tokens, others) in enumerate(zip(texts, expected, strict=True)):
        np.testing.assert_array_equal(tokens, others, err_msg=f"row {row}")
