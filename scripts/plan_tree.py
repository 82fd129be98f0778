"""Plans the tree of draft tokens that is fastest for a pair on this machine, and writes it.

python scripts/plan_tree.py --output=runs/tree.json
python scripts/generate.py --config.tree=runs/tree.json --prompt="import os" --show
python scripts/benchmark.py --config.tree=runs/tree.json

The target writes texts. At every position of them, draft tokens are drawn and verified, which gives
the rate at which each child of a node is accepted. Passes of both models are timed. The dynamic
programme of Sequoia (arXiv 2402.12374) finds the shape with most tokens per call for every number
of draft tokens and of levels; the fastest of these is taken.
Every key of the config is a flag; configs/experiments/plan_tree.py lists them.
"""

import json
import pathlib
from collections.abc import Callable

import _environment  # noqa: F401 (must be first: names a package that is missing)
import numpy as np
from absl import flags
from ml_collections import config_flags

from spsjax import generation, loading
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.evaluation import significance, speed, tree_planning
from spsjax.parallel import multihost
from spsjax.performance import tree_theory
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to plan.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the fastest tree to this file.")
main.require("output")


def run():
    config = _CONFIG.value
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    main.check_writable(_OUTPUT.value)
    params = from_config.build("sampling", SamplingParams, config.sampling)
    sizes = "most_children", "most_levels", "prompts", "prompt_tokens", "max_new_tokens"
    for field in (*sizes, "repetitions"):
        check_integer(field, config[field], 1)
    if not config.num_nodes:
        raise InputError("num_nodes: expected at least one, found none")
    for size in config.num_nodes:
        check_integer("num_nodes", size, 1)
    mesh = configs.mesh(config.mesh)
    target = loading.load(config.target, mesh, config.dtype)
    draft = loading.load(config.draft, mesh, config.dtype)
    drafter = loading.as_drafter(draft, target)

    prompts = list(speed.prompts_of(config, target).values())
    options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed}
    out = generation.generate(target, prompts, drafter, None, params, **options)
    texts = [(prompt, tokens.tolist()) for prompt, tokens in zip(prompts, out.tokens)]
    texts = [(prompt, tokens) for prompt, tokens in texts if tokens]
    progress = terminal.progress("acceptance by child")
    width = min(config.most_children, target.config.vocab_size)
    rates = tree_planning.child_rates(
        target, draft, texts, params, width, config.seed, progress=progress
    )
    show_rates(rates)
    length = config.prompt_tokens + config.max_new_tokens
    drafting, scoring = (
        costs(model, config, params, length, terminal.progress(f"timing the {name}"))
        for name, model in (("draft", draft), ("target", target))
    )
    plans = tree_theory.plans(
        rates.mean(axis=0).tolist(),
        config.num_nodes,
        by_rows(drafting, scoring[1]),
        by_rows(scoring, scoring[1]),
        config.most_levels,
    )
    terminal.plan_table(plans, 1e3 * scoring[1])
    fastest = max(plans.values(), key=lambda plan: plan.speedup)
    figures = {
        "parents": list(fastest.tree.parents),
        "replacement": fastest.tree.replacement,
        "tokens_per_call": round(fastest.tokens_per_call, 4),
        "speedup": round(fastest.speedup, 4),
        "rates": np.round(rates.mean(axis=0), 5).tolist(),
        "config": config.to_dict(),
    }
    if multihost.is_main_process():
        atomic_files.write(_OUTPUT.value, json.dumps(figures, indent=2) + "\n")
        print(f"The fastest is in {_OUTPUT.value}: {short_repr(fastest.tree.parents)}")


def costs(model, config, params, length, progress) -> dict[int, float]:
    """Returns the seconds of a pass of a model, by the tokens that it runs over."""
    powers = (2**power + 1 for power in range(max(config.num_nodes).bit_length()))
    counts = sorted({1, *powers, *(size + 1 for size in config.num_nodes)})
    return tree_planning.pass_costs(model, counts, params, length, config.repetitions, progress)


def show_rates(rates) -> None:
    """Prints the acceptance of each child, with its interval over texts."""
    rows = []
    for rank, values in enumerate(rates.T, start=1):
        low, high = significance.bootstrap_interval(np.mean, values) or (None, None)
        interval = "-" if low is None else f"{low:.3f} to {high:.3f}"
        rows.append((rank, f"{values.mean():.3f}", interval))
    terminal.print_table(["child", "accepted", "95% interval"], rows)


def by_rows(times: dict[int, float], one: float) -> Callable[[int], float]:
    """Returns the cost of a pass in passes of the target, linear between measured numbers."""
    counts = sorted(times)
    return lambda rows: float(np.interp(rows, counts, [times[count] / one for count in counts]))


if __name__ == "__main__":
    main.run(run, _CONFIGS / "plan_tree.py")
