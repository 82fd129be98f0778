"""Samplers side by side: records that depend on nothing else, and what is said of them."""

import dataclasses
import json
import types
from typing import ClassVar

import numpy as np
import pytest
from bad_input import one_line
from conftest import nearby_model, spread_model

from spsjax import SamplingParams, tokenization
from spsjax.evaluation import runner, summary
from spsjax.evaluation.journal import Journal
from spsjax.evaluation.runner import KEY, Plan
from spsjax.evaluation.samplers import ours
from spsjax.evaluation.tasks import base


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
    pieces = tokenization.train(["def f(x):\n    return x\n" * 9, "import os\n" * 9], path, 300)
    target = dataclasses.replace(spread_model(300), tokenizer=pieces)
    draft = dataclasses.replace(nearby_model(target), tokenizer=pieces)
    names = {"ArS": (None, 0), "SpS": (draft, 2), "itself": (target, 2)}
    return target, [ours(name, target, *drafter) for name, drafter in names.items()]


def filled(path, pair, plan=Plan(samples=2), stop=None):
    target, samplers = pair
    task = Toy()
    chosen = runner.choose(task, target, samplers, plan)
    journal = Journal(path, dataclasses.asdict(plan), KEY)

    def progress(jobs):
        yield from jobs[:stop]

    runner.sample(journal, task, chosen.examples, target, samplers, plan, progress)
    return chosen, journal


def plain(record):
    timed = "seconds", "prompt_seconds", "parts"
    return {name: value for name, value in record.items() if name not in timed}


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


def test_parts_of_a_round_are_timed_at_some_examples(pair, tmp_path):
    names = {0: set(), 1: {"one"}, 2: {"one", "two"}, 9: {"one", "two", "three"}}
    for timed, expected in names.items():
        path, plan = tmp_path / f"{timed}.jsonl", Plan(settings=("warm",), timed=timed)
        _, journal = filled(path, pair, plan)
        assert {record["example"] for record in journal.records if "parts" in record} == expected
    for record in journal.records:
        assert record["parts"]["scoring"] > 0
        assert (record["parts"]["draft_step"] > 0) == (record["sampler"] != "ArS")


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
    scores = summary.scores_of(Toy(), chosen.examples, journal.records)
    found = summary.rows(journal.records, scores)
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
        assert row.metrics["length"][0] > 0 and row.metrics["length"][1] is None  # of three
    ars, sps, itself = found[3:]
    assert (
        ars.speedup is None
        and ars.acceptance is None
        and ars.tokens_per_call == 1
        and ars.acceptance_by_position is None
    )
    assert sps.speedup == pytest.approx(ars.ms_per_token / sps.ms_per_token)
    assert sps.chances == {"length": 1, "1-grams": 1, "2-grams": 1}  # greedy texts are the same
    assert itself.acceptance == 1 and itself.tokens_per_call > 1.9
    json.dumps([dataclasses.asdict(row) for row in found])


def test_the_first_run_of_a_program_is_not_counted(pair, tmp_path):
    target, (ars, *_) = pair
    seconds = iter(range(1, 99))

    def call(*args, **options):
        made = ars.call(*args, **options)
        turn = next(seconds)
        stats = dataclasses.replace(made.stats, compile_seconds=float(turn in (1, 4)))
        return dataclasses.replace(made, seconds=float(turn), stats=stats if says else None)

    for says, kept in ((True, [2, 3, 5, 6]), (False, [8, 9, 10, 11])):
        plan = Plan(settings=("warm",))
        samplers = [dataclasses.replace(ars, call=call)]
        journal = Journal(tmp_path / f"{says}.jsonl", {}, KEY)
        chosen = runner.choose(Toy(), target, samplers, plan)
        runner.sample(journal, Toy(), chosen.examples, target, samplers, plan)
        assert [record["seconds"] for record in journal.records] == kept


@dataclasses.dataclass(frozen=True)
class Known(base.Task):
    """Eight prompts, whose records the test makes up."""

    settings: ClassVar = {"warm": SamplingParams()}
    max_new_tokens = 9

    def examples(self):
        for name in "abcdefgh":
            yield base.Example(name, (name,), group="late" if name > "d" else "early")

    def scores(self, example, answers):
        return {"length": float(len(answers[0]))}


def test_samplers_of_different_laws_are_told_apart():
    records = [
        {
            "setting": "warm", "sampler": name, "num_speculative_tokens": 0, "example": example,
            "turn": 0, "sample": 0, "group": "", "tokens": [token] * 10, "seconds": seconds,
            "text": "x" * length,
        }
        for number, example in enumerate("abcdefgh")
        for name, token, length, seconds in (("one", 1, 2, 1.0), ("other", 2, 3, 1.0 + number))
    ]  # fmt: skip
    scores = summary.scores_of(Known(), list(Known().examples()), records)
    one, other = summary.rows(records, scores)
    assert not one.differences and not one.chances and one.spread_ms == 0
    assert other.differences == {"length": (1.0, (1.0, 1.0))}
    assert other.chances["length"] == pytest.approx(2 / 256, abs=0.003)
    assert other.chances["1-grams"] == pytest.approx(2 / 256, abs=0.01)
    low, high = other.speedup_interval
    assert other.speedup == pytest.approx(1 / 4.5) and low < other.speedup < high
    assert other.spread_ms == pytest.approx(100 * np.std(range(8)))
    assert other.latency_ms == pytest.approx({50: 4500, 90: 7300, 99: 7930})


def test_a_short_text_has_little_weight_in_the_spread():
    records = [
        {
            "setting": "warm", "sampler": "one", "num_speculative_tokens": 0, "example": example,
            "turn": 0, "sample": 0, "group": "", "tokens": [7] * length, "seconds": 1.0,
        }
        for example, length in (("a", 1), ("b", 9))
    ]  # fmt: skip
    (row,) = summary.rows(records, {})
    assert row.ms_per_token == pytest.approx(200)
    assert row.spread_ms**2 == pytest.approx((800**2 + 9 * (1000 / 9 - 200) ** 2) / 10)


def test_what_is_spread():
    found = [runner.spread("abcdefghij", count) for count in (0, 1, 3, 10, 99)]
    assert ["".join(each) for each in found] == ["", "a", "adg", "abcdefghij", "abcdefghij"]


def test_a_loop_is_compared_at_the_same_examples():
    """A machine that slows down for one of them slows both samplers."""
    records = [
        {
            "setting": "warm", "sampler": name, "num_speculative_tokens": K, "example": example,
            "turn": 0, "sample": 0, "group": "", "tokens": [7] * 30,
            "prompt_seconds": 5.0, "seconds": 5.0 + calls * round_seconds * slow,
            "target_calls": calls, "proposed": K * calls, "accepted": [0, 0, calls][: K + 1],
            "parts": {"draft_step": draft_step * slow, "scoring": scoring * slow},
        }
        for example, slow in (("a", 1), ("b", 100), ("c", 3))
        for name, K, calls, round_seconds, draft_step, scoring in (
            ("ArS", 0, 30, 1.1, 0.0, 1.0), ("SpS", 2, 10, 2.2, 0.2, 1.6),
        )
    ]  # fmt: skip
    base, row = summary.rows(records, {})
    assert row.tokens_per_call == 3 and row.loop_speedup == pytest.approx(3 * 1.1 / 2.2)
    assert row.costs.draft_step == pytest.approx(0.2) and row.costs.scoring == pytest.approx(1.6)
    assert base.loop_over_parts == pytest.approx(1.1)
    assert row.loop_over_parts == pytest.approx(2.2 / (2 * 0.2 + 1.6))
    assert base.costs is base.loop_speedup is None


def test_a_fingerprint_is_of_all_that_is_asked_and_judged_by(pair):
    target, _ = pair
    example = base.Example("a", ("def f", "more"), {"summary": "x"})
    seen = {runner.fingerprint(Toy(), target, [example])}
    for changes in ({"turns": ("def f", "less")}, {"reference": {"summary": "y"}}, {"name": "b"}):
        changed = dataclasses.replace(example, **changes)
        seen.add(runner.fingerprint(Toy(), target, [changed]))
    other = tokenization.train(
        ["def more(f):\n" * 9], target.tokenizer.path.with_name("b.model"), 275
    )
    target = dataclasses.replace(target, tokenizer=other)
    seen.add(runner.fingerprint(Toy(), target, [example]))
    assert len(seen) == 5


@dataclasses.dataclass(frozen=True)
class Chat(Toy):
    chat: ClassVar = True


def test_a_conversation_is_by_the_template_where_there_is_one(pair):
    target, _ = pair
    turns, answers = ["Hi", "And?"], ["Hello"]
    plain = runner.ids_of(target, Chat(), turns, answers)
    assert target.tokenizer.decode(plain) == "Hi\n\nHello\n\nAnd?"
    talks = types.SimpleNamespace(has_template=True, chat=list)
    target = dataclasses.replace(target, tokenizer=talks)
    found = runner.ids_of(target, Chat(), turns, answers)
    assert [each["role"] for each in found] == ["user", "assistant", "user"]
    assert [each["content"] for each in found] == ["Hi", "Hello", "And?"]


@dataclasses.dataclass(frozen=True)
class Twins(Toy):
    def examples(self):
        yield base.Example("one", ("import os",))
        yield base.Example("one", ("import sys",))


def test_what_cannot_be_sampled(pair):
    target, samplers = pair
    with one_line("settings", "warm, greedy", "'cold'"):
        runner.settings(Toy(), Plan(settings=("cold",)))
    with one_line("names", "'one'"):
        runner.choose(Twins(), target, samplers, Plan())
    with one_line("max_new_tokens", "510"):
        runner.choose(Toy(), target, samplers, Plan(new_tokens=510))
    with one_line("samples"):
        Plan(samples=0)
    with one_line("tokenizer"):
        model = spread_model(48)
        runner.choose(Toy(), model, [ours("ArS", model)], Plan())
