"""Plans what to draft: how many tokens, in which tree, with which drafter, without which layers.

python scripts/plan.py --config.acceptance=0.8 --config.draft_ms=1.8 --config.target_ms=14.1
python scripts/plan.py --config.report=runs/figure1/report.json --workdir=runs/plan
python scripts/plan.py --config=configs/experiments/plan_tree.py --workdir=runs/plan
python scripts/plan.py --config=configs/experiments/plan_context.py --workdir=runs/plan
python scripts/plan.py --config=configs/experiments/plan_skips.py --workdir=runs/plan

`plan` in the config says what is planned: the speed-up over K by theory; the fastest tree for a
pair; the fastest way to draft by batch and context; or the sub-layers that a target leaves out when
it drafts for itself. Figures are written as JSON, and curves and maps as PNG.
Every key of the config is a flag; configs/experiments/plan_*.py list them.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

from spsjax.benchmarks import context_timing, report, skip_planning, tree_planning
from spsjax.cli import configs, main, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError
from spsjax.parallel import multihost
from spsjax.planning import contexts, speedup
from spsjax.planning.outcome import Outcome
from spsjax.utils import atomic_files, extras

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to plan.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")


def plan_speedup(config) -> Iterator[Outcome]:
    yield speedup.plan(config)


def plan_tree(config) -> Iterator[Outcome]:
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, weights=True)
    yield tree_planning.plan(config, configs.mesh(config.mesh), terminal.progress)


def plan_context(config) -> Iterator[Outcome]:
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=True)
    names = config.target, config.draft
    shapes = (configs.model_config(name, _environment.MODELS) for name in names)
    yield contexts.plan(config, *shapes)
    if config.measure:
        yield context_timing.plan(config.measured, terminal.progress)


def plan_skips(config) -> Iterator[Outcome]:
    config.target = _TARGET.value or config.target
    yield skip_planning.plan(config, configs.mesh(config.mesh), terminal.progress)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of plan: its function, the names of its files of figures, and its flags."""

    plan: Callable
    names: tuple[str, ...]
    flags: tuple[str, ...]


# Kinds by the key `plan` of the config.
KINDS = {
    "speedup": Kind(plan_speedup, ("speedup.json",), ()),
    "tree": Kind(plan_tree, ("tree.json",), ("target", "draft")),
    "context": Kind(plan_context, ("map.json", "measured.json"), ("target", "draft")),
    "skips": Kind(plan_skips, ("skips.json",), ("target",)),
}


def run():
    config = _CONFIG.value
    kind = KINDS[main.kind_of("plan", config, {name: kind.flags for name, kind in KINDS.items()})]
    workdir = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None
    if workdir:
        atomic_files.check_outputs(map(workdir.joinpath, kind.names), [workdir])
    elif kind.plan is not plan_speedup:
        raise InputError("--workdir: expected a folder for the results, found none")
    for name, outcome in zip(kind.names, kind.plan(config)):
        terminal.print_tables(outcome.tables)
        if outcome.summary:
            print(outcome.summary)
        if workdir and multihost.is_main_process():
            workdir.mkdir(parents=True, exist_ok=True)
            text = json.dumps(outcome.figures, indent=1)
            atomic_files.write(workdir / name, text + "\n")
            picture = (workdir / name).with_suffix(".png")
            if outcome.plot and report.can_draw():
                plot(f"plots.{outcome.plot}", outcome.figures)(picture)
            elif outcome.plot:
                terminal.note(f"no plot in {picture}: {extras.NO_PLOT}")
            print(f"The figures are in {workdir / name}")


if __name__ == "__main__":
    folder = _environment.EXPERIMENTS
    others = {f"plan={kind}": folder / f"plan_{kind}.py" for kind in KINDS if kind != "speedup"}
    main.run(run, folder / "plan_speedup.py", others=others)
