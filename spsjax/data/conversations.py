"""Conversations from JSON objects of several forms, and the questions in them."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

from spsjax.errors import InputError, short_repr
from spsjax.tokenization import chat_template

ANSWER = "assistant"  # role of the messages that a model writes
# Roles in ShareGPT's form.
_ROLES = {"human": "user", "user": "user", "gpt": ANSWER, "assistant": ANSWER, "system": "system"}
DIGITS = 16  # hexadecimal digits of a hash


@dataclasses.dataclass(frozen=True)
class Stored:
    """Token ids of a conversation, as the target wrote its answers.

    Attributes:
        tokens: token ids.
        answers: first and last token, exclusive, of each answer.
        tokenizer: first digits of the tokenizer's hash.
    """

    tokens: Sequence[int]
    answers: Sequence[Sequence[int]]
    tokenizer: str

    def mask(self) -> list[int]:
        """Returns 1 per token of an answer and 0 per other token; raises ValueError if damaged."""
        mask = [0] * len(self.tokens)
        for start, stop in self.answers:
            if not 0 <= start < stop <= len(mask):
                raise ValueError(f"an answer from {start} to {stop} in {len(mask)} tokens")
            mask[start:stop] = [1] * (stop - start)
        return mask


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation from a line of a file.

    Attributes:
        where: file and line, for errors.
        messages: messages in the form of chat templates.
        plain: whether it is a prompt with or without a completion, which needs no chat template.
        stored: token ids, if the line has them.
    """

    where: str
    messages: Sequence[Mapping]
    plain: bool = False
    stored: Stored | None = None

    @property
    def has_answers(self) -> bool:
        """Whether the assistant writes anything."""
        return any(message["role"] == ANSWER for message in self.messages)

    @functools.cached_property
    def text(self) -> str:
        """Contents of all messages, one per line."""
        return "\n".join(message.get("content") or "" for message in self.messages)

    @functools.cached_property
    def question(self) -> str:
        """Hash of the messages up to the first answer to a user, which answers to it share."""
        digest, asked = hashlib.sha256(), False
        for message in self.messages:
            if message["role"] == ANSWER and asked:
                break
            asked |= message["role"] != ANSWER
            digest.update(repr((message["role"], message.get("content"))).encode())
        return digest.hexdigest()[:DIGITS]

    def questions(self) -> list[list[Mapping]]:
        """Returns the messages without answers, in groups that each end with a user's message.

        Raises InputError if there is none, or if a message is not of a user or of the system.
        """
        groups = [[]]
        for message in self.messages:
            if message["role"] not in ("user", "system", "developer", ANSWER):
                raise InputError(
                    f"{self.where}: expected messages of user, system and assistant, "
                    f"found one of {short_repr(message['role'])}"
                )
            if message["role"] != ANSWER:
                groups[-1].append(message)
            if message["role"] == "user":
                groups.append([])
        if len(groups) < 2:
            raise InputError(f"{self.where}: expected a message of a user, found none")
        return groups[:-1]


def parse(record: Mapping, where: str) -> Conversation | None:
    """Returns the conversation in a JSON object, known by its keys; None if it has none of them.

    The keys are `messages` (a role and a content each), `conversations` (ShareGPT's `from` and
    `value`, or messages), `prompt` with or without `completion`, and `turns`, a user's texts. The
    keys `tokens`, `answers` and `tokenizer` beside `messages` are those of stored answers.

    Raises:
        InputError: the value of a key has another form. The message begins with `where`.
    """
    try:
        if "messages" in record:
            return Conversation(where, _messages(record["messages"]), stored=_stored(record))
        if "conversations" in record:
            return Conversation(where, _messages(_share_gpt(record["conversations"])))
        if "prompt" in record:
            roles = {"prompt": "user", "completion": ANSWER}
            texts = {role: record[key] for key, role in roles.items() if key in record}
            return Conversation(where, _texts(texts.items()), plain=True)
        if "turns" in record:
            turns = record["turns"]
            if not isinstance(turns, list):
                raise InputError(f"turns: expected a list of texts, found {short_repr(turns)}")
            return Conversation(where, _texts(("user", turn) for turn in turns))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return None


def _messages(messages) -> list[dict]:
    if not messages:
        raise InputError("expected messages, found none")
    checked = chat_template.conversation(messages)
    _check_unicode(message["content"] or "" for message in checked)
    return checked


def _texts(texts) -> list[dict]:
    for role, text in (texts := list(texts)):
        if not isinstance(text, str) or not text:
            kind = "an answer" if role == ANSWER else "a question"
            raise InputError(f"expected the text of {kind}, found {short_repr(text)}")
    return _messages([{"role": role, "content": text} for role, text in texts])


def _share_gpt(turns) -> list[dict]:
    """Returns messages from turns in ShareGPT's form; those in the form of messages stay."""
    if not isinstance(turns, list):
        raise InputError(f"conversations: expected a list of turns, found {short_repr(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            role = _ROLES.get(str(turn["from"]))
            if role is None or not isinstance(turn.get("value"), str):
                raise InputError(
                    f"conversations[{number}]: expected from (human, gpt or system) and value, "
                    f"found {short_repr(turn)}"
                )
            turn = {"role": role, "content": turn["value"]}
        messages.append(turn)
    return messages


def _stored(record: Mapping) -> Stored | None:
    names = "tokens", "answers", "tokenizer"
    if not all(name in record for name in names):  # `tokens` alone is often a count
        return None
    stored = Stored(*(record[name] for name in names))
    try:
        stored.mask()
        if not all(type(id) is int for id in stored.tokens):
            raise ValueError("others than integers")
    except (TypeError, ValueError) as error:
        raise InputError(f"tokens, answers: expected ids and ranges, found {error}") from None
    return stored


def _check_unicode(texts) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"expected texts in valid Unicode, found {error}") from None
