"""First look at a target and its drafter: a text of both algorithms, and a table of their speed."""

import dataclasses
from collections.abc import Sequence

from spsjax.benchmarks import speed, speed_report, workloads
from spsjax.benchmarks.summary import SystemSummary, fastest, share_cold_times
from spsjax.benchmarks.systems import spsjax_system
from spsjax.cli import terminal
from spsjax.loading import LoadedDrafter, Model
from spsjax.planning import hardware
from spsjax.runtime.setup import Setup

# Slots for a question and its answer. All but long questions then share two programs, which the
# next process reads from the cache on the disk.
_SLOTS = 512


def continuation(config, target: Model, draft: Model | LoadedDrafter) -> None:
    """Finds the fastest K, continues `config.prompt` by both algorithms, and measures their speed.

    The speed is that after held-out texts. Raises InputError for a value that cannot be used.
    """
    trial = speed.trial(config, target, draft, terminal.progress("trying K"))
    counts = {name: system.num_speculative_tokens for name, system in fastest(trial).items()}
    best = ", ".join(f"K = {count} ({name})" for name, count in counts.items())
    print(f"Fastest of K = {config.num_speculative_tokens} in a short trial here: {best}")
    config.num_speculative_tokens = tuple(sorted(set(counts.values())))

    K = counts.get(config.preview, config.num_speculative_tokens[0])
    heading = f"Speculative sampling (SpS), K = {K}: the same distribution, other draws"
    _show_both(target, config.prompt, config.prompt, draft, K, heading, **_options(config))

    terminal.heading(f"{config.max_new_tokens} tokens after held-out code, one text at a time")
    progress = terminal.progress("measuring")
    report = speed.speed_benchmark(config, target, draft, progress=progress)
    # The trial has compiled the programs.
    report = dataclasses.replace(report, systems=share_cold_times(report.systems, trial))
    terminal.print_tables([speed_report.table(report.systems)])
    print("\n".join(speed_report.sentences(report)))
    print(f"\nSpeculative sampling at its best K: {_speedups(report.systems)}.")


def answer(config, target: Model, draft: Model | LoadedDrafter) -> None:
    """Answers `config.chat.question` by both algorithms, and measures their speed.

    The target has a chat template, and K is the drafter's own. The speed is that of further answers
    to the question. Raises InputError for a value that cannot be used.
    """
    ids = target.tokenizer.chat([{"role": "user", "content": config.chat.question}])
    K = Setup(target, draft).num_speculative_tokens
    slots = max(_SLOTS, len(ids) + config.max_new_tokens + K + 1)
    terminal.heading("Question")
    print(config.chat.question)
    heading = f"Speculative sampling (SpS), drafts by {draft.name}: the same distribution"
    shown = _show_both(target, ids, "", draft, K, heading, slots=slots, **_options(config))

    terminal.heading("The same question again: an answer for every row, one at a time")
    sizes = config.max_new_tokens, config.chat.repetitions, config.seed
    systems = [
        spsjax_system("ArS", target, slots=slots),
        spsjax_system("SpS", target, draft, K, slots=slots),
    ]
    summaries = speed.compare_speed(
        systems,
        {"question": ids},
        workloads.sampling_settings(config),
        *sizes,
        progress=terminal.progress("measuring"),
        stop_at_eos=True,
    )
    # The texts above have compiled the programs.
    cold = {system.name: 1e3 * totals.warm_up for system, totals in zip(systems, shown)}
    summaries = [
        dataclasses.replace(summary, cold_first_token_ms=cold[summary.system])
        for summary in summaries
    ]
    terminal.print_tables([speed_report.table(summaries)])
    print(speed_report.conditions(hardware.machine(target)))
    print(f"\nSpeculative sampling, drafts by {draft.name}: {_speedups(summaries)}.")


def _options(config) -> dict:
    """Returns arguments of `generate` for the text that is shown."""
    return {
        "sampling": workloads.sampling_settings(config, [config.preview])[config.preview],
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def _show_both(target: Model, prompt, shown: str, draft, K: int, heading: str, **options) -> tuple:
    """Prints a text by both algorithms as it is generated; returns the counts and times of each."""
    terminal.heading("Autoregressive sampling (ArS)")
    plain = terminal.stream(target, prompt, shown, None, None, colour=False, **options)
    print(plain)
    terminal.heading(heading)
    drafted = terminal.stream(target, prompt, shown, draft, K, colour=True, **options)
    print(drafted)
    return plain, drafted


def _speedups(systems: Sequence[SystemSummary]) -> str:
    """Returns a clause with the best K and speed-up of each setting."""
    return "; ".join(
        f"{system.speedup:.2f} x as fast, {setting} (K = {system.num_speculative_tokens})"
        for setting, system in fastest(systems).items()
    )
