"""Trains a target language model from scratch on the Python standard library.

python scripts/train_target.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target
"""

import json
import pathlib

import jax
from absl import app, flags
from ml_collections import config_flags

from spsjax import data, tokenizer, train
from spsjax.models import huggingface, transformer

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_):
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    print(config)
    training, held_out = data.split(data.stdlib())
    path = workdir / "tokenizer.model"
    if not path.exists():
        tokenizer.train(training.values(), path, config.model.vocab_size)
    pieces = tokenizer.Tokenizer(path)
    examples = data.pack(training.values(), pieces, config.length)
    tests = data.pack(held_out.values(), pieces, config.length)
    print(f"{examples.size:,} training tokens, {tests.size:,} held out")
    model = transformer.Config(**config.model, bos_id=pieces.bos_id, eos_ids=(pieces.eos_id,))
    params = transformer.init(model, jax.random.key(config.seed))
    print(f"{transformer.num_params(params):,} parameters")
    loss = train.language_model_loss(model)
    params, metrics = train.fit(config, params, loss, examples, tests, workdir)
    huggingface.save(workdir / "model", model, params)
    (workdir / "model" / "tokenizer.model").write_bytes(path.read_bytes())
    (workdir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"held out: {metrics}; model in {workdir / 'model'}")


if __name__ == "__main__":
    app.run(main)
