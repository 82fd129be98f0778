"""Progress bars on terminals, and plain lines in log files."""

import sys
from collections.abc import Callable, Iterable, Sequence

from tqdm import tqdm

# Wrapper of a list of jobs that shows the progress; `iter` shows none.
Progress = Callable[[Sequence], Iterable]
# Function from a title to a `Progress`.
TitledProgress = Callable[[str], Progress]

_LOG_SECONDS = 10
_LINE = "{desc}: {n_fmt}/{total_fmt} in {elapsed}, {remaining} left, {rate_fmt}{postfix}"


class Bar(tqdm):
    """Progress bar on stderr, or a line every ten seconds if stderr is not a terminal.

    The arguments are those of `tqdm`.
    """

    def __init__(self, *args, **options):
        self._log = not sys.stderr.isatty()
        if self._log:
            # A step may take minutes, so the clock is checked after every step.
            options |= {"mininterval": _LOG_SECONDS, "miniters": 1, "leave": False}
            options |= {"bar_format": _LINE}
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Shows the bar, or prints a line; returns whether there is a bar to erase."""
        if not self._log:
            return super().display(msg, pos)
        if msg is None:  # an empty message would erase the bar
            print(self, file=self.fp, flush=True)
        return False

    def close(self) -> None:
        """Closes the bar; in a log file it prints a last line if the bar has printed before."""
        has_printed = not self.disable and self.last_print_t >= self.start_t + self.delay
        if self._log and has_printed:
            self.display()
        super().close()
