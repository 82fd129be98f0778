"""Bodies of requests and answers, and streams, of OpenAI's completions and chat endpoints."""

import dataclasses
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse

from spsjax.errors import InputError, one_line, printable, short_repr
from spsjax.sampling import SamplingParams
from spsjax.serving import absent, logprobs
from spsjax.tokenization.chat_template import conversation

_MOST_CHOICES = 16
_MOST_STOPS = 64
_MOST_LOGPROBS = 5  # of completions, at each token
MOST_TOP_LOGPROBS = 20  # of chats
_LONGEST_MESSAGE = 300


class ApiError(Exception):
    """An error that a client receives as its answer.

    Attributes:
        status: HTTP status.
        message: one line.
        kind: OpenAI's name of the kind of error.
        headers: further headers.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers):
        super().__init__(message)
        self.status, self.message, self.kind, self.headers = status, message, kind, headers

    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": None}}


async def body(http: HttpRequest, most_bytes: int) -> bytes:
    """Returns a request's JSON body, of which at most `most_bytes` are read.

    Other types are refused, because any page in a browser can send them without asking.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        actual = short_repr(kind)
        raise ApiError(415, f"Content-Type: expected 'application/json', found {actual}")
    read = bytearray()
    async for part in http.stream():
        read += part
        if len(read) > most_bytes:
            raise ApiError(413, f"body: expected at most {most_bytes} bytes, found more")
    return bytes(read)


def _stop_texts(value) -> list[str]:
    """Returns the texts before which an answer ends."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a text or a list of texts, found {short_repr(value)}")
    if len(texts) > _MOST_STOPS:
        raise ValueError(f"expected at most {_MOST_STOPS} texts, found {len(texts)}")
    return [text for text in texts if text]


def _prompts(value) -> list[str] | list[list[int]]:
    """Returns the prompts of a completion, as texts or as token ids."""

    def is_ids(ids) -> bool:
        known = isinstance(ids, list) and bool(ids)
        return known and all(type(id) is int and 0 <= id < 2**31 for id in ids)

    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    if isinstance(prompts, list) and any(
        all(map(known, prompts)) for known in (is_ids, lambda prompt: isinstance(prompt, str))
    ):
        return prompts
    raise ValueError(f"expected a text, token ids, or a list of either, found {short_repr(value)}")


def _number_of_logprobs(value) -> int | None:
    """Returns the number of a completion's `logprobs`, which may be false for none."""
    if value is False:
        return None
    if type(value) is not int or not 0 <= value <= _MOST_LOGPROBS:
        raise ValueError(f"expected an integer in [0, {_MOST_LOGPROBS}], found {short_repr(value)}")
    return value


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Ask(BaseModel):
    """Common fields of both kinds of request, without those that have no effect.

    Attributes:
        no_effect: values without an effect, by field (`absent`).
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    no_effect: ClassVar[dict[str, list]]

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    stop: Annotated[list[str], BeforeValidator(_stop_texts)] = []
    seed: int | None = None
    # Not in OpenAI's API, but in that of other servers. No limit of `top_k` is 0 or -1.
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = []

    @model_validator(mode="after")
    def _check(self):
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options: expected it with stream only")
        return self

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, max(self.top_k, 0), self.top_p, self.min_p)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options.include_usage


class Completion(Ask):
    """The body of a request of `/v1/completions`."""

    no_effect = absent.COMPLETION
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    best_of: int | None = None
    logprobs: Annotated[int | None, BeforeValidator(_number_of_logprobs)] = None

    @model_validator(mode="after")
    def _check_best(self):
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: expected {self.n}, as n, found {self.best_of}")
        return self

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    @property
    def top(self) -> tuple[str, int | None]:
        """Field, and number of most probable tokens per position; None: no log-probabilities."""
        return "logprobs", self.logprobs


class Chat(Ask):
    """The body of a request of `/v1/chat/completions`."""

    no_effect = absent.CHAT
    messages: list[Any]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0

    @model_validator(mode="after")
    def _check_logprobs(self):
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected it with logprobs only")
        return self

    @model_validator(mode="after")
    def _check_messages(self):
        if not self.messages:
            raise ValueError("messages: expected at least one, found none")
        for number, message in enumerate(conversation(self.messages)):
            for key, value in message.items():
                if key in _MESSAGE_FIELDS and isinstance(value, str):
                    continue
                known = "a text" if key in _MESSAGE_FIELDS else "none, as it is not implemented"
                raise ValueError(
                    f"messages[{number}].{key}: expected {known}, found {short_repr(value)}"
                )
        return self

    @property
    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> tuple[str, int | None]:
        """As that of completions."""
        field = "top_logprobs" if self.top_logprobs else "logprobs"
        return field, self.top_logprobs if self.logprobs else None


# Plainer messages, by pydantic's kinds of errors.
_PLAIN = {
    "extra_forbidden": "there is no such field",
    "model_type": "expected an object",
    "dict_type": "expected an object",
}
_Body = TypeVar("_Body", bound=BaseModel)
# Fields of a message that a chat template is given.
_MESSAGE_FIELDS = {"role", "content", "name", "reasoning_content", "reasoning"}


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Returns a request's body; raises ApiError unless it is one."""
    try:
        raw = json.loads(body)
        if issubclass(kind, Ask) and isinstance(raw, dict):
            raw = absent.without(raw, kind.no_effect)
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        keys, text = first["loc"], first["msg"].removeprefix("Value error, ")
        text = _PLAIN.get(first["type"], text)
        key = ".".join(map(str, keys))
        text = f"{key}: {text}" if key else text
    except InputError as error:
        text = str(error)
    except (ValueError, RecursionError) as error:
        text = f"expected JSON, found {one_line(error)}"
    raise ApiError(400, printable(one_line(ValueError(text)))[:_LONGEST_MESSAGE])


class Cut:
    """Cuts a growing text before the first of some stop texts.

    Attributes:
        end: length of the text up to the end of the stop that cuts it; 0: there is none yet.
    """

    def __init__(self, stops: list[str]):
        self.stops, self.end = stops, 0

    def __call__(self, text: str, done: bool) -> str:
        """Returns the text that is safe to send, without a possible beginning of a stop at its end.

        Of several stops, the one that is complete first counts.
        """
        starts = {stop: text.find(stop) for stop in self.stops}
        if ends := [(start + len(stop), start) for stop, start in starts.items() if start >= 0]:
            self.end, start = min(ends)
            return text[:start]
        if done:
            return text
        kept_back = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    kept_back = max(kept_back, size)
                    break
        return text[: len(text) - kept_back]


class Stream(StreamingResponse):
    """Lines that are sent as they are generated; `end` is called at the end, whatever its cause."""

    def __init__(self, lines: AsyncIterator[str], media_type: str, end: Callable[[], object]):
        super().__init__(lines, media_type=media_type)
        self._end = end

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


@dataclasses.dataclass
class Piece:
    """A piece of a choice, or all of it.

    Attributes:
        index: number of the choice.
        text: text.
        reason: why the choice ends with it; None: it does not end.
        entries: log-probabilities of its tokens, if they are wanted.
    """

    index: int
    text: str = ""
    reason: str | None = None
    entries: list[logprobs.Entry] = dataclasses.field(default_factory=list)


class Reply:
    """Bodies of the answers to one request."""

    def __init__(self, ask: Ask):
        self._chat = isinstance(ask, Chat)
        self._form = logprobs.of_chat if self._chat else logprobs.of_completion
        self._wanted = ask.top[1] is not None
        self._common = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": math.floor(time.time()),
            "model": ask.model,
        }

    def _body(self, choices: list[dict], usage: dict | None = None, chunk: bool = False) -> dict:
        name = "chat.completion" if self._chat else "text_completion"
        kind = {"object": f"{name}.chunk" if chunk and self._chat else name}
        counts = {} if usage is None else {"usage": usage}
        return self._common | kind | {"choices": choices} | counts

    def whole(self, pieces: list[Piece], usage: dict) -> dict:
        """Returns the body of an answer that is not streamed."""
        choices = []
        for piece in pieces:
            content = {"text": piece.text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": piece.text}}
            choices.append(self._choice(piece, self._wanted) | content)
        return self._body(choices, usage)

    def piece(self, piece: Piece, first: bool = False) -> dict:
        """Returns the body of a streamed piece; the last one of a choice has the reason."""
        content = {"text": piece.text}
        if self._chat:
            role = {"role": "assistant"} if first else {}
            content = {"delta": role | ({"content": piece.text} if piece.text or first else {})}
        return self._body([self._choice(piece, bool(piece.entries)) | content], chunk=True)

    def _choice(self, piece: Piece, has_logprobs: bool) -> dict:
        known = self._form(piece.entries) if has_logprobs else None
        return {"index": piece.index, "logprobs": known, "finish_reason": piece.reason}

    def usage(self, counts: dict) -> dict:
        """Returns the body that ends a stream with the numbers of tokens."""
        return self._body([], counts, chunk=True)
