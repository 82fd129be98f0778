"""Measures autoregressive against speculative sampling on held-out text, over a range of K.

python scripts/benchmark.py --json=runs/benchmark.json --plot=runs/benchmark.png
python scripts/benchmark.py --config.run_settings=greedy --config.num_speculative_tokens=4   # quick
python scripts/benchmark.py --peer=hf --peer=openvino --config.num_speculative_tokens=5
python scripts/benchmark.py --size=90M
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random

Every key of the config is a flag; configs/experiments/benchmark.py lists them.
"""

import dataclasses
import json
import pathlib
import re

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags
from ml_collections import config_flags

from spsjax import loading, verifiers
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, short_repr
from spsjax.evaluation import peers, samplers, speed
from spsjax.parallel import multihost
from spsjax.performance import forced_acceptance, mixtures
from spsjax.utils import atomic_files

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_MODELS = _CONFIGS.parent / "models"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_SIZE = flags.DEFINE_string("size", None, "Time ArS of a random model of this size: 90M.")
_RANDOM = flags.DEFINE_bool(
    "random", False, "Time random weights of the shapes in configs/models that the config names."
)
_PEER = flags.DEFINE_multi_enum("peer", [], peers.NAMES, peers.HELP)
_JSON = flags.DEFINE_string("json", None, "Write all figures to this file.")
_PLOT = flags.DEFINE_string("plot", None, "Write a PNG to this file.")


def run():
    config = _CONFIG.value
    configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=True)
    main.check_writable(_JSON.value)
    main.check_writable(_PLOT.value)
    for name in _PEER.value:
        main.check_installed(f"--peer={name}", *peers.modules(name))
    if _PLOT.value:
        main.check_installed("--plot", "matplotlib")
    mark = "random weights" if _SIZE.value or _RANDOM.value else ""
    verifier = config.verifier or None
    if config.router_skew and not _RANDOM.value:
        raise InputError("router_skew: expected --random beside it, found none")
    if config.forced_acceptance is not None:
        verifier = forced_acceptance.Verifier(config.forced_acceptance)
        if not _RANDOM.value:
            raise InputError(
                "forced_acceptance: expected --random beside it, because it makes texts "
                "meaningless, found none"
            )
        mark += f", acceptance forced to {config.forced_acceptance:g}"
    target, draft = load_models(config, configs.mesh(config.mesh))
    others = peers.systems(_PEER.value, config.peer, target, draft)
    if config.tree:
        others = [tree_system(config, target, draft, verifier), *others]
    progress = terminal.progress("measuring")
    report = speed.speed_benchmark(config, target, draft, others, progress, verifier)
    terminal.speed_table(report.systems, mark)
    terminal.position_table(report.systems, mark)
    terminal.speed_summary(report, mark)
    terminal.speed_prediction(report.systems, mark)
    if _JSON.value and multihost.is_main_process():
        weights = mark or "as loaded"
        figures = {"config": config.to_dict(), "weights": weights, **dataclasses.asdict(report)}
        text = json.dumps(rounded(figures), indent=2) + "\n"
        atomic_files.write(_JSON.value, text)
    if _PLOT.value and multihost.is_main_process():
        from spsjax.cli import plots

        plots.speed(report.systems, _PLOT.value, mark)


def tree_system(config, target, draft, verifier) -> samplers.System:
    """Returns speculative sampling with the trees that a config names."""
    rule = verifiers.by_name(verifier) if isinstance(verifier, str) else verifier
    if rule is not None and not rule.trees:
        raise InputError("tree: expected a verifier for trees beside it, found one for chains")
    drafter = configs.with_tree(draft, target, config.tree)
    tree = drafter.drafter.tree
    return samplers.spsjax_system(
        f"SpS, tree of {tree.num_nodes}",
        target,
        drafter,
        tree.depth,
        samplers.Role.ALTERNATIVE,
        verifier,
    )


def load_models(config, mesh) -> tuple[loading.Model, loading.Model | None]:
    """Returns the target and the draft model: loaded, or of random weights."""
    if _SIZE.value and _RANDOM.value:
        raise InputError("--size, --random: expected one of the two, found both")
    if _SIZE.value:
        shape = speed.config_of_size(parse_size(_SIZE.value))
        return in_int8(loading.random(shape, mesh=mesh, dtype=config.dtype), config), None
    if _RANDOM.value:
        shapes = [configs.model_config(name, _MODELS) for name in (config.target, config.draft)]
        target, draft = (
            loading.random(shape, seed, mesh, config.dtype) for seed, shape in enumerate(shapes)
        )
        if config.router_skew:
            target = mixtures.with_skew(target, config.router_skew)
        return in_int8(target, config), draft
    for flag in ("target", "draft"):
        name = config[flag]
        if name in configs.model_names(_MODELS) and not pathlib.Path(name).is_dir():
            raise InputError(
                f"--{flag}: expected a model folder, or --random for times alone, "
                f"found {name}, a shape without weights"
            )
    target = loading.load(config.target, mesh, config.dtype, quantize=config.quantize)
    draft = loading.load(config.draft, mesh, config.dtype)
    if config.texts and target.tokenizer is None:
        raise InputError(f"{target.name}: expected a tokenizer for texts, found none")
    return target, draft


def in_int8(model: loading.Model, config) -> loading.Model:
    """Returns a model with its matrices in int8, if the config asks for it."""
    return loading.quantized(model, config.quantize) if config.quantize else model


def rounded(tree):
    """Returns a tree with numbers of four significant digits, because more would be noise."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [rounded(value) for value in tree]
    return float(f"{tree:.4g}") if isinstance(tree, float) else tree


def parse_size(text: str) -> int:
    """Returns the number that a size such as 90M or 0.5B stands for."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([MB])", text, re.IGNORECASE)
    size = int(float(match[1]) * {"M": 10**6, "B": 10**9}[match[2].upper()]) if match else 0
    if not size:
        raise InputError(f"--size: expected a size such as 90M or 0.5B, found {short_repr(text)}")
    return size


if __name__ == "__main__":
    main.run(run, _CONFIGS / "benchmark.py")
