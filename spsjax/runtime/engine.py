"""Continuous batching: many requests in the rows of one loop."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from spsjax.decode import sizes
from spsjax.decode.schedule import Schedule
from spsjax.drafters import base
from spsjax.errors import InputError, NonFiniteError, check_integer
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.runtime import low_acceptance, memory
from spsjax.runtime.batch import check_stop_tokens
from spsjax.runtime.pool import Pool, Reading
from spsjax.runtime.requests import Request, Submission, Updates
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.verifiers.base import Verifier

_SAMPLED = 64  # tokens of the first prompt, in all rows, on which costs are measured


class Engine:
    """Continuous batching: requests run in the rows of one compiled loop.

    Between runs of a few rounds, rows that are done are emptied, and waiting prompts are read a
    chunk at a time and put into empty rows. A loop has 1, 2, 4, ... rows, as many as requests need,
    since a round takes longer with more of them.

    **Lossless** with a lossless verifier, as `generate` is. A request's tokens are those of
    `generate` alone with the same seed, to rounding, whatever else runs. (With a schedule, what is
    drafted depends on the other rows and on what is compiled, and so does the sample of a seed.
    The costs of "auto" are measured on the first prompt, with its sampling parameters.)

    Attributes:
        model: the target.
        rows: most requests that run at the same time.
        slots: tokens of each row: a prompt, its continuation, and K + 1 more.
    """

    def __init__(
        self,
        model: Model,
        drafter: Model | LoadedDrafter | base.Drafter | None = None,
        num_speculative_tokens: int | str | Schedule | None = None,
        *,
        rows: int = 8,
        slots: int = 2048,
        chunk: int = 128,
        rounds: int = 4,
        verifier: str | Verifier | None = None,
        stop_at_eos: bool = True,
    ):
        """Checks the arguments, of which `generate` describes those that are not listed here.

        Args:
            rows: most requests that run at the same time.
            slots: tokens of each row: a prompt, its continuation, and K + 1 more.
            chunk: most tokens of a prompt that are read between two runs of the loop.
            rounds: rounds of a run. More of them cost less time of the host, and make requests
                wait longer.

        Raises:
            InputError: an argument that cannot be used.
        """
        for name, value in (("rows", rows), ("slots", slots), ("chunk", chunk), ("rounds", rounds)):
            check_integer(name, value, 1, 2**31 - 1)
        self.model, self.slots = model, sizes.num_slots(slots)
        self._setup = Setup(model, drafter, num_speculative_tokens, verifier, stop_at_eos)
        program = self._setup.program
        limits = rows, self.slots, model.mesh
        memory.check("rows, slots", program, self._setup.params, *limits)
        self._pool = Pool(self._setup, rows, self.slots, chunk)
        self.rows = self._pool.sizes[-1]  # a mesh may have room for more
        self._rounds = rounds
        self._new: list[Request] = []  # since the last step
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}
        self._reading: tuple[Request, Reading] | None = None
        self._stepping, self._count = False, 0
        self._closed, self._ended = False, False  # for new requests; in all processes
        self._changed = threading.Condition()  # guards what is new, and whose turn it is
        multihost.check_same_everywhere("Engine", program, rows, slots, chunk, rounds, model.mesh)

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = SamplingParams(),
        max_new_tokens: int = 128,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> Request:
        """Queues a prompt, and returns its request. The arguments are those of `generate`.

        Stop tokens are looked for between runs of the loop, and none of them is compiled.

        Raises:
            InputError: an argument that cannot be used; the message names it.
        """
        if not multihost.is_main_process():
            raise InputError(f"submit: expected process 0, found process {jax.process_index()}")
        submitted = self._request(prompt, sampling, max_new_tokens, seed, stop_token_ids)
        if jax.process_count() == 1:
            _ = submitted.batch.arrays  # made here, so that the loop need not wait for them
        with self._changed:
            if self._closed:
                raise InputError("submit: expected an open engine, found a closed one")
            self._new.append(submitted)
        return submitted

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet, those that were cancelled included."""
        return len(self._new) + len(self._waiting) + (self._reading is not None)

    @property
    def num_running(self) -> int:
        """Requests in the rows of the loop."""
        return len(self._running)

    def room_after(self, prompt: Sequence[int]) -> int:
        """Returns how many new tokens may follow a prompt of token ids; below 0: it is too long."""
        room = self.slots - self._setup.num_speculative_tokens - 1
        return min(room, *self._setup.contexts.values()) - len(prompt)

    def warm_up(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = SamplingParams(),
        progress: Callable[[int, int], None] = lambda done, steps: None,
    ) -> None:
        """Compiles what requests need, for loops of all sizes, while nothing else runs.

        Otherwise this happens when it is needed first, and all requests wait. With "auto", the
        costs of rounds are measured on the prompt. `progress` is called with the number of steps
        that are done and that of all steps.
        """
        self.begin(prompt, sampling)
        self.compile_rest(progress)

    def begin(self, prompt: str | Sequence[int], sampling=SamplingParams()) -> None:
        """Compiles the least that requests need; `compile_rest` compiles the rest behind them.

        That is the reading of chunks, and the largest loop. With a schedule such as "auto", this
        loop drafts nothing for now, which compiles faster. Arguments: those of `warm_up`.
        """
        (ids,) = self._request(prompt, sampling, 0, 0).batch.prompts
        length = min(self._pool.chunk + 1, self.room_after([]) - 1)  # more than one chunk
        first = self._request((ids * length)[:length], sampling, 1, 0)
        self._pool.compiled = set(), {self._pool.chunk}
        self._finish(first)

    def compile_rest(self, progress: Callable[[int, int], None] = lambda done, steps: None) -> None:
        """Compiles what `begin` has left, of one process in another thread than the engine's.

        Requests wait while the costs of rounds are measured. `progress` is that of `warm_up`.
        Raises InputError without `begin`.
        """
        self._pool.compile_rest(self._turn, progress)

    def close(self) -> None:
        """Cancels all requests, and takes no more of them. Other processes stop following."""
        with self._changed:
            self._closed = True
            for submitted in self._all():
                submitted.cancelled = True
        while not self._ended:
            self.step()

    def follow(self) -> None:
        """Runs what process 0 decides until it closes the engine; for all other processes."""
        while not self._ended:
            self.step()

    def step(self) -> bool:
        """Reads a chunk of the waiting prompts, and runs the loop for a few rounds.

        Returns whether anything is left to do. Of several threads, one does it, and the others wait
        until it is done. An error ends the requests that run, which raise it when they are asked.
        """
        with self._changed:
            if self._stepping:
                self._changed.wait()
                return self._busy()
        with self._turn():
            try:
                self._update()
                self._advance()
            except BaseException as error:
                self._give_up(error)
                # Somebody wants to stop, or other processes would go on without this one.
                if not isinstance(error, Exception) or jax.process_count() > 1:
                    raise
        return self._busy()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other thread runs the engine, and keeps others from running it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def _busy(self) -> bool:
        return any(True for _ in self._all())

    def _all(self) -> Iterator[Request]:
        """Yields the requests that are not done."""
        yield from self._running.values()
        if self._reading is not None:
            yield self._reading[0]
        yield from self._waiting
        yield from self._new

    def _request(self, prompt, sampling, max_new_tokens, seed, stop_token_ids=()) -> Request:
        """Returns a request that is not queued yet; raises InputError as `submit` does."""
        batch = self._setup.batch([prompt], sampling, max_new_tokens, seed, "prompt")
        (ids,), (count,) = batch.prompts, batch.new_tokens
        K = self._setup.num_speculative_tokens
        if (needed := len(ids) + count + K + 1) > self.slots:
            raise InputError(
                f"prompt: expected prompt, new tokens and {K + 1} more within the engine's "
                f"{self.slots} slots, found {needed}"
            )
        stops = list(check_stop_tokens(stop_token_ids, self.model.config.vocab_size))
        submission = Submission(ids, sampling.of_one_row(), count, int(seed), stops)
        ends = {*self._setup.program.eos_ids, *stops}
        return Request(self, batch, submission, ends)

    def _update(self) -> None:
        """Takes new and cancelled requests, with several processes those of process 0."""
        with self._changed:
            new, self._new = self._new, []
            cancelled = tuple(one.number for one in self._all() if one.cancelled)
            updates = Updates(tuple(one.submission for one in new), cancelled, self._closed)
        if jax.process_count() > 1:
            updates = updates.of_first_process()
            if not multihost.is_main_process():
                new = [self._request(*vars(one).values()) for one in updates.submitted]
        for submitted in new:
            self._enqueue(submitted)
        self._drop(set(updates.cancelled))
        self._ended = updates.closed

    def _enqueue(self, submitted: Request) -> None:
        sample = submitted.prompt[:_SAMPLED], submitted.submission.sampling
        self._pool.sample = self._pool.sample or sample
        submitted.number, self._count = self._count, self._count + 1
        self._waiting.append(submitted)

    def _finish(self, submitted: Request) -> None:
        """Queues a request in every process, and runs it until it is done."""
        self._enqueue(submitted)
        while not submitted.done:
            self._advance()
        submitted.check()

    def _advance(self) -> None:
        """Reads a chunk of the waiting prompts, and runs the loop for a few rounds."""
        left = self._pool.chunk
        while left > 0 and (count := self._read()):
            left -= count
        if self._running:
            self._fit(len(self._running) + (self._reading is not None))
            self._hand_out(self._pool.run(self._rounds))

    def _read(self) -> int:
        """Reads the next chunk of a prompt, and returns its tokens; 0 if there is nothing to read.

        After the last chunk the request gets its row.
        """
        if self._reading is None:
            if len(self._running) == self.rows or not self._waiting:
                return 0
            first = self._waiting.popleft()
            self._reading = first, Reading(first.batch, self.slots)
        submitted, reading = self._reading
        before = reading.count
        fresh = self._pool.read(reading)
        if fresh is not None:
            self._fit(len(self._running) + 1)
            row = min(set(range(len(self._pool.state.done))) - self._running.keys())
            self._pool.insert(row, fresh)
            self._running[row], self._reading = submitted, None
        return reading.count - before

    def _fit(self, count: int) -> None:
        """Gives the loop as many rows as so many requests need."""
        if self._pool.fit(count, list(self._running)):
            self._running = dict(enumerate(self._running.values()))

    def _hand_out(self, read: dict[str, np.ndarray]) -> None:
        """Gives requests their new tokens, and empties the rows of those that are done."""
        for row, submitted in list(self._running.items()):
            start, end = len(submitted.prompt) + len(submitted.tokens), read["lengths"][row]
            stopped = submitted.take(read["tokens"][row, start:end].tolist())
            submitted.rounds = int(read["rounds"][row])
            submitted.accepted_histogram = read["accepted"][row].tolist()
            done, failed = read["done"][row], read["failed"][row]
            if failed and not stopped:
                submitted.error = NonFiniteError(
                    f"position {end}: expected finite logits, found a NaN or an infinity"
                )
            if failed or (stopped and not done):
                self._pool.empty_row(row)
            if done or stopped:
                proposed = int(read["proposed"][row])
                low_acceptance.count(self._setup, proposed, read["accepted"][row])
                submitted.done = True
                del self._running[row]

    def _drop(self, numbers: set[int]) -> None:
        """Ends requests that were cancelled."""
        for submitted in [one for one in self._waiting if one.number in numbers]:
            self._waiting.remove(submitted)
            submitted.done = True
        if self._reading is not None and self._reading[0].number in numbers:
            self._reading[0].done = True
            self._reading = None
        for row, submitted in list(self._running.items()):
            if submitted.number in numbers:
                self._pool.empty_row(row)
                submitted.done = True
                del self._running[row]

    def _give_up(self, error: BaseException) -> None:
        """Ends all that runs with an error: the rows may be lost. What waits is tried again.

        If nothing ran, what waits ends, too: it would meet the same error.
        """
        ended = list(self._running.values())
        if self._reading is not None:
            ended.append(self._reading[0])
        if not ended:
            ended = list(self._waiting)
            self._waiting.clear()
        for submitted in ended:
            submitted.error, submitted.done = error, True
        self._running, self._reading, self._pool.state = {}, None, None
