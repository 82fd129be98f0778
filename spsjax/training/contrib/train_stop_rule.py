"""Training of a rule that ends chains of draft tokens before tokens that are rarely accepted.

The target continues prompts, and every round is logged: its draft tokens, and the probabilities of
their acceptance. The rule, DISCO's or SpecDec++'s, is trained on three quarters of the prompts. The
other prompts, with the measured costs of drafting and scoring, choose its threshold and K.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spsjax import loading
from spsjax.benchmarks import workloads
from spsjax.drafters.contrib import learned_stopping
from spsjax.errors import InputError, short_repr
from spsjax.parallel import multihost
from spsjax.runtime.batch import check_seed
from spsjax.sampling import SamplingParams
from spsjax.training.config import check_name
from spsjax.training.contrib import stop_rules
from spsjax.utils import atomic_files
from spsjax.utils.fields import Checked, integer
from spsjax.utils.from_config import build, build_section
from spsjax.utils.progress import Bar

SECTION = "rules"
FILE = f"rule{learned_stopping.SUFFIX}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRuleConfig(Checked):
    """Options of the training of a rule; `configs/experiments/stop_rule.py` explains them."""

    target: str
    draft: str
    dtype: str | None
    mesh: Mapping[str, int]
    rule: str
    rules: Mapping[str, Mapping[str, Any]]
    num_speculative_tokens: int = integer(least=1)
    sampling: Mapping[str, Any]
    fit: Mapping[str, Any]
    data: Mapping[str, Any]
    texts: Sequence[str]
    prompts: int = integer(least=2)
    prompt_tokens: int = integer(least=1)
    max_new_tokens: int = integer(least=1)
    repetitions: int = integer(least=1)
    seed: int

    def __post_init__(self):
        super().__post_init__()
        for field in ("target", "draft"):
            check_name(field, getattr(self, field))
        check_seed(self.seed)
        if not isinstance(self.rules, Mapping):
            raise InputError(f"rules: expected keys and values, found {short_repr(self.rules)}")
        if self.rule not in self.rules or self.rule not in learned_stopping.RULES:
            known = " or ".join(learned_stopping.RULES)
            raise InputError(f"rule: expected {known}, found {short_repr(self.rule)}")


def train(
    config: Mapping[str, Any],
    workdir: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    export: str | None = None,
) -> learned_stopping.LoadedRule:
    """Trains a rule and writes it to `rule.safetensors` in a folder; see `fit.train`."""
    config, path = build("config", StopRuleConfig, config), pathlib.Path(workdir) / FILE
    if export is not None:
        raise InputError(f"export: expected none, as rules have no checkpoints, found {export}")
    K = config.num_speculative_tokens
    params = build_section("sampling", SamplingParams, config.sampling)
    fit = build_section("fit", stop_rules.Fit, config.fit)
    fields = config.rules[config.rule]
    rule = build_section(f"rules.{config.rule}", learned_stopping.RULES[config.rule], fields)
    atomic_files.check_outputs([path], [path.parent])
    target = loading.load(config.target, mesh, config.dtype)
    drafter = loading.load_drafter(config.draft, target)
    prompts = list(workloads.prompts_of(config, target).values())
    if len(prompts) < 2:
        raise InputError("prompts: expected at least 2, one to choose the threshold, found 1")
    length = max(map(len, prompts)) + config.max_new_tokens
    options = K, params, config.max_new_tokens, config.seed, _progress("prompts logged")
    rounds = stop_rules.log(target, drafter, rule, prompts, *options)
    costs = stop_rules.measured_costs(
        target, drafter, K, params, length, config.repetitions, _progress("costs measured")
    )
    kept = rounds.text >= len(prompts) - max(len(prompts) // 4, 1)
    others, kept = rounds.of(~kept), rounds.of(kept)
    trained = stop_rules.train(rule, others, fit, _progress("steps trained"))
    trained, most = stop_rules.tuned(trained, kept, costs)
    _report(trained, most, kept, costs)
    if multihost.is_main_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        learned_stopping.save(path, trained)
    print(
        f"{len(others):,} rounds trained on. The rule is in {path}; use it with "
        f"num_speculative_tokens = {most}"
    )
    return trained


def _progress(description: str):
    """Returns a wrapper of a list that shows the progress on stderr."""
    silent = not multihost.is_main_process()
    return functools.partial(Bar, desc=description, leave=False, disable=silent)


def _report(trained, most: int, rounds: stop_rules.Rounds, costs: stop_rules.Costs) -> None:
    """Prints the expected speed on the rounds that were not trained on, for K = `most`."""
    plain = stop_rules.speed(rounds, costs, 0)
    K = rounds.acceptance.shape[1]
    best = max(range(1, K + 1), key=lambda count: stop_rules.speed(rounds, costs, count))
    drafted = np.minimum(stop_rules.lengths(trained, rounds), most)
    print("expected speed-up over rounds without a draft:")
    rule = f"the rule, threshold {trained.rule.threshold}, K = {most}, "
    rule += f"{np.mean(drafted):.2f} tokens per round"
    speeds = {
        f"always {best} tokens, the best K": stop_rules.speed(rounds, costs, best),
        rule: stop_rules.speed(rounds, costs, drafted),
        "no rule is faster": stop_rules.greatest_speed(rounds, costs),
    }
    for name, speed in speeds.items():
        print(f"  {speed / plain:.3f}  {name}")
