"""The rows of one loop, of which there are as many as requests need."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from spsjax.decode import DecodeState, prompt, sizes
from spsjax.decode.schedule import Costs
from spsjax.decode.state import outcome
from spsjax.errors import InputError
from spsjax.parallel import multihost, sharding
from spsjax.runtime import batch, costs
from spsjax.runtime.batch import Batch
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.types import Array, PyTree

_PATIENCE = 8  # times in a row that fewer rows would do before the loop has fewer


def row_sizes(most: int, least: int = 1) -> list[int]:
    """Returns the numbers of rows for which a loop is compiled: each twice the one before."""
    return sorted({min(least << i, most) for i in range(most.bit_length() + 1)})


class Reading:
    """A prompt that is being read, a chunk at a time.

    Attributes:
        batch: the prompt; on a mesh with rows that fill it.
        count: tokens that were read.
        caches: caches of target and drafter so far; None: nothing was read, or all was.
        fresh: state of one row after the prompt, which any number of rows can begin with; None:
            not all of it was read.
    """

    def __init__(self, batch: Batch, slots: int):
        (ids,) = batch.prompts
        tokens = np.zeros((len(batch.lengths), slots), np.int32)
        tokens[0, : len(ids)], tokens[0, len(ids) :] = ids, ids[-1]
        self.tokens: Array = jax.device_put(tokens, sharding.batch_sharding(batch.mesh))
        self.batch, self.count = batch, 0
        self.caches: PyTree | None = None
        self.fresh: DecodeState | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.batch.prompts[0])


class Pool:
    """The state of a loop with 1, 2, 4, ... rows, since a round takes longer with more of them.

    Attributes:
        loop: the compiled loop.
        sizes: numbers of rows for which it is compiled, ascending.
        chunk: the most tokens of a prompt that are read at once.
        compiled: which of these sizes and which widths of chunks are compiled; None: each is when
            it is needed first. Until a size is, its requests run in the largest loop, which drafts
            nothing meanwhile if it has a schedule.
        state: state of all rows; None: nothing has run, or the rows were lost.
        sample: prompt and sampling parameters on which the costs of rounds are measured.
    """

    def __init__(self, setup: Setup, rows: int, slots: int, chunk: int):
        self.setup, self.loop = setup, setup.loop(slots)
        mesh = setup.model.mesh
        least = 1 if mesh is None else mesh.shape["data"]
        self.sizes = row_sizes(-(-rows // least) * least, least)
        most = min(chunk, prompt.max_chunk(setup.program, slots))
        self.chunk = prompt.chunk_width(slots, most, setup.program.target)
        self.compiled: tuple[set[int], set[int]] | None = None
        self.state: DecodeState | None = None
        self.sample: tuple | None = None
        self._costs: dict[int, Costs] = {}  # by number of rows
        self._larger = 0  # times in a row that fewer rows would have done

    def costs_of(self, rows: int) -> Costs | None:
        """Returns the costs of rounds of so many rows, measured when they are needed first."""
        if not self._needs_costs or not self.is_compiled(rows):
            return None
        if rows not in self._costs:
            self._costs[rows] = costs.of(self.loop, self._measured(rows))
        return self._costs[rows]

    def _measured(self, rows: int) -> Batch:
        """Returns the batch on which the costs of rounds of so many rows are measured."""
        ids, params = self.sample
        return self.setup.batch([ids] * rows, params, 0, 0, "prompt")

    @property
    def _needs_costs(self) -> bool:
        schedule = self.loop.program.schedule
        return schedule is not None and schedule.needs_costs

    def clear(self, rows: int) -> None:
        """Makes a state of so many rows, all of them done."""
        blank = batch.blank(rows, self.loop.mesh)
        self.state = self.loop.empty(blank, self.costs_of(rows))
        self._larger = 0

    def read(self, reading: Reading) -> None:
        """Reads the next chunk of a prompt."""
        width = min(self.chunk, sizes.num_slots(reading.length), self.loop.slots)
        if self.compiled is not None and width not in self.compiled[1]:
            width = self.chunk
        _, lengths, *_ = reading.batch.arrays
        reading.caches = self.loop.read_chunk(
            reading.tokens, lengths, reading.count, reading.caches, width=width
        )
        multihost.settle(self.state, reading.caches)
        reading.count += width
        if reading.count >= reading.length:
            reading.fresh = self.loop.begin(reading.caches, reading.batch, reading.tokens)
            reading.caches = None  # used up
            multihost.settle(self.state, reading.fresh)

    def insert(self, row: int, reading: Reading, sample: int) -> None:
        """Puts a prompt that was read into a row, as a sample of this number."""
        seed = reading.batch.seed
        self.state = self.loop.insert(self.state, row, reading.fresh, seed, sample)
        multihost.settle(self.state)

    def empty_row(self, row: int) -> None:
        """Ends the text of a row."""
        self.state = self.loop.stop(self.state, row)

    def fit(self, count: int, used: list[int]) -> bool:
        """Gives the state as many rows as so many requests need; fewer only after a while.

        Returns whether the used rows have moved: to the first rows, in their order.
        """
        possible = [size for size in self.sizes[:-1] if self.is_compiled(size)]
        size = next((size for size in possible if size >= count), self.sizes[-1])
        if self.state is None:
            self.clear(size)
            multihost.settle(self.state)
        now = len(self.state.done)
        self._larger = self._larger + 1 if size < now else 0
        if size <= now and self._larger <= _PATIENCE:
            return False
        rows = np.full(size, -1, np.int32)
        rows[: len(used)] = used
        self.state = self.loop.take(self.state, rows)
        multihost.settle(self.state)
        self._larger = 0
        return True

    def run(self, rounds: int) -> dict[str, Any]:
        """Runs the loop for a few rounds; returns what the host reads of the state."""
        rows = len(self.state.done)
        if self.loop.program.schedule is None or self.is_compiled(rows):
            self.state = self.loop.run(self.state, rounds, self.costs_of(rows))
        else:
            self.state = self.loop.rest(self.state, rounds)
        return multihost.to_host(outcome(self.state))

    def is_compiled(self, rows: int) -> bool:
        """Returns whether loops of so many rows may run; see `compiled`."""
        return self.compiled is None or rows in self.compiled[0]

    def compile_rest(
        self,
        turn: Callable[[], AbstractContextManager],
        progress: Callable[[int, int], None],
    ) -> None:
        """Compiles what is not compiled, beside what runs.

        Args:
            turn: returns a context in which nothing else runs.
            progress: called with the number of steps that are done and that of all steps.
        """
        if self.compiled is None:
            raise InputError("compile_rest: expected begin before it, found nothing that is left")
        lengths = range(1, self.chunk + 1)
        widths = sorted({min(self.chunk, sizes.num_slots(length)) for length in lengths})
        steps = len(self.sizes) + len(widths)
        try:
            for done, rows in enumerate(self.sizes):
                progress(done, steps)
                self._compile_size(rows)
                with turn():
                    self.compiled[0].add(rows)
                    self.costs_of(rows)
            for done, width in enumerate(widths, len(self.sizes)):
                progress(done, steps)
                self._read_blank(width)
                self.compiled[1].add(width)
        finally:
            with turn():
                self.compiled = None
        progress(steps, steps)

    def _compile_size(self, rows: int) -> None:
        """Compiles the loop of so many rows, and all that is done with them, beside what runs.

        It needs memory for two more states. Costs are measured, which compiles what is timed, but
        not kept: what runs meanwhile disturbs them.
        """
        known = costs.measure(self.loop, self._measured(rows)) if self._needs_costs else None
        state = self.loop.empty(batch.blank(rows, self.loop.mesh), known)
        state = self.loop.insert(state, 0, self._read_blank(self.chunk), 0, 0)
        state = self.loop.stop(self.loop.run(state, 1, known), 0)
        for others in self.sizes:
            moved = self.loop.take(state, np.full(others, -1, np.int32))
            multihost.settle(moved)
            del moved  # before the next one is made

    def _read_blank(self, width: int) -> DecodeState:
        """Returns the state after a prompt of one token that ends there."""
        reading = Reading(self.setup.batch([[0]], SamplingParams(), 0, 0), self.loop.slots)
        _, lengths, *_ = reading.batch.arrays
        caches = self.loop.read_chunk(reading.tokens, lengths, width=width)
        return self.loop.begin(caches, reading.batch, reading.tokens)
