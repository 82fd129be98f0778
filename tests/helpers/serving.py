"""A server in a thread of this process."""

import contextlib
import threading
import time

import spsjax


@contextlib.contextmanager
def address_of(application):
    """Yields the address at which an ASGI application is served, without a slash at its end."""
    import uvicorn

    config = uvicorn.Config(application, port=0, log_level="error", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def models_of(pair: list[str]):
    """Returns the target and the draft that two flags name."""
    target = spsjax.load(pair[0].partition("=")[2])
    return target, spsjax.load_drafter(pair[1].partition("=")[2], target)


def metrics_of(address: str) -> dict[str, str]:
    """Returns the metrics of the server whose endpoints are below an address, by name."""
    import httpx2

    text = httpx2.get(address.removesuffix("/v1") + "/metrics").text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
