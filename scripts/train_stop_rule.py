"""Trains a rule that ends chains of draft tokens where the next ones are hardly accepted.

python scripts/train_stop_rule.py --output=runs/disco.safetensors
python scripts/generate.py --config.num_speculative_tokens=8 \
    --config.stop_rule=runs/disco.safetensors --prompt="import os" --show

The target continues prompts, and every round is logged: what was drafted, and with what
probability it is accepted. The rule, DISCO's or SpecDec++'s, is trained on three quarters of the
prompts. The others, with the measured costs of drafting and scoring, choose its threshold and K.
Every key of the config is a flag; configs/experiments/stop_rule.py lists them.
"""

import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import numpy as np
from absl import flags
from ml_collections import config_flags

from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.drafters.contrib import learned_stopping
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.evaluation import speed
from spsjax.parallel import multihost
from spsjax.sampling import SamplingParams
from spsjax.training import stop_rules
from spsjax.utils import from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_OUTPUT = flags.DEFINE_string("output", None, "Write the rule to this .safetensors file.")
main.require("output")


def run():
    config = _CONFIG.value
    if not _OUTPUT.value.endswith(learned_stopping.SUFFIX):
        raise InputError(f"output: expected a name that ends in {learned_stopping.SUFFIX}")
    main.check_writable(_OUTPUT.value)
    K, rule = config.num_speculative_tokens, _rule(config)
    params = from_config.build("sampling", SamplingParams, config.sampling)
    fit = from_config.build("fit", stop_rules.Fit, config.fit)
    for field in ("num_speculative_tokens", "prompt_tokens", "max_new_tokens", "repetitions"):
        check_integer(field, config[field], 1)
    check_integer("prompts", config.prompts, 2)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    drafter = loading.load_drafter(config.draft, target)
    prompts = list(speed.prompts_of(config, target).values())
    if len(prompts) < 2:
        raise InputError("prompts: expected at least 2, one to choose the threshold, found 1")
    length = max(map(len, prompts)) + config.max_new_tokens
    options = K, params, config.max_new_tokens, config.seed, terminal.progress("prompts logged")
    rounds = stop_rules.log(target, drafter, rule, prompts, *options)
    costs = stop_rules.measured_costs(
        target, drafter, K, params, length, config.repetitions, terminal.progress("costs measured")
    )
    kept = rounds.text >= len(prompts) - max(len(prompts) // 4, 1)
    others, kept = rounds.of(~kept), rounds.of(kept)
    trained = stop_rules.train(rule, others, fit, terminal.progress("steps trained"))
    trained, most = stop_rules.tuned(trained, kept, costs)
    _report(trained, most, kept, costs)
    if multihost.is_main_process():
        learned_stopping.save(_OUTPUT.value, trained)
        print(
            f"{len(others):,} rounds trained on. The rule is in {_OUTPUT.value}; use it with "
            f"num_speculative_tokens = {most}"
        )


def _rule(config) -> learned_stopping.LearnedRule:
    """Returns the untrained rule of a config."""
    if config.rule not in learned_stopping.RULES:
        known = " or ".join(learned_stopping.RULES)
        raise InputError(f"rule: expected {known}, found {short_repr(config.rule)}")
    fields = config.rules[config.rule]
    return from_config.build(f"rules.{config.rule}", learned_stopping.RULES[config.rule], fields)


def _report(trained, most, rounds, costs):
    """Prints the expected speed on the rounds that were not trained on, for K = `most`."""
    plain = stop_rules.speed(rounds, costs, 0)
    K = rounds.acceptance.shape[1]
    best = max(range(1, K + 1), key=lambda count: stop_rules.speed(rounds, costs, count))
    drafted = np.minimum(stop_rules.lengths(trained, rounds), most)
    rows = [
        (f"always {best}, the best K", best, stop_rules.speed(rounds, costs, best)),
        (
            f"the rule, threshold {trained.rule.threshold}, K = {most}",
            np.mean(drafted),
            stop_rules.speed(rounds, costs, drafted),
        ),
        ("no rule is faster", "", stop_rules.greatest_speed(rounds, costs)),
    ]
    terminal.print_table(
        ["chains end", "drafted per round", "expected speed-up"],
        [(name, f"{n:.2f}" if n != "" else "", f"{value / plain:.3f}") for name, n, value in rows],
    )


if __name__ == "__main__":
    main.run(run, _CONFIGS / "stop_rule.py")
