"""The rows of one loop, of which there are as many as requests need."""

import jax
import numpy as np

from spsjax.decode import DecodeState, prompt, sizes
from spsjax.decode.schedule import Costs
from spsjax.parallel import multihost, sharding
from spsjax.runtime import batch, costs
from spsjax.runtime.batch import Batch
from spsjax.runtime.setup import Setup
from spsjax.types import Array, PyTree

_PATIENCE = 8  # times in a row that fewer rows would do before the loop has fewer
_READ_BY_HOST = "tokens", "lengths", "done", "failed", "rounds", "proposed", "accepted"


def row_sizes(most: int, least: int = 1) -> list[int]:
    """Returns the numbers of rows for which a loop is compiled: each twice the one before."""
    return sorted({min(least << i, most) for i in range(most.bit_length() + 1)})


class Reading:
    """A prompt that is being read, a chunk at a time.

    Attributes:
        batch: the prompt; on a mesh with rows that fill it.
        count: tokens that were read.
        caches: caches of target and drafter so far; None: nothing was read.
    """

    def __init__(self, batch: Batch, slots: int):
        (ids,) = batch.prompts
        tokens = np.zeros((len(batch.lengths), slots), np.int32)
        tokens[0, : len(ids)], tokens[0, len(ids) :] = ids, ids[-1]
        self.tokens: Array = jax.device_put(tokens, sharding.batch_sharding(batch.mesh))
        self.batch, self.count = batch, 0
        self.caches: PyTree | None = None

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
        state: state of all rows; None: nothing has run, or the rows were lost.
        sample: prompt and sampling parameters on which the costs of rounds are measured.
    """

    def __init__(self, setup: Setup, rows: int, slots: int, chunk: int):
        self.setup, self.loop = setup, setup.loop(slots)
        mesh = setup.model.mesh
        least = 1 if mesh is None else mesh.shape["data"]
        self.sizes = row_sizes(-(-rows // least) * least, least)
        most = min(chunk, prompt.max_chunk(setup.program, slots))
        self.chunk = prompt.chunk_width(slots, most)
        self.state: DecodeState | None = None
        self.sample: tuple | None = None
        self._costs: dict[int, Costs] = {}  # by number of rows
        self._larger = 0  # times in a row that fewer rows would have done

    def costs_of(self, rows: int) -> Costs | None:
        """Returns the costs of rounds of so many rows, measured when they are needed first."""
        schedule = self.loop.program.schedule
        if schedule is None or not schedule.needs_costs:
            return None
        if rows not in self._costs:
            ids, params = self.sample
            measured = self.setup.batch([ids] * rows, params, 0, 0, "prompt")
            self._costs[rows] = costs.of(self.loop, measured)
        return self._costs[rows]

    def clear(self, rows: int) -> None:
        """Makes a state of so many rows, all of them done."""
        blank = batch.blank(rows, self.loop.mesh)
        self.state = self.loop.empty(blank, self.costs_of(rows))
        self._larger = 0

    def read(self, reading: Reading) -> DecodeState | None:
        """Reads the next chunk of a prompt; after the last one, returns the state of its row."""
        width = min(self.chunk, sizes.num_slots(reading.length), self.loop.slots)
        _, lengths, *_ = reading.batch.arrays
        reading.caches = self.loop.read_chunk(
            reading.tokens, lengths, reading.count, reading.caches, width=width
        )
        multihost.settle(self.state, reading.caches)
        reading.count += width
        if reading.count < reading.length:
            return None
        fresh = self.loop.begin(reading.caches, reading.batch, reading.tokens)
        reading.caches = None  # used up
        multihost.settle(self.state, fresh)
        return fresh

    def insert(self, row: int, fresh: DecodeState) -> None:
        """Puts a text that was read into a row."""
        self.state = self.loop.insert(self.state, row, fresh)
        multihost.settle(self.state)

    def empty_row(self, row: int) -> None:
        """Ends the text of a row."""
        self.state = self.loop.stop(self.state, row)

    def fit(self, count: int, used: list[int]) -> bool:
        """Gives the state as many rows as so many requests need; fewer only after a while.

        Returns whether the used rows have moved: to the first rows, in their order.
        """
        size = next(size for size in self.sizes if size >= count)
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

    def run(self, rounds: int) -> dict[str, np.ndarray]:
        """Runs the loop for a few rounds; returns what the host reads of the state."""
        known = self.costs_of(len(self.state.done))
        self.state = self.loop.run(self.state, rounds, known)
        return multihost.to_host({name: getattr(self.state, name) for name in _READ_BY_HOST})
