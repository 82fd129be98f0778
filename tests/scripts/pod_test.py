"""Tests of the script for TPU slices: its commands, and that it deletes only its own slice."""

import os
import subprocess

import pytest
from helpers.environment import ROOT

pytestmark = pytest.mark.process  # of bash

GCLOUD = """#!/bin/bash
echo "$4 $5" >> "$LOG"
[[ " $FAIL " != *" $4 "* ]]
"""


@pytest.fixture
def pod(tmp_path):
    """Runs the script with a gcloud that notes its commands and fails those named in `fail`."""
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)

    def run(*steps: str, fail: str = "describe", **variables: str):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "FAIL": fail}
        result = subprocess.run(
            ["bash", ROOT / "scripts" / "tpu_pod.sh", *steps],
            capture_output=True, encoding="utf-8", env=os.environ | path | variables,
        )  # fmt: skip
        lines = log.read_text().splitlines() if log.exists() else []
        return result, [line.split()[0] for line in lines]

    return run


@pytest.mark.parametrize("variables", [{}, {"RUN": "0"}])
def test_pod_without_run_prints_all_steps(pod, variables):
    result, commands = pod("all", **variables)
    assert result.returncode == 0 and not commands
    lines = [line.split("tpu-vm ")[-1].split()[0] for line in result.stdout.splitlines()]
    assert lines == ["create", "git", "scp", "ssh", "rm", "ssh", "ssh", "scp", "delete"]


def test_pod_runs_all_steps_in_order(pod):
    result, commands = pod("all", RUN="1")
    assert result.returncode == 0, result.stderr
    assert commands == ["describe", "create", "scp", "ssh", "ssh", "ssh", "scp", "delete"]
    assert not (ROOT / "spsjax.tar.gz").exists()


@pytest.mark.parametrize("step", ["create", "scp", "ssh"])
def test_pod_step_that_fails_ends_run_and_deletes_slice(pod, step, tmp_path):
    (tmp_path / "git").write_text("#!/bin/bash\ntouch spsjax.tar.gz\n")  # the real one takes long
    (tmp_path / "git").chmod(0o755)
    result, commands = pod("all", RUN="1", fail=f"describe {step}")
    assert result.returncode != 0
    assert commands[-1] == "delete" and commands.count(step) == 1
    assert not (ROOT / "spsjax.tar.gz").exists()


def test_pod_leaves_existing_slice_alone(pod):
    result, commands = pod("all", RUN="1", fail="")
    assert result.returncode == 1 and commands == ["describe"]
    message = "TPU: expected the name of a slice that is not there yet, found 'spsjax'\n"
    assert result.stderr == message
    result, commands = pod("delete", RUN="1", TYPE="v3-8")  # whatever the type
    assert result.returncode == 0 and commands == ["delete"]


@pytest.mark.parametrize(
    ("steps", "variables", "message"),
    [
        (["all"], {"TYPE": "v3-8"}, "TYPE: expected v4-, v5p-, v5litepod- or v6e-"),
        (["run"], {"RESULTS": "my runs"}, "RESULTS: expected a relative folder"),
        (["create", "delete"], {}, "step: expected one, found 2"),
    ],
)
def test_pod_refuses_bad_arguments_in_one_line(pod, steps, variables, message):
    result, commands = pod(*steps, RUN="1", **variables)
    assert result.returncode == 1 and not set(commands) - {"describe"}
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_pod_keeps_quotes_of_command(pod):
    command = """python scripts/generate.py --prompt="import os" --config.seed=1"""
    result, _ = pod("run", COMMAND=command)
    show = ["bash", "-c", f"printf '%s\\n' {result.stdout}"]
    printed = subprocess.run(show, capture_output=True, encoding="utf-8")
    assert command in printed.stdout
