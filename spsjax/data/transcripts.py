"""Token ids of conversations as the model sees them, and which of them the assistant writes.

A chat template makes the text of a conversation. While the model answers, it reads the text up to
the beginning of the answer, and then its own tokens, up to the one that ends its turn. So the text
before an answer and the answer are tokenized separately, and nothing after the end of a turn, such
as a template's line break, counts as the assistant's.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from spsjax.data.conversations import ANSWER, DIGITS, Conversation, Stored
from spsjax.errors import InputError, short_repr
from spsjax.tokenization import Tokenizer, chat_template

_BATCH = 32  # conversations that one process renders


class Encoder:
    """Tokenizes conversations for a tokenizer and the token ids that end an assistant's turn."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int] = ()):
        self.tokenizer = tokenizer
        self.ends = {*ends} | ({tokenizer.eos_id} - {None})
        texts = {tokenizer.control_text(id): id for id in sorted(self.ends)}
        self._ends = {text: id for text, id in texts.items() if text}
        longest = sorted(self._ends, key=len, reverse=True)
        self._any_end = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @functools.cached_property
    def name(self) -> str:
        """First digits of the tokenizer's hash."""
        return self.tokenizer.sha256[:DIGITS]

    def encode(
        self, conversations: Sequence[Conversation]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yields the token ids of each conversation, up to the end of its last answer, and a mask.

        The mask is 1 for tokens that the assistant writes, the one that ends its turn included. If
        a template changes what stands before an answer (it may drop earlier thoughts), the text
        before that answer is repeated as the model sees it.

        Raises:
            InputError: a conversation has no answer, does not fit the chat template, or has token
                ids of another tokenizer. The message begins with its file and line.
        """
        for start in range(0, len(conversations), _BATCH):
            batch = conversations[start : start + _BATCH]
            rendered = self._render_prefixes(batch)
            for index, conversation in enumerate(batch):
                try:
                    transcript = self._transcript(conversation, rendered.get(index))
                except InputError as error:
                    raise InputError(f"{conversation.where}: {error}") from None
                yield transcript

    def _render_prefixes(self, batch: Sequence[Conversation]) -> dict[int, list]:
        """Returns the text before and after each answer, by the conversation's index in a batch."""
        requests, owners = [], []
        for index, conversation in enumerate(batch):
            if conversation.stored or (conversation.plain and not self.tokenizer.has_template):
                continue
            for number, message in enumerate(conversation.messages):
                if message["role"] == ANSWER:
                    for count, begins in ((number, True), (number + 1, False)):
                        messages = conversation.messages[:count]
                        requests.append({"messages": messages, "add_generation_prompt": begins})
                        owners.append(index)
        texts = {}
        if requests:
            for index, result in zip(owners, self.tokenizer.render(requests)):
                texts.setdefault(index, []).append(result)
        return texts

    def _transcript(
        self, conversation: Conversation, rendered: list | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Returns token ids and mask of a conversation from its texts before and after answers."""
        if conversation.stored:
            return self._read(conversation.stored)
        if not conversation.has_answers:
            raise InputError("expected an answer to train on, found none")
        transcript = Transcript(self)
        if rendered is None:
            question, answer = (message["content"] for message in conversation.messages)
            transcript.ask(question, whole=True)
            end = self.tokenizer.eos_id
            ids = [*self.continued(answer), *([] if end is None else [end])]
            transcript.answer(ids, answer, end)
            return transcript.ids, transcript.mask
        for result in reversed(rendered):  # marks in the whole text make the others needless
            if isinstance(result, InputError):
                raise result
            if result.answers:
                transcript.add_marked(result)
                return transcript.ids, transcript.mask
        for before, after in zip(rendered[::2], rendered[1::2]):
            if not after.text.startswith(before.text):
                raise InputError(
                    "expected a chat template that writes the same text before an answer with and "
                    f"without the answer, found {short_repr(before.text[-40:])} only without. "
                    "Mark the answers in the template with {% generation %}"
                )
            ids, text, end = self.split(after.text[len(before.text) :])
            if not ids:
                raise InputError("expected a chat template that writes answers, found none of one")
            transcript.ask(before.text)
            transcript.answer(ids, text, end)
        return transcript.ids, transcript.mask

    def _read(self, stored: Stored) -> tuple[Sequence[int], Sequence[int]]:
        if stored.tokenizer != self.name:
            raise InputError(
                f"tokenizer: expected token ids of {self.tokenizer.path}, {self.name}, "
                f"found {short_repr(stored.tokenizer)}. Write the answers with this target"
            )
        # The vocabulary of a model may be larger than its tokenizer's.
        most = 1 << (16 if self.tokenizer.vocab_size <= 1 << 16 else 31)
        if stored.tokens and not 0 <= min(stored.tokens) <= max(stored.tokens) < most:
            raise InputError("tokens: expected ids of the tokenizer, found others")
        return stored.tokens, stored.mask()

    def split(self, text: str) -> tuple[list[int], str, int | None]:
        """Returns the ids of an answer, its text, and the id that ends it, from text after it.

        The answer ends where generation would: with the first of the ids that end a turn. Without
        one, the answer is the whole text, and the last value is None.
        """
        found = self._any_end.search(text)
        if not found:
            return self.continued(text), text, None
        end = self._ends[found.group()]
        text = text[: found.start()]
        return [*self.continued(text), end], text, end

    def continued(self, text: str) -> list[int]:
        """Returns the ids of a text that stands behind another one.

        Some tokenizers put a space before every text that they are given, which a model does not
        write: then the ids are those behind a known text.

        Raises InputError if no such text is known.
        """
        if not self._adds_space:
            return self.tokenizer.encode(text, whole=False)
        for before in ("|", ".", "\n"):
            known = self.tokenizer.encode(before, whole=False)
            ids = self.tokenizer.encode(before + text, whole=False)
            if ids[: len(known)] == known:
                return ids[len(known) :]
        raise InputError(
            "expected a text whose tokens do not depend on the one before, found "
            f"{short_repr(text)}"
        )

    @functools.cached_property
    def _adds_space(self) -> bool:
        ids = self.tokenizer.encode("a", whole=False)
        return bool(ids) and self.tokenizer.pieces.get(ids[0], "").startswith(" ")

    def end_after(self, text: str, index: int) -> re.Match | None:
        """Returns the text that ends a turn at an index of a text; None: there is none."""
        return self._any_end.match(text, index)

    def prompts(self, conversations: Sequence[Sequence[Mapping]]) -> list[str | InputError]:
        """Returns the text before the next answer of each conversation, or what is wrong with it.

        Without a chat template it is the last message.
        """
        if not self.tokenizer.has_template:
            return [messages[-1]["content"] for messages in conversations]
        results = self.tokenizer.render([{"messages": messages} for messages in conversations])
        return [result if isinstance(result, InputError) else result.text for result in results]


class Transcript:
    """Token ids of a conversation as it goes on, and which of them the assistant writes.

    Attributes:
        ids: token ids.
        mask: 1 per token that the assistant writes, 0 per other token.
    """

    def __init__(self, encoder: Encoder):
        self.ids: list[int] = []
        self.mask: list[int] = []
        self._encoder, self._begin = encoder, 0
        # Text of the ids since `_begin`, without the id that ended the last answer.
        self._text, self._end = None, None

    @property
    def context(self) -> list[int]:
        """Token ids that the model sees before its next answer."""
        return self.ids[self._begin :]

    def ask(self, prompt: str, whole: bool = False) -> None:
        """Adds the text of a prompt, which repeats the conversation, as far as it is new.

        The prompt is added as a whole if it does not continue the ids so far: a template may change
        earlier answers, or end them with another token.

        Args:
            prompt: text up to the beginning of the next answer.
            whole: whether the tokenizer's first ids are added, as to a text without a template.
        """
        encode, fresh = self._encoder.tokenizer.encode, None
        if self._text is not None and prompt.startswith(self._text):
            fresh = encode(prompt[len(self._text) :], whole=False)
            if self._end is not None:
                fresh = fresh[1:] if fresh[:1] == [self._end] else None
        if fresh is None:
            self._begin, fresh = len(self.ids), encode(prompt, whole=whole)
        self._add(fresh, 0)
        self._text = prompt

    def answer(self, ids: Sequence[int], text: str, end: int | None) -> None:
        """Adds an answer: its ids, its text without the id that ends it, and that id or None."""
        self._add(ids, 1)
        self._text, self._end = self._text + text, end

    def add_marked(self, rendered: chat_template.Rendered) -> None:
        """Adds a whole conversation whose answers the template marks."""
        text, done = rendered.text, 0
        for start, stop in rendered.answers:
            before = text[done:start]
            encoder = self._encoder
            ids = encoder.continued(before) if done else encoder.tokenizer.encode(before, False)
            self._add(ids, 0)
            ids, answer, end = self._encoder.split(text[start:stop])
            done = stop
            after = self._encoder.end_after(text, start + len(answer))
            if after and end is None:  # the mark ends before the end of the turn
                ids, _, end = self._encoder.split(text[start : after.end()])
            if after:
                done = after.end()
            self._add(ids, 1)

    def _add(self, ids: Sequence[int], value: int) -> None:
        self.ids += ids
        self.mask += [value] * len(ids)
