"""Bodies of requests and answers, and streams, of OpenAI's completions and chat endpoints."""

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
from spsjax.serving import absent
from spsjax.tokenization.chat_template import conversation

_MOST_CHOICES = 16
_MOST_STOPS = 64
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

    @model_validator(mode="after")
    def _check_best(self):
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: expected {self.n}, as n, found {self.best_of}")
        return self

    @property
    def most_tokens(self) -> int:
        return self.max_tokens


class Chat(Ask):
    """The body of a request of `/v1/chat/completions`."""

    no_effect = absent.CHAT
    messages: list[Any]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] = {}

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


class Reply:
    """Bodies of the answers to one request."""

    def __init__(self, ask: Ask):
        self._chat = isinstance(ask, Chat)
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

    def whole(self, texts: list[str], reasons: list[str], usage: dict) -> dict:
        """Returns the body of an answer that is not streamed."""
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons)):
            content = {"text": text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": index, "logprobs": None, "finish_reason": reason} | content)
        return self._body(choices, usage)

    def piece(self, index: int, text: str, reason: str | None = None, first: bool = False) -> dict:
        """Returns the body of a streamed piece; the last one of a choice has the reason."""
        content = {"text": text}
        if self._chat:
            role = {"role": "assistant"} if first else {}
            content = {"delta": role | ({"content": text} if text or first else {})}
        choice = {"index": index, "logprobs": None, "finish_reason": reason}
        return self._body([choice | content], chunk=True)

    def usage(self, counts: dict) -> dict:
        """Returns the body that ends a stream with the numbers of tokens."""
        return self._body([], counts, chunk=True)
