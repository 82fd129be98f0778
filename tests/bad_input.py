"""What every complaint about bad input must look like."""

import contextlib

import pytest

import spsjax


@contextlib.contextmanager
def one_line(*parts):
    """Expects an InputError of one line with those parts, and no traceback of another error."""
    with pytest.raises(spsjax.InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for part in parts:
        assert part in message
    error = caught.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
