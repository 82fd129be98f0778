"""Bodies of requests and answers of OpenAI's completions and chat endpoints."""

import json
import math
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request as HttpRequest

from spsjax.errors import one_line, short_repr
from spsjax.sampling import SamplingParams

Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]
_MOST_CHOICES = 16
_LONGEST_MESSAGE = 300
_OF_SEVERAL_FORMS = "prompt", "stop", "content", "num_speculative_tokens"  # fields


class ApiError(Exception):
    """An answer that says what is wrong.

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
    """Returns a request's JSON body, of which no more is read than is allowed.

    Any page of a browser can send other types here without asking.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        found = short_repr(kind)
        raise ApiError(415, f"Content-Type: expected 'application/json', found {found}")
    read = bytearray()
    async for part in http.stream():
        read += part
        if len(read) > most_bytes:
            raise ApiError(413, f"body: expected at most {most_bytes} bytes, found more")
    return bytes(read)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Ask(BaseModel):
    """Fields of both kinds of request. Those that the loop cannot carry out are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: int | None = None
    # Not in OpenAI's API, but in that of other servers.
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Without an effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # With an effect that is not implemented: only their defaults are taken.
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _check(self):
        for name, allowed in self._only().items():
            if getattr(self, name) not in allowed:
                value = json.dumps(allowed[0])
                raise ValueError(f"{name}: expected {value}, as others are not implemented")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected it with stream only")
        return self

    def _only(self) -> dict[str, tuple]:
        """Returns the values of fields that have no other ones."""
        return {
            "presence_penalty": (0, None),
            "frequency_penalty": (0, None),
            "logit_bias": (None, {}),
        }

    @property
    def sampling(self) -> SamplingParams:
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingParams(temperature, self.top_k, top_p, self.min_p)

    @property
    def stops(self) -> list[str]:
        """The texts before which an answer ends."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(Ask):
    """The body of a request of `/v1/completions`."""

    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    def _only(self):
        return super()._only() | {
            "best_of": (None, self.n or 1),
            "echo": (False, None),
            "logprobs": (None,),
            "suffix": (None,),
        }

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        whole = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if whole else self.prompt

    @property
    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[_Part]


class Chat(Ask):
    """The body of a request of `/v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def _only(self):
        return super()._only() | {
            "logprobs": (False, None),
            "top_logprobs": (None, 0),
            "response_format": (None, {"type": "text"}),
            "tools": (None, []),
            "tool_choice": (None, "none", "auto"),
        }

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        joined = []
        for message in self.messages:
            content = message.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            joined.append({"role": message.role, "content": content})
        return joined

    @property
    def most_tokens(self) -> int | None:
        """None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse(kind: type[Ask], body: bytes) -> Ask:
    """Returns a request's body; raises ApiError unless it is one."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        parts, text = first["loc"], first["msg"]
        for index, part in enumerate(parts[:-1]):
            if part in _OF_SEVERAL_FORMS:  # the rest names one of them
                parts, text = parts[: index + 1], "it has none of the forms that are taken"
                break
        place = ".".join(map(str, parts))
        text = f"{place}: {text}" if place else text.removeprefix("Value error, ")
        raise ApiError(400, one_line(ValueError(text))[:_LONGEST_MESSAGE]) from None


class Cut:
    """Cuts a text that grows before the first of some texts.

    Args:
        stops: the texts.

    Attributes:
        end: length of the text up to the end of the stop that cuts it; 0: there is none yet.
    """

    def __init__(self, stops: list[str]):
        self.stops, self.end = stops, 0

    def __call__(self, text: str, done: bool) -> str:
        """Returns as much as is safe to send: what may be the beginning of a stop is held back.

        Of several stops the one that is whole first counts, however much of the text is known.
        """
        places = {stop: text.find(stop) for stop in self.stops}
        if ends := [(place + len(stop), place) for stop, place in places.items() if place >= 0]:
            self.end, place = min(ends)
            return text[:place]
        if done:
            return text
        held = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    held = max(held, size)
                    break
        return text[: len(text) - held]


class Reply:
    """Makes the bodies of one request's answers.

    Args:
        ask: the request.
    """

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
