"""Systems run in turn: records that depend on nothing else, and resume."""

import dataclasses
import json
import types
from typing import ClassVar

import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model

from spsjax import SamplingParams, decode, tokenization
from spsjax.evaluation import runner, samplers, speed, summary
from spsjax.evaluation.journal import Journal, Records
from spsjax.evaluation.runner import RECORD_KEY, Plan
from spsjax.evaluation.samplers import Role, System, spsjax_system
from spsjax.evaluation.tasks import base
from spsjax.performance import microbenchmarks


@dataclasses.dataclass(frozen=True)
class Toy(base.Task):
    """Task of three prompts, the second with two turns; the score of a text is its length."""

    settings: ClassVar = {"warm": SamplingParams(), "greedy": SamplingParams(temperature=0.0)}
    max_new_tokens = 6

    def examples(self):
        yield base.Example("one", ("import os",))
        yield base.Example("two", ("def f", "and g"), group="talk")
        yield base.Example("long", ("x" * 600,))
        yield base.Example("three", ("class A:",))

    def scores(self, example, answers):
        return {"length": float(np.mean([len(answer) for answer in answers]))}


@pytest.fixture(autouse=True)
def buffers(monkeypatch):
    """Buffers of 64 slots, so that prompts of all lengths share programs."""
    monkeypatch.setattr(decode, "num_slots", lambda length: 64)


@pytest.fixture(scope="module")
def pair(tiny_tokenizer):
    """A target and three systems: plain sampling, with a draft, and with itself as its draft."""
    target = dataclasses.replace(numpy_spread_model(300), tokenizer=tiny_tokenizer)
    draft = dataclasses.replace(numpy_nearby_model(target), tokenizer=tiny_tokenizer)
    names = {"ArS": (None, 0), "SpS": (draft, 2), "itself": (target, 2)}
    return target, [spsjax_system(name, target, *drafter) for name, drafter in names.items()]


def filled(path, pair, plan=Plan(samples=2, timed=0), stop=None):
    """Runs the first `stop` jobs of a plan on the toy task."""
    target, systems = pair
    task = Toy()
    selected = runner.select_examples(task, target, systems, plan)
    journal = Journal(path, dataclasses.asdict(plan), RECORD_KEY)

    def progress(jobs):
        yield from jobs[:stop]

    workload = runner.task_workload(task, target, selected.examples, plan)
    runner.run_all(systems, workload, journal, progress)
    return selected, journal


def without_times(record):
    times = "seconds", "prompt_seconds", "compile_seconds", "round_cost"
    return {name: value for name, value in record.items() if name not in times}


@pytest.mark.slow
def test_run_all_resumes_to_the_same_records(pair, tmp_path):
    """A run that was stopped and killed ends with the records of one that was not."""
    selected, whole = filled(tmp_path / "whole.jsonl", pair)
    assert [example.name for example in selected.examples] == ["one", "two", "three"]
    assert selected.too_long == 1
    assert len(whole.records) == (3 + 1) * 2 * 2 * 3  # examples and a turn, settings, samples
    path = tmp_path / "stopped.jsonl"
    for stop in (5, 9, 20):
        filled(path, pair, stop=stop)
    path.write_bytes(path.read_bytes()[:-7])  # killed while it wrote
    _, resumed = filled(path, pair)
    assert list(map(without_times, resumed.records)) == list(map(without_times, whole.records))


@pytest.mark.parametrize(
    ("timed", "expected"),
    [(0, []), (1, ["one"]), (2, ["one", "two"]), (9, ["one", "two", "three"])],
)
def test_run_all_times_rounds_at_some_examples(pair, tmp_path, timed, expected):
    """The parts of a round are timed at evenly spaced examples, as many as the plan says."""
    target, (ars, *_) = pair
    seen = []

    def time_round(prompt, *options):
        assert options == (SamplingParams(), 6)
        seen.append(target.tokenizer.decode(prompt))
        return microbenchmarks.RoundCost(0.0, 1.0)

    ars = dataclasses.replace(ars, call=lambda *_: samplers.Sample(1.0, [5]), time_round=time_round)
    plan = Plan(settings=("warm",), timed=timed)
    _, journal = filled(tmp_path / "journal.jsonl", (target, [ars]), plan)
    costs = {record["example"] for record in journal.records if "round_cost" in record}
    assert costs == {*expected}
    turns = {example.name: example.turns[0] for example in Toy().examples()}
    assert [text for text in seen if "\n" not in text] == [turns[name] for name in expected]


@pytest.mark.slow
def test_rounds_of_real_systems_have_costs(pair, tmp_path):
    _, journal = filled(tmp_path / "journal.jsonl", pair, Plan(settings=("warm",)))
    for record in journal.records:
        assert record["round_cost"]["scoring"] > 0
        assert (record["round_cost"]["draft_step"] > 0) == (record["role"] != Role.BASELINE)


@pytest.mark.slow
def test_run_all_systems_agree_if_greedy_only(pair, tmp_path):
    """Greedy texts are equal; sampled ones have the same distribution but other draws."""
    _, journal = filled(tmp_path / "journal.jsonl", pair)
    texts = {
        tuple(record[name] for name in RECORD_KEY): record["text"] for record in journal.records
    }
    for (setting, system, _, example, turn, sample, _), text in texts.items():
        if setting == "greedy":
            assert text == texts["greedy", "ArS", 0, example, turn, 0, 0], (system, sample)
    warm = [
        texts["warm", *key, "one", 0, sample, 0]
        for key in (("ArS", 0), ("SpS", 2))
        for sample in (0, 1)
    ]
    assert len(set(warm)) == 4


def test_summarize_matches_the_records(pair, tmp_path):
    """Summaries of real records are what the records say."""
    selected, journal = filled(tmp_path / "journal.jsonl", pair)
    scores = summary.score_examples(Toy(), selected.examples, journal.records)
    summaries = summary.summarize(journal.records, scores)
    assert [(system.setting, system.system) for system in summaries] == [
        (setting, system) for setting in ("warm", "greedy") for system in ("ArS", "SpS", "itself")
    ]
    for system in summaries:
        records = [
            record
            for record in journal.records
            if (record["setting"], record["system"]) == (system.setting, system.system)
        ]
        seconds = sum(record["seconds"] for record in records)
        tokens = sum(len(record["tokens"]) for record in records)
        assert system.ms_per_token == pytest.approx(1e3 * seconds / tokens)
        assert (system.num_examples, system.num_texts, system.num_tokens) == (3, 8, tokens)
        assert system.latency_ms[50] <= system.latency_ms[90] <= system.latency_ms[99]
        mean, interval = system.scores["length"]
        assert mean > 0 and interval is None  # there are only three examples
    ars, sps, itself = summaries[3:]
    assert (ars.role, sps.role) == (Role.BASELINE, Role.SPECULATIVE)
    assert ars.speedup is ars.acceptance_rate is ars.acceptance_by_position is None
    assert ars.block_efficiency == 1
    assert sps.speedup == pytest.approx(ars.ms_per_token / sps.ms_per_token)
    assert sps.p_values == {"length": 1, "1-grams": 1, "2-grams": 1}  # greedy texts are the same
    assert sps.same_tokens and itself.same_tokens
    assert [system.same_tokens for system in summaries[:3]] == [None] * 3
    assert itself.acceptance_rate == 1 and itself.block_efficiency > 1.9
    json.dumps([dataclasses.asdict(system) for system in summaries])


@pytest.mark.parametrize(
    ("reports", "seconds"), [(True, [2, 3, 5, 6]), (False, [2, 3, 4, 5])], ids=["ours", "others"]
)
def test_run_all_repeats_the_first_run_of_a_program(pair, reports, seconds):
    """A run that compiled, or the first one of a system that does not say, is not counted."""
    target, (ars, *_) = pair
    clock = iter(range(1, 99))

    def call(*args):
        out = ars.call(*args)
        number = next(clock)
        stats = dataclasses.replace(out.stats, compile_seconds=float(number in (1, 4)))
        return dataclasses.replace(out, seconds=float(number), stats=stats if reports else None)

    plan, systems = Plan(settings=("warm",)), [dataclasses.replace(ars, call=call)]
    records = Records(RECORD_KEY)
    examples = runner.select_examples(Toy(), target, systems, plan).examples
    workload = runner.task_workload(Toy(), target, examples, plan)
    runner.run_all(systems, workload, records)
    assert [record["seconds"] for record in records.records] == seconds


def test_compare_speed_interleaves_and_takes_medians():
    """Systems take turns in every repetition, and the median of the repetitions counts."""
    calls, clock = [], {"ArS": iter([9, 4, 8, 6]), "fast": iter([9, 2, 50, 3])}
    seeds = {name: set() for name in clock}

    def system(name, role):
        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            assert not stop_at_eos and max_new_tokens == 2
            calls.append(name)
            seeds[name].add(seed)
            return samplers.Sample(next(clock[name]), [1, 2])

        return System(name, role, 0, 512, call)

    systems = [system("ArS", Role.BASELINE), system("fast", Role.PEER)]
    settings = {"greedy": SamplingParams(temperature=0.0)}
    ars, fast = speed.compare_speed(systems, {"prompt": [1]}, settings, 2, repetitions=3)
    assert calls == ["ArS"] * 2 + ["fast"] * 2 + ["ArS", "fast"] * 2  # a warm-up each, then turns
    assert [ars.ms_per_token, fast.ms_per_token] == [3000, 1500]
    assert ars.speedup is None and fast.speedup == 2 and fast.same_tokens
    assert all(len(values) == 1 for values in seeds.values()) and seeds["ArS"] != seeds["fast"]
    with one_line("prompts, repetitions", "found 1 and 0"):
        speed.compare_speed(systems, {"prompt": [1]}, settings, 2, repetitions=0)


def test_evenly_spaced_returns_the_asked_number():
    """The items are evenly spaced, and all of them if there are fewer."""
    spaced = [runner.evenly_spaced("abcdefghij", count) for count in (0, 1, 3, 10, 99)]
    assert ["".join(items) for items in spaced] == ["", "a", "adg", "abcdefghij", "abcdefghij"]


def test_examples_fingerprint_depends_on_all_that_is_asked(pair):
    """Turns, references, names and token ids change the fingerprint."""
    target, _ = pair
    example = base.Example("a", ("def f", "more"), {"summary": "x"})
    seen = {runner.examples_fingerprint(Toy(), target, [example])}
    for changes in ({"turns": ("def f", "less")}, {"reference": {"summary": "y"}}, {"name": "b"}):
        changed = dataclasses.replace(example, **changes)
        seen.add(runner.examples_fingerprint(Toy(), target, [changed]))
    path = target.tokenizer.path.with_name("b.model")
    other = tokenization.train(["def more(f):\n" * 9], path, 275)
    target = dataclasses.replace(target, tokenizer=other)
    seen.add(runner.examples_fingerprint(Toy(), target, [example]))
    assert len(seen) == 5


@dataclasses.dataclass(frozen=True)
class Chat(Toy):
    chat: ClassVar = True


def test_prompt_ids_of_chat_uses_the_template(pair):
    """A conversation is formatted by the chat template, and joined by blank lines without one."""
    target, _ = pair
    turns, answers = ["Hi", "And?"], ["Hello"]
    plain = runner.prompt_ids(target, Chat(), turns, answers)
    assert target.tokenizer.decode(plain) == "Hi\n\nHello\n\nAnd?"
    template = types.SimpleNamespace(has_template=True, chat=list)
    target = dataclasses.replace(target, tokenizer=template)
    messages = runner.prompt_ids(target, Chat(), turns, answers)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [message["content"] for message in messages] == ["Hi", "Hello", "And?"]


@dataclasses.dataclass(frozen=True)
class Twins(Toy):
    def examples(self):
        yield base.Example("one", ("import os",))
        yield base.Example("one", ("import sys",))


def test_select_examples_refuses_what_cannot_run(pair):
    """An unknown setting, a repeated name, a great budget and a missing tokenizer are errors."""
    target, systems = pair
    with one_line("settings", "warm, greedy", "'cold'"):
        runner.plan_settings(Toy(), Plan(settings=("cold",)))
    with one_line("names", "'one'"):
        runner.select_examples(Twins(), target, systems, Plan())
    with one_line("max_new_tokens", "510"):
        runner.select_examples(Toy(), target, systems, Plan(new_tokens=510))
    with one_line("samples"):
        Plan(samples=0)
    with one_line("tokenizer"):
        model = numpy_spread_model(48)
        runner.select_examples(Toy(), model, [spsjax_system("ArS", model)], Plan())
