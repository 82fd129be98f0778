"""What surrounds a script: its packages, flags and output, and the devices that JAX looks for."""

import importlib.util
import os
import subprocess
import sys
from unittest import mock

import pytest
from helpers.command_line import ROOT, fails_with_one_line, run

from spsjax.cli import main
from spsjax.utils import extras

TARGET = ROOT / "configs" / "experiments" / "pystdlib_target.py"
SCRIPTS = sorted((ROOT / "scripts").glob("[!_]*.py"))


@pytest.mark.process
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_without_packages_is_one_line(path):
    """Without any package (-S), a script says which is missing and what to run."""
    command = [sys.executable, "-S", path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env={})
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "expected an installed package, found none. Run: " in done.stderr


@pytest.mark.parametrize(
    ("folders", "prefix", "remedy"),
    [
        ([".venv"], "/usr", "source {root}/.venv/bin/activate"),
        ([".venv"], "{root}/.venv", "python -m pip install -e {root}"),
        (["other"], "/usr", "python -m pip install -e {root}"),
        ([".venv", ".venv-3.13"], "/usr", "source {root}/.venv-3.13/bin/activate"),
        ([".venv", ".venv-3.13"], "{root}/.venv", "python -m pip install -e {root}"),
    ],
)
def test_remedy_activates_or_installs(monkeypatch, tmp_path, folders, prefix, remedy):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    import _environment

    for age, folder in enumerate([*folders, ".venv-empty"]):
        (tmp_path / folder / "bin").mkdir(parents=True)
        if folder in folders:
            (tmp_path / folder / "bin" / "python").touch()
        os.utime(tmp_path / folder, (age, age))
    monkeypatch.setattr(_environment, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", prefix.format(root=tmp_path))
    assert _environment.remedy() == "Run: " + remedy.format(root=tmp_path)


def test_missing_extra_is_named_before_a_script_runs(monkeypatch, capsys):
    """A script imports what needs an extra before `main.run` shows errors in one line."""
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    import _environment

    error = extras.MissingPackage("train", ["optax"])
    _environment.explain(type(error), error, None)
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(("generate.py --prompt=x --config.dtype=", flag) for flag in ("target", "coordinator")),
        ("benchmark.py --config.dtype=", "workdir"),
        (f"train.py --config={TARGET} --workdir=x --config.tokenizer=", "export"),
    ],
)
def test_empty_flag_is_one_line(tmp_path, command, flag):
    """A flag of an unset shell variable is not ignored. A key of a config may be empty."""
    result = run(*command.split(), f"--{flag}=", path=tmp_path)
    fails_with_one_line(result, f"error: --{flag}: expected a value, found none")


@pytest.mark.process
def test_closed_stdout_is_one_line():
    """Python has no sys.stdout then, and the next file that is opened would get its number."""
    script = [sys.executable, ROOT / "scripts" / "plan.py"]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *script]
    result = subprocess.run(closing, stderr=subprocess.PIPE, encoding="utf-8", timeout=600)
    fails_with_one_line(result, "output: expected stdout and stderr to be open")


@pytest.mark.parametrize(("platforms", "asked"), [(None, 1), ("tpu,cpu", 0)])
def test_messages_of_libtpu_are_hidden_without_a_tpu(capfd, monkeypatch, platforms, asked):
    """JAX names its platforms where it sees a TPU. There, nothing is hidden."""
    fake = mock.Mock()
    fake.config.jax_platforms = platforms
    fake.devices.side_effect = lambda: os.write(2, b"unexpected worker hostname")
    monkeypatch.setattr(main, "jax", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    main._find_devices()
    os.write(2, b"later")
    assert fake.devices.call_count == asked and capfd.readouterr().err == "later"
