"""Distils a draft model from a target on the Python standard library.

python scripts/train_drafter.py --config=configs/experiments/pystdlib_draft.py \
    --config.target=runs/target/model --workdir=runs/draft
"""

import pathlib

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags

from spsjax import arguments, cli, data, loading, losses, train
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
    if config.objective not in losses.DIVERGENCES:
        raise InputError(
            f"objective: expected one of {', '.join(losses.DIVERGENCES)}, "
            f"found {config.objective!r}"
        )
    target = loading.load(config.target, dtype=jnp.float32)
    if target.tokenizer is None:
        raise InputError(
            f"{config.target}: expected a tokenizer.model beside the weights, found none"
        )
    examples, held_out = data.stdlib_examples(target.tokenizer, config.length)
    print(f"{examples.size:,} training tokens, {held_out.size:,} held out")
    model = arguments.build(
        "model",
        transformer.Config,
        config.model,
        vocab_size=target.config.vocab_size,
        max_positions=target.config.max_positions,
        bos_id=target.config.bos_id,
        eos_ids=target.config.eos_ids,
    )
    params = transformer.init(model, jax.random.key(config.seed))
    print(f"{transformer.num_params(params):,} parameters")
    loss = train.distillation_loss(
        model, target.config, target.params, config.objective, config.temperatures
    )
    examples, held_out = (
        (tokens, train.target_states(target.config, target.params, tokens, workdir))
        for tokens in (examples, held_out)
    )
    params, metrics = train.fit(config, params, loss, examples, held_out, workdir)
    loading.save(workdir / "model", loading.Model("trained", model, params, target.tokenizer))
    print(f"held out: {metrics}; model in {workdir / 'model'}")


if __name__ == "__main__":
    cli.run(main, _CONFIGS / "pystdlib_draft.py")
