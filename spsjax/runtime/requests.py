"""Requests of an engine, and the updates that process 0 sends to the other processes."""

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from spsjax.decode import logprobs
from spsjax.decode.logprobs import LogProbs
from spsjax.errors import InputError
from spsjax.parallel import multihost
from spsjax.runtime.batch import Batch
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams
from spsjax.tokenization.base import incremental_text


@dataclasses.dataclass(frozen=True)
class Submission:
    """The arguments of `Engine.submit_group`, in this order."""

    prompt: list[int]
    count: int
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    stop_token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Updates:
    """Requests that came or were cancelled since the engine's last step.

    Attributes:
        submitted: new requests, by groups.
        cancelled: numbers of requests that are cancelled.
        closed: whether the engine takes no more requests.
    """

    submitted: tuple[Submission, ...]
    cancelled: tuple[int, ...]
    closed: bool

    def of_first_process(self) -> "Updates":
        """Returns the updates of process 0. Every process must call it."""
        text = multihost.broadcast_text(json.dumps(dataclasses.asdict(self)))
        received = json.loads(text)
        submitted = (
            Submission(**one | {"sampling": SamplingParams(**one["sampling"])})
            for one in received["submitted"]
        )
        return Updates(tuple(submitted), tuple(received["cancelled"]), received["closed"])


class Request:
    """A sample of a submitted prompt, as far as it is known.

    Iterate it for pieces of text, which join to `generate`'s text. That runs the engine as far as
    it needs; other threads may run it as well. Attributes are only to be read.

    Attributes:
        prompt: token ids.
        tokens: new tokens so far, the one that ends the text included.
        done: whether there will be no more.
        error: the exception that ended it early; None: nothing did.
        cancelled: whether it was cancelled.
        rounds: passes of the target after the prompt.
        accepted_histogram: [K+1], rounds per number of accepted draft tokens.
        ends: token ids that end the text.
        sample: number among the samples of its group.
    """

    def __init__(self, engine, submission: Submission, ends: set[int], sample: int = 0):
        self.prompt = submission.prompt
        self.tokens: list[int] = []
        self.done = False
        self.error: BaseException | None = None
        self.rounds = 0
        self._logprobs: list[LogProbs] = []  # of each run of the loop
        self.accepted_histogram: list[int] = []
        self._counts: tuple = 0, 0  # before the row's text was read
        self.cancelled = False
        self.number = -1  # of the engine's requests, from when the engine knows it
        self.submission, self.ends, self.sample, self._engine = submission, ends, sample, engine

    @property
    def text(self) -> str:
        """The continuation so far. A character that spans tokens is held back until it is whole.

        Raises:
            InputError: the model has no tokenizer.
        """
        done = self.done  # before the tokens are read
        return self.text_of(len(self.tokens), whole=done)

    def text_of(self, count: int, whole: bool = False) -> str:
        """Returns the text of the first new tokens; a last character that lacks some only if whole.

        Raises:
            InputError: the model has no tokenizer.
        """
        model = self._engine.model
        if model.tokenizer is None:
            raise InputError(f"{model.name}: expected a model with a tokenizer, found none")
        text = incremental_text(model.tokenizer, self.prompt, self.tokens[:count], self.ends)
        return text if whole else text.rstrip("\ufffd")

    def take(self, tokens: Sequence[int], logprobs: LogProbs | None = None) -> bool:
        """Adds new tokens, up to one that ends the text; returns whether one of them does.

        `logprobs` are those of the tokens, if the engine keeps them.
        """
        end = next((i for i, token in enumerate(tokens, start=1) if token in self.ends), None)
        if logprobs is not None:
            self._logprobs.append(jax.tree.map(lambda array: array[:end], logprobs))
        self.tokens += tokens[:end]
        return end is not None

    @property
    def logprobs(self) -> LogProbs | None:
        """Log-probabilities of `tokens`, as NumPy arrays; None: the engine keeps none."""
        top = self._engine.logprobs
        if top is None:
            return None
        none = jax.tree.map(np.asarray, logprobs.empty(1, 0, top).span(0, 0, 0))
        known = none, *self._logprobs  # a copy: another thread may add to it
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *known)

    def so_far(self, setup: Setup) -> Batch:
        """Returns the prompt and the new tokens so far as a prompt, with the same end."""
        told, ids = self.submission, self.prompt + self.tokens
        left = told.max_new_tokens - len(self.tokens)
        return setup.batch([ids], told.sampling, left, told.seed, "prompt")

    def count(self, rounds: int, accepted: np.ndarray) -> None:
        """Takes the counts of its row, since the row's text was read."""
        before, histogram = self._counts
        self.rounds = before + int(rounds)
        self.accepted_histogram = (histogram + accepted).tolist()

    def keep_counts(self) -> None:
        """Adds the counts so far to those to come: its text is read again."""
        self._counts = self.rounds, np.asarray(self.accepted_histogram or 0)

    def cancel(self) -> None:
        """Ends it soon. It keeps the tokens that it has, and its row goes to another request."""
        self.cancelled = True

    def result(self) -> list[int]:
        """Runs the engine until this request is done, and returns its new tokens.

        Raises:
            NonFiniteError: a model gave a NaN or an infinity.
        """
        while not self.done:
            self._engine.step()
        self.check()
        return self.tokens

    def __iter__(self) -> Iterator[str]:
        sent = 0
        while True:
            done, text = self.done, self.text  # in this order: another thread may add to it
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            elif done:
                break
            else:
                self._engine.step()
        self.check()

    def check(self) -> None:
        """Raises the error that ended it, if one did."""
        if self.error is not None:
            raise self.error


class Group:
    """Samples of one prompt, which is read once for all of them.

    Attributes:
        batch: the prompt, as a batch of one row.
        submission: the arguments.
        requests: one request per sample.
        waiting: those of them that have no row yet, in their order.
    """

    def __init__(self, engine, batch: Batch, submission: Submission, ends: set[int]):
        self.batch, self.submission = batch, submission
        samples = range(submission.count)
        self.requests = [Request(engine, submission, ends, sample) for sample in samples]
        self.waiting = collections.deque(self.requests)
