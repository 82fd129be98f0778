"""The form of every error message about bad input."""

import contextlib

import pytest

import spsjax


@contextlib.contextmanager
def one_line(*fragments):
    """Expects an InputError of one line with these fragments, and no traceback of another error."""
    with pytest.raises(spsjax.InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for fragment in fragments:
        assert fragment in message
    error = caught.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


def refused(model, *fragments, prompts=((1, 2),), **arguments):
    """Expects `generate` to refuse these arguments with a message that has these fragments."""
    with one_line(*fragments):
        spsjax.generate(model, prompts, **{"max_new_tokens": 2} | arguments)
