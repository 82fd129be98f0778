"""A page that streams a text with every token in the colour of its kind."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import importlib.resources
import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response

from spsjax import generation
from spsjax.drafters.base import Drafter
from spsjax.errors import InputError, NonFiniteError, one_line, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.runtime import drafting
from spsjax.runtime.rounds import Totals, pieces
from spsjax.sampling import SamplingParams
from spsjax.serving import protocol
from spsjax.serving.protocol import ApiError

PLAIN = "none"
_MOST_DRAFTED = 16
_RULES = tuple(drafting.SCHEDULES)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)


def _draft_length(value) -> int | str:
    if (type(value) is int and 1 <= value <= _MOST_DRAFTED) or value in _RULES:
        return value
    rules = " or ".join(f'"{rule}"' for rule in _RULES)
    raise ValueError(
        f"expected an integer in [1, {_MOST_DRAFTED}], {rules}, found {short_repr(value)}"
    )


class _Ask(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    drafter: str
    num_speculative_tokens: Annotated[int | str, BeforeValidator(_draft_length)] = drafting.AUTO
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 128
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


@dataclasses.dataclass(eq=False)
class _Text:
    """A text that is being generated, and the current job of the page's thread."""

    ask: _Ask
    job: concurrent.futures.Future | None = None


class Page:
    """The page and its endpoints, for one text at a time, apart from the engine's requests.

    Drafters are choices by name, the default first; plain decoding is added. `most_bytes` and
    `most_tokens` limit a request's body and its new tokens.
    """

    def __init__(
        self,
        model: Model,
        drafters: Mapping[str, LoadedDrafter | Drafter | Model],
        most_bytes: int,
        most_tokens: int,
        needs_key: bool,
    ):
        self._model, self._drafters = model, {**drafters, PLAIN: None}
        self._most_bytes, self._most_tokens = most_bytes, most_tokens
        self._needs_key = needs_key
        self._current: _Text | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "page")

    async def whole(self, http: HttpRequest) -> Response:
        """Returns the page, which needs no key."""
        text = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
        text = text.replace("NEEDS_KEY", str(self._needs_key).lower())
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    async def choices(self, http: HttpRequest) -> Response:
        """Returns the choices of the page's form."""
        return JSONResponse(
            {
                "model": self._model.name,
                "drafters": list(self._drafters),
                "num_speculative_tokens": [*_RULES, *range(1, _MOST_DRAFTED + 1)],
                "most_tokens": self._most_tokens,
            }
        )

    async def rounds(self, http: HttpRequest) -> Response:
        """Returns the pieces of a text as they are generated, one JSON object per line."""
        ask = protocol.parse(_Ask, await protocol.body(http, self._most_bytes))
        if ask.drafter not in self._drafters:
            known = ", ".join(self._drafters)
            raise ApiError(
                400, f"drafter: expected one of {known}, found {short_repr(ask.drafter)}"
            )
        if ask.max_tokens > self._most_tokens:
            most = self._most_tokens
            raise ApiError(400, f"max_tokens: expected at most {most}, found {ask.max_tokens}")
        if self._current is not None:
            raise ApiError(429, "the page shows another text; try again later", "rate_limit_error")
        text = self._current = _Text(ask)
        end = functools.partial(self._end, text)
        return protocol.Stream(self._lines(text), "application/x-ndjson", end)

    def _end(self, text: "_Text") -> None:
        """Lets the next text begin when the page's thread has finished this text."""

        def end(job=None):
            if self._current is text:
                self._current = None

        if text.job is None:
            end()
        else:
            text.job.add_done_callback(end)

    async def _do(self, text: "_Text", function, *arguments):
        """Calls a function in the page's thread, which continues even if the client has gone."""
        text.job = self._thread.submit(function, *arguments)
        return await asyncio.wrap_future(text.job)

    async def _lines(self, text: "_Text") -> AsyncIterator[str]:
        totals = Totals()
        try:
            yield _line(state="compiling")
            ids, steps = await self._do(text, self._begin, text.ask)
            shown = pieces(self._model.tokenizer, ids, totals.count(steps))
            while (piece := await self._do(text, next, shown, None)) is not None:
                yield _line(text=piece[0], kind=piece[1], **_figures(totals))
            self._end(text)  # before the client knows that it may ask for the next one
            yield _line(state="done", **_figures(totals))
        except (InputError, NonFiniteError) as error:
            yield _line(error=one_line(error))
        except Exception as error:  # whatever the model does, the page says so
            yield _line(error=f"{type(error).__name__}: {one_line(error)}")

    def _begin(self, ask: _Ask) -> tuple:
        """Returns the prompt's tokens and the rounds, of which one was run to compile them."""
        sampling = SamplingParams(ask.temperature, top_p=ask.top_p)
        drafter = self._drafters[ask.drafter]
        arguments = self._model, ask.prompt, drafter, ask.num_speculative_tokens
        options = {"sampling": sampling, "max_new_tokens": ask.max_tokens, "seed": ask.seed}
        _, steps = generation.rounds(*arguments, **options)
        next(steps, None)
        return generation.rounds(*arguments, **options)


def _figures(totals: Totals) -> dict:
    figures = {"tokens": totals.tokens, "calls": totals.rounds, "seconds": totals.seconds}
    return figures | {"accepted": totals.accepted, "proposed": totals.proposed}


def _line(**fields) -> str:
    return json.dumps(fields, ensure_ascii=False) + "\n"
