"""Training of a target whose first layers can draft (LayerSkip, Elhoushi et al. 2024, 2404.16710).

Layers are left out at random, later ones more often, and the logits after some of the earlier
layers are trained, too, through the norm and the head that all layers share.
"""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.training import losses
from spsjax.training import step as train_step
from spsjax.training.step import PerTokenMetrics, Precision
from spsjax.types import Array
from spsjax.utils.fields import Checked, integer, number


@dataclasses.dataclass(frozen=True)
class LayerSkip(Checked):
    """Options of a training that leaves out layers and trains early exits.

    Attributes:
        dropout: probability with which a row leaves out the last layer; a layer before it is left
            out with dropout (2^(l / (L - 1)) - 1), the first never.
        exit_scale: weight of the exits' losses, relative to that of the last layer's.
        every: distance in layers of the exits that a batch trains. The first exit is drawn at
            random (the authors rotate it).
    """

    dropout: float = number(0.1, most=1)
    exit_scale: float = number(0.5, most=1e6)
    every: int = integer(2, 1)


def training_metrics(
    config: transformer.Config, options: LayerSkip, precision: Precision
) -> PerTokenMetrics:
    """Returns the weighted loss of the last layer and of the exits of a batch.

    Random choices depend on the texts alone, so that a resumed run repeats them.
    """
    L = config.num_layers
    if options.every > max(L - 1, 1):
        raise InputError(
            f"layer_skip.every: expected at most {max(L - 1, 1)}, one less than the layers, "
            f"found {options.every}"
        )

    def metrics(params, frozen, batch):
        tokens = batch["tokens"]
        skips = jax.random.uniform(train_step.text_key(tokens, 0), (len(tokens), L))
        skips = skips < drop_rates(options.dropout, L)
        output = transformer.apply(
            config,
            params,
            tokens[:, :-1],
            tap_layers=tuple(range(1, L)),
            dtype=precision.dtype,
            remat=precision.remat,
            skipped=jnp.stack([skips, skips], axis=2),
        )
        last = losses.cross_entropy(output.logits, tokens[:, 1:])
        count = (L - 1) // options.every
        if not count:
            return {"loss": last, "last": last}
        first = jax.random.randint(train_step.text_key(tokens, 1), (), 0, options.every)
        exits = first + options.every * jnp.arange(count)
        streams = jnp.stack(output.taps)
        weights = loss_weights(exits, L, options.exit_scale)
        total = weights[-1] * last
        for index in range(count):
            logits = transformer.exit_logits(config, params, streams[exits[index]])
            total += weights[index] * losses.cross_entropy(logits, tokens[:, 1:])
        return {"loss": total, "last": last}

    return metrics


def held_out_metrics(config: transformer.Config, precision: Precision) -> PerTokenMetrics:
    """Returns the cross entropy of the last layer, "loss", and after every earlier layer."""

    def metrics(params, frozen, batch):
        tokens = batch["tokens"]
        taps = tuple(range(1, config.num_layers))
        output = transformer.apply(
            config, params, tokens[:, :-1], tap_layers=taps, dtype=precision.dtype
        )
        values = {"loss": losses.cross_entropy(output.logits, tokens[:, 1:])}
        for layers, stream in zip(taps, output.taps):
            logits = transformer.exit_logits(config, params, stream)
            values[f"after_{layers}"] = losses.cross_entropy(logits, tokens[:, 1:])
        return values

    return metrics


def drop_rates(dropout: float, num_layers: int) -> Array:
    """Returns [L]: the probability of skipping a layer (section 4.1.1)."""
    depth = jnp.arange(num_layers) / max(num_layers - 1, 1)
    return dropout * (2.0**depth - 1)


def loss_weights(exits_N: Array, num_layers: int, exit_scale: float) -> Array:
    """Returns the weights [N + 1] of the losses after exits [N] and after the last layer.

    The weights add up to 1. They grow with the layer, as the sum of the numbers of the layers that
    are trained up to it. Exits are ascending layers, counted from 0. Their weights are multiplied
    by `exit_scale`.
    """
    layers = jnp.append(exits_N, num_layers - 1)
    sums = jnp.cumsum(layers + 1)
    weights = jnp.where(layers < num_layers - 1, exit_scale * sums, sums)
    return weights / jnp.sum(weights)
