"""Systems run in turn: records that depend on nothing else, and resume."""

import dataclasses
import json
import types
from typing import ClassVar

import numpy as np
import pytest
from helpers import drafting
from helpers.bad_input import one_line
from helpers.numpy_models import numpy_nearby_model, numpy_params, numpy_spread_model

from spsjax import SamplingParams, decode, tokenization
from spsjax.benchmarks import microbenchmarks, runner, speed, summary, task_workloads, workloads
from spsjax.benchmarks.records import Journal, Records
from spsjax.benchmarks.runner import RECORD_KEY
from spsjax.benchmarks.systems import Role, Sample, System, spsjax_system
from spsjax.benchmarks.task_workloads import TaskPlan
from spsjax.benchmarks.tasks import base
from spsjax.data import documents
from spsjax.loading import Model
from spsjax.models import transformer


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
def small_programs(monkeypatch):
    """Buffers have 64 slots, so that prompts of all lengths share programs."""
    monkeypatch.setattr(decode.sizes, "num_slots", lambda length, roomy=False: 64)
    with drafting.small_programs():
        yield


@pytest.fixture(scope="module")
def pair(tiny_tokenizer):
    """A target and three systems: plain sampling, with a draft, and with itself as its draft."""
    target = dataclasses.replace(numpy_spread_model(300), tokenizer=tiny_tokenizer)
    draft = dataclasses.replace(numpy_nearby_model(target), tokenizer=tiny_tokenizer)
    names = {"ArS": (None, 0), "SpS": (draft, 2), "itself": (target, 2)}
    return target, [spsjax_system(name, target, *drafter) for name, drafter in names.items()]


def filled(path, pair, plan=TaskPlan(samples=2, timed=0), stop=None):
    """Runs the first `stop` jobs of a plan on the toy task."""
    target, systems = pair
    task = Toy()
    selected = task_workloads.select_examples(task, target, systems, plan)
    journal = Journal(path, dataclasses.asdict(plan), RECORD_KEY)

    def progress(jobs):
        yield from jobs[:stop]

    workload = task_workloads.task_workload(task, target, selected.examples, plan)
    runner.run_all(systems, workload, journal, progress)
    return selected, journal


def without_times(record):
    times = "seconds", "prompt_seconds", "compile_seconds", "round_cost"
    return {name: value for name, value in record.items() if name not in times}


@pytest.mark.slow
def test_run_all_resumes_to_the_same_records(pair, tmp_path):
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
    target, (ars, *_) = pair
    seen = []

    def time_round(prompt, *options):
        assert options == (SamplingParams(), 6)
        seen.append(target.tokenizer.decode(prompt))
        return microbenchmarks.RoundCost(0.0, 1.0)

    ars = dataclasses.replace(ars, call=lambda *_: Sample(1.0, [5]), time_round=time_round)
    plan = TaskPlan(settings=("warm",), timed=timed)
    _, journal = filled(tmp_path / "journal.jsonl", (target, [ars]), plan)
    costs = {record["example"] for record in journal.records if "round_cost" in record}
    assert costs == {*expected}
    turns = {example.name: example.turns[0] for example in Toy().examples()}
    assert [text for text in seen if "\n" not in text] == [turns[name] for name in expected]


def test_summarize_matches_the_records(pair, tmp_path):
    selected, journal = filled(tmp_path / "journal.jsonl", pair)
    scores = summary.score_examples(Toy(), selected.examples, journal.records)
    summaries = summary.summarize(journal.records, scores)
    names = [(system.setting, system.system) for system in summaries]
    assert names == [(of, name) for of in ("warm", "greedy") for name in ("ArS", "SpS", "itself")]
    for system in summaries:
        named = system.setting, system.system
        records = [row for row in journal.records if (row["setting"], row["system"]) == named]
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
    draws = {
        row["text"]
        for row in journal.records
        if (row["setting"], row["example"], row["turn"], row["system"] != "itself")
        == ("warm", "one", 0, True)
    }
    assert len(draws) == 4  # sampled texts have the same distribution but other draws


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

    plan, systems = TaskPlan(settings=("warm",)), [dataclasses.replace(ars, call=call)]
    records = Records(RECORD_KEY)
    examples = task_workloads.select_examples(Toy(), target, systems, plan).examples
    workload = task_workloads.task_workload(Toy(), target, examples, plan)
    runner.run_all(systems, workload, records)
    assert [record["seconds"] for record in records.records] == seconds


def test_compare_speed_interleaves_and_takes_medians():
    calls, clock = [], {"ArS": iter([9, 4, 8, 6]), "fast": iter([9, 2, 50, 3])}
    seeds = {name: set() for name in clock}

    def system(name, role):
        def call(prompt, params, max_new_tokens, seed, stop_at_eos):
            assert not stop_at_eos and max_new_tokens == 2
            calls.append(name)
            seeds[name].add(seed)
            return Sample(next(clock[name]), [1, 2])

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
    spaced = [task_workloads.evenly_spaced("abcdefghij", count) for count in (0, 1, 3, 10, 99)]
    assert ["".join(items) for items in spaced] == ["", "a", "adg", "abcdefghij", "abcdefghij"]


def test_examples_fingerprint_depends_on_all_that_is_asked(pair):
    target, _ = pair
    example = base.Example("a", ("def f", "more"), {"summary": "x"})
    seen = {task_workloads.examples_fingerprint(Toy(), target, [example])}
    for changes in ({"turns": ("def f", "less")}, {"reference": {"summary": "y"}}, {"name": "b"}):
        changed = dataclasses.replace(example, **changes)
        seen.add(task_workloads.examples_fingerprint(Toy(), target, [changed]))
    path = target.tokenizer.path.with_name("b.model")
    other = tokenization.train(["def more(f):\n" * 9], path, 275)
    target = dataclasses.replace(target, tokenizer=other)
    seen.add(task_workloads.examples_fingerprint(Toy(), target, [example]))
    assert len(seen) == 5


@dataclasses.dataclass(frozen=True)
class Chat(Toy):
    chat: ClassVar = True


def test_prompt_ids_of_chat_uses_the_template(pair):
    target, _ = pair
    turns, answers = ["Hi", "And?"], ["Hello"]
    plain = task_workloads.prompt_ids(target, Chat(), turns, answers)
    assert target.tokenizer.decode(plain) == "Hi\n\nHello\n\nAnd?"
    template = types.SimpleNamespace(has_template=True, chat=list)
    target = dataclasses.replace(target, tokenizer=template)
    messages = task_workloads.prompt_ids(target, Chat(), turns, answers)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [message["content"] for message in messages] == ["Hi", "Hello", "And?"]


@dataclasses.dataclass(frozen=True)
class Twins(Toy):
    def examples(self):
        yield base.Example("one", ("import os",))
        yield base.Example("one", ("import sys",))


def test_select_examples_refuses_what_cannot_run(pair):
    target, systems = pair
    with one_line("settings", "warm, greedy", "'cold'"):
        task_workloads.plan_settings(Toy(), TaskPlan(settings=("cold",)))
    with one_line("names", "'one'"):
        task_workloads.select_examples(Twins(), target, systems, TaskPlan())
    with one_line("max_new_tokens", "510"):
        task_workloads.select_examples(Toy(), target, systems, TaskPlan(new_tokens=510))
    with one_line("samples"):
        TaskPlan(samples=0)
    with one_line("tokenizer"):
        model = numpy_spread_model(48)
        task_workloads.select_examples(Toy(), model, [spsjax_system("ArS", model)], TaskPlan())


@pytest.mark.slow
def test_probe_of_small_draft_is_faster_than_scoring():
    config = transformer.Config(
        vocab_size=64, d_model=256, d_ff=1024, num_layers=2, num_heads=4, num_kv_heads=4,
        head_dim=64, max_positions=256,
    )  # fmt: skip
    target = Model("target", config, numpy_params(config, 0))
    small = dataclasses.replace(config, d_model=16, d_ff=16, num_layers=1)
    draft = Model("draft", small, numpy_params(small, 0))
    measure = microbenchmarks.round_cost_timer(target, draft, 4, SamplingParams(), 20, 40)
    cost = microbenchmarks.median([measure() for _ in range(5)])
    assert cost.draft_step < cost.scoring


def test_held_out_prompts_are_always_the_same(tiny_tokenizer, tmp_path):
    for index in range(60):  # of which five are held out
        (tmp_path / f"module_{index}.py").write_text(f"number = {index}\n" * 60)
    texts = documents.Sources((str(tmp_path),))
    prompts = workloads.held_out_prompts(tiny_tokenizer, 3, 50, texts)
    assert prompts == workloads.held_out_prompts(tiny_tokenizer, 3, 50, texts)
    assert list(prompts) == list(workloads.held_out_prompts(tiny_tokenizer, 5, 50, texts))[:3]
    assert all(documents.is_held_out(name) for name in prompts)
    assert all(len(tokens) == 50 for tokens in prompts.values())
