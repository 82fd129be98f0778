"""A compiled loop that is driven from the host."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from spsjax import sampling
from spsjax.decode import DecodeState, Program, prompt, rows, sizes, step
from spsjax.decode.schedule import Costs
from spsjax.parallel import sharding
from spsjax.runtime.batch import Batch
from spsjax.types import Array, PyTree
from spsjax.utils import compilation

_FOREVER = 2**31 - 1
_SHORT_CHUNK = 64  # tokens of a prompt in one pass, where one program reads all prompts


class Loop:
    """The jitted functions of one program, for buffers of one size.

    Equal programs share compiled code, so that a loop costs nothing to make. With several
    processes, all of them call the same methods in the same order.

    Attributes:
        program: static configuration.
        params: parameters of target and drafter.
        slots: size of token buffers and caches.
        mesh: mesh of the devices; None: one device.
        one_prefill: whether one program reads prompts of all lengths, in short chunks.
        compile_seconds: seconds that compilation has taken so far.
    """

    def __init__(
        self,
        program: Program,
        params: PyTree,
        slots: int,
        mesh: jax.sharding.Mesh | None = None,
        one_prefill: bool = False,
    ):
        if one_prefill:
            most = min(program.prefill_tokens, _SHORT_CHUNK)
            program = dataclasses.replace(program, prefill_tokens=most)
        self.program, self.params, self.slots, self.mesh = program, params, slots, mesh
        self.one_prefill = one_prefill
        self.compile_seconds = 0.0
        self._options = compilation.fast_options(params["target"], mesh)

    def call(self, function: Callable, *static, donate: int | None = None) -> Callable:
        """Returns `function(*static, ...)`, jitted, as a function of the remaining arguments.

        `donate` is the index of a remaining argument whose buffers the result may take over.
        """
        jitted = compilation.compiled(function, *static, donate=donate, options=self._options)

        def on_mesh(*args):
            with sharding.use_mesh(self.mesh):
                result, seconds = jitted(*args)
            self.compile_seconds += seconds
            return result

        return on_mesh

    def read(self, batch: Batch, costs: Costs | None = None) -> DecodeState:
        """Returns the state after a batch's prompts; `costs` are for the program's schedule."""
        return self.read_arrays(self.inputs(batch), costs)

    def inputs(self, batch: Batch) -> tuple:
        """Returns a batch as the arrays that `read_arrays` takes."""
        width = sizes.num_slots(batch.longest)
        # The number of chunks is data: prompts that need several share a program.
        several = width > prompt.max_chunk(self.program, self.slots)
        return batch.inputs(self.slots if several or self.one_prefill else width)

    def read_arrays(self, inputs: tuple, costs: Costs | None = None) -> DecodeState:
        """Returns the state after prompts; `inputs` are arrays like those of `inputs`."""
        prefill = self.call(prompt.prefill, self.program, self.slots)
        return prefill(self.params, *inputs, costs)

    def run(
        self, state: DecodeState, max_rounds: int = _FOREVER, costs: Costs | None = None
    ) -> DecodeState:
        """Returns the state after at most so many rounds. The given state is used up."""
        run = self.call(step.run, self.program, donate=1)
        return run(self.params, state, np.int32(max_rounds), costs)

    def rest(self, state: DecodeState, max_rounds: int) -> DecodeState:
        """Returns the state after at most so many rounds without a draft, which compile faster.

        The program has a schedule. The given state is used up.
        """
        return self.call(step.rest, self.program, donate=1)(
            self.params, state, np.int32(max_rounds)
        )

    def empty(self, batch: Batch, costs: Costs | None = None) -> DecodeState:
        """Returns a state with the rows of a batch, of which nothing is read, for `insert`."""
        empty = self.call(prompt.empty, self.program, self.slots)
        return empty(self.params, *self.inputs(batch), costs)

    def read_chunk(
        self,
        tokens_BT: Array,
        lengths_B: Array,
        start: int = 0,
        caches: PyTree | None = None,
        *,
        width: int,
    ) -> PyTree:
        """Returns the caches after one more chunk of prompts; the given ones are used up.

        Takes what `decode.prompt.read` takes; without caches, this is the first chunk.
        """
        if caches is None:
            read = self.call(prompt.read_first, self.program, self.slots, width)
            return read(self.params, tokens_BT, lengths_B)
        read = self.call(prompt.read, self.program, width, donate=4)
        return read(self.params, tokens_BT, lengths_B, np.int32(start), caches)

    def begin(
        self, caches: PyTree, batch: Batch, tokens_BS: Array, costs: Costs | None = None
    ) -> DecodeState:
        """Returns the state after the last chunk of a batch; the caches are used up."""
        begin = self.call(prompt.begin, self.program, donate=1)
        sampled, *others = batch.arrays
        return begin(self.params, caches, sampled, tokens_BS, *others, costs)

    def insert(
        self, state: DecodeState, row: int, fresh: DecodeState, seed: int, sample: int
    ) -> DecodeState:
        """Returns the state with the first row of another one; the given state is used up.

        The row draws the numbers of row `sample` of a batch with that seed.
        """
        insert = self.call(_insert, donate=0)
        return insert(state, np.int32(row), fresh, np.uint32(seed), np.uint32(sample))

    def take(self, state: DecodeState, rows_B: np.ndarray) -> DecodeState:
        """Returns a state of some rows of another; where `rows_B` is -1, a row that is done."""
        return self.call(rows.take)(state, rows_B)

    def stop(self, state: DecodeState, row: int) -> DecodeState:
        """Returns the state with a row that is done; the given state is used up."""
        return self.call(rows.stop, donate=0)(state, np.int32(row))


def _insert(
    state: DecodeState, row: Array, fresh: DecodeState, seed: Array, sample: Array
) -> DecodeState:
    return rows.insert(state, row, fresh, sampling.sample_key(seed, sample))
