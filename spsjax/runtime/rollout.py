"""Rollouts: several samples of each of many prompts, handed out as their groups finish."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np

from spsjax.decode.logprobs import LogProbs
from spsjax.errors import InputError, check_integer
from spsjax.runtime.batch import check_seed, token_ids
from spsjax.runtime.engine import Engine
from spsjax.runtime.requests import Request
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled continuation of a prompt, its log-probabilities and its counts.

    Attributes:
        tokens: [n] int32, new tokens, the one that ends the text included.
        text: their text; None if the model has no tokenizer.
        logprobs: the target's log-probabilities of the tokens, [n] each, when they were drawn.
        rounds: passes of the target after the prompt: n without a drafter.
        accepted_histogram: [K+1], rounds per number of accepted draft tokens.
    """

    tokens: np.ndarray
    text: str | None
    logprobs: LogProbs
    rounds: int
    accepted_histogram: list[int]


@dataclasses.dataclass(frozen=True)
class Group:
    """All samples of one prompt.

    Attributes:
        index: the prompt's place in the list of prompts.
        prompt: its token ids.
        samples: its samples, in the order of their random numbers.
    """

    index: int
    prompt: list[int]
    samples: list[Sample]


def rollout(
    engine: Engine,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    samples: int,
    sampling: SamplingParams = SamplingParams(),
    max_new_tokens: int = 128,
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> Iterator[Group]:
    """Yields the samples of each prompt, group by group, in the order in which groups finish.

    **Lossless** with a lossless verifier: samples are those of the engine's target, at every moment
    of a training that changes it (`Engine.set_weights`, also between two groups). For one seed and
    the same weights, the samples are the same to rounding, whatever the engine's rows and mesh
    (unless a schedule such as "auto" decides what is drafted, by what else runs).

    Args:
        engine: an engine with `logprobs=0` or more. Nothing else needs to run it meanwhile.
        prompts: texts, or lists of token ids.
        samples: samples per prompt; the prompt is read once for all of them.
        sampling: sampling parameters.
        max_new_tokens: the most new tokens per sample.
        seed: integer in [0, 2**32). Take another one for each step of a training.
        stop_token_ids: further ids at which a text ends.

    Raises:
        InputError: an argument that cannot be used; the message names it. Raised by the call, not
            when the first group is asked for. Or a sample was cancelled, as by `Engine.close`.
        NonFiniteError: a model gave a NaN or an infinity.
    """
    if not isinstance(engine, Engine):
        raise InputError(f"engine: expected an Engine, found {type(engine).__name__}")
    if engine.logprobs is None:
        raise InputError("engine: expected one with logprobs=0 or more, found one without logprobs")
    check_integer("samples", samples, 1, 2**31 - 1)
    check_seed(seed)
    ids = token_ids(engine.model, prompts)
    groups = []
    try:
        for index, prompt in enumerate(ids):
            own = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
            groups.append(
                engine.submit_group(prompt, samples, sampling, max_new_tokens, own, stop_token_ids)
            )
    except InputError as error:
        _cancel(groups)
        raise InputError(re.sub(r"^prompt\b", f"prompts[{index}]", str(error))) from None
    finished = _finished(engine, groups)
    next(finished)  # runs it to its first yield: only then does closing it cancel what is left
    return finished


def _finished(engine: Engine, groups: list[list[Request]]) -> Iterator[Group]:
    """Yields None, then groups that are done; cancels the others when it is closed."""
    left = dict(enumerate(groups))
    try:
        yield None
        while left:
            done = [index for index, group in left.items() if all(one.done for one in group)]
            for index in done:
                group = left.pop(index)
                yield Group(index, group[0].prompt, [_sample(engine, one) for one in group])
            if not done:
                engine.step()
    finally:
        _cancel(left.values())


def _cancel(groups) -> None:
    for group in groups:
        for request in group:
            request.cancel()


def _sample(engine: Engine, request: Request) -> Sample:
    request.check()
    if request.cancelled:
        raise InputError("rollout: expected samples that run to their ends, found one cancelled")
    return Sample(
        tokens=np.asarray(request.tokens, np.int32),
        text=None if engine.model.tokenizer is None else request.text,
        logprobs=request.logprobs,
        rounds=request.rounds,
        accepted_histogram=request.accepted_histogram,
    )
