"""Base class of drafters that read the target's features.

A feature is what the target has computed of a token, such as its final hidden state.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from spsjax import caches as kv
from spsjax.drafters import base, shapes
from spsjax.errors import InputError, check_integer
from spsjax.models.config import Config
from spsjax.models.layers import Context, KeysValues, context_of
from spsjax.parallel import sharding
from spsjax.types import Array, Block, ModelOutput, PyTree
from spsjax.utils.from_config import build


class FeatureDrafter(base.TrainableDrafter):
    """Drafts from the target's features.

    A step takes the feature of a token, or what stands for it, and the token that follows. From its
    outputs the token after that is drafted.

    Attributes:
        target: shape of the target.
        num_speculative_tokens: K. None: the depth of the tree, or of a chain the most steps that it
            can take, else 4.
        tree: shape of the tree; None: a chain.
        tokens_per_step: tokens that are drafted from one output, without seeing each other.
    """

    target: Config
    tree: shapes.Shape = None
    tokens_per_step: ClassVar[int] = 1
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
        """Steps that a training needs, so that it reaches all weights."""
        return self.max_steps or self.tokens_per_step

    @property
    @abc.abstractmethod
    def split_like(self) -> Config:
        """Shape of the model by whose sharding rules the weights can be split."""

    def shardings(
        self, mesh: Mesh | None, replicate: bool | None = None
    ) -> Callable[[tuple], Sharding]:
        """Returns a function from a parameter's path to its sharding.

        Args:
            mesh: mesh of the target; None: one device.
            replicate: whether every device holds all weights; None: yes, because for a layer of a
                small model collectives cost more than they save.

        Raises:
            InputError: the mesh does not divide the layer.
        """
        split = mesh is not None and replicate is False
        if split and self.target.d_model % mesh.shape["model"]:
            raise InputError(
                f"d_model: expected a multiple of the mesh's model axis, {mesh.shape['model']}, "
                f"found {self.target.d_model}"
            )
        return sharding.param_shardings(mesh, self.split_like, replicate=not split)

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        """Returns initial weights, of which some are replaced by the target's.

        `params["drafter"]` holds the constants only.
        """
        return weights

    def step_weights(self, params: PyTree) -> PyTree:
        """Returns those of the arrays in `params` that every draft step multiplies with."""
        return params["drafter"]

    @abc.abstractmethod
    def features(self, params: PyTree, output: ModelOutput) -> Array:
        """Returns the features [B, T, D] of what the target has read."""

    @abc.abstractmethod
    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, R] of the draft's tokens, from a step's outputs."""

    def draft_ids(self, params: PyTree) -> Array | None:
        """Returns the target's ids [R] of the draft's tokens; None: they are the target's."""
        return None

    def logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        """Returns the logits [B, T, V] of the next token, from the outputs of a step.

        The first step after the last committed token has depth 0.
        """
        logits = sharding.gather_vocab(self.draft_logits(params, outputs_BTD, depth))
        ids = self.draft_ids(params)
        if ids is None:
            return logits
        # What is never drafted gets probability 0. (An infinity would be reported as one.)
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
        """Yields the outputs of each step of the drafts that begin everywhere in texts.

        In step i, index t stands for a draft that began after feature t, with the text's tokens
        t + 2 to t + 1 + i as its tokens. It sees what `propose` sees. The last i indices have no
        such tokens, and garbage.

        Outputs are [B, T, D] of all indices in the first step, and [B, L, D] of the indices `later`
        [L] from then on; None: of all.

        Args:
            params: parameters of target and drafter.
            next_BT: the token that follows each feature.
            features_BTD: the target's features of the texts.
            steps: number of steps.
            detached: whether gradients stop between steps.
            remat: whether each step is computed again in the backward pass.
            later: indices that go on after the first step.
        """


def layer_from_config(options: Mapping[str, object], target: Config) -> tuple[Config, dict]:
    """Returns the shape of a layer and the other options of a training's section `drafter`.

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
    """Returns the outputs of one layer and the grown block; arguments as of `transformer.apply`."""
    context = context_of(num_tokens, cache, block, positions_BT, ancestors)
    cached = () if cache is None else cache.segments()[0]
    earlier = None if block is None else (block.keys[0], block.values[0])
    result, rows = outputs(context, cached, earlier)
    return result, context.block([rows], len(result))
