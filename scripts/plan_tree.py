"""Plans the tree of draft tokens that is fastest for a pair on this machine, and writes it.

python scripts/plan_tree.py --output=runs/tree.json
python scripts/generate.py --config.tree=runs/tree.json --prompt="import os" --show
python scripts/benchmark.py --config.tree=runs/tree.json

The target writes texts. At every position of them, draft tokens are drawn and verified, which gives
the rate at which each child of a node is accepted. Passes of both models are timed. The dynamic
programme of Sequoia (arXiv 2402.12374) finds the shape with most tokens per call for every number
of draft tokens and of levels; the fastest of these is taken.

    python scripts/plan_tree.py --draft=runs/medusa/drafter --output=runs/tree.json

A drafter of the target's features gets a tree of its most probable tokens, which grows where they
are accepted most often, by depth and rank (Medusa, arXiv 2401.10774). Its drafting is timed on
chains, so that wide trees of a drafter with a layer look cheaper than they are.
Every key of the config is a flag; configs/experiments/plan_tree.py lists them.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import _environment  # noqa: F401 (must be first: names a package that is missing)
import numpy as np
from absl import flags
from ml_collections import config_flags

from spsjax import generation, loading
from spsjax.cli import configs, main, terminal
from spsjax.drafters import base
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.evaluation import significance, speed, tree_planning
from spsjax.parallel import multihost
from spsjax.performance import tree_theory
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to plan.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the drafter.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the fastest tree to this file.")
main.require("output")


def run():
    config = _CONFIG.value
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, weights=True)
    main.check_writable(_OUTPUT.value)
    params = from_config.build("sampling", SamplingParams, config.sampling)
    sizes = "most_children", "most_levels", "prompts", "prompt_tokens", "max_new_tokens"
    for field in (*sizes, "repetitions"):
        check_integer(field, config[field], 1)
    if not config.num_nodes:
        raise InputError("num_nodes: expected at least one, found none")
    for size in config.num_nodes:
        check_integer("num_nodes", size, 1)
    target = loading.load(config.target, configs.mesh(config.mesh), config.dtype)
    if loading.is_feature_drafter(config.draft):
        draft, plan = loading.load_drafter(config.draft, target), plans_of_head
        drafter = draft
    else:
        draft, plan = loading.load(config.draft, target.mesh, config.dtype), plans_of_model
        drafter = loading.as_drafter(draft, target)
    prompts = list(speed.prompts_of(config, target).values())
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed}
    out = generation.generate(target, prompts, drafter, None, params, **options)
    texts = [(prompt, tokens.tolist()) for prompt, tokens in zip(prompts, out.tokens)]
    texts = [(prompt, tokens) for prompt, tokens in texts if tokens]
    if not texts:
        raise InputError("prompts: expected texts that go on after them, found none")
    rates, plans, target_seconds = plan(target, draft, texts, params, config)
    if not plans:
        found = short_repr(config.num_nodes)
        raise InputError(f"num_nodes: expected a tree that can be drafted, found {found}")
    terminal.plan_table(plans, 1e3 * target_seconds)
    fastest = max(plans.values(), key=lambda plan: plan.speedup)
    figures = {
        "parents": list(fastest.tree.parents),
        "replacement": fastest.tree.replacement,
        "chosen": fastest.tree.chosen,
        "tokens_per_call": round(fastest.tokens_per_call, 4),
        "speedup": round(fastest.speedup, 4),
        "rates": np.round(rates.mean(axis=0), 5).tolist(),
        "config": config.to_dict(),
    }
    if multihost.is_main_process():
        atomic_files.write(_OUTPUT.value, json.dumps(figures, indent=2) + "\n")
        print(f"The fastest is in {_OUTPUT.value}: {short_repr(fastest.tree.parents)}")


def plans_of_model(target, draft, texts, params, config):
    """Returns rates [texts, W], the fastest shapes, and the seconds of a pass of the target."""
    progress = terminal.progress("acceptance by child")
    width = min(config.most_children, target.config.vocab_size)
    rates = tree_planning.child_rates(target, draft, texts, params, width, config.seed, progress)
    show_rates(rates)
    drafting, scoring = (
        costs(model, config, params, terminal.progress(f"timing the {name}"))
        for name, model in (("draft", draft), ("target", target))
    )
    plans = tree_theory.plans(
        rates.mean(axis=0).tolist(),
        config.num_nodes,
        by_count(drafting, scoring[1]),
        by_count(scoring, scoring[1]),
        config.most_levels,
    )
    return rates, plans, scoring[1]


def plans_of_head(target, drafter, texts, params, config):
    """Returns rates [texts, K, W], the fastest trees, and the seconds of a pass of the target."""
    levels = min(config.most_levels, base.max_steps(drafter.drafter) or config.most_levels)
    inner = dataclasses.replace(drafter.drafter, num_speculative_tokens=levels)
    drafter = dataclasses.replace(drafter, drafter=inner)
    progress = terminal.progress("acceptance by depth and rank")
    width = min(config.most_children, target.config.vocab_size)
    rates = tree_planning.rank_rates(target, drafter, texts, params, width, progress)
    for depth in range(levels):
        show_rates(rates[:, depth], f"level {depth + 1}, rank")
    scoring = costs(target, config, params, terminal.progress("timing the target"))
    length = config.prompt_tokens + config.max_new_tokens
    progress = terminal.progress("timing the drafter")
    drafting = tree_planning.draft_costs(
        target, drafter, levels, params, length, config.repetitions, progress
    )
    plans = tree_theory.plans_by_rank(
        rates.mean(axis=0),
        config.num_nodes,
        by_count(drafting, scoring[1]),
        by_count(scoring, scoring[1]),
    )
    return rates, plans, scoring[1]


def costs(model, config, params, progress) -> dict[int, float]:
    """Returns the seconds of a pass of a model, by the tokens that it runs over."""
    powers = (2**power + 1 for power in range(max(config.num_nodes).bit_length()))
    counts = sorted({1, *powers, *(size + 1 for size in config.num_nodes)})
    length = config.prompt_tokens + config.max_new_tokens
    return tree_planning.pass_costs(model, counts, params, length, config.repetitions, progress)


def show_rates(rates, name: str = "child") -> None:
    """Prints the acceptance of each child, with its interval over texts."""
    rows = []
    for rank, values in enumerate(rates.T, start=1):
        low, high = significance.bootstrap_interval(np.mean, values) or (None, None)
        interval = "-" if low is None else f"{low:.3f} to {high:.3f}"
        rows.append((rank, f"{values.mean():.3f}", interval))
    terminal.print_table([name, "accepted", "95% interval"], rows)


def by_count(times: dict[int, float], one: float) -> Callable[[int], float]:
    """Returns a cost by a count, in passes of the target, linear between measured counts."""
    counts = sorted(times)
    return lambda count: float(np.interp(count, counts, [times[count] / one for count in counts]))


if __name__ == "__main__":
    main.run(run, _CONFIGS / "plan_tree.py")
