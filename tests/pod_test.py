"""The script for TPU slices: what it would run, and that it deletes only its own."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
GCLOUD = """#!/bin/bash
echo "$4 $5" >> "$LOG"
[[ " $FAIL " != *" $4 "* ]]
"""


@pytest.fixture
def pod(tmp_path):
    """Runs the script with a gcloud that only notes what it is asked, and fails where told to."""
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
        asked = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
        return result, asked

    return run


@pytest.mark.parametrize("variables", [{}, {"RUN": "0"}, {"RUN": ""}])
def test_all_steps_are_printed_and_none_is_run(pod, variables):
    result, asked = pod("all", **variables)
    assert result.returncode == 0 and not asked
    lines = [line.split("tpu-vm ")[-1].split()[0] for line in result.stdout.splitlines()]
    assert lines == ["create", "git", "scp", "ssh", "rm", "ssh", "ssh", "scp", "delete"]


def test_all_steps_run_in_order(pod):
    result, asked = pod("all", RUN="1")
    assert result.returncode == 0, result.stderr
    assert asked == ["describe", "create", "scp", "ssh", "ssh", "ssh", "scp", "delete"]
    assert not (ROOT / "spsjax.tar.gz").exists()


@pytest.mark.parametrize("step", ["create", "scp", "ssh"])
def test_a_step_that_fails_ends_the_run_and_deletes_the_slice(pod, step):
    result, asked = pod("all", RUN="1", fail=f"describe {step}")
    assert result.returncode != 0
    assert asked[-1] == "delete" and asked.count(step) == 1
    assert not (ROOT / "spsjax.tar.gz").exists()


def test_a_slice_that_is_there_already_is_left_alone(pod):
    result, asked = pod("all", RUN="1", fail="")
    assert result.returncode == 1 and asked == ["describe"]
    assert (
        result.stderr == "TPU: expected the name of a slice that is not there yet, found 'spsjax'\n"
    )


@pytest.mark.parametrize(
    ("steps", "variables", "found"),
    [
        (["all"], {"TYPE": "v3-8"}, "TYPE: expected v4-, v5p-, v5litepod- or v6e-"),
        (["run"], {"RESULTS": "my runs"}, "RESULTS: expected a relative folder"),
        (["run"], {"RESULTS": "/runs"}, "RESULTS: expected a relative folder"),
        (["create", "delete"], {}, "step: expected one, found 2"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(pod, steps, variables, found):
    result, asked = pod(*steps, RUN="1", **variables)
    assert result.returncode == 1 and not set(asked) - {"describe"}
    assert result.stderr.startswith(found) and result.stderr.count("\n") == 1


def test_the_type_does_not_matter_to_what_is_there(pod):
    result, asked = pod("delete", RUN="1", TYPE="v3-8")
    assert result.returncode == 0 and asked == ["delete"]


def test_a_command_s_quotes_arrive(pod):
    command = """python scripts/generate.py --prompt="import os" --config.seed=1"""
    result, _ = pod("run", COMMAND=command)
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {result.stdout}"], capture_output=True, encoding="utf-8"
    )
    assert command in printed.stdout
