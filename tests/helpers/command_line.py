"""Helpers that run the scripts as users do, on a tiny pair of models."""

import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from unittest import mock

import jax
from helpers import script_server
from helpers.environment import CHILD_FLAGS, ROOT

from spsjax import tokenization
from spsjax.data import documents
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["helpers.script_server"])


def tiny_pair(folder: pathlib.Path) -> list[str]:
    """Makes a target and a draft with a tokenizer in a folder, and returns flags that name them."""
    texts = [text for name, text in documents.stdlib().items() if documents.is_held_out(name)]
    tokenizer = tokenization.train(texts[:3], folder / "tokenizer.model", 400)
    for seed, name in enumerate(("target", "draft")):
        config = transformer.Config(
            vocab_size=400, d_model=16, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=8, max_positions=256, bos_id=tokenizer.bos_id, eos_ids=(tokenizer.eos_id,),
        )  # fmt: skip
        hf_weights.save(folder / name, config, transformer.init(config, jax.random.key(seed)))
        (folder / name / "tokenizer.model").write_bytes(tokenizer.path.read_bytes())
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
        environment = {"XLA_FLAGS": xla_flags, "COLUMNS": "120"}
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


def free_port() -> int:
    """Returns a port that no process listens to."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run(script: str, *flags: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
    """Runs a script in a folder."""
    return Script(script, *flags, folder=path).wait()


def run_afresh(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a script with a new Python interpreter, which reads environment variables anew."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *flags],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"XLA_FLAGS": CHILD_FLAGS} | variables,
        timeout=600,
    )


def succeeds(script: str, *flags: str) -> subprocess.CompletedProcess:
    """Runs a script, and asserts that it succeeds."""
    result = run(script, *flags)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def fails_with_one_line(result: subprocess.CompletedProcess, *parts: str):
    """Asserts that a script failed with one line that contains all parts."""
    assert result.returncode not in (0, None)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for part in parts:
        assert part in result.stderr
