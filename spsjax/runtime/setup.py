"""A target with its drafter, rule of acceptance and ends of texts: everything but the prompts."""

from collections.abc import Sequence

from spsjax import verifiers
from spsjax.decode import Program, prompt
from spsjax.errors import check_flag
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.runtime import drafting, memory
from spsjax.runtime.batch import Batch, batch_of, check_stop_tokens
from spsjax.runtime.loop import Loop
from spsjax.sampling import SamplingParams


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
    ):
        """Takes these arguments of `generate`. Raises InputError for one that cannot be used."""
        drafting.check_model(model)
        check_flag("stop_at_eos", stop_at_eos)
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
        )
        self.params = self.drafter.with_target(model.params)
        self.contexts = {model.name: model.config.max_positions}
        if self.drafter.max_positions:
            self.contexts[self.drafter.name] = self.drafter.max_positions

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

    def loop(self, slots: int) -> Loop:
        """Returns the loop with buffers of this size."""
        return Loop(self.program, self.params, slots, self.model.mesh)

    def loop_for(self, prompts: Batch, caller: str) -> Loop:
        """Returns the loop for one batch, after a check of the memory and of the other processes.

        `caller` is the name of the call that all processes must be in.
        """
        call = prompts.prompts, prompts.new_tokens, prompts.params, prompts.seed
        multihost.check_same_everywhere(caller, self.program, *call, self.model.mesh)
        rows, K = len(prompts.lengths), self.num_speculative_tokens
        slots = prompts.slots(K, roomy=True)
        with self.model.in_mesh():
            if not prompt.has_room(self.program, rows, slots):
                slots = prompts.slots(K)
        arguments = "prompts, max_new_tokens"
        memory.check(arguments, self.program, self.params, rows, slots, self.model.mesh)
        return self.loop(slots)
