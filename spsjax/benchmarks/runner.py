"""Runs of alternating systems on the same prompts, recorded with texts and times."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

from spsjax.benchmarks.records import Records
from spsjax.benchmarks.systems import Sample, System
from spsjax.benchmarks.tasks.base import Example, Task
from spsjax.benchmarks.workloads import Prompt, Workload
from spsjax.tokenization.base import incremental_text
from spsjax.utils.progress import Progress

# Fields that identify the system that wrote a record, and fields that identify a record.
SYSTEM_FIELDS = "setting", "system", "num_speculative_tokens"
RECORD_KEY = *SYSTEM_FIELDS, "example", "turn", "sample", "repetition"


def run_all(
    systems: Sequence[System], workload: Workload, records: Records, progress: Progress = iter
) -> None:
    """Runs every system on every prompt and adds the missing records.

    Systems alternate on every prompt, so that a machine that slows down slows all systems. The
    costs of a round are timed right after the call for the same reason. A record depends only on
    prompt, setting, system, sample number and seed. A later turn that does not fit into the context
    is left out. With a `Journal` as records, the measurement is resumable.
    """
    context = min(system.context for system in systems)
    warm: set[tuple[System, str]] = set()
    jobs = [
        (repetition, prompt, setting, sample, system)
        for repetition in range(workload.repetitions)
        for prompt in workload.prompts
        for setting in workload.settings
        for sample in range(workload.samples)
        for system in systems
    ]
    for repetition, prompt, setting, sample, system in progress(jobs):
        answers: list[str] = []
        who = setting, system.name, system.num_speculative_tokens
        for turn in range(prompt.turns):
            key = *who, prompt.name, turn, sample, repetition
            if key not in records:
                ids = prompt.ids(answers)
                if turn and len(ids) + workload.max_new_tokens > context:
                    break
                measured = _measure(system, workload, setting, prompt, ids, key, warm)
                records.add({**dict(zip(RECORD_KEY, key)), "group": prompt.group, **measured})
            answers.append(records[key].get("text", ""))


def _measure(
    system: System,
    workload: Workload,
    setting: str,
    prompt: Prompt,
    ids: list[int],
    key: tuple,
    warm: set[tuple[System, str]],
) -> dict:
    """Runs a system once and returns the fields of the record that depend on the run."""
    params, budget = workload.settings[setting], workload.max_new_tokens
    # Seeds differ between systems and samples, which are independent, but not between repetitions,
    # of which only the times differ.
    seed = _seed(workload.seed, *key[:-1])
    call = functools.partial(system.call, ids, params, budget, seed, workload.stop_at_eos)
    out = call()
    compile_seconds = out.stats.compile_seconds if out.stats else 0.0
    # The first run of a program takes longer than later runs, even without its compile time.
    if compile_seconds if out.stats else (system, setting) not in warm:
        out = call()
    warm.add((system, setting))
    record = {
        "role": str(system.role),
        "greedy": not params.temperature,
        "prompt_tokens": len(ids),
        "tokens": list(out.tokens),
        "seconds": out.seconds,
        "compile_seconds": compile_seconds,
    }
    if workload.tokenizer is not None:
        record["text"] = incremental_text(workload.tokenizer, ids, out.tokens)
    if system.time_round and prompt.name in workload.timed:
        record["round_cost"] = dataclasses.asdict(system.time_round(ids, params, budget))
    return record | _counts(out)


def _counts(sample: Sample) -> dict:
    """Returns the counts of a call; {} if the system does not report them."""
    if sample.stats is None:
        return {}
    return {
        "prompt_seconds": sample.stats.prompt_seconds,
        "target_calls": sample.stats.target_calls,
        "proposed_tokens": sample.stats.proposed_tokens,
        "accepted_histogram": sample.stats.accepted_histogram,
    }


def _seed(*fields) -> int:
    """Returns a 32-bit seed by hashing the fields."""
    text = "\0".join(map(str, fields))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def final_answers(
    task: Task, examples: Sequence[Example], records: Sequence[dict]
) -> Iterator[tuple[Example, tuple, list[str]]]:
    """Yields examples with a system's key and its answers to the last turn, by sample number."""
    answers: dict[tuple, dict[int, str]] = {}
    by_name = {example.name: example for example in examples}
    for record in records:
        example = by_name.get(record["example"])
        if example is None or record["turn"] != len(example.turns) - 1:
            continue
        text = task.answer(example, record["text"])
        answers.setdefault((example.name, system_key(record)), {})[record["sample"]] = text
    for (name, key), texts in answers.items():
        yield by_name[name], key, [texts[number] for number in sorted(texts)]


def system_key(record: dict) -> tuple[str, str, int]:
    """Returns the setting, the system and K of a record: `SYSTEM_FIELDS`."""
    return tuple(record[name] for name in SYSTEM_FIELDS)
