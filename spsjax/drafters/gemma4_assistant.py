"""Assistants that ship with Gemma 4: queries alone, over the keys and values of the target.

A step reads the last token and the last hidden state. Its layers have no keys and values: each
attends to those of the target's last layer of its kind, with full attention or with a window. So an
assistant has neither a cache nor a prompt to read. All steps of a draft have the position of the
root (transformers, `gemma4_assistant`). **Lossless**, as is every drafter.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import base, gemma4_folders, parallel, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.gemma4_folders import ORDERING
from spsjax.drafters.sample import Level
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.models.caches import Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues
from spsjax.models.layers import DecoderBlock
from spsjax.models.linear import INIT, head_logits, make_linear
from spsjax.models.norm import Norm
from spsjax.models.products import row_product
from spsjax.types import Array, Proposal, PyTree, Round
from spsjax.utils.fields import integer
from spsjax.utils.from_config import build


class Assistant(nnx.Module):
    """Layers of queries between two projections, and the head."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        config, width = drafter.config, drafter.target.d_model
        linear = functools.partial(make_linear, bias=False, dtype=dtype, rngs=rngs)
        self.pre_projection = linear(2 * width, config.d_model)
        own = map(config.layer, range(config.num_layers))
        self.layers = nnx.List([DecoderBlock(layer, dtype=dtype, rngs=rngs) for layer in own])
        self.norm = Norm(config, config.d_model, dtype=dtype)
        self.post_projection = linear(config.d_model, width)
        self.embed = nnx.Embed(
            *(config.vocab_rows, config.d_model),
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=INIT,
            rngs=rngs,
        )
        if drafter.num_centroids:
            self.centroids = linear(config.d_model, drafter.num_centroids)

    def __call__(
        self,
        embedded_BTD: Array,
        hidden_BTD: Array,
        context: Context,
        read: Sequence[tuple[Sequence[Segment], KeysValues]],
    ) -> Array:
        """Returns the outputs [B, T, d] of a step, which the head and `post_projection` multiply.

        `read` are the segments and the block that each layer reads.
        """
        x_BTD = self.pre_projection(jnp.concatenate([embedded_BTD, hidden_BTD], axis=-1))
        for layer, (cached, block) in zip(self.layers, read, strict=True):
            x_BTD, _ = layer(x_BTD, context, cached, block)
        return self.norm(x_BTD)


@dataclasses.dataclass(frozen=True)
class Drafter(parallel.StateDrafter):
    """Drafts with queries to the keys and values of the target. Lossless.

    With centroids, only the tokens of the centroids that are nearest to an output can be drawn: the
    others get probability 0. `params["drafter"]["ordering"]` are the tokens of all centroids, one
    centroid after another.

    Attributes:
        config: shape of the layers, all of which share the keys of another layer.
        num_centroids: number of centroids; 0: a head with all tokens.
        top_centroids: most centroids whose tokens can be drawn.
    """

    config: Config = dataclasses.field(kw_only=True)
    num_centroids: int = integer(0)
    top_centroids: int = integer(32, 1)

    module = Assistant

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab = self.config.vocab_rows
        if vocab not in (self.target.vocab_size, self.target.vocab_rows):
            raise InputError(
                f"vocab_size: expected the target's {self.target.vocab_rows}, found {vocab}"
            )
        if self.num_centroids and vocab % self.num_centroids:
            raise InputError(
                f"num_centroids: expected a divisor of the vocabulary of {vocab}, found "
                f"{self.num_centroids}"
            )
        for layer in range(self.config.num_layers):
            self._source(layer)

    @classmethod
    def from_config(cls, options: Mapping[str, Any], target: Config) -> Self:
        """Returns an assistant to be planned (`scripts/compile.py`); it cannot be trained.

        It has four layers, the last of which has full attention, and the target's sizes, unless
        `num_layers`, `d_model` and `d_ff` say otherwise.
        """
        own = {name: options[name] for name in gemma4_folders.SIZES if name in options}
        others = {name: value for name, value in options.items() if name not in own}
        return build(
            "drafter", cls, others, config=gemma4_folders.like(target, **own), target=target
        )

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        return (ORDERING,) if self.num_centroids else ()

    @property
    def sharding_config(self) -> Config:
        return self.config

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        ordering = jax.ShapeDtypeStruct((self.config.vocab_rows,), jnp.int32)
        return super().param_shapes(dtype) | dict.fromkeys(self.constants, ordering)

    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        ordering = jnp.arange(self.config.vocab_rows, dtype=jnp.int32)
        return super().init_params(key, dtype) | dict.fromkeys(self.constants, ordering)

    def cache_slots(self, slots: int) -> int:
        """Returns 0: it reads the target's cache."""
        return 0

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        """Returns the steps of a round (`base.Planned`)."""
        K = self.num_speculative_tokens
        return {"step": base.Pass(self._trained(params), times=K)}

    def head_weights(self, params: PyTree) -> PyTree:
        return ()  # they are among the layers' weights

    def _source(self, layer: int) -> int:
        """Returns the target's layer whose keys and values a layer reads.

        Raises InputError if the target has none that fits.
        """
        own = self.config.layer(layer)
        for source in reversed(range(self.target.num_layers)):
            other = self.target.layer(source)
            if other.mixer == "attention" and bool(other.windows) == bool(own.windows):
                break
        else:
            kind = "a window" if own.windows else "full attention"
            raise InputError(f"drafter: expected a target with {kind} in some layer, found none")
        for field in ("head_dim", "num_kv_heads"):
            if getattr(own, field) != getattr(other, field):
                raise InputError(
                    f"drafter: expected a target with {field} {getattr(own, field)} in layer "
                    f"{source}, found {getattr(other, field)}"
                )
        return source

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, module = self.num_speculative_tokens, self.bind(params)
        context, read = self._read(now)

        def feed(states_BFD: Array, level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Runs a step over one level of nodes (`sample.Feed`)."""
            above = level.parents
            before = state[:, None] if level.is_root else tree.along(above, states_BFD)
            embedded = transformer.embed(self.target, params["target"], level.tokens)
            outputs = module(embedded.astype(state.dtype), before, context, read)
            after = module.post_projection(outputs)
            states_BFD = lax.dynamic_update_slice_in_dim(states_BFD, after, level.start, axis=1)
            return self.choices(params, outputs), outputs, states_BFD

        shape = len(state), shapes.num_fed(self.tree, K), self.target.d_model
        return sample.grow(self.tree, K, feed, jnp.zeros(shape, state.dtype), now)[0]

    def _read(self, now: Round) -> tuple[Context, list[tuple[Sequence[Segment], KeysValues]]]:
        """Returns positions and masks, and what each layer reads: segments and a block.

        The block has one empty node, which only a text of one token sees: no key comes before it,
        and a softmax of nothing would not be finite.
        """
        positions, segments = now.lengths[:, None] - 1, now.cache.segments()
        alone = (positions <= 0)[:, None]
        context = Context(positions, positions, alone, None, False)
        read = []
        for source in map(self._source, range(self.config.num_layers)):
            keys_BGSC, values_BGSC = now.cache.keys[source], now.cache.values[source]
            block = jnp.zeros_like(keys_BGSC[:, :, :1]), jnp.zeros_like(values_BGSC[:, :, :1])
            read.append((segments[source], block))
        return context, read

    def draft_logits(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Array:
        if self.num_centroids:
            return self._candidates(params, outputs_BTD).whole()[..., : self.target.vocab_size]
        table = self.bind(params).embed.embedding[...]
        return head_logits(outputs_BTD, table, row_product)[..., : self.target.vocab_size]

    def choices(self, params: PyTree, outputs_BTD: Array, depth: int | Array = 0) -> Choices:
        if self.num_centroids and self.config.vocab_rows == self.target.vocab_size:
            return self._candidates(params, outputs_BTD)
        # Candidates may be in the padding of the target's vocabulary.
        return super().choices(params, outputs_BTD, depth)

    def _candidates(self, params: PyTree, outputs_BTD: Array) -> Choices:
        """Returns the logits of the tokens of the nearest centroids."""
        module = self.bind(params)
        scores = module.centroids(outputs_BTD).astype(jnp.float32)
        nearest = lax.top_k(scores, min(self.top_centroids, self.num_centroids))[1]
        ids = params["drafter"][ORDERING].reshape(self.num_centroids, -1)[nearest]
        ids = jnp.sort(ids.reshape(*nearest.shape[:2], -1), axis=-1)
        rows, wide = module.embed.embedding[...][ids], jnp.promote_types(self.dtype(params), "f4")
        logits = jnp.einsum("btd,btnd->btn", outputs_BTD, rows, preferred_element_type=wide)
        return Choices(logits, ids, self.config.vocab_rows)

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
        """Raises InputError: a training has no keys and values of the target."""
        raise InputError("gemma4_assistant: expected a drafter that can be trained")


LAYOUT = gemma4_folders.AssistantLayout()
