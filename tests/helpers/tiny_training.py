"""Training runs of tiny size: their texts, their configs and what they log."""

import json
import pathlib
import runpy

from helpers.environment import ROOT

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


def write_texts(folder: pathlib.Path) -> str:
    for index in range(40):
        lines = [f"    total = total + {index} * {line}\n" for line in range(12)]
        (folder / f"{index}.txt").write_text(f"def function_{index}(total):\n{''.join(lines)}")
    return str(folder)


def config(name, texts, **changes):
    """The shipped config of a target or a draft, made small and changed."""
    path = ROOT / "configs" / "experiments" / f"pystdlib_{name}.py"
    small = runpy.run_path(str(path))["get_config"]()
    small.update(SMALL | {"data": {"train": (texts,)}})
    if name == "target":
        small.model.update(SHAPE | {"num_layers": 2, "vocab_size": 320, "max_positions": 64})
    else:
        small.model.update(SHAPE)
        small.draft_eval.update({"prompts": 4, "prompt_length": 8, "new_tokens": 16})
    small.update(changes)
    return small


def records(folder, group):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["group"] == group]
