"""A line on the terminal that says what is being compiled, and for how long."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

# "off": no line.
VARIABLE = "SPSJAX_COMPILATION_PROGRESS"

_DELAY_SECONDS = 2.0  # what compiles faster is not worth a line
_STEP_SECONDS = 0.5

_changed = threading.Condition()
_compiling: dict[object, tuple[str, float]] = {}  # name and start by compilation
_watcher: threading.Thread | None = None
_line: tqdm | None = None  # leaves other progress bars as they are
_is_on = os.environ.get(VARIABLE, "").lower() != "off"


def turn(on: bool) -> None:
    """Turns the line on or off for this process; it is on unless the environment says "off"."""
    global _is_on
    with _changed:
        _is_on = on
        if not on:
            _erase()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Shows no line in this block, whose output may end in the middle of a line."""
    was_on = _is_on
    turn(False)
    try:
        yield
    finally:
        turn(was_on)


def begin(name: str) -> object:
    """Notes that a program of this name is being compiled, until `end` gets what this returns.

    After two seconds a line on stderr says so, if stderr is a terminal. Several programs that are
    compiled at the same time share it.
    """
    global _watcher
    compilation = object()
    if not (_is_on and sys.stderr is not None and sys.stderr.isatty()):
        return compilation
    with _changed:
        _compiling[compilation] = name, time.monotonic()
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="compile_line", daemon=True)
            _watcher.start()
    return compilation


def end(compilation: object) -> None:
    """Notes that a program is compiled, and erases the line if it was the last one."""
    with _changed:
        _compiling.pop(compilation, None)
        if not _compiling:
            _erase()
            _changed.notify_all()  # the watcher ends


def _watch() -> None:
    """Writes the line again and again until nothing is compiled."""
    global _watcher
    with _changed:
        while _compiling:
            _changed.wait(_STEP_SECONDS)
            _write(time.monotonic())
        _watcher = None


def _write(now: float) -> None:
    global _line
    long = [(name, now - start) for name, start in _compiling.values()]
    long = [(name, seconds) for name, seconds in long if seconds >= _DELAY_SECONDS]
    if not (long and _is_on):
        return
    names = ", ".join(dict.fromkeys(name for name, _ in long))
    if _line is None:
        _line = tqdm(bar_format="{desc}", leave=False, file=sys.stderr)
    _line.set_description_str(f"compiling {names}, {max(s for _, s in long):.0f} s …")


def _erase() -> None:
    global _line
    if _line is not None:
        _line.close()
        _line = None
