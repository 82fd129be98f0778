"""Training of an engine's drafter on the texts that the engine writes.

The losses are those of offline training: distillation for a draft model, and the objectives of
`feature_losses` for a drafter of features. The target's distributions and features are computed
from the texts when they are trained on, by the weights that the engine then has: a text takes four
bytes per token, where one distribution would take four per token of the vocabulary, and what is
kept does not age when the target changes. Samples stay exact at every moment, because with any
drafter the engine samples from its target.
"""

from collections.abc import Sequence

import jax
import numpy as np

from spsjax.drafters import base, draft_model
from spsjax.drafters.features import FeatureDrafter
from spsjax.errors import InputError, check_integer
from spsjax.loading import LoadedDrafter
from spsjax.parallel import sharding
from spsjax.runtime.batch import check_seed, token_ids
from spsjax.runtime.engine import Engine
from spsjax.training import distillation, feature_losses
from spsjax.training import step as train_step
from spsjax.training.optimizer import OptimizerConfig
from spsjax.types import PyTree

_NO_END = 2**30  # steps of a schedule whose rate is constant after its warm-up


class OnlineTrainer:
    """Trains an engine's drafter, a draft model or a drafter of features, between its steps.

    `add` takes texts, `learn` trains on them, `publish` gives the engine the trained weights.

    Attributes:
        engine: the engine.
        count: texts in the buffer.
        params: trained weights, in float32.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        texts: int = 1024,
        length: int = 128,
        batch: int = 8,
        learning_rate: float = 3e-4,
        objective: distillation.Objective | feature_losses.FeatureObjective | None = None,
        seed: int = 0,
    ):
        """Takes a copy of the drafter's weights.

        Args:
            engine: the engine.
            texts: size of the buffer. A new text takes the place of the oldest one.
            length: tokens of a training text. Longer texts are cut into several.
            batch: texts per training step; on a mesh a multiple of its data axis.
            learning_rate: AdamW's, constant after 10 steps.
            objective: the loss; None: the default of offline training.
            seed: random seed of the choice of texts.

        Raises:
            InputError: an argument that cannot be used, or a drafter that is not trained.
        """
        loaded, target = engine.drafter, engine.model
        context = min(target.config.max_positions, loaded.max_positions or 2**31 - 1)
        check_integer("length", length, 2, context)
        for name, value in (("texts", texts), ("batch", batch)):
            check_integer(name, value, 1, 2**31 - 1)
        if target.mesh is not None and batch % (size := target.mesh.shape["data"]):
            raise InputError(f"batch: expected a multiple of the mesh's {size} rows, found {batch}")
        check_seed(seed)
        self.engine = engine
        optimizer = OptimizerConfig(learning_rate, steps=_NO_END, warmup=10, final_rate=1.0)
        trained, self._constants, metrics = _trainable(loaded, target.config, objective)
        self._state = train_step.init_state(
            jax.tree.map(_float32_copy, trained), _shapes(trained, optimizer), optimizer
        )
        self._step = train_step.make_step(metrics, optimizer)
        self._batch, self._rng = batch, np.random.default_rng(seed)
        self._tokens = np.zeros((texts, length + 1), np.int32)
        self._spans = np.zeros((texts, 2), np.int32)  # [start, stop) of the tokens that count
        self.count = self._next = 0

    @property
    def params(self) -> PyTree:
        """Trained weights, in float32. They are used up by the next `learn`."""
        return self._state["params"]

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Adds a text to train on: the token ids of a prompt and of its continuation.

        Raises InputError for an id that the target does not have.
        """
        token_ids(self.engine.model, [text := [*map(int, prompt), *map(int, tokens)]], "text")
        width = self._tokens.shape[1]
        first = max(len(prompt) - width // 2, 0)  # a long prompt's beginning is not needed
        for start in range(first, len(text) - 1, width - 1):
            piece = text[start : start + width]
            if start + len(piece) <= len(prompt):
                continue  # it has no token of the continuation
            self._tokens[self._next] = np.pad(piece, (0, width - len(piece)), mode="edge")
            self._spans[self._next] = max(len(prompt) - start, 1), len(piece)
            self._next = (self._next + 1) % len(self._tokens)
            self.count = min(self.count + 1, len(self._tokens))

    def learn(self, steps: int) -> dict[str, float]:
        """Takes training steps on texts of the buffer, and returns the means of their metrics.

        Raises InputError if the buffer is empty.
        """
        check_integer("steps", steps, 1, 2**31 - 1)
        if not self.count:
            raise InputError("learn: expected texts in the buffer, found none: call add first")
        frozen: PyTree = self.engine.model.params
        if self._constants is not None:
            frozen = {"target": frozen, "drafter": self._constants}
        where = sharding.batch_sharding(self.engine.model.mesh)
        seen = []
        for _ in range(steps):
            rows = self._rng.integers(0, self.count, self._batch)
            columns = {"tokens": self._tokens[rows]}
            columns["start"], columns["stop"] = self._spans[rows].T
            with self.engine.model.in_mesh():
                self._state, metrics = self._step(
                    self._state, frozen, jax.device_put(columns, where)
                )
            seen.append(metrics)
        return {name: float(np.mean([one[name] for one in seen])) for name in seen[0]}

    def publish(self) -> None:
        """Gives the engine a copy of the trained weights (`Engine.set_weights`)."""
        self.engine.set_weights(drafter=self.params | (self._constants or {}))


def _trainable(
    loaded: LoadedDrafter, target, objective
) -> tuple[PyTree, PyTree | None, train_step.PerTokenMetrics]:
    """Returns the weights to train, the constants beside them, and the metrics function.

    Constants are None for a draft model: its metrics function takes the target's weights alone.
    """
    drafter, precision = base.unwrapped(loaded.drafter), train_step.Precision()
    if any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(loaded.params)):
        raise InputError(
            f"engine: expected a drafter that can be trained, found int8 in {loaded.name}"
        )
    if isinstance(drafter, FeatureDrafter):
        constants = {name: loaded.params[name] for name in drafter.constants}
        own = {name: leaf for name, leaf in loaded.params.items() if name not in constants}
        objective = objective or feature_losses.FeatureObjective()
        return own, constants, feature_losses.feature_metrics(drafter, objective, precision)
    if isinstance(drafter, draft_model.Drafter):
        objective = objective or distillation.Objective()
        metrics = distillation.distillation_metrics(drafter.config, target, objective, precision)
        return loaded.params, None, metrics
    raise InputError(
        "engine: expected a draft model or a drafter of features, which can be trained, found "
        f"{loaded.name}"
    )


def _shapes(trained: PyTree, optimizer: OptimizerConfig) -> PyTree:
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding), trained
    )
    return train_step.state_shapes(shapes, optimizer)


def _float32_copy(leaf: jax.Array) -> jax.Array:
    return jax.numpy.array(leaf, np.float32, copy=True)
