"""Samples a batch in one of several processes; the first process prints the tokens as JSON.

It samples autoregressively and speculatively.

python tests/helpers/worker.py --target=FOLDER --draft=FOLDER --data=2 --model=4 --rounds=1
    [--coordinator=host:port --num_processes=2 --process_id=0]
"""

import dataclasses
import json

import jax
from absl import flags
from ml_collections import ConfigDict

import spsjax
from spsjax import loading
from spsjax.cli import configs, main
from spsjax.drafters import base
from spsjax.parallel import multihost
from spsjax.runtime import costs

_TARGET = flags.DEFINE_string("target", None, "Folder of the target.")
_DRAFT = flags.DEFINE_string("draft", None, "Folder of the draft.")
_DATA = flags.DEFINE_integer("data", 1, "Size of the mesh's data axis.")
_MODEL = flags.DEFINE_integer("model", 1, "Size of the mesh's model axis.")
_SEED = flags.DEFINE_integer("seed", 0, "Random seed of the samples.")
_STREAM = flags.DEFINE_bool("stream", False, "Stream one text instead.")
_MORE = flags.DEFINE_bool("more", False, "Choose K in every round, and serve by an engine, too.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Number of batches.")

PROMPTS = ["import os\n", "def read(path):\n", "class Stack:\n", "for"]


def run():
    mesh = configs.mesh(ConfigDict({"data": _DATA.value, "model": _MODEL.value}))
    target, draft = (spsjax.load(folder.value, mesh) for folder in (_TARGET, _DRAFT))
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(target.params)
        for shard in leaf.addressable_shards
    )
    options = {
        "sampling": spsjax.SamplingParams(temperature=[0.0, 0.8, 0.8, 1.0], top_p=0.95),
        "max_new_tokens": [24, 24, 9, 24],
        "seed": _SEED.value,
    }
    greedy = {"sampling": spsjax.SamplingParams(temperature=0.0)}  # else K changes the texts
    if _STREAM.value:
        print("".join(spsjax.stream(target, PROMPTS[0], draft, seed=_SEED.value)))
        return
    for _ in range(_ROUNDS.value):
        outs = [spsjax.generate(target, PROMPTS, drafter, **options) for drafter in (None, draft)]
        if _MORE.value:
            # Costs need not be exact here, and nothing or one token is drafted.
            costs._MOST_ROUNDS, costs._SECONDS, costs._LEAST_SWEEPS = 4, 0.0, 1
            base.SCHEDULED_TOKENS = 1
            loaded = loading.as_drafter(draft, target)
            one = dataclasses.replace(loaded.drafter, num_speculative_tokens=1)
            scheduled = dataclasses.replace(loaded, drafter=one)
            outs.append(spsjax.generate(target, PROMPTS, scheduled, "auto", **options | greedy))
        tokens = [[row.tolist() for row in out.tokens] for out in outs]
        if multihost.is_main_process():
            print(json.dumps({"tokens": tokens, "held": held}), flush=True)
    if _MORE.value:
        serve(spsjax.Engine(target, draft, 3, rows=2, slots=64, chunk=8))


def serve(engine: spsjax.Engine) -> None:
    """Prints the tokens of requests that come one after another, of which one is cancelled.

    Among them are the samples of a group, of which one is cancelled, too.
    """
    engine.warm_up(PROMPTS[0])
    if not multihost.is_main_process():
        engine.follow()
        return
    sampling = spsjax.SamplingParams(temperature=0.8, top_p=0.95)
    cancelled = engine.submit(PROMPTS[0], sampling, 40, 9)
    requests = []
    for seed, prompt in enumerate(PROMPTS):
        requests.append(engine.submit(prompt, sampling, 16, seed))
        engine.step()
    *group, last = engine.submit_group(PROMPTS[0], 4, sampling, 16, 5)
    for one in (cancelled, last):
        one.cancel()
    tokens, samples = ([one.result() for one in some] for some in (requests, group))
    engine.close()
    served = {"tokens": tokens, "samples": samples, "cancelled": cancelled.done and last.done}
    print(json.dumps(served), flush=True)


if __name__ == "__main__":
    main.run(run)
