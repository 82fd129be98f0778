"""Falcon: a decoder layer that drafts several tokens per pass (Gao et al. 2024, arXiv 2412.12639).

An LSTM reads pairs of a feature and the next token. The layer runs over a unit of k pairs, which
attend to each other in both directions, and gives the distributions of k tokens. These tokens do
not depend on each other. **Lossless**, as is every drafter.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import folders, pairs, pending, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.contrib import falcon_training, sequences
from spsjax.drafters.contrib.lstm import LSTM
from spsjax.drafters.folders import Folder
from spsjax.drafters.sample import Level
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.models.caches import KVCache
from spsjax.models.config import Config
from spsjax.models.context import KeysValues
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.hf import config_json
from spsjax.models.hf.fields import COUNT, OBJECT
from spsjax.types import Array, Block, Proposal, PyTree, Round, pytree_dataclass
from spsjax.utils.fields import integer

LSTM_LAYERS = 2


class Falcon(nnx.Module):
    """LSTM over pairs of a feature and a token, and a decoder layer."""

    def __init__(self, config: Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        width = config.d_model
        self.lstm = LSTM(2 * width, width, LSTM_LAYERS, dtype=dtype, rngs=rngs)
        self.layer = FeatureLayer(config, dtype=dtype, rngs=rngs)


@pytree_dataclass
class State:
    """State between rounds."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    read: Array  # [B, k, D] outputs of the LSTM at the last k pairs; 0: there is no such pair
    carry: Array  # [B, L, 2, D] carry of the LSTM after the last pair
    pending: pending.Pending


@pytree_dataclass
class _Draft:
    """Draft of one round: F fed nodes and U units. Every unit ends at a fed node."""

    tokens: Array  # [B, F] int32
    parents: Array  # [B, F] int32, fed number of a node's parent
    units: Array  # [B, F] int32, unit from whose outputs a node's children are drawn
    outputs: Array  # [B, U, k, D] outputs of the layer
    carries: Array  # [B, U, L, 2, D] carries of the LSTM after each unit
    sees: Array  # [B, U, U] bool, whether a unit attends to a unit: those on its path
    count: Array  # [] number of units so far
    block: Block  # keys and values of all units


@dataclasses.dataclass(frozen=True)
class Drafter(pairs.LayerDrafter):
    """Drafts k tokens per pass, with the target's embedding and head. Lossless.

    The output at slot t is a prediction of feature t + k. A round begins with a unit of the last k
    pairs, whose slots give the first k tokens. This unit need not continue a unit of the previous
    round.

    Attributes:
        tokens_per_step: k; 1 gives EAGLE-1 with an LSTM in place of its projection.
    """

    module = Falcon
    tokens_per_step: int = integer(2, 1)

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        dtype, (cache, buffer) = self.dtype(params), self.empty(params, batch, slots)
        read = jnp.zeros((batch, self.tokens_per_step, self.config.d_model), dtype)
        return State(cache, read, self.no_carry(batch, dtype), buffer)

    def extend(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        starts_B: Array,
        pairs_B: Array,
    ) -> PyTree:
        # The first pairs may have been read before, and the LSTM must not read them twice.
        k, T, cache = self.tokens_per_step, tokens_BT.shape[1], state.cache
        slots, known = starts_B[:, None] + jnp.arange(T), cache.lengths[:, None]
        new = slots >= known
        read, carries = self.read(params, tokens_BT, features_BTD, state.carry, new)
        # The outputs are unused, so the compiler computes keys and values only.
        _, block = self.run(params, read, None, positions_BT=slots)

        def merged(rows_BGTC: Array, buffer_BGSC: Array) -> Array:
            """Returns new rows, and the cached rows of pairs that were read before."""
            old = tree.along(jnp.minimum(slots, cache.num_slots - 1), buffer_BGSC, axis=2)
            return jnp.where(new[:, None, :, None], rows_BGTC, old)

        keys, values = block.keys + block.values
        keys, values = merged(keys, cache.keys[0]), merged(values, cache.values[0])
        block = dataclasses.replace(block, keys=(keys,), values=(values,))
        # The last k pairs may begin among those that `state.read` has: it comes first below.
        last = pairs_B[:, None] - k + jnp.arange(k)
        index = jnp.where(last < known, last - known + k, last - starts_B[:, None] + k)
        carries = jnp.concatenate([state.carry[:, None], carries], axis=1)
        at = jnp.maximum(pairs_B - starts_B, 0)[:, None]
        return State(
            cache.at(starts_B).write(block, None, pairs_B, read),
            tree.along(index, jnp.concatenate([state.read, read], axis=1)),
            tree.along(at, carries)[:, 0],
            state.pending,
        )

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        k, K = self.tokens_per_step, self.num_speculative_tokens
        cache = state.cache.at(jnp.maximum(now.lengths - 1 - k, 0))

        def feed(draft: "_Draft", level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Runs the layer where units begin, at every k-th level (`sample.Feed`)."""
            units_BT = tree.along(level.parents, draft.units)
            draft = dataclasses.replace(
                draft,
                tokens=sequences.put(draft.tokens, level.tokens, level.start),
                parents=sequences.put(draft.parents, level.parents, level.start),
                units=sequences.put(draft.units, units_BT, level.start),
            )

            def run_units(draft: "_Draft") -> "_Draft":
                read, carries = state.read[:, None], state.carry[:, None]
                if not level.is_root:
                    read, carries = self._continued(params, level, units_BT, draft)
                return self._with_units(params, cache, level, units_BT, read, carries, draft)

            begins = level.depth % k == 0
            if not isinstance(begins, bool):  # in a chain the depth is traced
                draft = lax.cond(begins, run_units, lambda same: same, draft)
            elif begins:
                draft = run_units(draft)
            units_BT = lax.dynamic_slice_in_dim(draft.units, level.start, units_BT.shape[1], axis=1)
            outputs = lax.dynamic_index_in_dim(draft.outputs, level.depth % k, 2, keepdims=False)
            outputs = tree.along(units_BT, outputs)
            return self.choices(params, outputs, level.depth), outputs, draft

        start = self._empty_draft(shapes.fed_levels(self.tree, K), state)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def _empty_draft(self, fed_levels: list[int], state: State) -> _Draft:
        config, B, dtype = self.config, len(state.read), state.read.dtype
        k, F = self.tokens_per_step, sum(fed_levels)
        U = sum(fed_levels[::k])
        nodes = jnp.zeros((B, F), jnp.int32)
        return _Draft(
            tokens=nodes,
            parents=nodes,
            units=nodes,
            outputs=jnp.zeros((B, U, k, config.d_model), dtype),
            carries=jnp.zeros((B, U, *state.carry.shape[1:]), dtype),
            sees=jnp.zeros((B, U, U), bool),
            count=jnp.zeros((), jnp.int32),
            block=kv.empty_block(kv.shapes(config, B, U * k), dtype),
        )

    def _continued(
        self, params: PyTree, level: Level, units_BT: Array, draft: "_Draft"
    ) -> tuple[Array, Array]:
        """Returns the LSTM's outputs [B, T, k, D] at the last k nodes up to each node of a level.

        The second result are the LSTM's carries [B, T, L, 2, D] after these nodes.
        """
        k, (B, T) = self.tokens_per_step, units_BT.shape
        nodes = [jnp.broadcast_to(level.start + jnp.arange(T), (B, T))]
        for _ in range(k - 1):
            nodes.insert(0, tree.along(nodes[0], draft.parents))
        tokens = tree.along(jnp.stack(nodes, axis=2).reshape(B, T * k), draft.tokens)
        # Each token is paired with the output that it was drawn from.
        above = tree.along(units_BT, draft.outputs).reshape(B * T, k, -1)
        carry = sequences.rows(tree.along(units_BT, draft.carries))
        read, carries = self.read(params, tokens.reshape(B * T, k), above, carry)
        return read.reshape(B, T, k, -1), carries[:, -1].reshape(B, T, *carries.shape[2:])

    def _with_units(
        self,
        params: PyTree,
        cache: KVCache,
        level: Level,
        units_BT: Array,
        read_BTkD: Array,
        carries: Array,
        draft: "_Draft",
    ) -> _Draft:
        """Returns the draft with one more unit per node of a level, which ends at the node.

        `units_BT` are the units above them.
        """
        k, (B, T), U = self.tokens_per_step, units_BT.shape, draft.sees.shape[1]
        new_T = draft.count + jnp.arange(T, dtype=jnp.int32)
        above = tree.along(units_BT, draft.sees) & (draft.count > 0)
        sees = above | (jnp.arange(U) == new_T[:, None])
        positions = cache.lengths[:, None, None] + level.depth + jnp.arange(k)
        outputs, block = self.run(
            params,
            read_BTkD.reshape(B, T * k, -1),
            cache,
            draft.block,
            jnp.broadcast_to(positions, (B, T, k)).reshape(B, T * k),
            jnp.repeat(jnp.repeat(sees, k, axis=1), k, axis=2),
        )
        return dataclasses.replace(
            draft,
            units=sequences.put(draft.units, jnp.broadcast_to(new_T, (B, T)), level.start),
            outputs=sequences.put(draft.outputs, outputs.reshape(B, T, k, -1), draft.count),
            carries=sequences.put(draft.carries, carries, draft.count),
            sees=sequences.put(draft.sees, sees, draft.count),
            count=draft.count + T,
            block=block,
        )

    # A unit ends at every feature, and slot j of it is step j.
    unrolled = falcon_training.unrolled

    def read(
        self,
        params: PyTree,
        tokens_BT: Array,
        features_BTD: Array,
        carry: Array,
        new_BT: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the LSTM's outputs at pairs [B, T, D], and its carries [B, T, L, 2, D].

        Pairs that are not `new_BT` do not change the carry; None: all pairs are new.
        """
        embedded = transformer.embed(self.target, params["target"], tokens_BT)
        pair_BTI = jnp.concatenate([embedded, features_BTD], axis=-1).astype(carry.dtype)
        new_BT = jnp.ones(tokens_BT.shape, bool) if new_BT is None else new_BT
        return self.bind(params).lstm(pair_BTI, carry, new_BT)

    def run(
        self,
        params: PyTree,
        read_BTD: Array,
        cache: KVCache | None,
        block: Block | None = None,
        positions_BT: Array | None = None,
        ancestors: Array | None = None,
    ) -> tuple[Array, Block]:
        """Returns the layer's outputs and the extended block (see `transformer.apply`)."""
        layer, T = self.bind(params).layer, read_BTD.shape[1]

        def outputs(*context: Any) -> tuple[Array, KeysValues]:
            return layer(read_BTD, read_BTD, *context)

        return pairs.run_layer(outputs, T, cache, block, positions_BT, ancestors)

    def no_carry(self, batch: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, LSTM_LAYERS, 2, self.config.d_model), dtype)


class _Layout(folders.OwnLayout[Drafter]):
    """Layout whose config.json contains the config of the layer."""

    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields = super().drafter_fields(folder, target)
        layer = config_json.parse(folder.path / "config.json", folder.fields.get("layer", OBJECT))
        layer = dataclasses.replace(layer, num_layers=1, vocab_size=target.vocab_size, eos_ids=())
        return fields | {"config": layer}

    def to_json(self, drafter: Drafter, target_name: str, dtype: str) -> dict:
        raw = super().to_json(drafter, target_name, dtype)
        return raw | {"layer": config_json.to_json(drafter.config, dtype)}


LAYOUT = _Layout("falcon", {"tokens_per_step": COUNT})
