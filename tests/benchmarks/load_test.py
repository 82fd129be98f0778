"""Requests that arrive over time: who is served when, and the model of an engine."""

import json

import numpy as np
import pytest
from helpers.command_line import ROOT, fails_with_one_line, launch, run, settings, succeeds

import spsjax
from spsjax import InputError, SamplingParams
from spsjax.benchmarks import load
from spsjax.decode.schedule import Costs

LOAD = f"--config={ROOT / 'configs' / 'experiments' / 'load.py'}"
PROMPTS = [[1, 2, 3], [4]]


def test_arrivals_are_a_poisson_process():
    jobs = load.poisson(PROMPTS, 5.0, 4000, 40, seed=1)
    gaps = np.diff([0.0, *(job.arrival for job in jobs)])
    assert gaps.min() > 0
    np.testing.assert_allclose([gaps.mean(), gaps.std()], 0.2, rtol=0.05)
    wanted = [job.new_tokens for job in jobs]
    assert (min(wanted), max(wanted)) == (10, 40)
    assert [job.prompt for job in jobs[:3]] == [[1, 2, 3], [4], [1, 2, 3]]
    assert jobs == load.poisson(PROMPTS, 5.0, 4000, 40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [None, 2])
def test_engine_serves_every_job(target, draft, clients):
    """Two clients never have more than two requests; without clients many come at once."""
    engine = spsjax.Engine(target, draft, 2, rows=4, slots=64, stop_at_eos=False)
    jobs = load.poisson(PROMPTS, 1e5, 10, 12)
    served = load.run(engine, jobs, SamplingParams(), clients)
    assert sorted(job.tokens for job in served) == sorted(job.new_tokens for job in jobs)
    assert all(job.arrival <= job.first <= job.end for job in served)
    at_once = [sum(job.arrival < end <= job.end for job in served) for end in ends(served)]
    assert max(at_once) <= 2 if clients else max(at_once) > 2
    figures = load.summary(served)
    waits = [job.end - job.arrival for job in served]
    assert figures.latency == pytest.approx(np.mean(waits))
    assert figures.latency_percentiles[0] == pytest.approx(np.median(waits))
    total = sum(job.new_tokens for job in jobs)
    assert figures.tokens_per_second == pytest.approx(total / max(ends(served)))


def ends(served):
    return [job.end for job in served]


def hardware(draft, token, rates=(0.8, 0.7, 0.6, 0.5)):
    """Returns times in which a round costs 1, and more for each draft token and each scored one."""

    def costs(rows):
        depth = np.arange(len(rates) + 1)
        score = 1 + token * rows * (1 + depth)
        return Costs((draft * depth).astype(np.float32), score.astype(np.float32), np.int32(0))

    return load.Hardware(costs, lambda tokens: 0.01 * tokens, rates, (1, 2, 4, 8))


def latency(model, jobs, depth):
    served = load.simulate(model, jobs, depth)
    assert len(served) == len(jobs)
    return load.summary(served).latency


@pytest.mark.parametrize("rate", [0.002, 0.1])
@pytest.mark.parametrize("token", [0.001, 0.3, 1.0])
def test_chosen_depths_are_as_fast_as_the_best_fixed_depth(rate, token):
    """Over all fixed depths by brute force: from idle to full rows, from free to dear scoring."""
    model, jobs = hardware(0.05, token), load.poisson(PROMPTS, rate, 30, 60, seed=2)
    fixed = {depth: latency(model, jobs, depth) for depth in range(5)}
    assert latency(model, jobs, None) <= 1.03 * min(fixed.values())


def test_simulated_times_are_those_of_the_rounds():
    """One job alone, of which nothing is accepted: its prompt, then a round for every token."""
    model = hardware(0.05, 0.0, (0.0, 0.0))
    (served,) = load.simulate(model, [load.Job(3.0, [1] * 10, 20, 0)], 2)
    assert served.first == pytest.approx(3 + 0.1 + 1.1)
    assert served.end == pytest.approx(3 + 0.1 + 20 * 1.1)
    (served,) = load.simulate(hardware(0.05, 0.0, (1.0, 1.0)), [load.Job(0.0, [1], 20, 0)], 2)
    assert served.end == pytest.approx(0.01 + 7 * 1.1)


def test_loads_that_cannot_be_made():
    for arguments, message in (
        (([], 1.0, 5, 8), "prompts: expected at least one, found none"),
        ((PROMPTS, 0.0, 5, 8), "rate: expected a finite number"),
        ((PROMPTS, 1.0, 0, 8), "count: expected an integer >= 1, found 0"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            load.poisson(*arguments)


@pytest.mark.slow
def test_script_measures_all_loads(pair, tmp_path):
    pytest.importorskip("matplotlib")
    workdir = tmp_path / "load"
    small = {
        "num_speculative_tokens": "('0','2')", "rows": 2, "slots": 64, "rates": "(50.0,)",
        "clients": "(2,)", "requests": 3, "texts": "('import os', 'def f(x):')",
        "prompt_lengths": "(4,)", "max_new_tokens": 8,
    }  # fmt: skip
    flags = [*pair, *settings(small)]
    shown = succeeds("benchmark.py", LOAD, *flags, f"--workdir={workdir}").stdout
    rows = json.loads((workdir / "table.json").read_text())["rows"]
    names = [(row["load"], row["system"]) for row in rows]
    assert names == [(of, name) for of in ("rate", "clients") for name in ("plain", "K = 2")]
    assert all(row["requests"] == 3 and row["latency"] > 0 for row in rows)
    assert (workdir / "table.md").read_text() in shown
    assert (workdir / "table.png").read_bytes().startswith(b"\x89PNG")
    for odd, name in (("rates=(-1.0,)", "rates"), ("max_new_tokens=200", "prompt")):
        other = f"--workdir={tmp_path / 'other'}"
        fails_with_one_line(run("benchmark.py", LOAD, *flags, other, f"--config.{odd}"), name)


@pytest.mark.process
def test_script_simulates_loads(tmp_path):
    pytest.importorskip("matplotlib")
    flags = settings(simulated=True, requests=30, rates="(1.0,20.0)")
    folder = tmp_path / "load"
    succeeds("benchmark.py", LOAD, *flags, f"--workdir={folder}", by=launch)
    rows = json.loads((folder / "table.json").read_text())["rows"]
    assert len(rows) == 8
    for rate in (1.0, 20.0):
        own = {row["system"]: row["latency"] for row in rows if row["value"] == rate}
        assert own["K chosen"] <= 1.05 * min(own.values())
    for odd in ("acceptance=(2.0,)", "floors.target_row=-1.0", "clients=(2,)"):
        other = f"--workdir={tmp_path / 'other'}"
        result = run("benchmark.py", LOAD, *flags, other, f"--config.{odd}")
        fails_with_one_line(result, odd.partition("=")[0].rpartition(".")[2])


def test_repetitions_count_as_one_long_run():
    one = [load.Served(0.0, 1.0, 2.0, 10), load.Served(1.0, 2.0, 4.0, 30)]
    both = one + load.later(one, one)
    assert both[3] == load.Served(5.0, 6.0, 8.0, 30)
    assert load.summary(both).latency == load.summary(one).latency
    assert load.summary(both).tokens_per_second == load.summary(one).tokens_per_second
    assert load.later(one, []) == one
