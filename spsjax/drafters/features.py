"""Base class of drafters that read the target's features.

A feature is an activation of the target at a token, such as the final hidden state.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from spsjax.drafters import base, shapes
from spsjax.errors import InputError, check_integer
from spsjax.models import caches as kv
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues, context_of
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, PyTree
from spsjax.utils.from_config import build


class FeatureDrafter(base.TrainableDrafter):
    """Drafts from the target's features.

    A step takes the feature of token t, or a prediction of it, and token t + 1. Its output gives
    the distribution of token t + 2.

    Attributes:
        target: shape of the target.
        num_speculative_tokens: K. None: the depth of the tree; for a chain `max_steps`, or 4 if the
            weights allow any number.
        tree: shape of the tree; None: a chain.
        tokens_per_step: number of tokens per step, which do not depend on each other.
        separate_steps: whether every step of a draft has weights of its own.
    """

    target: Config
    tree: shapes.Shape = None
    tokens_per_step: ClassVar[int] = 1
    separate_steps: ClassVar[bool] = False
    steps_name: ClassVar[str] = "steps"  # for messages

    def __post_init__(self):
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

    @property
    def score_sizes(self):
        return shapes.score_sizes(self.tree, self.num_speculative_tokens)

    @property
    def least_steps(self) -> int:
        """Number of steps that reach all weights, so that training needs at least as many."""
        return self.max_steps or self.tokens_per_step

    @property
    @abc.abstractmethod
    def sharding_config(self) -> Config:
        """Shape of a model whose sharding rules fit the drafter's weights."""

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
        if split and self.target.d_model % mesh.shape["model"]:
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

    def step_weights(self, params: PyTree) -> PyTree:
        """Returns the arrays in `params` that every draft step reads."""
        return params["drafter"]

    @abc.abstractmethod
    def features(self, params: PyTree, output: ModelOutput) -> Array:
        """Returns the features [B, T, D] of the tokens that the target has read."""

    @abc.abstractmethod
    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, R] over the draft vocabulary, from the outputs of a step."""

    def draft_ids(self, params: PyTree) -> Array | None:
        """Returns the target's ids [R] of the draft vocabulary; None: it is the target's."""
        return None

    def logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, V] of the next token, from the outputs of a step.

        Depth 0 is the first step after the last committed token.
        """
        logits = sharding.gather_vocab(self.draft_logits(params, outputs_BTD, depth))
        ids = self.draft_ids(params)
        if ids is None:
            return logits
        # Tokens outside of the draft vocabulary get probability 0. Their logit is finite, because
        # `sampling.to_probs` reports a row with an infinite logit as an error.
        shape, least = (*logits.shape[:2], self.target.vocab_size), jnp.finfo(logits.dtype).min
        lowest = jnp.full(shape, least / 2, logits.dtype)
        return lowest.at[..., ids].set(logits)

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
    ) -> Iterator[Array]:
        """Yields the outputs of each step of drafts that begin at every position of the texts.

        In step i, index t is a draft that began after feature t. Its tokens are the text's tokens
        t + 2 to t + 1 + i, and it attends to the same keys as in `propose`. The last i indices
        exceed the text, and their outputs are meaningless.

        The first step yields the outputs [B, T, D] at all indices. Later steps yield [B, L, D] at
        the indices `later` [L].

        Args:
            params: parameters of target and drafter.
            next_BT: token that follows each feature.
            features_BTD: features of the texts.
            steps: number of steps.
            detached: whether gradients stop between steps.
            remat: whether the backward pass computes each step again instead of storing it.
            later: indices of the drafts that continue after the first step; None: all.
        """


def layer_from_config(options: Mapping[str, object], target: Config) -> tuple[Config, dict]:
    """Returns the shape of a layer and the other options of the section `drafter` of a config.

    Sizes that are 0 or missing are the target's.
    """
    others = dict(options)
    sizes = {
        field: others.pop(field, 0) or getattr(target, field)
        for field in ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
    }
    shared = {
        field: getattr(target, field)
        for field in ("vocab_size", "max_positions", "rope_theta", "norm_eps")
    }
    return build("drafter", Config, sizes, num_layers=1, **shared), others


def run_layer(
    outputs: Callable[[Context, Sequence[kv.Segment], KeysValues | None], tuple[Array, KeysValues]],
    num_tokens: int,
    cache: kv.KVCache | None,
    block: Block | None,
    positions_BT: Array | None,
    ancestors: Array | None,
) -> tuple[Array, Block]:
    """Returns the outputs of one layer and the extended block.

    The arguments are those of `transformer.apply`; `outputs` applies the layer.
    """
    context = context_of(num_tokens, cache, block, positions_BT, ancestors)
    cached = () if cache is None else cache.segments()[0]
    earlier = None if block is None else (block.keys[0], block.values[0])
    result, rows = outputs(context, cached, earlier)
    return result, context.block((rows[0],), (rows[1],), len(result))
