"""Base class of drafters that read the target's features.

A feature is an activation of the target at a token, such as the final hidden state.
"""

import abc
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spsjax.drafters import base, shapes
from spsjax.drafters.choices import Choices
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.models import pure, transformer
from spsjax.models.config import Config
from spsjax.parallel import sharding
from spsjax.types import Array, ModelOutput, PyTree
from spsjax.utils.from_config import build


class Learned(NamedTuple):
    """Logits and loss on which a step of drafts is trained."""

    drawn: Array  # logits [B, T, R] of the distributions from which tokens are drawn
    logits: Array  # logits [B, T, R] whose divergence from the target's is minimised
    own: Array | None = None  # [B, T] a loss of the drafter's own; None: there is none


class FeatureDrafter(base.TrainableDrafter):
    """Drafts from the target's features.

    A step takes the feature of token t, or a prediction of it, and token t + 1. Its output gives
    the distribution of token t + 2.

    The weights are those of a Flax module. A drafter without a vocabulary matrix of its own uses
    the target's.

    Attributes:
        module: class of the module with the drafter's weights.
        target: shape of the target.
        num_speculative_tokens: K. None: the depth of the tree; for a chain `max_steps`, or 4 if the
            weights allow any number.
        tree: shape of the tree; None: a chain.
        separate_steps: whether every step of a draft has weights of its own.
    """

    module: ClassVar[type[nnx.Module]]
    target: Config
    tree: shapes.Shape = None
    separate_steps: ClassVar[bool] = False
    steps_name: ClassVar[str] = "steps"  # for messages

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_steps
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        elif self.tree is None:
            object.__setattr__(self, "num_speculative_tokens", most)
        vocab = self.target.vocab_size
        K = shapes.checked_depth(self.tree, self.num_speculative_tokens, vocab)
        if most is not None and most < K:
            raise InputError(
                f"num_speculative_tokens: expected at most one for each of {most} "
                f"{self.steps_name}, found {K}"
            )
        object.__setattr__(self, "num_speculative_tokens", K)

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns the drafter that the section `drafter` of a training config describes."""
        return build("drafter", cls, options, target=target)

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return shapes.score_sizes(self.tree, self.num_speculative_tokens)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per step, which do not depend on each other."""
        return 1

    @property
    def least_steps(self) -> int:
        """Number of steps that reach all weights, so that training needs at least as many."""
        return self.max_steps or self.tokens_per_step

    @property
    def sharding_config(self) -> Config:
        """Shape of a model whose sharding rules fit the drafter's weights."""
        return self.target

    @property
    def module_config(self) -> Hashable:
        """Argument of `module`, which determines the shapes of the weights."""
        return self

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        return pure.param_shapes(self.module, self.module_config, dtype)

    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        return pure.init(self.module, self.module_config, key, dtype)

    def dtype(self, params: PyTree) -> np.dtype:
        """Returns the type of the drafter's weights, in which its module computes."""
        return jax.tree.leaves(self._trained(params))[0].dtype

    def bind(self, params: PyTree) -> nnx.Module:
        """Returns the module with the weights in `params`."""
        weights = self._trained(params)
        return pure.bind(self.module, self.module_config, weights, self.dtype(params))

    def _trained(self, params: PyTree) -> PyTree:
        weights = params["drafter"].items()
        return {name: value for name, value in weights if name not in self.constants}

    def shardings(
        self, mesh: Mesh | None, replicate: bool | None = None
    ) -> Callable[[tuple], Sharding]:
        """Returns a function from a parameter's path to its sharding.

        Args:
            mesh: mesh of the target; None: one device.
            replicate: whether every device has all weights; None: yes, because collectives of one
                layer cost more than they save.

        Raises:
            InputError: the mesh does not divide the layer.
        """
        split = mesh is not None and replicate is False
        if mesh is not None and split and self.target.d_model % mesh.shape["model"]:
            raise InputError(
                f"d_model: expected a multiple of the mesh's model axis, {mesh.shape['model']}, "
                f"found {self.target.d_model}"
            )
        return sharding.param_shardings(mesh, self.sharding_config, replicate=not split)

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        """Returns initial weights, with copies of the target's weights where they fit.

        `params["drafter"]` has the constants only.
        """
        return weights

    def head_weights(self, params: PyTree) -> PyTree:
        """Returns the arrays in `params` that `draft_logits` multiplies with."""
        return params["target"]["embed" if self.target.tie_embeddings else "head"]

    def features(self, params: PyTree, output: ModelOutput) -> Array:
        """Returns the features [B, T, D] of the tokens that the target has read.

        They are the target's final hidden states, after its norm, unless a subclass says otherwise.
        """
        return output.hidden

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, R] over the draft vocabulary, from the outputs of a step."""
        weights = params["target"]
        outputs = outputs_BTD.astype(weights["norm"]["scale"].dtype)
        return transformer.head(self.target, weights, outputs)

    def draft_ids(self, params: PyTree) -> Array | None:
        """Returns the target's ids [R] of the draft vocabulary; None: it is the target's."""
        return None

    def choices(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Choices:
        """Returns the logits of the next token's choices, from the outputs of a step.

        Depth 0 is the first step after the last committed token.
        """
        logits = sharding.gather_vocab(self.draft_logits(params, outputs_BTD, depth))
        return Choices(logits, self.draft_ids(params), self.target.vocab_size)

    def training_passes(self, steps: int, first: float, later: float) -> float:
        """Returns the number of passes over the weights per token of a text in training.

        Args:
            steps: number of steps of a draft.
            first: share of the tokens at which drafts begin.
            later: share of the tokens whose drafts continue after their first step.
        """
        return first if self.separate_steps else first + (steps - 1) * later

    def learned(
        self,
        params: PyTree,
        outputs_BTD: Array,
        target_logs_BTR: Array,
        depth: int | Array = 0,
        hard: bool = False,
    ) -> Learned:
        """Returns what is trained, from the outputs of a step.

        It is the divergence of `draft_logits`, unless a subclass says otherwise.

        Args:
            params: parameters of target and drafter.
            outputs_BTD: outputs of the step.
            target_logs_BTR: target's log probabilities of the tokens of the draft vocabulary.
            depth: number of the step.
            hard: whether labels are the target's most probable tokens, not its distributions.
        """
        logits = self.draft_logits(params, outputs_BTD, depth)
        return Learned(logits, logits)

    @abc.abstractmethod
    def unrolled(
        self,
        params: PyTree,
        next_BT: Array,
        features_BTD: Array,
        steps: int,
        detached: bool = False,
        remat: bool = False,
        later: Array | None = None,
        anchors: Array | None = None,
    ) -> Iterator[Array]:
        """Yields the outputs of each step of drafts that begin at positions of the texts.

        In step i, index t is a draft that began after feature t. Its tokens are the text's tokens
        t + 2 to t + 1 + i, and it attends to the same keys as in `propose`. The last i indices
        exceed the text, and their outputs are meaningless.

        The first step yields the outputs [B, T, D] at all indices. Later steps yield [B, L, D] at
        the indices `later` [L]. With `anchors` [B, N], all steps yield [B, N, D] at these indices
        of each row, and what other drafts alone need is not computed.

        Args:
            params: parameters of target and drafter.
            next_BT: token that follows each feature.
            features_BTD: features of the texts.
            steps: number of steps.
            detached: whether gradients stop between steps.
            remat: whether the backward pass computes each step again instead of storing it.
            later: indices of the drafts that continue after the first step; None: all.
            anchors: indices at which drafts begin; None: all. With anchors, all of them continue.
        """


def at_index(old_BD: Array, new_BTD: Array, index_B: Array) -> Array:
    """Returns one new entry per row [B, D]; rows whose index is outside of [0, T) keep the old."""
    T = new_BTD.shape[1]
    index = jnp.clip(index_B, 0, T - 1)[:, None, None]
    entry_BD = jnp.take_along_axis(new_BTD, index, axis=1)[:, 0].astype(old_BD.dtype)
    return jnp.where(((index_B >= 0) & (index_B < T))[:, None], entry_BD, old_BD)


def entries(array_BT: Array, index: Array) -> Array:
    """Returns the entries of each row at indices: [B, T, ...] -> [B, L, ...].

    The indices are [L], the same in all rows, or [B, L]. An index beyond the row gives its last
    entry.
    """
    if index.ndim == 1:
        return jnp.take(array_BT, index, axis=1, mode="clip")
    index = jnp.clip(index, 0, array_BT.shape[1] - 1)
    index = index.reshape(*index.shape, *[1] * (array_BT.ndim - 2))
    return jnp.take_along_axis(array_BT, index, axis=1)


def lengths_before(index: Array, batch: int) -> Array:
    """Returns how many entries drafts at indices [L] or [B, L] read, one per text and draft."""
    lengths = index.astype(jnp.int32) + 1
    return jnp.broadcast_to(lengths, (batch, index.shape[-1])).reshape(-1)


def check_taps(tap_layers: tuple[int, ...], target: Config) -> None:
    """Raises InputError unless these are layers of the target, or its final stream."""
    last = target.num_layers
    known = isinstance(tap_layers, tuple) and all(
        type(tap) is int and 0 <= tap <= last for tap in tap_layers
    )
    if not known or not tap_layers:
        raise InputError(
            f"tap_layers: expected layers in [0, {last}], found {short_repr(tap_layers)}"
        )
