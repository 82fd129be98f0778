"""Requests of an engine, and the updates that process 0 sends to the other processes."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from spsjax.errors import InputError
from spsjax.parallel import multihost
from spsjax.runtime.batch import Batch
from spsjax.sampling import SamplingParams
from spsjax.tokenization.base import incremental_text


@dataclasses.dataclass(frozen=True)
class Submission:
    """The arguments of a request, in this order."""

    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    stop_token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Updates:
    """Requests that came or were cancelled since the engine's last step.

    Attributes:
        submitted: new requests.
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
    """A submitted prompt, and its continuation as far as it is known.

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
    """

    def __init__(self, engine, batch: Batch, submission: Submission, ends: set[int]):
        self.prompt = batch.prompts[0]
        self.tokens: list[int] = []
        self.done = False
        self.error: BaseException | None = None
        self.rounds = 0
        self.accepted_histogram: list[int] = []
        self.cancelled = False
        self.number = -1  # of the engine's requests, from when the engine knows it
        self.batch, self.submission, self.ends = batch, submission, ends
        self._engine = engine

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

    def take(self, tokens: Sequence[int]) -> bool:
        """Adds new tokens, up to one that ends the text; returns whether one of them does."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.ends:
                return True
        return False

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
