"""The task of distilling a draft model from a target."""

from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.training import distillation
from spsjax.training import step as train_step
from spsjax.training.config import DraftConfig
from spsjax.training.tasks import base
from spsjax.training.tasks.drafter import DrafterTask


class DraftTask(DrafterTask):
    """A draft model with the target's vocabulary."""

    config_class = DraftConfig
    config: DraftConfig

    def __init__(self, config: DraftConfig, mesh):
        super().__init__(config, mesh)
        target = self.target.config
        shared = ("vocab_size", "max_positions", "bos_id", "eos_ids")
        self.model = base.build_model(
            config.model, **{field: getattr(target, field) for field in shared}
        )
        base.check_model(config, mesh, self.model)
        base.choose_tokenizer(config.init, self.tokenizer)
        config.draft_eval.check_fits(target.max_positions, config.length + 1)
        self.title = f"Draft of {config.target}"
        self.temperatures = config.objective.temperatures
        self.shapes = train_step.model_shapes(self.model, mesh)
        self.frozen = self.target.params
        self.loss = self.metrics_at(1.0)

    def start(self, run):
        super().start(run)
        self._on_policy = distillation.on_policy(
            self.config.mixture, self._draft, run.batch_sharding, self.config.seed
        )

    def metrics_at(self, temperature):
        config = self.config
        return distillation.distillation_metrics(
            self.model, self.target.config, config.objective, config.compute, temperature
        )

    def init(self):
        return base.init_model(self, self.model)

    def replace_batch(self, step, params, batch):
        return self._on_policy(step, params, batch) if self.config.mixture.draft else batch

    def pair(self, params):
        return self.target, self._draft(params)

    def _draft(self, params) -> Model:
        return Model("draft", self.model, params, self.tokenizer, self.mesh)

    def flops_per_token(self):
        # A cached target costs next to nothing.
        runs_target = self.config.target_cache.store == "nothing"
        frozen = transformer.num_params(self.target.params) if runs_target else 0
        count = transformer.num_params(self.shapes)
        return base.flops_per_token(self.model, count, self.config.length, frozen)

    def export(self, params):
        draft = self._draft(params)
        self.run.save_model(draft)
        return draft
