"""The requests of an engine: which wait, which is being read, and which run."""

import collections
from collections.abc import Iterator
from typing import Any

from spsjax.errors import NonFiniteError
from spsjax.runtime import low_acceptance
from spsjax.runtime.pool import Pool, Reading
from spsjax.runtime.requests import Group, Request
from spsjax.runtime.setup import Setup

_SAMPLED = 64  # tokens of the first prompt, in all rows, on which costs are measured


class Queue:
    """Requests that are not done, in their order, and the rows of those that run.

    Attributes:
        running: requests by their row of the loop.
    """

    def __init__(self, setup: Setup, pool: Pool, rounds: int):
        """`rounds` are those of a run of the loop."""
        self._setup, self._pool, self._rounds = setup, pool, rounds
        self._waiting: collections.deque[Group] = collections.deque()
        self.running: dict[int, Request] = {}
        self._reading: Reading | None = None  # of the first group that waits
        self._count = 0

    def __iter__(self) -> Iterator[Request]:
        # Copies, since another thread may run the engine, which lets what waits run.
        for group in [*self._waiting]:
            yield from [*group.waiting]
        yield from [*self.running.values()]

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return sum(len(group.waiting) for group in [*self._waiting])

    def add(self, submitted: Group) -> None:
        """Queues the samples of a prompt."""
        sample = submitted.submission.prompt[:_SAMPLED], submitted.submission.sampling
        self._pool.sample = self._pool.sample or sample
        for request in submitted.requests:
            request.number, self._count = self._count, self._count + 1
        self._waiting.append(submitted)

    def advance(self) -> None:
        """Reads a chunk of the waiting prompts, and runs the loop for a few rounds."""
        left = self._pool.chunk
        while left > 0 and self._waiting and len(self.running) < self._pool.sizes[-1]:
            left -= self._read()
        if self.running:
            self._fit()
            self._hand_out(self._pool.run(self._rounds))

    def _read(self) -> int:
        """Reads the next chunk of the first prompt that waits, and returns its number of tokens.

        After the last chunk its samples get free rows. What was read stays until all of them have
        one, and no other prompt is read before: beside the rows, there is memory for one prompt.
        """
        if self._reading is None:
            self._reading = Reading(self._waiting[0].batch, self._pool.loop.slots)
        before = self._reading.count
        if self._reading.fresh is None:
            self._pool.read(self._reading)
        count = self._reading.count - before
        if self._reading.fresh is not None:
            self._give_rows(self._waiting[0])
        return count

    def _give_rows(self, group: Group) -> None:
        """Gives free rows to samples of the prompt that was read."""
        self._fit()
        rows = sorted(set(range(len(self._pool.state.done))) - self.running.keys())
        for row in rows[: len(group.waiting)]:
            self._pool.insert(row, self._reading, group.waiting[0].sample)
            self.running[row] = group.waiting[0]
            group.waiting.popleft()
        self._forget(group)

    def _forget(self, group: Group) -> None:
        """Removes a group of which no sample waits."""
        if not group.waiting:
            if group is self._waiting[0]:
                self._reading = None
            self._waiting.remove(group)

    def read_again(self) -> None:
        """Reads all texts again, because the target has new weights."""
        self._reading = None
        for row, submitted in self.running.items():
            reading = Reading(submitted.so_far(self._setup), self._pool.loop.slots)
            while reading.fresh is None:
                self._pool.read(reading)
            self._pool.insert(row, reading, submitted.sample)
            submitted.keep_counts()

    def _fit(self) -> None:
        """Gives the loop as many rows as requests need that run or wait for the prompt in work."""
        waiting = 0 if self._reading is None else len(self._waiting[0].waiting)
        if self._pool.fit(len(self.running) + waiting, list(self.running)):
            self.running = dict(enumerate(self.running.values()))

    def _hand_out(self, read: dict[str, Any]) -> None:
        """Gives requests their new tokens, and empties the rows of those that are done."""
        for row, submitted in list(self.running.items()):
            start, end = len(submitted.prompt) + len(submitted.tokens), read["lengths"][row]
            known = read["logprobs"]
            stopped = submitted.take(
                read["tokens"][row, start:end].tolist(),
                None if known is None else known.span(row, start, end),
            )
            submitted.count(read["rounds"][row], read["accepted"][row])
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
                del self.running[row]

    def drop(self, numbers: set[int]) -> None:
        """Ends requests that were cancelled."""
        for group in [*self._waiting]:
            for submitted in [one for one in group.waiting if one.number in numbers]:
                group.waiting.remove(submitted)
                submitted.done = True
            self._forget(group)
        for row, submitted in list(self.running.items()):
            if submitted.number in numbers:
                self._pool.empty_row(row)
                submitted.done = True
                del self.running[row]

    def give_up(self, error: BaseException) -> None:
        """Ends all that runs with an error: the rows may be lost. What waits is tried again.

        A prompt that is being read ends, too. So does all that waits if nothing else is left, since
        it would meet the same error.
        """
        ended = [*self.running.values()]
        if self._reading is not None and not (ended and self._reading.fresh is not None):
            ended += self._waiting.popleft().waiting
        if not ended:
            ended = [*self]
            self._waiting.clear()
        for submitted in ended:
            submitted.error, submitted.done = error, True
        self._reading = None
        self.running, self._pool.state = {}, None
