"""The ASGI application: endpoints, limits and streams."""

import asyncio
import bisect
import contextlib
import dataclasses
import hmac
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spsjax.errors import InputError, one_line, short_repr
from spsjax.runtime.engine import Request
from spsjax.serving import protocol
from spsjax.serving.logprobs import Entries, TokenTexts
from spsjax.serving.metrics import Metrics
from spsjax.serving.page import Page
from spsjax.serving.protocol import ApiError, Piece
from spsjax.serving.worker import Busy, Starting, Ticket, Worker

_PATH = re.compile(r"(?<![\w.])/[^\s:'\",]+")  # an absolute one
_LOOK_SECONDS = 0.5  # how often a waiting handler looks whether its client is still there


@dataclasses.dataclass(frozen=True)
class Options:
    """Limits of a server, and the names by which clients know it."""

    name: str  # name of the model that clients ask for
    api_key: str = ""  # key that clients must send; empty: none
    most_bytes: int = 2**20  # greatest size of a request's body
    most_tokens: int = 4096  # most new tokens of a request
    # Names by which the server may be asked; (): any. It keeps pages of other names away that
    # resolve to this machine.
    hosts: tuple[str, ...] = ()


def make(worker: Worker, options: Options, page: Page | None = None) -> Starlette:
    """Returns the application of a worker, which it stops at its end; `page` is served at "/"."""
    server = _Server(worker, options)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(worker.stop)

    routes = [
        Route("/health", server.health),
        Route("/metrics", server.answering(server.metrics)),
        Route("/v1/models", server.answering(server.models)),
        Route("/v1/models/{name:path}", server.answering(server.model)),
        Route("/v1/completions", server.answering(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.answering(server.chat), methods=["POST"]),
    ]
    if page is not None:
        routes += [
            Route("/", page.whole),
            Route("/page/choices", server.answering(page.choices)),
            Route("/page/rounds", server.answering(page.rounds), methods=["POST"]),
        ]
    unknown = {
        404: lambda http, error: _refusal(ApiError(404, f"{http.url.path}: no such endpoint")),
        405: lambda http, error: _refusal(
            ApiError(405, f"{http.method}: expected another method", **(error.headers or {}))
        ),
    }
    middleware = []
    if options.hosts:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=options.hosts))
    return Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=unknown
    )


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


class _Server:
    """The endpoints of one worker."""

    def __init__(self, worker: Worker, options: Options):
        self._worker, self._options = worker, options
        self._metrics = Metrics(worker.engine)
        self._texts = TokenTexts(worker.engine.model.tokenizer)
        self._started = int(time.time())

    def answering(self, endpoint: Callable) -> Callable:
        """Returns an endpoint that checks the key, answers errors and counts answers."""

        async def answer(http: HttpRequest) -> Response:
            try:
                self._check_key(http)
                response = await endpoint(http)
            except ApiError as error:
                response = _refusal(error)
            except ClientDisconnect:
                response = Response(status_code=499)  # its client has gone
            self._metrics.answered(endpoint.__name__, response.status_code)
            return response

        return answer

    async def health(self, http: HttpRequest) -> Response:
        ready = self._worker.ready
        return JSONResponse({"status": "ok" if ready else "starting"}, 200 if ready else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, http: HttpRequest) -> Response:
        ask = await self._parsed(http, protocol.Completion)
        return await self._answer(http, ask, ask.prompt)

    async def chat(self, http: HttpRequest) -> Response:
        ask = await self._parsed(http, protocol.Chat)
        tokenizer = self._worker.engine.model.tokenizer
        try:
            prompt = await asyncio.to_thread(
                tokenizer.chat, ask.messages, **ask.chat_template_kwargs
            )
        except InputError as error:
            raise ApiError(400, self._public(error)) from None
        return await self._answer(http, ask, [prompt])

    async def _parsed(self, http: HttpRequest, kind: type[protocol.Ask]) -> protocol.Ask:
        return protocol.parse(kind, await protocol.body(http, self._options.most_bytes))

    def _model(self) -> dict:
        about = {"object": "model", "created": self._started, "owned_by": "spsjax"}
        return {"id": self._options.name} | about

    def _check_model(self, name: str) -> None:
        if name != self._options.name:
            text = f"model: expected {self._options.name!r}, found {short_repr(name)}"
            raise ApiError(404, text, "not_found_error")

    def _public(self, error: Exception) -> str:
        """Returns an error's line without names of this machine's files.

        Errors of arguments quote what clients have sent, which stays as it is.
        """
        text, tokenizer = one_line(error), self._worker.engine.model.tokenizer
        if tokenizer is not None:
            text = text.replace(str(tokenizer.path.parent), "the model")
        return text if isinstance(error, InputError) else _PATH.sub("(a file)", text)

    def _check_key(self, http: HttpRequest) -> None:
        if not self._options.api_key:
            return
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        wanted = self._options.api_key.encode()
        sent = key.encode("latin-1")  # the header's bytes
        if kind.lower() != "bearer" or not hmac.compare_digest(sent, wanted):
            raise ApiError(401, "expected the API key as a bearer token", "authentication_error")

    async def _answer(self, http: HttpRequest, ask: protocol.Ask, prompts: list) -> Response:
        self._check_model(ask.model)
        start, tickets = time.monotonic(), await self._submit(ask, prompts)
        reply = protocol.Reply(ask)
        if ask.stream:  # which notices itself if its client has gone
            events = self._events(None, ask, tickets, start)
            lines = _lines(events, reply, ask, tickets)
            return protocol.Stream(lines, "text/event-stream", lambda: _cancel(tickets))
        choices = [Piece(index) for index in range(len(tickets))]
        async with contextlib.aclosing(self._events(http, ask, tickets, start)) as events:
            async for piece in events:
                choice = choices[piece.index]
                choice.text += piece.text
                choice.entries += piece.entries
                choice.reason = piece.reason
        return JSONResponse(reply.whole(choices, _usage(tickets, len(prompts))))

    async def _submit(self, ask: protocol.Ask, prompts: list) -> list[Ticket]:
        """Returns tickets of all choices of all prompts."""
        self._check_logprobs(*ask.top)
        most = self._options.most_tokens
        if ask.most_tokens is not None and ask.most_tokens > most:
            raise ApiError(400, f"max_tokens: expected at most {most}, found {ask.most_tokens}")
        if not prompts:
            raise ApiError(400, "prompt: expected at least one, found none")
        seed = secrets.randbits(32) if ask.seed is None else ask.seed
        seeds = [(seed + index) % 2**32 for index in range(len(prompts))]
        budget = ask.most_tokens
        if budget is None:
            room = min(map(self._worker.engine.room_after, prompts))
            budget = max(min(room, most), 0)
        loop = asyncio.get_running_loop()
        options = ask.n, ask.sampling, budget, seeds, loop, ask.stop_token_ids
        try:
            return await asyncio.to_thread(self._worker.submit, prompts, *options)
        except InputError as error:
            raise ApiError(400, self._public(error)) from None
        except Starting:
            text, later = "the server is starting: programs are compiled", {"Retry-After": "5"}
            raise ApiError(503, text, "server_error", **later) from None
        except Busy:
            text, later = "too many requests wait; try again later", {"Retry-After": "1"}
            raise ApiError(429, text, "rate_limit_error", **later) from None

    def _check_logprobs(self, field: str, top: int | None) -> None:
        """Raises ApiError if the engine does not keep what a request asks for."""
        most = self._worker.engine.logprobs
        if top is None or (most is not None and top <= most):
            return
        if most is None:
            expected = "no log-probabilities, which this server does not keep (--config.logprobs)"
        else:
            expected = f"at most {most}, as this server keeps (--config.logprobs)"
        found = "true" if field == "logprobs" and not top else top
        raise ApiError(400, f"{field}: expected {expected}, found {found}")

    async def _events(
        self, http: HttpRequest | None, ask: protocol.Ask, tickets: list[Ticket], start: float
    ) -> AsyncIterator[Piece]:
        """Yields the pieces of all choices as they arrive.

        At its end, all requests are done or cancelled. With `http` it ends when the client has
        gone.
        """
        pieces: asyncio.Queue = asyncio.Queue()
        tasks = []
        for index, ticket in enumerate(tickets):
            cut = protocol.Cut(ask.stop)
            entries = Entries(self._texts, ticket.request, ask.top[1])
            follow = self._follow(http, index, ticket, cut, entries, pieces, start)
            tasks.append(asyncio.create_task(follow))
        try:
            left = len(tickets)
            while left:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                left -= piece.reason is not None
                yield piece
        finally:
            _cancel(tickets)
            for task in tasks:
                task.cancel()

    async def _follow(
        self, http, index: int, ticket: Ticket, cut, entries: Entries, pieces, start: float
    ) -> None:
        """Puts the pieces of one choice into a queue as it is generated."""
        request, sent, began = ticket.request, 0, False
        try:
            while True:
                done = request.done
                text = cut(request.text, done)
                if request.tokens and not began:
                    began = True
                    self._metrics.began(start)
                if done and request.error is not None:
                    raise request.error
                if done and request.cancelled:
                    raise ApiError(503, "the server is being stopped", "server_error")
                reason = None
                if done or cut.end:
                    ended = cut.end or (request.tokens[-1:] and request.tokens[-1] in request.ends)
                    reason = "stop" if ended else "length"
                    ticket.used = _used(request, cut.end)
                new = entries.until(None if done and not cut.end else len(text))
                if len(text) > sent or new or reason:
                    pieces.put_nowait(Piece(index, text[sent:], reason, new))
                    sent = max(sent, len(text))
                if reason:
                    return
                await ticket.news(_LOOK_SECONDS)
                if http is not None and await http.is_disconnected():
                    raise ClientDisconnect
        except (ApiError, ClientDisconnect) as error:
            pieces.put_nowait(error)
        except Exception as error:  # an error of this request or of the model: others continue
            pieces.put_nowait(ApiError(500, self._public(error), "server_error"))
        finally:
            request.cancel()
            self._metrics.ended(request, start)


def _cancel(tickets: list[Ticket]) -> None:
    """Cancels all requests that are not done."""
    for ticket in tickets:
        ticket.request.cancel()


async def _lines(stream, reply: protocol.Reply, ask: protocol.Ask, tickets: list[Ticket]):
    """Yields the lines of an event stream."""
    begun: set[int] = set()
    try:
        async for piece in stream:
            index, reason, piece.reason = piece.index, piece.reason, None
            if piece.text or piece.entries or index not in begun:
                yield _line(reply.piece(piece, first=index not in begun))
                begun.add(index)
            if reason:
                yield _line(reply.piece(Piece(index, reason=reason)))
        if ask.wants_usage:
            yield _line(reply.usage(_usage(tickets, len(tickets) // (ask.n))))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _line(error.body())
    finally:
        await stream.aclose()


def _line(body: dict) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _used(request: Request, end: int) -> int:
    """Returns the number of new tokens of a text, up to the end of its stop if it has one."""
    most, text = len(request.tokens), request.text[:end]

    def has_all(count: int) -> bool:
        return request.text_of(count, whole=True)[:end] == text

    return bisect.bisect_left(range(most), True, key=has_all) if end else most


def _usage(tickets: list[Ticket], prompts: int) -> dict[str, int]:
    """Returns the numbers of tokens; a prompt counts once, whatever its number of choices."""
    choices = len(tickets) // prompts
    before = sum(len(ticket.request.prompt) for ticket in tickets[::choices])
    new = sum(ticket.used for ticket in tickets)
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}
