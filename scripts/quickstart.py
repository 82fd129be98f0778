"""Shows one text by autoregressive and by speculative sampling, then how much faster the second is.

bash scripts/quickstart.sh    # sets up an environment and runs this file

Every key of the config is a flag; configs/experiments/quickstart.py lists them.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

import spsjax
from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.evaluation import race, speed
from spsjax.models import transformer

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to show.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")


def main():
    config = _CONFIG.value
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    target = spsjax.load(config.target, dtype=config.dtype)
    draft = spsjax.load(config.draft, dtype=config.dtype)
    for model in (target, draft):
        print(f"{model.name}: {transformer.num_params(model.params) / 1e6:.1f}M parameters")
    if target.tokenizer is None:
        raise spsjax.InputError(f"{target.name}: expected a tokenizer, found none")

    options = {
        "sampling": speed.settings(config, [config.show.setting])[config.show.setting],
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
    K = config.show.num_speculative_tokens
    terminal.heading("Autoregressive sampling (ArS)")
    print(
        terminal.stream(target, config.prompt, config.prompt, None, None, colour=False, **options)
    )
    terminal.heading(f"Speculative sampling (SpS), K = {K}: the same law, other random numbers")
    print(terminal.stream(target, config.prompt, config.prompt, draft, K, colour=True, **options))

    terminal.heading(f"{config.max_new_tokens} tokens after held-out code, one text at a time")
    report = speed.compare(config, target, draft, progress=terminal.progress("measuring"))
    terminal.table(report.lines)
    terminal.summary(report)
    print(f"\n{verdict(report.lines)}\nThe proof that nothing else changed: bash scripts/test.sh")


def verdict(lines: list[race.Line]) -> str:
    """The best K of each setting, and what it gains."""
    best = terminal.best_lines(lines)
    parts = (
        f"{line.speedup:.2f} x as fast, {setting} (K = {line.num_speculative_tokens})"
        for setting, line in best.items()
    )
    return "Speculative sampling at its best K: " + "; ".join(parts) + "."


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "quickstart.py")
