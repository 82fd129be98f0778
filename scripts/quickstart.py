"""Finds the fastest K, shows a text of both algorithms, and measures their speed.

bash scripts/quickstart.sh    # creates an environment and runs this file

Every key of the config is a flag; configs/experiments/quickstart.py lists them.
"""

import dataclasses

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax.benchmarks import speed, speed_report, workloads
from spsjax.benchmarks.summary import SystemSummary, fastest, share_cold_times
from spsjax.cli import configs, main, terminal
from spsjax.errors import check_integer
from spsjax.models import transformer

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to show.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)


def run():
    config = _CONFIG.value
    configs.choose_pair(config, _TARGET.value, _DRAFT.value)
    if config.preview not in config.run_settings:
        known = ", ".join(config.run_settings)
        raise spsjax.InputError(f"preview: expected one of {known}, found {config.preview}")
    check_integer("prompts", config.prompts, 1)
    target = spsjax.load(config.target, dtype=config.dtype)
    draft = configs.load_drafter("model", config.draft, config, target, config.dtype)
    for model in (target, draft):
        print(f"{model.name}: {transformer.num_params(model.params) / 1e6:.1f}M parameters")
    if target.tokenizer is None:
        raise spsjax.InputError(f"{target.name}: expected a tokenizer, found none")

    trial = speed.trial(config, target, draft, terminal.progress("trying K"))
    counts = {name: system.num_speculative_tokens for name, system in fastest(trial).items()}
    best = ", ".join(f"K = {count} ({name})" for name, count in counts.items())
    print(f"Fastest of K = {config.num_speculative_tokens} in a short trial here: {best}")
    config.num_speculative_tokens = tuple(sorted(set(counts.values())))

    settings = workloads.sampling_settings(config, [config.preview])
    K = counts.get(config.preview, config.num_speculative_tokens[0])
    options = {
        "sampling": settings[config.preview],
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
    terminal.heading("Autoregressive sampling (ArS)")
    print(
        terminal.stream(target, config.prompt, config.prompt, None, None, colour=False, **options)
    )
    terminal.heading(f"Speculative sampling (SpS), K = {K}: the same distribution, other draws")
    print(terminal.stream(target, config.prompt, config.prompt, draft, K, colour=True, **options))

    terminal.heading(f"{config.max_new_tokens} tokens after held-out code, one text at a time")
    progress = terminal.progress("measuring")
    report = speed.speed_benchmark(config, target, draft, progress=progress)
    # The trial has compiled the programs.
    report = dataclasses.replace(report, systems=share_cold_times(report.systems, trial))
    terminal.print_tables(speed_report.tables(report)[:1])
    print("\n".join(speed_report.sentences(report)))
    print(f"\n{verdict(report.systems)}\nTests of exactness: bash scripts/test.sh")


def verdict(systems: list[SystemSummary]) -> str:
    """Returns a sentence with the best K and speed-up of each setting."""
    clauses = (
        f"{system.speedup:.2f} x as fast, {setting} (K = {system.num_speculative_tokens})"
        for setting, system in fastest(systems).items()
    )
    return "Speculative sampling at its best K: " + "; ".join(clauses) + "."


if __name__ == "__main__":
    main.run(run, _environment.EXPERIMENTS / "quickstart.py")
