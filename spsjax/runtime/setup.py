"""A target with its drafter, rule of acceptance and ends of texts: everything but the prompts."""

import dataclasses
from collections.abc import Sequence

from spsjax import verifiers
from spsjax.decode import Program, sizes
from spsjax.errors import InputError, check_flag, check_integer
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.runtime import drafting, memory
from spsjax.runtime.batch import Batch, batch_of, check_stop_tokens
from spsjax.runtime.loop import Loop
from spsjax.sampling import SamplingParams
from spsjax.types import PyTree


class Setup:
    """The arguments of `generate` that concern no prompt, checked.

    Attributes:
        model: the target.
        drafter: the loaded drafter, with K set.
        program: static configuration of the loop.
        params: parameters of target and drafter.
        contexts: the most tokens of a text, by the name of the model that cannot read more.
    """

    def __init__(
        self,
        model: Model,
        drafter=None,
        num_speculative_tokens=None,
        verifier=None,
        stop_at_eos: bool = True,
        stop_token_ids: Sequence[int] = (),
        logprobs: int | None = None,
    ):
        """Takes these arguments of `generate`. Raises InputError for one that cannot be used."""
        drafting.check_model(model)
        check_flag("stop_at_eos", stop_at_eos)
        if logprobs is not None:
            check_integer("logprobs", logprobs, 0, model.config.vocab_size)
            logprobs = int(logprobs)
        self.model = model
        self.drafter = drafting.drafter_for(model, drafter, num_speculative_tokens)
        drafts = self.drafter.drafter.num_speculative_tokens > 0
        if verifier is None:
            verifier = "recursive"  # for chains it is modified rejection sampling
        verifier = drafting.check_verifier(verifier)
        if not drafts:  # there is nothing to verify
            verifier = verifiers.by_name("rejection")
        ends = model.eos_ids if stop_at_eos else ()
        ends += check_stop_tokens(stop_token_ids, model.config.vocab_size)
        self.program = Program(
            model.config,
            self.drafter.drafter,
            verifier,
            tuple(dict.fromkeys(ends)),
            schedule=drafting.schedule_of(num_speculative_tokens) if drafts else None,
            logprobs=logprobs,
        )
        self.params = self.drafter.with_target(model.params)
        drafting.check_estimates(self.program, self.params)
        self.contexts = {model.name: model.config.max_positions}
        if self.drafter.max_positions:
            self.contexts[self.drafter.name] = self.drafter.max_positions

    def use(self, params: PyTree) -> None:
        """Takes other parameters of target and drafter in place of its own."""
        self.params = params
        self.model = dataclasses.replace(self.model, params=params["target"])
        self.drafter = dataclasses.replace(self.drafter, params=params["drafter"])

    @property
    def num_speculative_tokens(self) -> int:
        """K, the most draft tokens that a round accepts."""
        return self.program.drafter.num_speculative_tokens

    def batch(
        self,
        prompts,
        params: SamplingParams,
        max_new_tokens,
        seed: int,
        name: str = "prompts[{}]",
    ) -> Batch:
        """Returns prompts as the loop takes them. Arguments and errors: `batch_of`."""
        return batch_of(self.model, prompts, params, max_new_tokens, seed, self.contexts, name)

    def loop(self, slots: int, one_prefill: bool = False) -> Loop:
        """Returns the loop with buffers of this size; see `Loop`."""
        return Loop(self.program, self.params, slots, self.model.mesh, one_prefill)

    def loop_for(self, prompts: Batch, caller: str, slots: int | None = None) -> Loop:
        """Returns the loop for one batch, after a check of the memory and of the other processes.

        Args:
            prompts: the batch.
            caller: name of the call that all processes must be in.
            slots: the least size of the buffers, for prompts and texts of all lengths; None: the
                smallest of a few sizes that these prompts need.

        Raises:
            InputError: `slots` has no room for a text, or the memory none for the buffers.
        """
        call = prompts.prompts, prompts.new_tokens, prompts.params, prompts.seed, slots
        multihost.check_same_everywhere(caller, self.program, *call, self.model.mesh)
        arguments, size = "prompts, max_new_tokens", prompts.slots(self.num_speculative_tokens)
        if slots is not None:
            check_integer("slots", slots, 1, 2**31 - 1)
            given = sizes.num_slots(slots)
            if given < size:
                needed = int(prompts.limits.max()) + self.num_speculative_tokens + 1
                raise InputError(
                    f"slots: expected at least {needed}, the tokens of the longest text and K + 1 "
                    f"more, found {slots}"
                )
            arguments, size = "slots", given
        rows = len(prompts.lengths)
        memory.check(arguments, self.program, self.params, rows, size, self.model.mesh)
        return self.loop(size, one_prefill=slots is not None)
