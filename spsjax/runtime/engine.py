"""Continuous batching: many requests in the rows of one loop."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from spsjax.decode import sizes
from spsjax.decode.schedule import Schedule
from spsjax.drafters import base
from spsjax.errors import InputError, check_integer
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.runtime import memory, weights
from spsjax.runtime.batch import check_stop_tokens
from spsjax.runtime.pool import Pool
from spsjax.runtime.queue import Queue
from spsjax.runtime.requests import Group, Request, Submission, Updates
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.types import PyTree
from spsjax.verifiers.base import Verifier


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
        logprobs: int | None = None,
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
        self._setup = Setup(
            model, drafter, num_speculative_tokens, verifier, stop_at_eos, logprobs=logprobs
        )
        program = self._setup.program
        limits = rows, self.slots, model.mesh
        memory.check("rows, slots", program, self._setup.params, *limits)
        self._pool = Pool(self._setup, rows, self.slots, chunk)
        self.rows = self._pool.sizes[-1]  # a mesh may have room for more
        self._queue = Queue(self._setup, self._pool, rounds)
        self._new: list[Group] = []  # since the last step
        self._stepping = False
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
        arguments = sampling, max_new_tokens, seed, stop_token_ids
        (request,) = self.submit_group(prompt, 1, *arguments)
        return request

    def submit_group(
        self,
        prompt: str | Sequence[int],
        count: int,
        sampling: SamplingParams = SamplingParams(),
        max_new_tokens: int = 128,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Request]:
        """Queues `count` samples of one prompt, which is read once; returns a request per sample.

        Request i gets the tokens of row i of `generate([prompt] * count, seed=seed)`, to rounding.
        Samples get rows as these become free. What was read stays in memory until the last one has
        its row: as much as one row takes.

        Raises:
            InputError: an argument that cannot be used; the message names it.
        """
        if not multihost.is_main_process():
            raise InputError(f"submit: expected process 0, found process {jax.process_index()}")
        submitted = self._group(prompt, count, sampling, max_new_tokens, seed, stop_token_ids)
        if jax.process_count() == 1:
            _ = submitted.batch.arrays  # made here, so that the loop need not wait for them
        with self._changed:
            if self._closed:
                raise InputError("submit: expected an open engine, found a closed one")
            self._new.append(submitted)
        return submitted.requests

    @property
    def logprobs(self) -> int | None:
        """Number of most probable tokens whose log-probabilities are kept; None: none at all."""
        return self._setup.program.logprobs

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet, those that were cancelled included."""
        return sum(len(group.waiting) for group in [*self._new]) + self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """Requests in the rows of the loop."""
        return len(self._queue.running)

    @property
    def drafter(self) -> LoadedDrafter:
        """The drafter, with the weights that it has now."""
        return self._setup.drafter

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
        ids = self._group(prompt, 1, sampling, 0, 0).submission.prompt
        length = min(self._pool.chunk + 1, self.room_after([]) - 1)  # more than one chunk
        first = self._group((ids * length)[:length], 1, sampling, 1, 0)
        self._pool.compiled = set(), {self._pool.chunk}
        self._finish(first)

    def compile_rest(self, progress: Callable[[int, int], None] = lambda done, steps: None) -> None:
        """Compiles what `begin` has left, of one process in another thread than the engine's.

        Requests wait while the costs of rounds are measured. `progress` is that of `warm_up`.
        Raises InputError without `begin`.
        """
        self._pool.compile_rest(self._turn, progress)

    def set_weights(self, target: PyTree | None = None, drafter: PyTree | None = None) -> None:
        """Replaces weights by copies of new ones, between two steps of the engine.

        The programs of the engine stay as they are; a first conversion of a type compiles a little.

        Requests go on. With new weights of the target their texts so far are read again, so that
        each further token is a sample of the new target after the text before it. A drafter keeps
        what it has cached with earlier weights, which may cost acceptance in texts that are under
        way, and changes no distribution.

        Args:
            target: weights as those of `Model.params`, of any floating-point type, which are
                converted; None: those that the engine has.
            drafter: the same of `LoadedDrafter.params`, or of a draft model.

        Raises:
            InputError: a weight is missing, is left over or has another shape; or there are several
                processes.
        """
        if jax.process_count() > 1:
            raise InputError(f"set_weights: expected one process, found {jax.process_count()}")
        given = {"target": target, "drafter": drafter}
        new = {
            name: weights.like(name, tree, self._setup.params[name])
            for name, tree in given.items()
            if tree is not None
        }
        with self._turn():
            self._setup.use(self._setup.params | new)
            self.model, self._pool.loop.params = self._setup.model, self._setup.params
            if target is None:
                return
            try:
                self._queue.read_again()
            except BaseException as error:
                self._queue.give_up(error)
                raise

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
                self._queue.advance()
            except BaseException as error:
                self._queue.give_up(error)
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
        yield from self._queue
        for group in self._new:
            yield from group.requests

    def _group(self, prompt, count, sampling, max_new_tokens, seed, stop_token_ids=()) -> Group:
        """Returns requests that are not queued yet; raises InputError as `submit_group` does."""
        check_integer("count", count, 1, 2**31 - 1)
        batch = self._setup.batch([prompt], sampling, max_new_tokens, seed, "prompt")
        (ids,), (budget,) = batch.prompts, batch.new_tokens
        K = self._setup.num_speculative_tokens
        if (needed := len(ids) + budget + K + 1) > self.slots:
            raise InputError(
                f"prompt: expected prompt, new tokens and {K + 1} more within the engine's "
                f"{self.slots} slots, found {needed}"
            )
        stops = list(check_stop_tokens(stop_token_ids, self.model.config.vocab_size))
        one = sampling.of_one_row()
        submission = Submission(ids, int(count), one, budget, int(seed), stops)
        return Group(self, batch, submission, {*self._setup.program.eos_ids, *stops})

    def _update(self) -> None:
        """Takes new and cancelled requests, with several processes those of process 0."""
        with self._changed:
            new, self._new = self._new, []
            cancelled = tuple(one.number for one in self._all() if one.cancelled)
            updates = Updates(tuple(one.submission for one in new), cancelled, self._closed)
        if jax.process_count() > 1:
            updates = updates.of_first_process()
            if not multihost.is_main_process():
                new = [self._group(*vars(one).values()) for one in updates.submitted]
        for submitted in new:
            self._queue.add(submitted)
        dropped = set(updates.cancelled)
        if jax.process_count() == 1:  # new requests have their numbers now
            dropped = {one.number for one in self._queue if one.cancelled}
        self._queue.drop(dropped)
        self._ended = updates.closed

    def _finish(self, submitted: Group) -> None:
        """Queues a group in every process, and runs it until it is done."""
        self._queue.add(submitted)
        while not all(request.done for request in submitted.requests):
            self._queue.advance()
        for request in submitted.requests:
            request.check()
