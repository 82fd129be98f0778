r"""Measures the speed of a pair or of shapes, the latency of requests, or the cost of trainings.

python scripts/benchmark.py --workdir=runs/benchmark
python scripts/benchmark.py --config.run_settings=greedy --config.num_speculative_tokens=4   # quick
python scripts/benchmark.py --peer=hf --peer=openvino --config.num_speculative_tokens=5
python scripts/benchmark.py --size=90M
python scripts/benchmark.py --config=configs/experiments/gpt2_xl.py --random
python scripts/benchmark.py --config=configs/experiments/shapes.py --workdir=runs/gpu --peer=hf
python scripts/benchmark.py --config=configs/experiments/load.py --workdir=runs/load
python scripts/benchmark.py --config=configs/experiments/training_cost.py --workdir=runs/cost

`benchmark` in the config says what is measured:

- "pair": ArS against SpS over K on the same prompts. With --random the models have random weights
  of the shapes in configs/models that the config names; --size times ArS of a random model.
- "shapes": the loop, drafts and scoring passes at given batches and contexts with random weights,
  against the memory's bandwidth, and greedy texts that only rounding changes.
- "load": how long requests wait that arrive over time, for several K.
- "training": what a training token costs, by drafter.

The folder receives a table in `table.md`, its figures in `table.json`, a plot in `table.png` and
the config in `experiment.json`. Every key of the config is a flag.
"""

import pathlib

import _environment  # must be first: names a package that is missing
from absl import flags
from ml_collections import config_flags

from spsjax.benchmarks import peers
from spsjax.cli import configs, main
from spsjax.cli.measurements import load, pair, shapes
from spsjax.errors import InputError

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name, folder or GGUF file of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, main.DRAFT_HELP)
_SIZE = flags.DEFINE_string("size", None, "Time ArS of a random model of this size: 90M.")
_RANDOM = flags.DEFINE_bool("random", False, "Time random weights of shapes in configs/models.")
_PEER = flags.DEFINE_multi_enum("peer", [], peers.NAMES, peers.HELP)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")

# The flags that each measurement takes.
FLAGS = {
    "pair": ("target", "draft", "size", "random", "peer"),
    "shapes": ("peer",),
    "load": ("target", "draft"),
    "training": ("target",),
}


def run():
    config, folder = _CONFIG.value, _WORKDIR.value
    kind = main.kind_of("benchmark", config, FLAGS)
    workdir = None if folder is None else pathlib.Path(folder)
    if workdir is not None:
        main.check_folder(workdir)
    elif kind != "pair":
        raise InputError("--workdir: expected a value, found none")
    if kind == "pair":
        for name in _PEER.value:
            peers.require(name)
        configs.choose_pair(config, _TARGET.value, _DRAFT.value, models=_RANDOM.value)
        pair.run(config, workdir, _environment.MODELS, _RANDOM.value, _SIZE.value, _PEER.value)
    else:
        main.check_one_process()
        if kind == "load":
            configs.choose_pair(config, _TARGET.value, _DRAFT.value)
            text = load.run(config, workdir)
        elif kind == "training":
            from spsjax.cli.measurements import training  # needs the extra "train"

            config.target = _TARGET.value or config.target
            text = training.run(config, workdir, _environment.DRAFTERS)
        else:
            text = shapes.run(config, workdir, _environment.MODELS, _PEER.value)
        print(f"\n{text}")
    if workdir is not None:
        print(f"{workdir / 'table.md'}, table.json, table.png")


if __name__ == "__main__":
    folder = _environment.EXPERIMENTS
    files = {"shapes": "shapes", "load": "load", "training": "training_cost"}
    others = {f"benchmark={kind}": folder / f"{name}.py" for kind, name in files.items()}
    main.run(run, folder / "benchmark.py", free=("pairs", "changes"), others=others)
