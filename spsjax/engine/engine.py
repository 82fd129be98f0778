"""The engine: which requests are read, which rows they have, and runs of the loop between."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from spsjax import chance, decode, execution, memory, pacing, request
from spsjax.drafters import base
from spsjax.engine.requests import News, Request, Submission
from spsjax.errors import InputError, NonFiniteError, check_integer
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost, sharding
from spsjax.sampling import SamplingParams
from spsjax.utils.compilation import compiled
from spsjax.verifiers.base import Verifier

_SAMPLED = 64  # tokens of the first prompt, in all rows, on which costs are measured
_CALM = 8  # times in a row that fewer rows would do before the loop has fewer
_READ_BY_HOST = "tokens", "lengths", "done", "failed", "rounds", "proposed", "accepted"


@dataclasses.dataclass
class _Reading:
    """A prompt that is being read."""

    request: Request
    tokens: jax.Array | np.ndarray  # [B, S], of which the first row is the prompt
    count: int = 0  # tokens that were read
    caches: tuple | None = None


def row_sizes(most: int, least: int = 1) -> list[int]:
    """Returns the numbers of rows for which a loop is compiled: each twice the one before."""
    return sorted({min(least << i, most) for i in range(most.bit_length() + 1)})


class Engine:
    """Continuous batching: requests run in the rows of one compiled loop.

    Between runs of a few rounds, rows that are done are emptied, and waiting prompts are read a
    chunk at a time and put into empty rows. A loop has 1, 2, 4, ... rows, as many as requests need,
    since a round takes longer with more of them.

    **Lossless** with a lossless verifier, as `generate` is. A request's tokens are those of
    `generate` alone with the same seed, to rounding, whatever else runs. (With "auto", what is
    drafted depends on the other rows, and so does the sample of a seed. Its costs are measured on
    the first prompt, with that one's sampling parameters.)

    Attributes:
        model: the target.
        rows: most requests that run at the same time.
        slots: tokens of each row: a prompt, its continuation, and K + 1 more.
    """

    def __init__(
        self,
        model: Model,
        drafter: Model | LoadedDrafter | base.Drafter | None = None,
        num_speculative_tokens: int | str | pacing.Pacer | None = None,
        *,
        rows: int = 8,
        slots: int = 2048,
        chunk: int = 128,
        rounds: int = 4,
        verifier: str | Verifier | None = None,
        stop_at_eos: bool = True,
    ):
        """Checks the arguments. Programs are compiled when they are needed first.

        Args:
            model, drafter, num_speculative_tokens, verifier, stop_at_eos: as for `generate`.
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
        self._fixed = drafter, num_speculative_tokens, verifier, stop_at_eos
        self.model, self.slots = model, decode.num_slots(slots)
        one = self._checked([[0]], SamplingParams(), 0, 0)
        memory.check("rows, slots", one.program, one.params, rows, self.slots, model.mesh)
        whole = self._checked([[0]] * rows, SamplingParams(), 0, 0)
        self.rows = len(whole.lengths)  # a mesh may have room for more
        least = 1 if model.mesh is None else model.mesh.shape["data"]
        self._sizes = row_sizes(self.rows, least)
        self._loops: dict[int, request.Request] = {}  # by number of rows, with nothing to do
        self._program, self._params = whole.program, whole.params
        self._context = whole.context
        most = min(chunk, decode.most_read(whole.program, self.slots))
        self._chunk = decode.chunk_width(self.slots, most)
        self._rounds = rounds
        self._state: decode.DecodeState | None = None
        self._calm = 0  # times in a row that fewer rows would have done
        # The first request's prompt and sampling, on which the costs of rounds are measured.
        self._sample: tuple[list[int], SamplingParams] | None = None
        self._new: list[Request] = []  # since the last step
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}
        self._reading: _Reading | None = None
        self._stepping, self._count = False, 0
        self._closed, self._ended = False, False  # for new requests; in all processes
        self._changed = threading.Condition()  # guards what is new, and whose turn it is
        sizes = rows, slots, chunk, rounds, model.mesh
        multihost.check_same_everywhere("Engine", whole.program, *sizes)

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
            _ = submitted.call.inputs  # made here, so that the loop need not wait for them
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
        K = self._program.drafter.num_speculative_tokens
        return min(self._context, self.slots - K - 1) - len(prompt)

    def warm_up(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams = SamplingParams(),
        progress: Callable[[int, int], None] = lambda done, steps: None,
    ) -> None:
        """Compiles what requests like these need, for loops of all sizes, while nothing else runs.

        Otherwise this happens when it is needed first, and all requests wait. With "auto", the
        costs of rounds are measured on the first prompt. `progress` is called with the number of
        steps that are done and that of all steps.
        """
        if not prompts:
            raise InputError("prompts: expected at least one, found none")
        steps = len(prompts) + len(self._sizes)
        for done, prompt in enumerate(prompts):
            progress(done, steps)
            self._finish(self._request(prompt, sampling, 1, 0))
        for done, rows in enumerate(self._sizes, len(prompts)):
            progress(done, steps)
            self._state, _ = execution.prefill(self._loop(rows))
            self._calm = 0  # or it would have fewer rows at once
            self._finish(self._request(prompts[0], sampling, 1, 0))
            self._empty_row(0)
            with self.model.in_mesh():
                for others in self._sizes:
                    empty = np.full(others, -1, np.int32)
                    jax.block_until_ready(compiled(decode.take)(self._state, empty))
        progress(steps, steps)

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
            self._stepping = True
        try:
            self._hear()
            self._advance()
        except BaseException as error:
            self._give_up(error)
            # Somebody wants to stop, or other processes would go on without this one.
            if not isinstance(error, Exception) or jax.process_count() > 1:
                raise
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
        return self._busy()

    def _busy(self) -> bool:
        return any(True for _ in self._all())

    def _all(self) -> Iterator[Request]:
        """Yields the requests that are not done."""
        yield from self._running.values()
        if self._reading is not None:
            yield self._reading.request
        yield from self._waiting
        yield from self._new

    def _request(self, prompt, sampling, max_new_tokens, seed, stop_token_ids=()) -> Request:
        """Returns a request that is not queued yet; raises InputError as `submit` does."""
        call = self._checked([prompt], sampling, max_new_tokens, seed)
        (count,) = request.budgets(max_new_tokens, 1)
        K = call.program.drafter.num_speculative_tokens
        if (needed := len(call.prompts[0]) + count + K + 1) > self.slots:
            raise InputError(
                f"prompt: expected prompt, new tokens and {K + 1} more within the engine's "
                f"{self.slots} slots, found {needed}"
            )
        stops = list(request.check_stop_tokens(stop_token_ids, self.model.config.vocab_size))
        submission = Submission(call.prompts[0], sampling.of_one_row(), count, int(seed), stops)
        return Request(self, call, submission)

    def _settle(self, *results) -> None:
        """Waits, if there are several processes, until all programs have ended.

        Those that do not need each other's results may run in other orders elsewhere, and their
        collectives would meet the wrong partners.
        """
        if jax.process_count() > 1:
            caches = None if self._reading is None else self._reading.caches
            jax.block_until_ready((self._state, caches, results))

    def _hear(self) -> None:
        """Takes in what is new. With several processes, that is what process 0 says."""
        with self._changed:
            new, self._new = self._new, []
            cancelled = tuple(one.number for one in self._all() if one.cancelled)
            news = News(tuple(one.news for one in new), cancelled, self._closed)
        if jax.process_count() > 1:
            news = news.of_first_process()
            if not multihost.is_main_process():
                new = [self._request(*vars(one).values()) for one in news.submitted]
        for submitted in new:
            self._enqueue(submitted)
        self._drop(set(news.cancelled))
        self._ended = news.closed

    def _enqueue(self, submitted: Request) -> None:
        self._sample = self._sample or (submitted.prompt[:_SAMPLED], submitted.news.sampling)
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
        left = self._chunk
        while left > 0 and (count := self._read()):
            left -= count
        if self._running:
            self._fit(len(self._running) + (self._reading is not None))
            loop = self._loop(len(self._state.done))
            self._state, _ = execution.run(loop, self._state, self._rounds)
            self._hand_out()

    def _checked(self, prompts, sampling, max_new_tokens, seed) -> request.Request:
        drafter, count, verifier, stop = self._fixed
        return request.Request(
            "engine",
            self.model,
            prompts,
            drafter,
            count,
            sampling,
            max_new_tokens,
            seed,
            verifier,
            stop,
        )

    def _read(self) -> int:
        """Reads the next chunk of a prompt, and returns its tokens; 0 if there is nothing to read.

        After the last chunk the request takes its row.
        """
        if self._reading is None and not self._take_next():
            return 0
        reading, program, params = self._reading, self._program, self._params
        prompt, call = reading.request.prompt, reading.request.call
        rows, _, lengths, limits, keys = call.inputs
        width = min(self._chunk, decode.num_slots(len(prompt)), self.slots)
        with self.model.in_mesh():
            if reading.caches is None:
                read = compiled(decode.read_first, program, self.slots, width)
                reading.caches, _ = read(params, reading.tokens, lengths)
            else:
                read = compiled(decode.read, program, width, donate=4)
                start = np.int32(reading.count)
                reading.caches, _ = read(params, reading.tokens, lengths, start, reading.caches)
            self._settle()
            reading.count += width
            if reading.count < len(prompt):
                return width
            begin = compiled(decode.begin, program, donate=1)
            fresh, _ = begin(params, reading.caches, rows, reading.tokens, lengths, limits, keys)
            reading.caches = None  # used up
            self._settle(fresh)
        self._fit(len(self._running) + 1)
        row = min(set(range(len(self._state.done))) - self._running.keys())
        with self.model.in_mesh():
            insert = compiled(decode.insert, donate=0)
            self._state, _ = insert(self._state, np.int32(row), fresh)
        self._running[row], self._reading = reading.request, None
        self._settle()
        return width

    def _loop(self, rows: int) -> request.Request:
        """Returns the loop of so many rows: a call with nothing to do, and the costs of its rounds.

        They are measured when the loop is needed first.
        """
        if rows not in self._loops:
            loop = self._checked([[0]] * rows, SamplingParams(), 0, 0)
            loop.slots = self.slots
            if loop.program.pacer is not None:
                prompt, sampling = self._sample
                measured = self._checked([prompt] * rows, sampling, 0, 0)
                measured.slots = self.slots
                execution.prepare(measured)
                loop.params["costs"] = measured.params["costs"]
            self._loops[rows] = loop
        return self._loops[rows]

    def _fit(self, count: int) -> None:
        """Gives the state as many rows as so many requests need; fewer only after a while."""
        size = next(size for size in self._sizes if size >= count)
        if self._state is None:
            self._state, _ = execution.prefill(self._loop(size))
            self._settle()
        now = len(self._state.done)
        self._calm = self._calm + 1 if size < now else 0
        if size > now or self._calm > _CALM:
            rows = np.full(size, -1, np.int32)
            rows[: len(self._running)] = list(self._running)
            with self.model.in_mesh():
                self._state, _ = compiled(decode.take)(self._state, rows)
            self._settle()
            self._running = dict(enumerate(self._running.values()))
            self._calm = 0

    def _take_next(self) -> bool:
        """Begins to read the prompt that has waited longest, if a row is free for it."""
        if len(self._running) == self.rows or not self._waiting:
            return False
        submitted = self._waiting.popleft()
        rows = len(submitted.call.lengths)  # more than one on a mesh
        tokens = np.zeros((rows, self.slots), np.int32)
        tokens[0, : len(submitted.prompt)] = submitted.prompt
        tokens[0, len(submitted.prompt) :] = submitted.prompt[-1]
        self._reading = _Reading(submitted, tokens)
        where = sharding.batch_sharding(self.model.mesh)
        self._reading.tokens = jax.device_put(tokens, where)
        return True

    def _hand_out(self) -> None:
        """Gives requests their new tokens, and empties the rows of those that are done."""
        found = multihost.to_host({name: getattr(self._state, name) for name in _READ_BY_HOST})
        for row, submitted in list(self._running.items()):
            start, end = len(submitted.prompt) + len(submitted.tokens), found["lengths"][row]
            stopped = submitted.take(found["tokens"][row, start:end].tolist())
            submitted.rounds = int(found["rounds"][row])
            submitted.accepted_histogram = found["accepted"][row].tolist()
            done, failed = found["done"][row], found["failed"][row]
            if failed and not stopped:
                submitted.error = NonFiniteError(
                    f"position {end}: expected finite logits, found a NaN or an infinity"
                )
            if failed or (stopped and not done):
                self._empty_row(row)
            if done or stopped:
                chance.note(submitted.call, int(found["proposed"][row]), found["accepted"][row])
                submitted.done = True
                del self._running[row]

    def _drop(self, numbers: set[int]) -> None:
        """Ends requests that were cancelled."""
        for submitted in [one for one in self._waiting if one.number in numbers]:
            self._waiting.remove(submitted)
            submitted.done = True
        if self._reading is not None and self._reading.request.number in numbers:
            self._reading.request.done = True
            self._reading = None
        for row, submitted in list(self._running.items()):
            if submitted.number in numbers:
                self._empty_row(row)
                submitted.done = True
                del self._running[row]

    def _empty_row(self, row: int) -> None:
        with self.model.in_mesh():
            self._state, _ = compiled(decode.stop, donate=0)(self._state, np.int32(row))

    def _give_up(self, error: BaseException) -> None:
        """Ends all that runs with an error: the rows may be lost. What waits is tried again.

        If nothing ran, what waits ends, too: it would meet the same error.
        """
        ended = list(self._running.values())
        if self._reading is not None:
            ended.append(self._reading.request)
        if not ended:
            ended = list(self._waiting)
            self._waiting.clear()
        for submitted in ended:
            submitted.error, submitted.done = error, True
        self._running, self._reading, self._state = {}, None, None
