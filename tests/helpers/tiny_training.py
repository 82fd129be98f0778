"""Training runs of tiny size: their texts, their configs, what they log, and runs to share."""

import functools
import json
import pathlib
import runpy

import pytest
from helpers.environment import ROOT

from spsjax import tokenization
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights

SHAPE = {"d_model": 32, "d_ff": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
SMALL = {
    "length": 32,
    "batch": 4,
    "steps": 30,
    "eval_every": 15,
    "eval_examples": 8,
    "log_every": 5,
    "optimization": {"warmup": 3, "learning_rate": 1e-2},
}
DRAFT_EVAL = {"prompts": 4, "prompt_length": 8, "new_tokens": 16}
ONE_STEP = {"steps": 1, "optimization": {"warmup": 0, "learning_rate": 1e-12}}


# `conftest` imports this module, also for tests that train nothing. Training is imported late.


def whole_training(test):
    """Marks a test that trains, or needs what the tests of a process train once."""
    return pytest.mark.training(pytest.mark.xdist_group("trainings")(test))


def write_texts(folder: pathlib.Path) -> str:
    for index in range(40):
        lines = [f"    total = total + {index} * {line}\n" for line in range(12)]
        (folder / f"{index}.txt").write_text(f"def function_{index}(total):\n{''.join(lines)}")
    return str(folder)


def config(name, texts, target=None, **changes):
    """The shipped config of a target, a draft or a drafter of features, made small and changed."""
    model = name in ("target", "draft")
    path = f"experiments/pystdlib_{name}.py" if model else f"drafters/{name}.py"
    small = runpy.run_path(str(ROOT / "configs" / path))["get_config"]()
    small.update(SMALL | {"data": {"train": (texts,)}})
    if model:
        small.model.update(SHAPE)
    if name == "target":
        small.model.update({"num_layers": 2, "vocab_size": 320, "max_positions": 64})
    else:
        small.draft_eval.update(DRAFT_EVAL)
        small.target = str(target)
    if not model:
        small.target_cache.store = "nothing"
        small.draft_eval.temperatures = (1.0,)
    small.update(changes)
    return small


def records(folder, group):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["group"] == group]


@functools.cache
def untrained_target(texts: str, base: pathlib.Path) -> pathlib.Path:
    """Returns the model folder of a target of random weights, with a tokenizer of its texts.

    It has the shape of a target that `config` trains, and is made without compiling anything.
    """
    from helpers.numpy_models import numpy_params

    folder = base / "untrained_target"
    content = [path.read_text() for path in sorted(pathlib.Path(texts).iterdir())]
    tokenizer = tokenization.train(content, base / "untrained.model", 320)
    model = transformer.Config(**config("target", texts).model, eos_ids=(tokenizer.eos_id,))
    params = numpy_params(model, 0, 0.3)
    hf_weights.save(folder, model, params)
    tokenizer.save(folder)
    return folder
