"""Serves a pair with the endpoints of OpenAI's API: completions, chat, models; and /metrics.

python scripts/serve.py --target=FOLDER --draft=FOLDER
SPSJAX_API_KEY=... python scripts/serve.py --config.host=0.0.0.0   # clients must send the key

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="pystdlib/target", prompt="import os")

Requests share the rows of one loop, and K is chosen in every round. Only this machine can reach the
server, unless --config.host says otherwise. After Ctrl-C or SIGTERM requests may end, then the
server does. Needs the extra `serve`. Every key of the config is a flag:
configs/experiments/serve.py lists them.
"""

import os
import pathlib
import socket

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_integer, one_line

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "How to serve.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the drafter.")

_PROMPT = [1]  # for warming up


def run():
    config = _CONFIG.value
    config.target = _TARGET.value or config.target
    config.draft = config.draft if _DRAFT.value is None else _DRAFT.value
    main.check_installed("serving", "starlette", "uvicorn", "pydantic", "prometheus_client")
    import uvicorn

    from spsjax.serving import app
    from spsjax.serving.worker import Worker

    if jax.process_count() > 1:
        raise InputError(f"expected one process, found {jax.process_count()}")
    for field in ("most_waiting", "most_bytes", "most_tokens", "grace_seconds"):
        check_integer(field, config[field], 1)
    listening = bound(config.host, config.port)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    if target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer, found none")
    drafter = loading.load_drafter(config.draft, target) if config.draft else None
    sizes = {name: config[name] for name in ("rows", "slots", "chunk", "rounds")}
    K = configs.draft_length(config.num_speculative_tokens)
    engine = spsjax.Engine(target, drafter, K, **sizes)
    if config.warm_up:
        terminal.note("Compiling the programs of all numbers of rows (a minute or two)")
        lengths = (config.chunk, 128, 96, 64, 48, 32)
        room = engine.room_after([]) - 1
        engine.warm_up([_PROMPT * min(length, room) for length in lengths])
    limits = {name: config[name] for name in ("most_bytes", "most_tokens")}
    key = os.environ.get("SPSJAX_API_KEY", "")
    options = app.Options(config.name or target.name, key, **limits)
    served = app.make(Worker(engine, config.most_waiting), options)
    host, port = listening.getsockname()[:2]
    if not key and config.host != "127.0.0.1":
        terminal.note(
            "warning: whoever reaches this machine can use the server; set SPSJAX_API_KEY"
        )
    print(f"Serving {options.name} at http://{host}:{port}/v1", flush=True)
    how = uvicorn.Config(
        served, log_level="warning", timeout_graceful_shutdown=config.grace_seconds
    )
    uvicorn.Server(how).run(sockets=[listening])


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address; raises InputError if that is not possible."""
    check_integer("port", port, 0, 65535)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # so that whoever reads the address can connect at once
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"host, port: {host}:{port}: expected a free address, found {one_line(error)}"
        ) from None
    return listening


if __name__ == "__main__":
    main.run(run, _CONFIGS / "serve.py")
