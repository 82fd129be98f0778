"""Compiles a pair for a TPU slice that is not attached, and reports what it needs there.

python scripts/compile_tpu.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py
python scripts/compile_tpu.py --topology=v5e:2x4 --config.target=... --json=report.json
python scripts/compile_tpu.py --drafter=eagle3 --config.target=llama:3-70b
python scripts/compile_tpu.py --drafter=sparse_self:512 --config.target=llama:3.1-8b \
    --config.batch=16 --config.prompt_tokens=32256

Needs `pip install libtpu`. A pair that does not fit into the memory is refused.
"""

import collections
import dataclasses
import inspect
import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
from absl import flags
from ml_collections import config_flags

from spsjax.cli import configs, main, terminal
from spsjax.drafters import sparse_self
from spsjax.errors import InputError
from spsjax.performance import aot, compiled_program
from spsjax.training import train_head
from spsjax.utils import atomic_files

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compile.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "Kind and shape of the slice.")
_DRAFTER = flags.DEFINE_string(
    "drafter",
    None,
    f"Draft without config.draft: {', '.join(train_head.LAYERS)} (from the target's features), or "
    "sparse_self:512 (the target with a cache of 512 tokens).",
)
_JSON = flags.DEFINE_string("json", None, "Write the report to this file.")


def run():
    config = _CONFIG.value.to_dict()
    main.check_writable(_JSON.value)
    head = config.pop("head", {})
    known = inspect.signature(aot.compile_pair).parameters
    for key in config:
        if key not in known:
            raise InputError(f"--config: expected no key {key}, found one")
    target = configs.model_config(config.pop("target"), _CONFIGS / "models")
    draft = config.pop("draft")
    method, _, slots = (_DRAFTER.value or "").partition(":")
    if method == "sparse_self":
        draft = sparse_self.by_name(slots, target)
    elif _DRAFTER.value:
        if method not in train_head.LAYERS or slots:
            known = ", ".join((*train_head.LAYERS, "sparse_self:512"))
            raise InputError(f"--drafter: expected one of {known}, found {_DRAFTER.value}")
        chosen = {field: value for field, value in head.items() if value}
        draft = train_head.build_drafter({"method": _DRAFTER.value} | chosen, target)
    else:
        draft = configs.model_config(draft, _CONFIGS / "models")
    config["quantize"] = config["quantize"] or None
    config["compiler_options"] = _options(config["compiler_options"])
    config["tree"] = configs.read_tree(config["tree"]) if config["tree"] else None
    report = aot.compile_pair(
        target, draft, _TOPOLOGY.value, progress=terminal.progress("compiling"), **config
    )
    show(report, config["num_speculative_tokens"])
    if _JSON.value:
        atomic_files.write(_JSON.value, json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def _options(text: str) -> dict[str, str]:
    """Returns the options in a text such as "a=1,b=false"."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(f"compiler_options: expected name=value,..., found {text}")
    return {name: value for name, _, value in pairs}


def show(report: aot.CompileReport, K: int) -> None:
    """Prints tables of the programs and of their passes, and the predicted speed-up."""
    print(
        f"{report.device}: {report.needed / 1e9:.2f} of {report.memory / 1e9:.2f} GB per chip: "
        f"weights {report.weights / 1e9:.2f}, caches {report.caches / 1e9:.3f}, "
        "the rest temporaries"
    )
    show_programs(report)
    show_passes(report)
    print(
        f"at the lower bound, with {report.acceptance:.0%} of draft tokens accepted "
        f"({report.block_efficiency:.2f} tokens per round, K = {K}): ArS {report.ars_ms:.2f}, "
        f"SpS {report.sps_ms:.2f} ms/token, {report.ars_ms / report.sps_ms:.2f} times as fast"
    )


def show_programs(report: aot.CompileReport) -> None:
    """Prints memory, cycles and collectives of each program."""
    programs = [
        (
            name,
            f"{program.seconds:.0f}",
            f"{program.temporary / 1e9:.3f}",
            f"{program.aliased / 1e9:.3f}",
            f"{program.flops / 1e9:.1f}",
            f"{program.bytes_accessed / 1e9:.2f}",
        )
        for name, program in report.programs.items()
    ]
    header = ("program", "compiled in s", "temporary GB", "aliased GB", "GFLOP", "accessed GB")
    terminal.print_table(header, programs)
    print("(the body of a loop, and of the loop of draft steps within it, is counted once)\n")
    scopes = [
        scope
        for scope in compiled_program.PARTS
        if any(scope in program.cycles for program in report.programs.values())
    ]
    cycles = (
        (name, *(f"{program.cycles.get(scope, 0) / 1e6:.3f}" for scope in scopes))
        for name, program in report.programs.items()
    )
    terminal.print_table(("million cycles per round", *scopes), cycles)
    counts = {
        name: collections.Counter(
            (collective.kind, f"{collective.num_bytes / 1e3:.1f}", _where(collective.scope))
            for collective in program.collectives
        )
        for name, program in report.programs.items()
    }
    collectives = (
        (name, *key, count) for name, counter in counts.items() for key, count in counter.items()
    )
    header = ("program", "collective", "kB", "in", "count")
    terminal.print_table(header, collectives, left=(0, 1, 3))


def show_passes(report: aot.CompileReport) -> None:
    """Prints the lower bounds on the time of each pass."""
    passes = []
    for name, cost in report.passes.items():
        bounds = cost.memory_seconds, cost.compute_seconds, cost.interconnect_seconds, cost.seconds
        sizes = f"{cost.weights / 1e9:.2f}", f"{cost.cache / 1e9:.3f}"
        passes.append((name, *sizes, *(f"{1e3 * seconds:.3f}" for seconds in bounds)))
    header = ("pass", "weights GB", "cache GB", "memory ms", "compute ms", "interconnect ms")
    terminal.print_table((*header, "lower bound ms"), passes)


def _where(scope: str) -> str:
    """Returns the part of the round that a scope belongs to; the draft's later steps are a loop."""
    return compiled_program.part(scope) + ", each step" * ("/propose/while/" in scope)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # only the TPU's compiler is needed, not a TPU
    main.run(run, _CONFIGS / "experiments" / "chinchilla_70b.py")
