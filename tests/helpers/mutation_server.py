"""Server of the mutation tests: forks pytest, with some modules of spsjax replaced by other texts.

Importing takes most of a short test's time, so the server has imported what spsjax imports, but
nothing of spsjax itself. Nothing here may ask JAX for devices: they would not survive the fork.

    python -m helpers.mutation_server

reads requests from its input and writes results to its output, one JSON value per line.
"""

import gc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from typing import NoReturn

# isort: split
import flax.linen
import flax.nnx  # noqa: F401
import jax  # noqa: F401
import optax  # noqa: F401
import pytest
import safetensors.numpy  # noqa: F401
import scipy.optimize
import scipy.stats  # noqa: F401
import sentencepiece  # noqa: F401
import tokenizers  # noqa: F401
import yaml  # noqa: F401

gc.freeze()  # imported modules never become garbage


class Replaced(importlib.machinery.SourceFileLoader):
    """Loads one module from another text than its file's, as a finder in `sys.meta_path`."""

    def __init__(self, file: str, text: str):
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, os.path.abspath(file))
        self.text, self.loaded = text, False

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname):
        self.loaded = True
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Watch:
    """Plugin of pytest that notes which tests fail, and with what."""

    def __init__(self):
        self.failed = []

    def pytest_exception_interact(self, node, call, report):
        if report.failed:
            proven = issubclass(call.excinfo.type, (AssertionError, pytest.fail.Exception))
            line = call.excinfo.exconly().strip().partition("\n")[0]
            self.failed.append({"test": report.nodeid, "error": line, "is_assertion": proven})


def answer(request: dict) -> dict:
    """Returns the outcome of pytest in this process.

    Args:
        request: "arguments" of pytest, and "texts", a dict from the path of a module, as
            "spsjax/tree.py", to the text in place of its own.
    """
    replaced = [Replaced(file, text) for file, text in request["texts"].items()]
    sys.meta_path[:0] = replaced
    watch = Watch()
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *request["arguments"]], [watch])
    unused = [loader.name for loader in replaced if not loader.loaded]
    return {"status": int(status), "unused": unused, **vars(watch)}


def answer_in_fork(request: dict) -> dict:
    """Returns what `answer` does, from a forked process, which is ended after `seconds`.

    The result also has the "output" of the process, its processor time in "seconds", and whether it
    was "ended". Its "status" is None if there is no answer.
    """
    with tempfile.TemporaryFile() as output:
        text, ended, seconds = _wait_for_fork(request, output.fileno())
        output.seek(0)
        printed = output.read().decode(errors="replace")
    result = {"status": None} if ended or not text else json.loads(text)
    return {**result, "ended": ended, "output": printed, "seconds": seconds}


def _wait_for_fork(request: dict, output: int) -> tuple[bytes, bool, float]:
    """Returns the JSON text of an answer, whether the process was ended, and its seconds."""
    receiver, sender = os.pipe()
    deadline, child = time.monotonic() + request["seconds"], os.fork()
    if child == 0:
        _send_answer(request, output, sender)
    os.close(sender)
    text = b""
    while True:
        left = max(deadline - time.monotonic(), 0)
        ended = not select.select([receiver], [], [], left)[0]
        data = b"" if ended else os.read(receiver, 1 << 16)
        if not data:
            break
        text += data
    if ended:
        os.killpg(child, signal.SIGKILL)
    os.close(receiver)
    usage = os.wait4(child, 0)[2]
    return text, ended, usage.ru_utime + usage.ru_stime


def _send_answer(request: dict, output: int, sender: int) -> NoReturn:
    """Writes the answer to a pipe, and all that is printed to a file, and ends this process."""
    try:
        os.setsid()  # so that processes of its own end with it
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, descriptor)
        result = answer(request)
        with os.fdopen(sender, "w") as file:
            json.dump(result, file)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main():
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer_in_fork(json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
