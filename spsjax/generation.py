"""What people call: `generate` and `stream`."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from spsjax import decode, request, sampling
from spsjax.drafters import base
from spsjax.errors import InputError, NonFiniteError
from spsjax.loading import Model
from spsjax.parallel import multihost, sharding
from spsjax.sampling import SamplingParams
from spsjax.verifiers import rejection as verify


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call did, over all its rows.

    Attributes:
        target_calls: passes of the target after the prompt.
        proposed_tokens: draft tokens offered to the target.
        acceptance_rate: accepted / proposed draft tokens; 0 if none was proposed.
        block_efficiency: new tokens a row and target call; K + 1 at the most, 1 without a drafter.
        accepted_histogram: [K+1], how many rounds of a row accepted 0, 1, .. K draft tokens,
            before an end of sequence or a full budget cut the block off.
        seconds: run time, prompt included.
        prompt_seconds: the part of it that went into the prompt.
        compile_seconds: time to compile, once for each new bucket of lengths.
    """

    target_calls: int
    proposed_tokens: int
    acceptance_rate: float
    block_efficiency: float
    accepted_histogram: list[int]
    seconds: float
    prompt_seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """`tokens`: the new tokens of each row, an end of sequence included; `texts`: their text."""

    tokens: list[np.ndarray]
    texts: list[str] | None
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one row: `accepted` draft tokens, then one of the target's own."""

    tokens: np.ndarray
    accepted: int
    proposed: int


def generate(
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    drafter: Model | base.Drafter | None = None,
    num_speculative_tokens: int | None = None,
    sampling: SamplingParams = SamplingParams(),
    max_new_tokens: int | Sequence[int] = 128,
    seed: int = 0,
    *,
    lenience: float = 1.0,
    stop_at_eos: bool = True,
) -> Generation:
    """Continues each prompt with samples of the target, by speculative sampling.

    Args:
        model: the target.
        prompts: texts, or lists of token ids.
        drafter: None (autoregressive sampling); a loaded model, which drafts; or a
            `spsjax.drafters.*.Drafter`.
        num_speculative_tokens: K, draft tokens a round. None: the drafter's own, 4 for a model.
        sampling: of the target, and of a draft model just so.
        max_new_tokens: one budget, or one a row.
        seed: in [0, 2**32); row b of any call with this seed draws the same random numbers.
        lenience: below 1, accepts more drafts and is **lossy** (`verify.lenience_bias`).
        stop_at_eos: False goes on to the budget.

    Raises:
        InputError: an argument that cannot be used; the message names it.
        NonFiniteError: a model gave a NaN or an infinity; the message names row and position.
    """
    job = _Job(
        "run", model, prompts, drafter, num_speculative_tokens, sampling, max_new_tokens, seed,
        lenience, stop_at_eos,
    )  # fmt: skip
    return job.run()


def stream(
    model: Model,
    prompt: str | Sequence[int],
    drafter: Model | base.Drafter | None = None,
    num_speculative_tokens: int | None = None,
    **options,
) -> Iterator[str]:
    """Yields the text of one continuation as it grows; the pieces join to `generate`'s text.

    Takes what `generate` takes, and raises what it raises. A character that spans tokens is held
    back until it is whole.
    """
    request.check_model(model)
    if model.tokenizer is None:
        raise InputError(f"{model.name}: expected a model with a tokenizer, found none")
    return _texts(model, *rounds(model, prompt, drafter, num_speculative_tokens, **options))


def rounds(
    model: Model,
    prompt: str | Sequence[int],
    drafter: Model | base.Drafter | None = None,
    num_speculative_tokens: int | None = None,
    sampling: SamplingParams = SamplingParams(),
    max_new_tokens: int = 128,
    seed: int = 0,
    *,
    lenience: float = 1.0,
    stop_at_eos: bool = True,
) -> tuple[list[int], Iterator[Round]]:
    """The prompt's token ids, and the rounds of one continuation as they happen."""
    job = _Job(
        "rounds", model, [prompt], drafter, num_speculative_tokens, sampling, max_new_tokens, seed,
        lenience, stop_at_eos,
    )  # fmt: skip
    return job.prompts[0], job.rounds()


def _texts(model: Model, prompt: list[int], steps: Iterator[Round]) -> Iterator[str]:
    tokens, sent = [], 0
    for step in steps:
        tokens += step.tokens.tolist()
        text = continuation(model.tokenizer, prompt, tokens)
        whole = text.rstrip("\ufffd")
        if len(whole) > sent:
            yield whole[sent:]
            sent = len(whole)
    text = continuation(model.tokenizer, prompt, tokens)
    if len(text) > sent:
        yield text[sent:]


def continuation(tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add to the prompt's; some tokenizers read them otherwise alone."""
    before = tokenizer.decode(prompt)
    both = tokenizer.decode([*prompt, *tokens])
    # The new tokens may complete the prompt's last character.
    for start in (before, before.rstrip("\ufffd")):
        if both.startswith(start):
            return both[len(start) :]
    return tokenizer.decode(tokens)


class _Job:
    """A checked call of `generate`: programs, parameters, and the arrays to start from."""

    def __init__(
        self, how, model, prompts, drafter, num_speculative_tokens, params, max_new_tokens, seed,
        lenience, stop_at_eos,
    ):  # fmt: skip
        verify.check_lenience(lenience)
        request.check_model(model)
        request.check_sampling(params)
        request.check_seed(seed)
        draft = [drafter] if isinstance(drafter, Model) else []
        drafter, weights = request.drafter(model, drafter, num_speculative_tokens)
        self.model = model
        self.prompts = request.prompts(model, prompts)
        budgets = request.budgets(max_new_tokens, len(self.prompts))
        request.check_lengths(self.prompts, budgets, model, *draft)
        eos_ids = model.config.eos_ids if stop_at_eos else ()
        self.program = decode.Program(model.config, drafter, eos_ids, float(lenience))
        self.params = {"target": model.params, "drafter": weights}
        multihost.check_same_everywhere(
            how, self.program, self.prompts, budgets, params, seed, model.mesh
        )
        # Rows come in multiples of the mesh's data axis; the extra ones are done from the start.
        extra = -len(self.prompts) % (1 if model.mesh is None else model.mesh.shape["data"])
        lengths = np.asarray([len(prompt) for prompt in self.prompts] + [1] * extra, np.int32)
        limits = lengths + np.asarray([*budgets, *[0] * extra], np.int32)
        width = decode.num_slots(int(lengths.max()))
        self.slots = max(
            width, decode.num_slots(int(limits.max()) + drafter.num_speculative_tokens + 1)
        )
        tokens = np.zeros((len(lengths), width), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
            tokens[row, len(prompt) :] = prompt[-1]  # masked; a token that is known to be harmless
        rows = params.rows(len(self.prompts))
        rows = jax.tree.map(lambda column: np.pad(column, (0, extra)), rows)
        place = sharding.batch_sharding(model.mesh)
        with self.model.in_mesh():
            keys = jax.jit(_keys, static_argnums=1, out_shardings=place)(
                np.uint32(seed), len(lengths)
            )
            self.inputs = (*jax.device_put((tokens, lengths, limits), place), keys)
            self.rows = jax.device_put(rows, place)
        self.lengths = lengths

    def run(self) -> Generation:
        """The whole of it in one jitted loop."""
        start = time.perf_counter()
        with self.model.in_mesh():
            state, first = decode.compiled(decode.prefill, self.program, self.slots)(
                self.params, *self.inputs
            )
            jax.block_until_ready(state)
            prompt_seconds = time.perf_counter() - start - first
            loop = decode.compiled(decode.run, self.program, donate=2)
            state, second = loop(self.params, self.rows, state)
            result = multihost.to_host(_small(state))
        seconds = time.perf_counter() - start - first - second
        self._check(result)
        count = len(self.prompts)
        tokens = [
            result["tokens"][row, self.lengths[row] : result["lengths"][row]]
            for row in range(count)
        ]
        histogram = result["accepted"][:count].sum(axis=0)
        proposed = int(result["proposed"][:count].sum())
        calls = result["rounds"][:count]
        stats = Stats(
            target_calls=int(calls.max()),
            proposed_tokens=proposed,
            acceptance_rate=float(histogram @ np.arange(len(histogram)) / max(proposed, 1)),
            block_efficiency=float(sum(map(len, tokens)) / max(calls.sum(), 1)),
            accepted_histogram=histogram.tolist(),
            seconds=seconds,
            prompt_seconds=prompt_seconds,
            compile_seconds=first + second,
        )
        texts = None
        if self.model.tokenizer is not None:
            pairs = zip(self.prompts, tokens)
            texts = [continuation(self.model.tokenizer, prompt, new) for prompt, new in pairs]
        return Generation(tokens, texts, stats)

    def rounds(self) -> Iterator[Round]:
        """The same step, called from here, one row."""
        with self.model.in_mesh():
            state, _ = decode.compiled(decode.prefill, self.program, self.slots)(
                self.params, *self.inputs
            )
        before = multihost.to_host(_small(state))
        step = decode.compiled(decode.step, self.program, donate=2)
        while not before["done"].all():
            with self.model.in_mesh():
                state, _ = step(self.params, self.rows, state)
            after = multihost.to_host(_small(state))
            self._check(after)
            yield Round(
                tokens=after["tokens"][0, before["lengths"][0] : after["lengths"][0]],
                accepted=int(np.argmax(after["accepted"][0] - before["accepted"][0])),
                proposed=int(after["proposed"][0] - before["proposed"][0]),
            )
            before = after

    def _check(self, result) -> None:
        for row in np.flatnonzero(result["failed"]):
            raise NonFiniteError(
                f"row {row}, position {result['lengths'][row]}: expected finite logits, "
                "found a NaN or an infinity"
            )


def _keys(seed, count: int) -> jax.Array:
    return sampling.row_keys(jax.random.key(seed, impl=sampling.GENERATOR), count)


def _small(state: decode.DecodeState) -> dict[str, jax.Array]:
    """What the host wants to see of a state: everything but caches and keys."""
    fields = ("tokens", "lengths", "done", "failed", "rounds", "proposed", "accepted")
    return {field: getattr(state, field) for field in fields}
