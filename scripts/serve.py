"""Serves a pair with the endpoints of OpenAI's API, and a page that colours tokens by kind.

python scripts/serve.py --target=FOLDER --draft=FOLDER
SPSJAX_API_KEY=... python scripts/serve.py --config.host=0.0.0.0   # clients must send the key

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="pystdlib/target", prompt="import os")

The endpoints are completions, chat and models; /metrics has counts for Prometheus. Requests share
the rows of one loop, and K is chosen in every round. The page at / shows one text at a time. Only
this machine can reach the server, unless --config.host says otherwise. After Ctrl-C or SIGTERM
requests may end, then the server does. Needs the extra `serve`. Every key of the config is a flag:
configs/experiments/serve.py lists them.
"""

import dataclasses
import functools
import ipaddress
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import _environment  # must be first: names a package that is missing
import jax
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_integer, one_line
from spsjax.parallel import multihost

_CONFIG = config_flags.DEFINE_config_file("config", None, "How to serve.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)

_PROMPT = [1]  # for warming up
_SECONDS_TO_END = 10  # for requests that are cancelled when the server stops


def run():
    config = _CONFIG.value
    configs.choose_pair(config, _TARGET.value, _DRAFT.value)
    from spsjax.serving import app, protocol

    for field in ("most_waiting", "most_bytes", "most_tokens", "grace_seconds"):
        check_integer(field, config[field], 1)
    check_integer("logprobs", config.logprobs, -1, protocol.MOST_TOP_LOGPROBS)
    address = bound(config.host, config.port) if multihost.is_main_process() else None
    target = loading.load(
        config.target, configs.mesh(config.mesh), config.dtype, quantize=config.quantize
    )
    if target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer, found none")
    target = dataclasses.replace(target, name=config.name or public(config.target))
    drafter = named_drafter(config.draft, target) if config.draft else None
    sizes = {name: config[name] for name in ("rows", "slots", "chunk", "rounds")}
    K = configs.draft_length(config.num_speculative_tokens)
    logprobs = None if config.logprobs < 0 else config.logprobs
    engine = spsjax.Engine(target, drafter, K, **sizes, logprobs=logprobs)
    limits = {name: config[name] for name in ("most_bytes", "most_tokens")}
    key = os.environ.get("SPSJAX_API_KEY", "")
    page = page_of(config, target, drafter, limits, bool(key))
    if engine.room_after([]) < 2:
        raise InputError(f"slots: expected room for a prompt and a token, found {engine.slots}")
    if address is not None:
        serve(config, engine, page, address, app.Options(target.name, key, **limits))
        return
    if config.warm_up:
        engine.warm_up(_PROMPT)
    engine.follow()


def serve(config, engine, page, address: tuple[socket.socket, bool], options):
    """Serves an engine at an address that `bound` returned, until the server is stopped."""
    import uvicorn

    from spsjax.serving import app
    from spsjax.serving.worker import Worker

    listening, loopback = address
    host, port = listening.getsockname()[:2]
    # Without a key, pages of other names must not reach it through a browser on this machine.
    if loopback and not options.api_key and ":" not in host:
        options = dataclasses.replace(options, hosts=(host, "localhost"))
    compilation = Compilation(engine)
    prepare = compilation.begin if config.warm_up else None
    worker = Worker(engine, config.most_waiting, prepare)
    served = app.make(worker, options, page)
    host = f"[{host}]" if ":" in host else host
    if not options.api_key and not loopback:
        terminal.note(
            "warning: whoever reaches this machine can use the server; set SPSJAX_API_KEY"
        )
    print(f"Serving {options.name} at http://{host}:{port}/v1", flush=True)
    if jax.process_count() == 1:
        print(f"A page that shows how a text comes about: http://{host}:{port}/", flush=True)
    # The worker tells clients why their requests end, before uvicorn closes connections. A client
    # that reuses a connection while it is closed for being idle would lose a request.
    late = config.grace_seconds + _SECONDS_TO_END
    times = {"timeout_keep_alive": 60, "timeout_graceful_shutdown": late}
    # uvicorn lets requests end, then raises the signal again. Other processes wait for a clean end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            compilation.may_begin.set()

        async def shutdown(self, sockets=None):
            stop = threading.Timer(config.grace_seconds, worker.stop)
            stop.start()
            await super().shutdown(sockets)
            stop.cancel()

    server = compilation.server = Server(uvicorn.Config(served, log_level="warning", **times))
    try:
        server.run(sockets=[listening])
    except (KeyboardInterrupt, SystemExit) as end:
        if jax.process_count() == 1 and (compilation.is_alive() or not worker.ready):
            # What compiles cannot be stopped, and would crash the interpreter at its end.
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(130 if isinstance(end, KeyboardInterrupt) else end.code or 0)
        raise
    if compilation.error is not None:
        raise compilation.error


class Compilation(threading.Thread):
    """Compiles an engine's programs: the first in the engine's thread, the others in this one.

    Attributes:
        server: server that an error ends.
        may_begin: set when the server listens.
        error: error that has ended the server; None: there was none.
    """

    def __init__(self, engine):
        super().__init__(name="compilation", daemon=True)
        self._engine, self.server, self.error = engine, None, None
        self.may_begin = threading.Event()

    def begin(self) -> None:
        """Compiles what the first requests need, and starts the thread that compiles the rest."""
        self.may_begin.wait()
        if jax.process_count() > 1:  # all of them compile the same at the same time
            work = functools.partial(self._engine.warm_up, _PROMPT, progress=progress())
        else:
            work = functools.partial(self._engine.begin, _PROMPT)
        if not self._succeeds(work):
            sys.exit()  # this thread: the engine is not ready
        if jax.process_count() == 1:
            self.start()

    def run(self) -> None:
        self._succeeds(functools.partial(self._engine.compile_rest, progress()))

    def _succeeds(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # raised when the server has ended
            self.error, self.server.should_exit = error, True
        return self.error is None


def public(name: str) -> str:
    """Returns the name of a model or drafter without the path of its folder or GGUF file."""
    if pathlib.Path(name).is_dir() or (name.endswith(".gguf") and pathlib.Path(name).is_file()):
        return pathlib.Path(name).resolve().name
    method, folder = re.fullmatch(r"(.*[:+])?(.*)", name, re.DOTALL).groups("")
    return method + public(folder) if method else name


def named_drafter(name: str, target: loading.Model) -> loading.LoadedDrafter:
    """Returns a drafter under its public name, which messages quote."""
    return dataclasses.replace(loading.load_drafter(name, target), name=public(name))


def progress() -> Callable[[int, int], None]:
    """Returns a function that shows how many programs are compiled."""
    start = time.monotonic()

    def show(done: int, steps: int) -> None:
        seconds = time.monotonic() - start
        serves = "; requests are answered, and slower until the end" if done < steps else ""
        terminal.note(f"Compiled: {done} of {steps} steps, {seconds:.0f} s{serves}")

    return show


def page_of(config, target, drafter, limits: dict[str, int], needs_key: bool):
    """Returns the page; None with several processes, which would have to write its texts, too."""
    from spsjax.serving.page import Page

    if jax.process_count() > 1:
        return None
    drafters = {drafter.name: drafter} if drafter else {}
    drafters |= {public(name): named_drafter(name, target) for name in config.page}
    return Page(target, drafters, **limits, needs_key=needs_key)


def bound(host: str, port: int) -> tuple[socket.socket, bool]:
    """Returns a socket that is bound to an address, and whether only this machine can reach it.

    Raises InputError if that is not possible.
    """
    check_integer("port", port, 0, 65535)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # so that a client can connect as soon as it reads the address
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"host, port: {host}:{port}: expected a free address, found {one_line(error)}"
        ) from None
    return listening, ipaddress.ip_address(address[0]).is_loopback


if __name__ == "__main__":
    main.run(run, _environment.EXPERIMENTS / "serve.py")
