"""Compiles a pair for a TPU topology on a machine that has none, and says what it needs there.

python scripts/compile_tpu.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py
python scripts/compile_tpu.py --topology=v5e:2x4 --config.target=... --json=report.json

Needs `pip install libtpu`. A pair that does not fit is refused, with what is too much.
"""

import collections
import dataclasses
import inspect
import json
import pathlib

import jax
from absl import flags
from ml_collections import config_flags

from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.errors import InputError
from spsjax.performance import aot
from spsjax.utils import atomic_files

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to compile.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "Kind and shape of the slice.")
_JSON = flags.DEFINE_string("json", None, "Write the report to this file.")


def main():
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler is asked for, not a TPU
    config = _CONFIG.value.to_dict()
    cli.check_writable(_JSON.value)
    known = inspect.signature(aot.compile_pair).parameters
    for key in config:
        if key not in known:
            raise InputError(f"--config: expected no key {key}, found one")
    target, draft = (
        cli.model_config(config.pop(name), _CONFIGS / "models") for name in ("target", "draft")
    )
    config["compiler_options"] = _options(config["compiler_options"])
    report = aot.compile_pair(
        target, draft, _TOPOLOGY.value, progress=terminal.progress("compiling"), **config
    )
    show(report, config["num_speculative_tokens"])
    if _JSON.value:
        atomic_files.write(_JSON.value, json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def _options(text: str) -> dict[str, str]:
    """The pairs of a text such as "a=1,b=false"."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise InputError(f"compiler_options: expected name=value,..., found {text}")
    return {name: value for name, _, value in pairs}


def show(report: aot.Report, K: int) -> None:
    """Three tables and the prediction."""
    print(
        f"{report.device}: {report.needed / 1e9:.2f} of {report.memory / 1e9:.2f} GB a chip: "
        f"weights {report.weights / 1e9:.2f}, caches {report.caches / 1e9:.3f}, "
        "the rest temporaries"
    )
    terminal.columns(
        ("program", "compiled in s", "temporary GB", "aliased GB", "GFLOP", "GB accessed"),
        (
            (
                name,
                f"{program.seconds:.0f}",
                f"{program.temporary / 1e9:.3f}",
                f"{program.aliased / 1e9:.3f}",
                f"{program.flops / 1e9:.1f}",
                f"{program.bytes_accessed / 1e9:.2f}",
            )
            for name, program in report.programs.items()
        ),
    )
    print("(a loop's body, and that of the draft's steps within it, counted once)\n")
    parts = [part for part in aot.PARTS if any(part in p.cycles for p in report.programs.values())]
    terminal.columns(
        ("cycles a round", *parts),
        (
            (name, *(f"{program.cycles.get(part, 0):,}" for part in parts))
            for name, program in report.programs.items()
        ),
    )
    counted = (
        (name, *key, count)
        for name, program in report.programs.items()
        for key, count in collections.Counter(
            (each.kind, f"{each.num_bytes / 1e3:.1f}", _where(each.scope))
            for each in program.collectives
        ).items()
    )
    terminal.columns(("program", "collective", "kB", "in", "count"), counted, left=(0, 1, 3))
    terminal.columns(
        (
            "pass",
            "weights GB",
            "cache GB",
            "memory ms",
            "compute ms",
            "interconnect ms",
            "floor ms",
        ),
        (
            (
                name,
                f"{each.weights / 1e9:.2f}",
                f"{each.cache / 1e9:.3f}",
                *(
                    f"{1e3 * seconds:.3f}"
                    for seconds in (
                        each.memory_seconds,
                        each.compute_seconds,
                        each.interconnect_seconds,
                        each.seconds,
                    )
                ),
            )
            for name, each in report.passes.items()
        ),
    )
    print(
        f"at the floor, with {report.acceptance:.0%} of draft tokens accepted "
        f"({report.block_efficiency:.2f} tokens a round, K = {K}): ArS {report.ars_ms:.2f}, "
        f"SpS {report.sps_ms:.2f} ms a token, {report.ars_ms / report.sps_ms:.2f} times as fast"
    )


def _where(scope: str) -> str:
    """Part of the round; the draft's later steps are a loop."""
    return aot.part(scope) + ", each step" * ("/propose/while/" in scope)


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "experiments" / "chinchilla_70b.py")
