"""The task of training a target, and its tokenizer unless the config names one."""

import dataclasses

import jax

from spsjax import loading, tokenization
from spsjax.data import pipeline
from spsjax.errors import InputError
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.training import layer_skip
from spsjax.training import step as train_step
from spsjax.training.config import TargetConfig
from spsjax.training.tasks import base


class TargetTask(base.Task):
    """A language model, trained on text with cross entropy."""

    config_class = TargetConfig
    title = "Target"

    def __init__(self, config: TargetConfig, mesh):
        super().__init__(config, mesh)
        self.model = base.build_model(config.model)
        base.check_model(config, mesh, self.model)
        named = tokenization.load(config.tokenizer) if config.tokenizer else None
        self.tokenizer = base.choose_tokenizer(config.init, named)
        self.vocab_size = self.model.vocab_size
        self.ends = loading.load_config(config.init).eos_ids if config.init else ()
        self.loss = self._held_out = train_step.language_model_metrics(self.model, config.compute)
        if config.layer_skip is not None:
            options = self.model, config.layer_skip, config.compute
            self.loss = layer_skip.training_metrics(*options)
            self._held_out = layer_skip.held_out_metrics(self.model, config.compute)
        self.frozen = {}

    def start(self, run):
        super().start(run)
        tokenizer = run.tokenizer
        if tokenizer.vocab_size > self.vocab_size:
            raise InputError(
                f"model.vocab_size: expected at least the tokenizer's {tokenizer.vocab_size}, "
                f"found {self.vocab_size}"
            )
        ends = {"bos_id": tokenizer.bos_id, "eos_ids": (tokenizer.eos_id,)}
        self.model = dataclasses.replace(self.model, **ends)
        self.shapes = train_step.model_shapes(self.model, self.mesh)
        self._jitted_held_out = jax.jit(self._held_out)

    def batches(self):
        table = pipeline.Table(tokens=self.run.train, **self.run.train.columns)
        config, where = self.config, self.run.batch_sharding
        return pipeline.BatchIterator([table], [1.0], config.batch, config.seed, where)

    def init(self):
        return base.init_model(self, self.model)

    def evaluate(self, step, params):
        table = pipeline.Table(tokens=self.run.held_out, **self.run.held_out_columns)
        record = self.run.measure(self._jitted_held_out, params, self.frozen, table)
        self.run.report(step, "held_out", record)
        return -record["loss"]["mean"]

    def flops_per_token(self):
        count = transformer.num_params(self.shapes)
        return base.flops_per_token(self.model, count, self.config.length)

    def export(self, params):
        model = Model("trained", self.model, params, self.run.tokenizer, self.mesh)
        self.run.save_model(model)
        return model
