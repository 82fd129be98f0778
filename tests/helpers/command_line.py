"""Helpers that run the scripts on a tiny pair of models, in this process or in one of their own."""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import multiprocessing
import os
import pathlib
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import warnings
from unittest import mock

import absl.app
from absl.testing import flagsaver
from helpers import script_server
from helpers.environment import CHILD_FLAGS, ROOT
from helpers.numpy_models import numpy_params

from spsjax import tokenization
from spsjax.data import documents
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import multihost

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["helpers.script_server"])
COLUMNS = "120"  # width of the terminal that the scripts see

# The standard library stays as it is while tests run, and listing its files takes a second.
_all_files = documents._all_files
_stdlib_files = functools.cache(lambda: _all_files("stdlib"))
documents._all_files = lambda source: _stdlib_files() if source == "stdlib" else _all_files(source)


@functools.cache
def _tiny_pair() -> tempfile.TemporaryDirectory:
    """Makes the folders of a target and of a draft with a tokenizer."""
    holder = tempfile.TemporaryDirectory()
    folder = pathlib.Path(holder.name)
    texts = [inspect.getsource(module) for module in (dataclasses, json.decoder, textwrap)]
    tokenizer = tokenization.train(texts, folder / "tokenizer.model", 400)
    for seed, name in enumerate(("target", "draft")):
        config = transformer.Config(
            vocab_size=400, d_model=16, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=8, max_positions=256, bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,),
        )  # fmt: skip
        hf_weights.save(folder / name, config, numpy_params(config, seed))
        (folder / name / "tokenizer.model").write_bytes(tokenizer.path.read_bytes())
    return holder


def tiny_pair(folder: pathlib.Path) -> list[str]:
    """Puts a target and a draft with a tokenizer into a folder; returns flags that name them."""
    shutil.copytree(_tiny_pair().name, folder, dirs_exist_ok=True)
    return [f"--target={folder / 'target'}", f"--draft={folder / 'draft'}"]


class Script:
    """A script in a process of its own, as a user runs it; with methods of `subprocess.Popen`.

    The process forks from one that has already imported JAX (`script_server`).
    """

    def __init__(self, script, *flags, folder=ROOT, devices=8, file_kib=None):
        """Starts a script.

        Args:
            script: path of the script, in `scripts` unless absolute.
            flags: its arguments.
            folder: folder in which it runs.
            devices: number of CPU devices.
            file_kib: size of the largest file that it can write, in KiB; None: no limit.
        """
        self.output = tempfile.TemporaryDirectory()
        self.arguments = [str(ROOT / "scripts" / script), *map(str, flags)]
        xla_flags = f"{CHILD_FLAGS} --xla_force_host_platform_device_count={devices}"
        environment = {"XLA_FLAGS": xla_flags, "COLUMNS": COLUMNS}
        details = self.arguments, environment, str(folder), file_kib, self.output.name
        self.process = _SERVER.Process(target=script_server.run, args=details)
        with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"):
            self.process.start()  # the first call starts the server, too
        self.kill, self.terminate = self.process.kill, self.process.terminate

    def poll(self) -> int | None:
        """Returns the exit status, or None if it has not ended."""
        return self.process.exitcode

    def read(self, name: str) -> str:
        """Returns what it has written so far to "stdout" or "stderr"."""
        path = pathlib.Path(self.output.name) / name
        return path.read_text("utf-8") if path.exists() else ""

    def wait(self, timeout: float = 600) -> subprocess.CompletedProcess:
        """Waits for its end."""
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        output = self.read("stdout"), self.read("stderr")
        return subprocess.CompletedProcess(self.arguments, self.poll(), *output)


def launch(script: str, *flags: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    """Runs a script in a folder, in a process of its own."""
    return Script(script, *flags, folder=path).wait()


def run(script: str, *flags: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    """Runs a script in a folder, in this process, which keeps what the script compiles.

    Flags, warnings, locks of folders and the search path are those of a new process, and are
    restored afterwards. An exception that the script does not catch is raised here.
    """
    program, arguments = str(ROOT / "scripts" / script), [*map(str, flags)]
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with (
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]),
        mock.patch.object(sys, "excepthook", sys.excepthook),
        # The original would set up logging and the handling of crashes, too.
        mock.patch.object(absl.app, "run", _run_app),
        mock.patch.object(multihost, "_LOCKED", {}) as locked,
        mock.patch.dict(os.environ, COLUMNS=COLUMNS),
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
        flagsaver.flagsaver(),
        contextlib.chdir(path),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            runpy.run_path(program, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            for lock in locked.values():
                lock.__exit__(None, None, None)
    texts = []
    for stream in (stdout, stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return subprocess.CompletedProcess([program, *arguments], code, *texts)


def _run_app(main, argv, flags_parser) -> None:
    """Parses the flags and calls a function with the rest, as `absl.app.run` does."""
    sys.exit(main(flags_parser(argv)))


def settings(values=(), **more) -> list[str]:
    """Returns flags that set keys of a config."""
    return [f"--config.{name}={value}" for name, value in {**dict(values), **more}.items()]


def free_port() -> int:
    """Returns a port that no process listens to."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_afresh(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a script with a new Python interpreter, which reads environment variables anew."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *flags],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"XLA_FLAGS": CHILD_FLAGS} | variables,
        timeout=600,
    )


def succeeds(script: str, *flags: str, by=run) -> subprocess.CompletedProcess:
    """Runs a script by `run` or `launch`, and asserts that it succeeds."""
    result = by(script, *flags)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def fails_with_one_line(result: subprocess.CompletedProcess, *parts: str):
    """Asserts that a script failed with one line that contains all parts."""
    assert result.returncode not in (0, None)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for part in parts:
        assert part in result.stderr
