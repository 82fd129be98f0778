"""A thread that runs an engine for callers in an event loop."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import jax

from spsjax.errors import InputError
from spsjax.runtime.engine import Engine, Request
from spsjax.sampling import SamplingParams

_BEAT_SECONDS = 5.0  # heartbeat of an idle engine with several processes: collectives time out


class Busy(Exception):
    """Too many requests wait already."""


class Starting(Exception):
    """Programs are still being compiled."""


class Ticket:
    """A submitted request, as an event loop sees it.

    Attributes:
        request: the engine's request.
        used: number of answered tokens, known at the end; the request may run for another round.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop):
        self.request, self._loop = request, loop
        self.used = 0
        self._news = asyncio.Event()
        self._seen = 0

    async def news(self, seconds: float) -> None:
        """Waits for more tokens or the end of the request, at most for some seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return
        self._news.clear()

    def publish(self) -> bool:
        """Notifies the event loop of new tokens, from the engine's thread; returns `done`.

        A closed event loop cancels the request, without an effect on others.
        """
        done = self.request.done  # before the tokens: they are complete if it is
        if done or len(self.request.tokens) > self._seen:
            self._seen = len(self.request.tokens)
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:
                self.request.cancel()
        return done


class Worker:
    """Runs an engine in a thread of its own until it is stopped.

    Only this thread runs the engine. It first calls `prepare`; until that returns, no request is
    taken. `most_waiting` requests may wait for a row.

    Attributes:
        ready: whether requests are taken.
    """

    def __init__(
        self, engine: Engine, most_waiting: int, prepare: Callable[[], None] | None = None
    ):
        self.engine, self._most_waiting = engine, most_waiting
        self._prepare, self.ready = prepare, prepare is None
        self._tickets: set[Ticket] = set()
        # The engine's thread never waits for a submission, which may take long to encode a text.
        self._submitting, self._lock = threading.Lock(), threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompts: Sequence[str | Sequence[int]],
        count: int,
        sampling: SamplingParams,
        max_new_tokens: int,
        seeds: Sequence[int],
        loop: asyncio.AbstractEventLoop,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Ticket]:
        """Queues `count` samples per prompt and seed, all or none, and returns their tickets.

        The samples of a prompt share its prefill, and their tickets follow one another. `loop` is
        the event loop in which the tickets are awaited.

        Raises:
            Starting: the engine is not ready.
            Busy: too many requests wait.
            InputError: an argument that cannot be used, or more prompts than may ever wait.
        """
        if not self.ready:
            raise Starting
        most, choices = self._most_waiting, count * len(prompts)
        if choices > most:
            raise InputError(f"prompt, n: expected at most {most} choices in all, found {choices}")
        with self._submitting:
            if self._stopped or self.engine.num_waiting + choices > most:
                raise Busy
            requests = []
            try:
                for prompt, seed in zip(prompts, seeds, strict=True):
                    options = sampling, max_new_tokens, seed, stop_token_ids
                    requests += self.engine.submit_group(prompt, count, *options)
            except InputError:
                for request in requests:
                    request.cancel()
                self._wake.set()  # or an idle engine would keep them
                raise
            tickets = [Ticket(request, loop) for request in requests]
            with self._lock:
                self._tickets.update(tickets)
        self._wake.set()
        return tickets

    def stop(self) -> None:
        """Cancels what is left, ends the thread, and closes the engine.

        A thread that is not ready yet is left alone: what compiles cannot be interrupted.
        """
        with self._submitting, self._lock:
            self._stopped = True
            for ticket in self._tickets:
                ticket.request.cancel()
        self._wake.set()
        if not self.ready:
            return
        self._thread.join()
        self.engine.close()

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
            self.ready = True
        while True:
            busy = self.engine.step()
            with self._lock:
                self._tickets = {ticket for ticket in self._tickets if not ticket.publish()}
                if self._stopped and not self._tickets:
                    return
            if not busy:
                self._wake.wait(_BEAT_SECONDS if jax.process_count() > 1 else None)
                self._wake.clear()
