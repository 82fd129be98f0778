"""Samplers side by side: records that depend on nothing else, and what is said of them."""

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest
from bad_input import one_line
from conftest import nearby_model, spread_model

from spsjax import SamplingParams, comparison, side_by_side, tokenizer
from spsjax.journal import Journal
from spsjax.samplers import ours
from spsjax.side_by_side import KEY, Plan
from spsjax.tasks import base


@dataclasses.dataclass(frozen=True)
class Toy(base.Task):
    """Three prompts, the second of two turns; a text is worth its length."""

    settings: ClassVar = {"warm": SamplingParams(), "greedy": SamplingParams(temperature=0.0)}
    max_new_tokens = 6

    def examples(self):
        yield base.Example("one", ("import os",))
        yield base.Example("two", ("def f", "and g"), group="talk")
        yield base.Example("long", ("x" * 600,))
        yield base.Example("three", ("class A:",))

    def scores(self, example, answers):
        return {"length": float(np.mean([len(answer) for answer in answers]))}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    pieces = tokenizer.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, 300)
    target = dataclasses.replace(spread_model(300), tokenizer=pieces)
    draft = dataclasses.replace(nearby_model(target), tokenizer=pieces)
    names = {"ArS": (None, 0), "SpS": (draft, 2), "itself": (target, 2)}
    return target, [ours(name, target, *drafter) for name, drafter in names.items()]


def filled(path, pair, plan=Plan(samples=2), stop=None):
    target, samplers = pair
    task = Toy()
    chosen = side_by_side.choose(task, target, samplers, plan)
    journal = Journal(path, dataclasses.asdict(plan), KEY)

    def progress(jobs):
        yield from jobs[:stop]

    side_by_side.sample(journal, task, chosen.examples, target, samplers, plan, progress)
    return chosen, journal


def plain(record):
    return {name: value for name, value in record.items() if "seconds" not in name}


def test_a_run_that_was_stopped_ends_with_the_same_records(pair, tmp_path):
    chosen, whole = filled(tmp_path / "whole.jsonl", pair)
    assert [example.name for example in chosen.examples] == ["one", "two", "three"]
    assert chosen.too_long == 1
    assert len(whole.records) == (3 + 1) * 2 * 2 * 3  # examples and a turn, settings, samples
    for stop in (5, 9, 20):
        filled(tmp_path / "parts.jsonl", pair, stop=stop)
    lines = (tmp_path / "parts.jsonl").read_bytes()
    (tmp_path / "parts.jsonl").write_bytes(lines[:-7])  # killed while it wrote
    _, parts = filled(tmp_path / "parts.jsonl", pair)
    assert list(map(plain, parts.records)) == list(map(plain, whole.records))


def test_samplers_agree_where_they_must(pair, tmp_path):
    _, journal = filled(tmp_path / "journal.jsonl", pair)
    texts = {tuple(record[name] for name in KEY): record["text"] for record in journal.records}
    for (setting, sampler, _, example, turn, number), text in texts.items():
        if setting == "greedy":
            assert text == texts["greedy", "ArS", 0, example, turn, 0], (sampler, number)
    warm = [
        texts["warm", *who, "one", 0, number]
        for who in (("ArS", 0), ("SpS", 2))
        for number in (0, 1)
    ]
    assert len(set(warm)) == 4  # of one law, but not of the same numbers


def test_rows_are_what_the_records_say(pair, tmp_path):
    chosen, journal = filled(tmp_path / "journal.jsonl", pair)
    scores = comparison.scores_of(Toy(), chosen.examples, journal.records)
    found = comparison.rows(journal.records, scores)
    assert [(row.setting, row.sampler) for row in found] == [
        (setting, sampler) for setting in ("warm", "greedy") for sampler in ("ArS", "SpS", "itself")
    ]
    for row in found:
        mine = [
            record
            for record in journal.records
            if (record["setting"], record["sampler"]) == (row.setting, row.sampler)
        ]
        seconds, tokens = (
            sum(column) for column in zip(*((r["seconds"], len(r["tokens"])) for r in mine))
        )
        assert row.ms_per_token == pytest.approx(1e3 * seconds / tokens)
        assert (row.examples, row.texts, row.tokens) == (3, 8, tokens)
        assert row.latency_ms[50] <= row.latency_ms[90] <= row.latency_ms[99]
        mean, (low, high) = row.metrics["length"]
        assert low <= mean <= high
    ars, sps, itself = found[3:]
    assert (
        ars.speedup is None
        and ars.acceptance is None
        and ars.tokens_per_call == 1
        and ars.acceptance_by_position is None
    )
    assert sps.speedup == pytest.approx(ars.ms_per_token / sps.ms_per_token)
    assert sps.speedup_interval[0] <= sps.speedup <= sps.speedup_interval[1]
    assert sps.chances == {"length": 1, "1-grams": 1, "2-grams": 1}  # greedy texts are the same
    assert itself.acceptance == 1 and itself.tokens_per_call > 1.9
    json.dumps([dataclasses.asdict(row) for row in found])


def test_what_cannot_be_sampled(pair):
    target, samplers = pair
    with one_line("settings", "warm, greedy", "'cold'"):
        side_by_side.settings(Toy(), Plan(settings=("cold",)))
    with one_line("tokens", "longer"):
        side_by_side.choose(Toy(), target, samplers, Plan(new_tokens=510))
    with one_line("samples"):
        Plan(samples=0)
    with one_line("tokenizer"):
        model = spread_model(48)
        side_by_side.choose(Toy(), model, [ours("ArS", model)], Plan())
