"""Training batches for drafters: corpus text and samples of the target, with cached columns."""

from collections.abc import Sequence

import numpy as np

from spsjax.data import pipeline
from spsjax.loading import Model
from spsjax.training.distillation import Mixture
from spsjax.training.target_cache import TargetCache, target_samples
from spsjax.training.trainer import Trainer, TrainingCorpus


def batches(
    trainer: Trainer,
    corpus: TrainingCorpus,
    target: Model,
    mixture: Mixture,
    cache: TargetCache,
    temperatures: Sequence[float] = (),
    tap_layers: tuple[int, ...] = (),
    first: int = 0,
) -> pipeline.BatchIterator:
    """Returns training batches of corpus text and samples of the target, by their shares.

    Args:
        trainer: the run.
        corpus: its corpus.
        target: target model.
        mixture: shares of the kinds of text.
        cache: what to cache of the target.
        temperatures: temperatures of the objective.
        tap_layers: layers of the target whose input is cached, too.
        first: number of tokens at the start of each text that do not count.
    """
    config = trainer.config

    def table(examples, start, **columns) -> pipeline.Table:
        columns["start"] = np.maximum(start, first).astype(np.int32)
        if mixture.draft == 1:  # every batch is replaced: its texts only serve as prompts
            return pipeline.Table(tokens=examples, **columns)
        cached = cache.columns(
            target,
            examples,
            temperatures,
            trainer.cache,
            trainer.batch_sharding,
            trainer.precision.dtype,
            tap_layers,
        )
        return pipeline.Table(tokens=examples, **columns, **cached)

    tables, shares = [], []
    if mixture.corpus or not mixture.target:
        # All tables of an iterator have the same columns: corpus examples count from end to end.
        count = len(corpus.train)
        start, stop = (np.full(count, end, np.int32) for end in (0, config.length + 1))
        tables.append(table(corpus.train, start, stop=stop))
        shares.append(mixture.corpus)
    if mixture.target:
        samples = target_samples(target, corpus.train, mixture, trainer.cache, config.seed)
        tables.append(table(samples.pop("tokens"), **samples))
        shares.append(mixture.target)
    total = sum(shares)
    shares = [share / total if total else 1 / len(shares) for share in shares]
    return pipeline.BatchIterator(tables, shares, config.batch, config.seed, trainer.batch_sharding)
