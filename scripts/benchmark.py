"""Measures autoregressive against speculative sampling on held-out text, over a range of K.

python scripts/benchmark.py --json=runs/benchmark.json --plot=runs/benchmark.png
python scripts/benchmark.py --config.what=greedy --config.num_speculative_tokens=4   # quick
python scripts/benchmark.py --peer=hf --config.num_speculative_tokens=5
python scripts/benchmark.py --size=90M
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random

Every key of the config is a flag; configs/experiments/benchmark.py lists them.
"""

import dataclasses
import json
import pathlib
import re

from absl import flags
from ml_collections import config_flags

from spsjax import loading
from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.errors import InputError
from spsjax.evaluation import hf_baseline, speed
from spsjax.parallel import multihost
from spsjax.utils import atomic_files

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_MODELS = _CONFIGS.parent / "models"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the draft model.")
_SIZE = flags.DEFINE_string("size", None, "Time ArS of a random model of this size, as 90M.")
_RANDOM = flags.DEFINE_bool(
    "random", False, "Time random weights of the config's shapes: those of configs/models."
)
_PEER = flags.DEFINE_enum("peer", None, ["hf"], "Race Hugging Face generate, too.")
_JSON = flags.DEFINE_string("json", None, "Write all figures to this file.")
_PLOT = flags.DEFINE_string("plot", None, "Write a PNG to this file.")


def main():
    config = _CONFIG.value
    config.target, config.draft = _TARGET.value or config.target, _DRAFT.value or config.draft
    cli.check_writable(_JSON.value)
    cli.check_writable(_PLOT.value)
    if _PEER.value:
        cli.check_installed("--peer", "torch", "transformers")
    if _PLOT.value:
        cli.check_installed("--plot", "matplotlib")
    mesh = cli.mesh(config.mesh)
    if _SIZE.value and _RANDOM.value:
        raise InputError("--size, --random: expected one of the two, found both")
    if _SIZE.value:
        shape = speed.config_of_size(parse_size(_SIZE.value))
        target, draft = loading.random(shape, mesh=mesh, dtype=config.dtype), None
    elif _RANDOM.value:
        shapes = [cli.model_config(name, _MODELS) for name in (config.target, config.draft)]
        target, draft = (
            loading.random(shape, seed, mesh, config.dtype) for seed, shape in enumerate(shapes)
        )
    else:
        for flag in ("target", "draft"):
            name = config[flag]
            if name in cli.model_names(_MODELS) and not pathlib.Path(name).is_dir():
                raise InputError(
                    f"--{flag}: expected a model folder, or --random for times alone, "
                    f"found {name}, a shape without weights"
                )
        target = loading.load(config.target, mesh, config.dtype)
        draft = loading.load(config.draft, mesh, config.dtype)
        if config.texts and target.tokenizer is None:
            raise InputError(f"{target.name}: expected a tokenizer for texts, found none")
    others = hf_baseline.samplers(config.peer, target, draft) if _PEER.value else []
    report = speed.compare(config, target, draft, others, terminal.progress("measuring"))
    mark = "random weights" if _SIZE.value or _RANDOM.value else ""
    terminal.table(report.lines, mark)
    terminal.positions(report.lines, mark)
    terminal.summary(report, mark)
    terminal.prediction(report.lines, mark)
    if _JSON.value and multihost.is_main_process():
        weights = mark or "as loaded"
        figures = {"config": config.to_dict(), "weights": weights, **dataclasses.asdict(report)}
        text = json.dumps(rounded(figures), indent=2) + "\n"
        atomic_files.write(_JSON.value, text)
    if _PLOT.value and multihost.is_main_process():
        from spsjax.cli import plots

        plots.speed(report.lines, _PLOT.value, mark)


def rounded(tree):
    """Four significant digits: more would be noise."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [rounded(value) for value in tree]
    return float(f"{tree:.4g}") if isinstance(tree, float) else tree


def parse_size(text: str) -> int:
    """90M -> 90,000,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", text, re.IGNORECASE)
    if not match:
        raise InputError(f"--size: expected a size as 90M or 0.5B, found {text!r}")
    return int(float(match[1]) * {"M": 10**6, "B": 10**9}[match[2].upper()])


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "benchmark.py")
