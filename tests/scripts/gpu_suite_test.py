"""The suite for one accelerator, all of it at tiny shapes on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers.command_line import ROOT, fails_with_one_line, run

from spsjax.cli import plots
from spsjax.evaluation import flips, hf_times
from spsjax.performance.decode_times import Cell

SCRIPT = ROOT / "scripts" / "gpu_suite.sh"
TINY = f"--config={ROOT / 'configs' / 'experiments' / 'gpu_suite.py'}:tiny"
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


STUB = """#!/bin/bash
# Stands for Python: notes what it is asked for, and each part takes no time, fails or takes long.
for word; do
  case "$word" in --part=*) part=${word#--part=} ;; --out=*) out=${word#--out=} ;; esac
done
case "$*" in
  *torch*) exit 1 ;;
  *default_backend*) echo cpu; exit ;;
  *"-m pytest"*) echo "tests $SPSJAX_TEST_PLATFORM" >> "$LOG"; exit ;;
esac
echo "$part" >> "$LOG"
case "$part" in pairs) echo tiny ;; report) cat "$out"/part-* ;; "$SLOW") sleep 60 ;; esac
[ "$part" != "$FAIL" ] || exit 3
[ "$part" != flips ] || echo '"new"' > "$out/part-flips.json"
[ "$part" != loop ] || echo '"loop"' > "$out/part-loop-tiny.json"
"""


def suite(*arguments, **environment):
    environment = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )


@pytest.fixture
def stubbed(tmp_path):
    """Runs the suite with a stub of Python; returns its result and the parts that it ran."""
    stub, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    stub.write_text(STUB)
    stub.chmod(0o755)
    out.mkdir()

    def run_suite(**environment):
        log.write_text("")
        result = suite(out, "--tiny", PYTHON=str(stub), LOG=str(log), **environment)
        return result, log.read_text().splitlines()

    run_suite.out = out
    return run_suite


@pytest.mark.process
def test_suite_leaves_a_row_per_program_and_a_plot(tmp_path):
    """Without torch that part is left out."""
    pytest.importorskip("matplotlib")
    result = suite(tmp_path, "--tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    parts = {part["part"]: part for part in json.loads((tmp_path / "results.json").read_text())}
    assert set(parts) == {"loop", "flips", *(["huggingface"] if HAS_TORCH else [])}
    names = [Cell(**row["cell"]).name for row in parts["loop"]["rows"]]
    assert names == ["ArS", "SpS 2", "score 1", "score 3", "draft 2", "tree 4"]
    assert [row["texts"] for row in parts["flips"]["rows"]] == [1, 1, 1]
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    # In a process of its own: the profiler can crash one that has loaded thousands of programs.
    profile = tmp_path / "profile-tiny"
    assert "HloModule" in (profile / "ArS" / "program.txt").read_text()
    assert len(list(profile.rglob("*.trace.json.gz"))) == 2
    assert "passed" in (tmp_path / "tests.log").read_text().splitlines()[-1]
    shown = "huggingface-tiny: exit code 0" if HAS_TORCH else "huggingface: left out"
    for text in (shown, *names):
        assert text in result.stdout


@pytest.mark.process
def test_suite_runs_parts_in_order(stubbed):
    """The tests come last, because they would disturb the times."""
    result, parts = stubbed()
    assert result.returncode == 0, result.stdout + result.stderr
    assert parts == ["pairs", "loop", "flips", "tests cpu", "report"]
    assert "huggingface: left out" in result.stdout


@pytest.mark.process
def test_suite_out_of_time_ends_parts_and_succeeds(stubbed):
    """Results of parts that did not run again stay, and are in the report."""
    (stubbed.out / "part-loop-tiny.json").write_text('"old"')
    (stubbed.out / "part-flips.json").write_text('"old"')
    result, parts = stubbed(PARTS="flips", SUITE_SECONDS="1", SLOW="flips")
    assert result.returncode == 0 and "flips: exit code 124" in result.stdout
    assert parts == ["pairs", "flips", "report"] and '"old"' in result.stdout
    assert (stubbed.out / "part-loop-tiny.json").read_text() == '"old"'
    assert not (stubbed.out / "part-flips.json").exists()
    assert "flips: no results; more SUITE_SECONDS than 1 may help" in result.stdout


@pytest.mark.process
@pytest.mark.parametrize(("part", "name"), [("loop", "loop-tiny"), ("flips", "flips")])
def test_suite_fails_with_a_part(stubbed, part, name):
    """The exit code says it, and the other parts are there."""
    result, parts = stubbed(PARTS="loop flips", FAIL=part)
    assert result.returncode == 1 and f"{name}: exit code 3" in result.stdout
    assert f"error: these parts failed: {name}" in result.stderr
    assert parts == ["pairs", "loop", "flips", "report"]


def test_part_whose_file_is_a_folder_fails(tmp_path):
    (tmp_path / "part-flips.json" / "x").mkdir(parents=True)
    result = run("gpu_suite.py", TINY, f"--out={tmp_path}", "--part=flips")
    fails_with_one_line(result, "part-flips.json", "found a folder")


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), {}, "expected a folder"),
        (("x", "--tinny"), {}, "--tinny: expected --tiny or nothing"),
        (("x",), {"PARTS": "loops"}, "PARTS: expected some of loop"),
        (("x",), {"PARTS": " "}, "PARTS: expected some of loop"),
        (("x",), {"SUITE_SECONDS": "1.5"}, "SUITE_SECONDS: expected 1 to 999999 seconds"),
        (("x",), {"PYTHON": "nopython"}, "PYTHON: expected an interpreter, found nopython"),
        (("--tiny",), {}, "expected a folder"),
    ],
)
def test_suite_names_a_mistake(tmp_path, arguments, environment, message):
    result = suite(*(tmp_path / name if name == "x" else name for name in arguments), **environment)
    assert result.returncode and message in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--part=loop", "--pair=x"), "--pair: expected one of tiny, found x"),
        (("--part=report",), "expected results of other parts, found none"),
        ((), "--part: expected one of pairs, loop"),
        (("--part=loop", "--pair=tiny", "--config.threads=0"), "threads: expected"),
        (("--part=loop", "--pair=tiny", "--config.contexts=()"), "contexts: expected at least one"),
    ],
)
def test_part_names_a_mistake(tmp_path, flags, message):
    fails_with_one_line(run("gpu_suite.py", TINY, f"--out={tmp_path}", *flags), message)


def test_damaged_part_is_named(tmp_path):
    (tmp_path / "part-loop-x.json").write_text('{"part": "loop"}')
    result = run("gpu_suite.py", TINY, f"--out={tmp_path}", "--part=report")
    fails_with_one_line(result, "part-loop-x.json: expected the results of a part")


def test_huggingface_drafts_for_one_row_only():
    cells = hf_times.cells(("plain", "assisted"), (1, 8), (128,))
    assert cells == [("plain", 1, 128), ("assisted", 1, 128), ("plain", 8, 128)]


@pytest.mark.slow
def test_flips_counts_texts_that_differ(target, draft):
    """A pair agrees with itself; against other weights the first difference has a margin."""
    prompts = [[1, 2, 3], [4, 5, 6]]
    same, *_ = flips.compare({"a": (target, draft)}, prompts, 8, 2)
    assert (same.texts, same.differ, same.tokens, same.margins) == (2, 0, 16, [])
    *_, other = flips.compare({"a": (target, draft), "b": (draft, draft)}, prompts, 8, 2)
    assert other.compared == "ArS: a and b" and other.differ == len(other.margins) > 0
    assert other.differ <= other.tokens < 16


def test_plot_leaves_out_what_has_no_time_per_token(tmp_path):
    pytest.importorskip("matplotlib")
    plots.decoding([{"part": "flips", "pair": None, "rows": [{}]}], tmp_path / "none.png")
    assert not list(tmp_path.iterdir())
