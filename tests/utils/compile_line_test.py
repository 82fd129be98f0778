"""The line on a terminal that says what is being compiled."""

import io
import threading
import time
import types

import jax
import pytest

from spsjax.utils import compile_line
from spsjax.utils.compilation import compiled, jitted


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal as stderr, on which lines appear at once."""
    # Not `sys.stderr` itself, which pytest replaces after this.
    monkeypatch.setattr(compile_line, "sys", types.SimpleNamespace(stderr=Screen()))
    monkeypatch.setattr(compile_line, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(compile_line, "_STEP_SECONDS", 0.01)
    return compile_line.sys.stderr


def patient(screen, *names):
    """Returns a function of a number that is traced until the screen names other functions, too."""

    def slow(x):
        end = time.monotonic() + 30
        while not all(name in screen.getvalue() for name in ("slow", *names)):
            assert time.monotonic() < end, screen.getvalue()
            time.sleep(0.01)
        return x + 1

    return slow


def test_compiled_shows_line_and_erases_it(screen):
    call = compiled(patient(screen))
    assert call(1)[0] == 2
    shown = screen.getvalue()
    assert "compiling slow, 0 s …" in shown and "\n" not in shown
    assert not shown.rpartition("…")[2].strip() and shown.endswith("\r")
    assert call(1)[0] == 2 and screen.getvalue() == shown  # nothing is compiled


def test_compiled_that_fails_erases_line(screen):
    def fails(x):
        patient(screen)(x)
        raise ValueError("no program")

    fails.__name__ = "slow"
    with pytest.raises(ValueError, match="no program"):
        compiled(fails)(1)
    assert screen.getvalue().endswith("\r") and not compile_line._compiling


def test_compiled_in_two_threads_shares_line(screen):
    def other(x):
        return patient(screen, "other")(x)

    thread = threading.Thread(target=compiled(other), args=(1,))
    thread.start()
    assert compiled(patient(screen, "other"))(1)[0] == 2
    thread.join()
    assert "compiling other, slow, " in screen.getvalue() or "slow, other" in screen.getvalue()
    assert screen.getvalue().endswith("\r") and not compile_line._compiling


def test_compiled_quickly_shows_nothing(screen, monkeypatch):
    monkeypatch.setattr(compile_line, "_DELAY_SECONDS", 60.0)
    assert compiled(lambda x: x + 2)(1)[0] == 3
    assert not screen.getvalue() and not compile_line._compiling


@pytest.mark.parametrize("why", ["off", "file", "traced only"])
def test_compiled_without_line_starts_no_thread(screen, monkeypatch, why):
    monkeypatch.setattr(compile_line, "_watch", lambda: pytest.fail("a thread was started"))
    if why == "file":
        monkeypatch.setattr(screen, "isatty", lambda: False)
    if why == "traced only":
        program, numbers = jitted(lambda x: x + 3)
        program.lower(numbers, 1)
    else:
        with compile_line.off() if why == "off" else jax.named_scope(""):
            compiled(lambda x: x + 4)(1)
    assert compile_line._watcher is None and not screen.getvalue()
