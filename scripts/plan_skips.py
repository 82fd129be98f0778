"""Looks for sub-layers of a target that can be left out when it drafts for itself.

python scripts/plan_skips.py --output=runs/skips.json
python scripts/generate.py --config.drafter=early_exit:runs/skips.json --prompt="import os" --show

The target writes texts. Attention and feed-forward sub-layers are then left out, one more at a
time: the one with which the expected speed-up is highest (Draft & Verify, arXiv 2309.08168). The
expectation takes a pass to cost the bytes of weights that it reads. The best set is then measured.
Every key of the config is a flag; configs/experiments/plan_skips.py lists them.
"""

import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import config_flags

from spsjax import generation, loading
from spsjax.cli import configs, main, terminal
from spsjax.drafters.contrib import early_exit
from spsjax.errors import InputError, check_integer
from spsjax.evaluation import skip_planning, speed
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to plan.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the best set to this file.")
main.require("output")


def run():
    config = _CONFIG.value
    config.target = _TARGET.value or config.target
    main.check_writable(_OUTPUT.value)
    params = from_config.build("sampling", SamplingParams, config.sampling)
    for field in ("most_tokens", "prompts", "prompt_tokens", "max_new_tokens"):
        check_integer(field, config[field], 1)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    prompts = list(speed.prompts_of(config, target).values())
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "sampling": params}
    plain = generation.generate(target, prompts, **options)
    texts = [(prompt, tokens.tolist()) for prompt, tokens in zip(prompts, plain.tokens)]
    texts = [(prompt, tokens) for prompt, tokens in texts if tokens]
    if not texts:
        raise InputError("prompts: expected texts that go on after them, found none")
    progress = terminal.progress("sub-layers left out")
    plans = skip_planning.plans(target, texts, params, config.most_tokens, progress)
    terminal.print_table(
        ["left out", "acceptance", "cost of a step", "best K", "expected speed-up"],
        [
            (
                number,
                f"{plan.acceptance:.3f}",
                f"{plan.cost:.3f}",
                plan.num_speculative_tokens,
                f"{plan.speedup:.2f}",
            )
            for number, plan in enumerate(plans, start=1)
        ],
    )
    best = max(plans, key=lambda plan: plan.speedup)
    drafter = early_exit.Drafter(target.config, best.skipped, best.num_speculative_tokens)
    drafted = generation.generate(target, prompts, drafter, **options)
    figures = {
        "attention": list(best.skipped.attention),
        "ffn": list(best.skipped.ffn),
        "num_speculative_tokens": best.num_speculative_tokens,
        "acceptance": round(best.acceptance, 4),
        "expected_speedup": round(best.speedup, 4),
        "tokens_per_call": round(drafted.stats.block_efficiency, 4),
        "config": config.to_dict(),
    }
    if multihost.is_main_process():
        atomic_files.write(_OUTPUT.value, json.dumps(figures, indent=2) + "\n")
        print(
            f"Without attention in layers {_listed(best.skipped.attention)} and feed-forward in "
            f"{_listed(best.skipped.ffn)}: {drafted.stats.block_efficiency:.2f} tokens per call at "
            f"K = {best.num_speculative_tokens}, measured. It is in {_OUTPUT.value}"
        )
        if best.speedup <= 1:
            print("No set is expected to be faster than drafting nothing.")


def _listed(layers) -> str:
    return ", ".join(map(str, layers)) or "none"


if __name__ == "__main__":
    main.run(run, _CONFIGS / "plan_skips.py")
