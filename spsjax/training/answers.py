"""Answers that a target writes to questions, in JSON lines that training reads.

A line holds one conversation: its token ids as the target saw and wrote them, the ranges of the
answers, and its messages for readers. Lines are only appended, each when its conversation is
complete, so that a killed process loses no answer that was written.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from spsjax.data import documents
from spsjax.data.conversations import ANSWER, Conversation
from spsjax.data.transcripts import Encoder, Transcript
from spsjax.errors import InputError, one_line, short_repr
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.runtime.batch import check_seed
from spsjax.runtime.engine import Engine
from spsjax.runtime.requests import Request
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, hashing, jsonl
from spsjax.utils.fields import Checked, integer
from spsjax.utils.progress import Bar


@dataclasses.dataclass(frozen=True)
class AnswersConfig(Checked):
    """Numbers of answers and of processes that write them."""

    samples: int = integer(1, 1)  # conversations per line of the questions
    rows: int = integer(8, 1)  # most answers that are written at the same time
    slots: int = integer(2048, 1)  # tokens of a conversation; longer ones are left out or cut
    parts: int = integer(1, 1)  # processes without a connection that share the questions
    part: int = integer(0)  # number of this process, from 0

    def __post_init__(self):
        super().__post_init__()
        if self.part >= self.parts:
            raise InputError(f"part: expected less than parts={self.parts}, found {self.part}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters, budget and random seed of all answers."""

    sampling: SamplingParams  # sampling parameters
    max_new_tokens: int  # most tokens per answer
    seed: int = 0  # random seed of all answers


class Dialogue:
    """A conversation with the target: questions that wait, and what was said.

    Attributes:
        name: name of the line of the questions, with a hash of them.
        sample: number of the conversation among those about the same questions.
        messages: questions and answers so far.
        transcript: the same as token ids.
        request: the answer that is being written.
    """

    def __init__(self, name: str, sample: int, questions: Sequence, encoder: Encoder):
        self.name, self.sample = name, sample
        self.messages: list[Mapping] = []
        self.transcript = Transcript(encoder)
        self.request: Request | None = None
        self._questions, self._turn = questions, 0

    def next_question(self) -> bool:
        """Adds the next question to the messages; returns whether there is one."""
        if self._turn == len(self._questions):
            return False
        self.messages += self._questions[self._turn]
        self._turn += 1
        return True

    def seed(self, seed: int) -> int:
        """Returns the random seed of the next answer, which no other answer has."""
        text = json.dumps([seed, self.name, self.sample, self._turn])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def take_answer(self) -> None:
        """Adds the answer of the request, which is done."""
        self.request.check()
        tokens, text = self.request.tokens, self.request.text
        end = tokens[-1] if tokens[-1] in self.request.ends else None
        self.transcript.answer(tokens, text, end)
        self.messages.append({"role": ANSWER, "content": text})

    def record(self, tokenizer: str) -> dict:
        """Returns what is stored; `data.conversations.parse` reads it."""
        mask, messages = [*self.transcript.mask], list(self.messages)
        while not mask[-1]:  # a last question that was too long
            mask.pop()
        while messages[-1]["role"] != ANSWER:
            messages.pop()
        edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
        return {
            "id": self.name,
            "sample": self.sample,
            "tokenizer": tokenizer,
            "tokens": self.transcript.ids[: len(mask)],
            "answers": list(zip(edges[::2], edges[1::2])),
            "messages": messages,
        }


class Writer:
    """Writes the answers of one engine to one file, from which an interrupted run resumes.

    Args:
        engine: engine of the target, which no one else uses.
        source: file, folder or pattern of JSON lines with questions.
        folder: folder of the answers of all processes.
        options: numbers of answers and of processes.
        sampling: what determines an answer.
        drafting: names of what also decides which sample a seed gives: drafter, K, verifier.

    Raises:
        InputError: the target has no tokenizer, the questions cannot be read, or the file has
            answers with other options.
    """

    def __init__(
        self,
        engine: Engine,
        source: str,
        folder: str | pathlib.Path,
        options: AnswersConfig,
        sampling: Sampling,
        drafting: Mapping[str, str] = MappingProxyType({}),
    ):
        check_seed(sampling.seed)
        model = engine.model
        if model.tokenizer is None:
            raise InputError(f"{model.name}: expected a tokenizer, found none")
        self._engine, self._source, self._options = engine, source, options
        self._sampling = sampling
        self._encoder = Encoder(model.tokenizer, model.config.eos_ids)
        stops = sorted(self._encoder.ends - {*model.config.eos_ids})
        self._stops = [id for id in stops if id < model.config.vocab_size]
        name = f"answers-{options.part:05}-of-{options.parts:05}"
        self.path = pathlib.Path(folder) / f"{name}.jsonl"
        # Hidden files of a folder are not read as documents.
        self._recipe_path, self._lock_path = (
            self.path.with_name(f".{name}.{suffix}") for suffix in ("json", "lock")
        )
        atomic_files.check_outputs([self.path, self._recipe_path], [self.path.parent])
        self._recipe = json.loads(
            json.dumps(
                {
                    "target": hashing.params_fingerprint(model.params),
                    "tokenizer": self._encoder.name,
                    **dataclasses.asdict(sampling),
                    "slots": engine.slots,
                    **drafting,
                }
            )
        )

    def write(self) -> None:
        """Writes all answers that the file does not have yet."""
        with self._opened():
            done = self._read_done()
            total = known = 0
            for name, sample, _ in self._dialogues():
                total, known = total + 1, known + ((name, sample) in done)
            todo = (
                Dialogue(name, sample, conversation.questions(), self._encoder)
                for name, sample, conversation in self._dialogues()
                if (name, sample) not in done
            )
            bar = Bar(desc="answers", total=total, initial=known, unit="answer")
            with bar:
                self._hold(todo, bar)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Locks the file, and makes it and its recipe, or checks that it has the same one."""
        path = self._recipe_path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_files.lock(self._lock_path, wait=False):
                if path.exists():
                    self._check_recipe(path)
                else:
                    atomic_files.write(path, json.dumps(self._recipe, indent=1) + "\n")
                if self.path.exists():
                    jsonl.drop_torn_line(self.path)
                yield
        except BlockingIOError:
            raise InputError(
                f"{self.path}: expected a file that no other process writes, found one in use. "
                "Give each process a part of its own"
            ) from None

    def _check_recipe(self, path: pathlib.Path) -> None:
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: expected options, found {one_line(error)}") from None
        for key, value in self._recipe.items():
            if before.get(key) != value:
                raise InputError(
                    f"{self.path}: expected the options of the answers in it, with "
                    f"{key}={short_repr(before.get(key))}, found {short_repr(value)}. Restore the "
                    "value or choose another folder"
                )

    def _read_done(self) -> set[tuple[str, int]]:
        """Returns names and samples of the conversations in the file."""
        if not self.path.exists():
            return set()
        try:
            return {(record["id"], record["sample"]) for _, record in jsonl.read(self.path)}
        except (KeyError, TypeError) as error:
            raise InputError(f"{self.path}: expected answers, found no {one_line(error)}") from None

    def _dialogues(self) -> Iterator[tuple[str, int, Conversation]]:
        """Yields name, sample and conversation of everything that this process is to write."""
        template = self._encoder.tokenizer.has_template
        for index, (name, conversation) in enumerate(documents.questions(self._source)):
            if index % self._options.parts != self._options.part:
                continue
            questions = conversation.questions()
            if not (template or conversation.plain):
                raise InputError(
                    f"{conversation.where}: expected a target with a chat template, found one "
                    "without. Only the key prompt needs none"
                )
            digest = hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:8]
            for sample in range(self._options.samples):
                yield f"{name}:{digest}", sample, conversation

    def _hold(self, todo: Iterator[Dialogue], bar: Bar) -> None:
        """Holds dialogues, as many at a time as keep the engine's rows full, and writes them."""
        begin, count, too_long = time.monotonic(), 0, 0
        at_once, active = 2 * self._engine.rows, []
        while True:
            # Questions are read in groups: one process renders those of a group.
            if len(active) < at_once:
                active += (fresh := list(itertools.islice(todo, at_once)))
                self._ask(fresh)
            if not active:
                break
            self._engine.step()
            asked = [one for one in active if one.request and one.request.done]
            for dialogue in asked:
                dialogue.take_answer()
                count += len(dialogue.request.tokens)
            self._ask(asked)
            for dialogue in [one for one in active if one.request is None]:
                active.remove(dialogue)
                if any(dialogue.transcript.mask):
                    jsonl.append(self.path, dialogue.record(self._encoder.name))
                else:
                    too_long += 1
                rate = count / max(time.monotonic() - begin, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.update()
        seconds = time.monotonic() - begin
        print(f"{count:,} new tokens in {seconds:.1f} s. The answers are in {self.path}")
        if too_long:
            print(f"{too_long} questions left out: longer than slots={self._engine.slots} allow")

    def _ask(self, dialogues: Sequence[Dialogue]) -> None:
        """Submits the next question of each dialogue; the request of one without is None."""
        asked = []
        for dialogue in dialogues:
            dialogue.request = None
            if dialogue.next_question():
                asked.append(dialogue)
        prompts = self._encoder.prompts([dialogue.messages for dialogue in asked]) if asked else []
        whole = not self._encoder.tokenizer.has_template
        for dialogue, prompt in zip(asked, prompts):
            if isinstance(prompt, InputError):
                raise InputError(f"{dialogue.name}: {prompt}")
            dialogue.transcript.ask(prompt, whole)
            context = dialogue.transcript.context
            room = min(self._engine.room_after(context), self._sampling.max_new_tokens)
            if room > 0:
                dialogue.request = self._engine.submit(
                    context,
                    self._sampling.sampling,
                    room,
                    dialogue.seed(self._sampling.seed),
                    self._stops,
                )


def write(
    model: Model,
    drafter,
    num_speculative_tokens,
    source: str,
    folder: str | pathlib.Path,
    options: AnswersConfig,
    sampling: Sampling,
    verifier=None,
) -> None:
    """Writes the answers of a target to questions; the same call resumes what was interrupted.

    With several processes of one run, process 0 reads and writes, and all of them compute.

    Args:
        model, drafter, num_speculative_tokens, verifier: as for `generate`.
        source, folder, options, sampling: as for `Writer`.

    Raises:
        InputError: an argument, a question or an existing file that cannot be used.
    """
    engine = Engine(
        model,
        drafter,
        num_speculative_tokens,
        rows=options.rows,
        slots=options.slots,
        verifier=verifier,
    )
    drafting = {
        "drafter": "none" if drafter is None else drafter.name,
        "num_speculative_tokens": str(num_speculative_tokens),
        "verifier": str(verifier or ""),
    }
    writer = Writer(engine, source, folder, options, sampling, drafting)
    if not multihost.is_main_process():
        engine.follow()
        return
    try:
        writer.write()
    finally:
        engine.close()
