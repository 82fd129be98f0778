"""The calls that users make: `generate`, `stream` and `propose`."""

import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from spsjax.decode import DecodeState, Program, step
from spsjax.decode.logprobs import LogProbs
from spsjax.decode.schedule import Schedule
from spsjax.decode.state import outcome
from spsjax.drafters import base
from spsjax.errors import InputError, NonFiniteError
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost
from spsjax.runtime import costs, drafting, low_acceptance
from spsjax.runtime.batch import Batch
from spsjax.runtime.loop import Loop
from spsjax.runtime.rounds import Round
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.tokenization.base import incremental_text
from spsjax.types import Proposal
from spsjax.verifiers import match
from spsjax.verifiers.base import Verifier


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of a call, over all its rows.

    Attributes:
        target_calls: passes of the target after the prompt.
        proposed_tokens: draft tokens offered to the target.
        acceptance_rate: accepted / proposed draft tokens; 0 if none was proposed.
        block_efficiency: new tokens per row and target call: 1 without a drafter, at most K + 1.
        accepted_histogram: [K+1], rounds per number of accepted draft tokens, before an end of
            sequence or a full budget cut the block off.
        seconds: run time in seconds, prompt included.
        prompt_seconds: seconds of it that the prompt took.
        compile_seconds: seconds to compile or to read compiled programs from the cache on the disk,
            and to measure costs for K = "auto": in the first call of every size of buffers, for
            hybrids and rules that end chains also of every set of sampling parameters.
        first_token_seconds: time to the first token without compilation: that of the prompt and of
            a mean round. The loop runs on the device and is not interrupted to measure it.
        cold_first_token_seconds: the same with `compile_seconds`: what this call's user waited.
    """

    target_calls: int
    proposed_tokens: int
    acceptance_rate: float
    block_efficiency: float
    accepted_histogram: list[int]
    seconds: float
    prompt_seconds: float
    compile_seconds: float

    @property
    def first_token_seconds(self) -> float:
        """Time to the first token without compilation."""
        return self.prompt_seconds + (self.seconds - self.prompt_seconds) / max(
            self.target_calls, 1
        )

    @property
    def cold_first_token_seconds(self) -> float:
        """Time to the first token with compilation."""
        return self.first_token_seconds + self.compile_seconds


@dataclasses.dataclass(frozen=True)
class Generation:
    """Continuations.

    Attributes:
        tokens: new tokens per row, the one that ends it included.
        texts: their texts, up to the token that ends them; None if the model has no tokenizer.
        stats: statistics of the call.
        logprobs: log-probabilities of `tokens` per row, as NumPy arrays; None: not asked for.
    """

    tokens: list[np.ndarray]
    texts: list[str] | None
    stats: Stats
    logprobs: list[LogProbs] | None = None


def generate(
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    drafter: Model | LoadedDrafter | base.Drafter | None = None,
    num_speculative_tokens: int | str | Schedule | None = None,
    sampling: SamplingParams = SamplingParams(),
    max_new_tokens: int | Sequence[int] = 128,
    seed: int = 0,
    *,
    verifier: str | Verifier | None = None,
    stop_at_eos: bool = True,
    stop_token_ids: Sequence[int] = (),
    slots: int | None = None,
    logprobs: int | None = None,
) -> Generation:
    """Continues each prompt with samples of the target, by speculative sampling.

    Args:
        model: the target.
        prompts: texts, or lists of token ids.
        drafter: None for autoregressive sampling; a loaded model, which then drafts; what
            `load_drafter` returns; or a `spsjax.drafters.*.Drafter` that has no weights.
        num_speculative_tokens: K, draft tokens per round. None: the drafter's own, 4 for a model.
            "auto": chosen in every round, 0 included, by what was accepted before and by measured
            costs (`spsjax.decode.schedule.Fastest`), for which the first call of its shapes times
            rounds for a few seconds. Chains are then up to 7 tokens long, or as long as the
            drafter's own K if that is greater. `spsjax.decode.schedule.Fixed(K)`: K in every round,
            by programs that all K share. "confidence": as "auto", but only as much of a chain is
            scored as the drafter's estimates of acceptance are worth
            (`spsjax.decode.confidence.Confident`). Or another `spsjax.decode.schedule.Schedule`.
            Without a drafter it is ignored.
        sampling: parameters for the target; a draft model uses the same.
        max_new_tokens: one budget, or one per row.
        seed: integer in [0, 2**32); row b of any call with this seed draws the same random numbers.
        verifier: rule that decides which draft tokens are accepted: a name of
            `spsjax.verifiers.NAMES`, or a `spsjax.verifiers.*.Verifier`. None: modified
            rejection sampling, which is lossless: "rejection", or "recursive" for trees.
        stop_at_eos: whether a row ends at the model's end-of-sequence ids: those of its config, its
            generation config and its tokenizer.
        stop_token_ids: further ids at which a row ends. Each set of them is compiled.
        slots: size of the buffers: the most tokens of a prompt, its continuation, and K + 1 more.
            Two programs then serve all calls with as many prompts, whatever the lengths of prompts
            and budgets. A round takes somewhat longer than in the buffers that a short text needs.
            None: the smallest of a few sizes, each of which is compiled.
        logprobs: None, or the target's log-probabilities of the new tokens are returned, and at
            each of them those of so many most probable tokens. Each number is compiled.

    Raises:
        InputError: an argument that cannot be used; the message names it.
        NonFiniteError: a model gave a NaN or an infinity; the message names row and position.
    """
    setup = Setup(
        model, drafter, num_speculative_tokens, verifier, stop_at_eos, stop_token_ids, logprobs
    )
    batch = setup.batch(prompts, sampling, max_new_tokens, seed)
    return _run(setup, setup.loop_for(batch, "generate", slots), batch)


def stream(
    model: Model,
    prompt: str | Sequence[int],
    drafter: Model | LoadedDrafter | base.Drafter | None = None,
    num_speculative_tokens: int | str | Schedule | None = None,
    **options,
) -> Iterator[str]:
    """Yields the text of one continuation as it grows; the pieces join to `generate`'s text.

    Takes what `generate` takes, and raises what it raises. A character that spans tokens is held
    back until it is complete.
    """
    drafting.check_model(model)
    if model.tokenizer is None:
        raise InputError(f"{model.name}: expected a model with a tokenizer, found none")
    ids, steps = rounds(model, prompt, drafter, num_speculative_tokens, **options)
    own = model.eos_ids if options.get("stop_at_eos", True) else ()
    return _texts(model, ids, steps, {*own, *options.get("stop_token_ids", ())})


def rounds(
    model: Model,
    prompt: str | Sequence[int],
    drafter: Model | LoadedDrafter | base.Drafter | None = None,
    num_speculative_tokens: int | str | Schedule | None = None,
    sampling: SamplingParams = SamplingParams(),
    max_new_tokens: int = 128,
    seed: int = 0,
    *,
    verifier: str | Verifier | None = None,
    stop_at_eos: bool = True,
    stop_token_ids: Sequence[int] = (),
    slots: int | None = None,
) -> tuple[list[int], Iterator[Round]]:
    """Returns the prompt's token ids, and the rounds of one continuation as they happen."""
    setup = Setup(model, drafter, num_speculative_tokens, verifier, stop_at_eos, stop_token_ids)
    batch = setup.batch([prompt], sampling, max_new_tokens, seed, "prompt")
    return batch.prompts[0], _rounds(setup, setup.loop_for(batch, "rounds", slots), batch)


def propose(
    model: Model,
    prompt: str | Sequence[int],
    drafter: Model | LoadedDrafter | base.Drafter,
    num_speculative_tokens: int | str | Schedule | None = None,
    sampling: SamplingParams = SamplingParams(),
    seed: int = 0,
) -> Proposal:
    """Returns what the drafter would propose after a prompt, for people who study drafters.

    Takes what `generate` takes, and raises what it raises. The proposal has one row, and is the
    one of `generate`'s first round with the same seed; with "auto", one of the greatest K.
    """
    if drafter is None:
        raise InputError("drafter: expected a loaded model or a drafter, found None")
    rule = match.Verifier()  # verifies nothing here, but allows chains and trees
    setup = Setup(model, drafter, num_speculative_tokens, rule, False)
    batch = setup.batch([prompt], sampling, 0, seed, "prompt")
    loop = setup.loop_for(batch, "propose")
    loop.program = dataclasses.replace(loop.program, schedule=None)
    proposal = loop.call(_propose, loop.program)(loop.params, loop.read(batch))
    return jax.tree.map(lambda leaf: leaf[:1], multihost.to_host(proposal))


def _propose(program: Program, params, state: DecodeState) -> Proposal:
    state, now = step.next_round(program, params, state)
    return dataclasses.replace(step.propose(program, params, state, now), aux=())


def _run(setup: Setup, loop: Loop, batch: Batch) -> Generation:
    """Runs all rows of a batch in one jitted loop."""
    known = costs.of(loop, batch)
    start, before = time.perf_counter(), loop.compile_seconds
    state = loop.read(batch, known)
    jax.block_until_ready(state)
    prompt_seconds = time.perf_counter() - start - (loop.compile_seconds - before)
    state = loop.run(state, costs=known)
    result = multihost.to_host(outcome(state))
    seconds = time.perf_counter() - start - (loop.compile_seconds - before)
    _check_finite(result)
    count = len(batch.prompts)
    spans = [*enumerate(zip(batch.lengths[:count], result["lengths"]))]
    tokens = [result["tokens"][row, start:end] for row, (start, end) in spans]
    logprobs = None
    if (known := result["logprobs"]) is not None:
        logprobs = [known.span(row, start, end) for row, (start, end) in spans]
    histogram = result["accepted"][:count].sum(axis=0)
    proposed = int(result["proposed"][:count].sum())
    calls = result["rounds"][:count]
    low_acceptance.count(setup, proposed, histogram)
    stats = Stats(
        target_calls=int(calls.max()),
        proposed_tokens=proposed,
        acceptance_rate=float(histogram @ np.arange(len(histogram)) / max(proposed, 1)),
        block_efficiency=float(sum(map(len, tokens)) / max(calls.sum(), 1)),
        accepted_histogram=histogram.tolist(),
        seconds=seconds,
        prompt_seconds=prompt_seconds,
        compile_seconds=loop.compile_seconds,
    )
    texts, tokenizer = None, setup.model.tokenizer
    if tokenizer is not None:
        pairs = zip(batch.prompts, tokens)
        ends = setup.program.eos_ids
        texts = [incremental_text(tokenizer, prompt, new, ends) for prompt, new in pairs]
    return Generation(tokens, texts, stats, logprobs)


def _rounds(setup: Setup, loop: Loop, batch: Batch) -> Iterator[Round]:
    """Yields the rounds of a batch of one prompt: the same loop, one round at a time."""
    known = costs.of(loop, batch)
    state = loop.read(batch, known)
    before = multihost.to_host(outcome(state))
    while not before["done"].all():
        state = loop.run(state, 1, known)
        after = multihost.to_host(outcome(state))
        _check_finite(after)
        proposed = int(after["proposed"][0] - before["proposed"][0])
        yield Round(
            tokens=after["tokens"][0, before["lengths"][0] : after["lengths"][0]],
            accepted=int(np.argmax(after["accepted"][0] - before["accepted"][0])),
            proposed=proposed,
            longest=min(proposed, setup.num_speculative_tokens),
        )
        before = after
    low_acceptance.count(setup, int(before["proposed"][0]), before["accepted"][0])


def _check_finite(result: dict[str, np.ndarray]) -> None:
    for row in np.flatnonzero(result["failed"]):
        raise NonFiniteError(
            f"row {row}, position {result['lengths'][row]}: expected finite logits, "
            "found a NaN or an infinity"
        )


def _texts(
    model: Model, prompt: list[int], steps: Iterator[Round], ends: Collection[int] = ()
) -> Iterator[str]:
    tokens, sent = [], 0
    for decoded in steps:
        tokens += decoded.tokens.tolist()
        text = incremental_text(model.tokenizer, prompt, tokens, ends)
        whole = text.rstrip("\ufffd")
        if len(whole) > sent:
            yield whole[sent:]
            sent = len(whole)
    text = incremental_text(model.tokenizer, prompt, tokens, ends)
    if len(text) > sent:
        yield text[sent:]
