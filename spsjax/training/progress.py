"""Progress bar of a training run, and its speed."""

import contextlib
import time
from collections.abc import Iterator

import jax

from spsjax.parallel import multihost
from spsjax.planning import hardware
from spsjax.utils.progress import Bar


class Progress:
    """A progress bar on standard error: steps, time left, loss, tokens/s and share of peak FLOP/s.

    `tokens` and `flops` are per step on all devices together.
    """

    def __init__(self, start: int, steps: int, tokens: int, flops: float):
        self._tokens, self._flops = tokens, flops
        self._seconds, self._steps, self._since = 0.0, 0, time.perf_counter()
        self._bar = Bar(
            total=steps,
            initial=start,
            unit="step",
            disable=not multihost.is_main_process(),
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def advance(self) -> None:
        """Counts one more finished step."""
        self._steps += 1
        self._bar.update()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock, so that evaluation does not count as training time."""
        self._seconds += time.perf_counter() - self._since
        yield
        self._since = time.perf_counter()

    def measure(self, loss: float) -> dict[str, float]:
        """Returns the speed since the last call and shows it next to the loss."""
        with self.paused():
            rate = self._steps / max(self._seconds, 1e-9)
            self._seconds, self._steps = 0.0, 0
        speed = {"tokens_per_second": rate * self._tokens}
        text = f"loss {loss:.3f}, {speed['tokens_per_second']:,.0f} tokens/s"
        peak = hardware.peak(jax.devices()[0])
        if peak:  # unknown for CPUs
            speed["share_of_peak"] = rate * self._flops / (peak * jax.device_count())
            text += f", {speed['share_of_peak']:.0%} of peak"
        self._bar.set_postfix_str(text, refresh=False)
        return speed

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
