"""Trains a target language model, and its tokenizer, on the Python standard library.

python scripts/train_target.py --config=configs/experiments/pystdlib_target.py --workdir=runs/target
"""

import pathlib

import jax
from absl import flags
from ml_collections import config_flags

from spsjax import arguments, cli, data, loading, tokenizer, train
from spsjax.errors import InputError
from spsjax.models import transformer

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept.")
flags.mark_flag_as_required("workdir")


def main():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    print(config)
    train.check(config)
    path = workdir / "tokenizer.model"
    if not path.exists():
        training, _ = data.split(data.stdlib())
        tokenizer.train(training.values(), path, config.model.vocab_size)
    pieces = tokenizer.Tokenizer(path)
    if pieces.vocab_size != config.model.vocab_size:
        raise InputError(
            f"{path}: expected {config.model.vocab_size} pieces (model.vocab_size), "
            f"found {pieces.vocab_size}"
        )
    examples, held_out = data.stdlib_examples(pieces, config.length)
    print(f"{examples.size:,} training tokens, {held_out.size:,} held out")
    model = arguments.build(
        "model",
        transformer.Config,
        config.model,
        bos_id=pieces.bos_id,
        eos_ids=(pieces.eos_id,),
    )
    params = transformer.init(model, jax.random.key(config.seed))
    print(f"{transformer.num_params(params):,} parameters")
    loss = train.language_model_loss(model)
    params, metrics = train.fit(config, params, loss, examples, held_out, workdir)
    loading.save(workdir / "model", loading.Model("trained", model, params, pieces))
    print(f"held out: {metrics}; model in {workdir / 'model'}")


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "pystdlib_target.py")
