"""Compiles a pair for chips that are not attached, and reports memory and lower bounds.

python scripts/compile.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py
python scripts/compile.py --config.target=llama:3.1-8b --config.draft=llama:3.2-1b --json=a.json
python scripts/compile.py --drafter=eagle3 --config.target=llama:3-70b
python scripts/compile.py --drafter=sparse_self:512 --config.target=llama:3.1-8b \
    --config.batch=16 --config.prompt_tokens=32256

python scripts/compile.py --topology=H100 --config.target=llama:3.1-8b --config.draft=llama:3.2-1b

TPUs need the extra `tpu-compiler`, GPUs `gpu-compiler`. A pair that does not fit into the memory is
refused.
"""

import collections
import dataclasses
import inspect
import json
from collections.abc import Mapping

import _environment  # must be first: names a package that is missing
import jax
from absl import flags
from ml_collections import config_flags

from spsjax import drafters
from spsjax.benchmarks.report import provenance, rounded
from spsjax.cli import configs, main, terminal
from spsjax.drafters import base, draft_model, sparse_self
from spsjax.errors import InputError
from spsjax.models.config import Config
from spsjax.planning import aot, compile_report, compiled_program
from spsjax.utils import atomic_files, kernel_choice

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compile.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "TPU slice, or H100 or H200.")
_DRAFTER = flags.DEFINE_string(
    "drafter",
    None,
    "Draft without config.draft: eagle, eagle3, mtp, dflash, dflash2, dspark or gemma4_assistant "
    "(from the target's features), or sparse_self:512 (the target with a cache of 512 tokens).",
)
_JSON = flags.DEFINE_string("json", None, "Write the report to this file.")

# Keys of the config that describe the drafter, and those that `report` takes.
OF_DRAFTER = "draft", "head", "num_speculative_tokens", "tree"
OF_REPORT = "acceptance", "collective_us", "compiler_options"


def run():
    if not _DRAFTER.value:
        configs.choose_pair(_CONFIG.value, models=True)
    config = _CONFIG.value.to_dict()
    main.check_writable(_JSON.value)
    target = configs.model_config(config.pop("target"), _environment.MODELS)
    drafter = _drafter(target, *(config.pop(key) for key in OF_DRAFTER))
    options = {key: config.pop(key) for key in OF_REPORT}
    options["compiler_options"] = _options(options["compiler_options"])
    config["quantize"] = config["quantize"] or None
    for key in config:
        if key not in inspect.signature(aot.plan_pair).parameters:
            raise InputError(f"--config: expected no key {key}, found one")
    plan = aot.plan_pair(target, drafter, _TOPOLOGY.value, **config)
    report = compile_report.report(plan, **options, progress=terminal.progress("compiling"))
    show(report, drafter.num_speculative_tokens)
    if _JSON.value:
        content = _content(report, _settings(drafter, config))
        atomic_files.write(_JSON.value, json.dumps(content, indent=2) + "\n")


def _drafter(target: Config, draft: str, head: dict, K: int, tree: str) -> base.Planned:
    """Returns the drafter of --drafter, or a draft model of the shape `draft`."""
    shape = {"tree": configs.read_tree(tree) if tree else None, "num_speculative_tokens": K}
    method, _, slots = (_DRAFTER.value or "").partition(":")
    if not method:
        config = configs.model_config(draft, _environment.MODELS)
        return draft_model.Drafter(config, **shape)
    if method == "sparse_self":
        return dataclasses.replace(sparse_self.by_name(slots, target), **shape)
    methods = {
        name: module
        for name, module in drafters.methods_with("LAYOUT").items()
        if hasattr(module.Drafter, "passes")  # `base.Planned`
    }
    if method not in methods or slots:
        known = ", ".join((*methods, "sparse_self:512"))
        raise InputError(f"--drafter: expected one of {known}, found {_DRAFTER.value}")
    fields = {field: value for field, value in head.items() if value}
    return dataclasses.replace(methods[method].Drafter.from_config(fields, target), **shape)


def _options(text: str) -> dict[str, str]:
    """Returns the options in a text such as "a=1,b=false"."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(f"compiler_options: expected name=value,..., found {text}")
    return {name: value for name, _, value in pairs}


def _settings(drafter: base.Planned, config: Mapping) -> dict:
    """Returns what the report is about, for the JSON file."""
    return {
        "topology": _TOPOLOGY.value,
        "target": _CONFIG.value.target,
        "drafter": _DRAFTER.value or _CONFIG.value.draft,
        "num_speculative_tokens": drafter.num_speculative_tokens,
        "kernels": kernel_choice.mode(),
        **config,
    }


def _content(report: compile_report.CompileReport, settings: Mapping) -> dict:
    """Returns the content of the JSON file: the report, with equal collectives counted."""
    content = {"made": provenance(), "settings": settings, **rounded(dataclasses.asdict(report))}
    for name, program in report.programs.items():
        del content["programs"][name]["seconds"]  # it says nothing of the slice
        content["programs"][name]["collectives"] = [
            {"kind": kind, "bytes": size, "in": where, "count": count}
            for (kind, size, where), count in _counted(program).items()
        ]
    return content


def _counted(program: compiled_program.CompiledProgram) -> collections.Counter:
    """Returns the number of collectives of a program by kind, bytes and phase of a round."""
    return collections.Counter(
        (collective.kind, collective.num_bytes, _where(collective.scope))
        for collective in program.collectives
    )


def show(report: compile_report.CompileReport, K: int) -> None:
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
        f"SpS {report.sps_ms:.2f} ms/token (a round {report.round_ms:.2f}), "
        f"{report.ars_ms / report.sps_ms:.2f} times as fast"
    )


def show_programs(report: compile_report.CompileReport) -> None:
    """Prints memory, cycles and collectives of each program."""
    programs = [
        (
            name,
            f"{program.seconds:.0f}",
            f"{program.temporary / 1e9:.3f}",
            f"{program.aliased / 1e9:.3f}",
            "-" if program.flops is None else f"{program.flops / 1e9:.1f}",
            f"{sum(program.accessed.values()) / 1e9:.2f}" if program.accessed else "-",
        )
        for name, program in report.programs.items()
    ]
    header = ("program", "compiled in s", "temporary GB", "aliased GB", "GFLOP", "memory GB")
    terminal.print_table(header, programs)
    print("(operations count the body of a loop once; memory is read and written in one round)\n")
    counts = {name: program.cycles for name, program in report.programs.items()}
    _show_phases("million cycles per round", counts, 1e6)
    counts = {name: program.kernels for name, program in report.programs.items()}
    _show_phases("kernels per round", counts)
    collectives = (
        (name, kind, f"{size / 1e3:.1f}", where, count)
        for name, program in report.programs.items()
        for (kind, size, where), count in _counted(program).items()
    )
    header = ("program", "collective", "kB", "in", "count")
    terminal.print_table(header, collectives, left=(0, 1, 3))


def _show_phases(title: str, counts: Mapping[str, Mapping], unit: float | None = None) -> None:
    """Prints counts of programs per phase of a round, if there are any; `unit` divides them."""
    shown = [
        phase for phase in compiled_program.PHASES if any(phase in own for own in counts.values())
    ]
    if not shown:
        return

    def cell(count):
        return f"{count / unit:.3f}" if unit else count

    rows = ((name, *(cell(own.get(phase, 0)) for phase in shown)) for name, own in counts.items())
    terminal.print_table((title, *shown), rows)


def show_passes(report: compile_report.CompileReport) -> None:
    """Prints the lower bounds on the time of each pass."""
    passes = []
    for name, cost in report.passes.items():
        bounds = cost.memory_seconds, cost.compute_seconds, cost.interconnect_seconds, cost.seconds
        sizes = cost.times, f"{cost.weights / 1e9:.3f}", f"{cost.cache / 1e9:.3f}"
        passes.append((name, *sizes, *(f"{1e3 * seconds:.3f}" for seconds in bounds)))
    sizes = "per round", "weights GB", "cache GB"
    header = ("pass", *sizes, "memory ms", "compute ms", "interconnect ms")
    terminal.print_table((*header, "lower bound ms"), passes)


def _where(scope: str) -> str:
    """Returns the phase of a round that a scope belongs to; the draft's later steps are a loop."""
    return compiled_program.phase(scope) + ", each step" * ("/propose/while/" in scope)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # only compilers are needed
    main.run(run, _environment.EXPERIMENTS / "chinchilla_70b.py")
