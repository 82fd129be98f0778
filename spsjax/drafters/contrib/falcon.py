"""Decoder layer that drafts several tokens per pass (Falcon; Gao et al. 2024, arXiv 2412.12639).

An LSTM joins each feature with the token that follows it. The layer runs over a unit of k such
pairs, which all see each other, and gives k tokens, none of which depends on the others.
**Lossless**, as is every drafter.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spsjax import caches as kv
from spsjax import tree
from spsjax.drafters import features, folders, pending, sample, shapes
from spsjax.drafters.contrib.lstm import LSTM
from spsjax.errors import InputError, check_integer
from spsjax.models import pure, transformer
from spsjax.models.config import Config
from spsjax.models.feature_layer import FeatureLayer
from spsjax.models.hf import config_json
from spsjax.models.hf.fields import COUNT, OBJECT
from spsjax.types import Array, Block, PyTree, pytree_dataclass
from spsjax.utils.from_config import build

LSTM_LAYERS = 2


class Falcon(nnx.Module):
    """LSTM and decoder layer."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        width = config.d_model
        self.lstm = LSTM(2 * width, width, LSTM_LAYERS, dtype=dtype, rngs=rngs)
        self.layer = FeatureLayer(config, dtype=dtype, rngs=rngs)


@pytree_dataclass
class State:
    """State between rounds, of rows with n pairs."""

    cache: kv.KVCache  # slot t holds the pair of feature t and token t + 1
    read: Array  # [B, k, D] what the layer reads of the last k pairs; 0: there is no such pair
    carry: Array  # [B, L, 2, D] of the LSTM, after the last pair
    pending: pending.Pending


@pytree_dataclass
class _Draft:
    """Draft of one round: F fed nodes, and U units, each of which ends at such a node."""

    tokens: Array  # [B, F] int32
    parents: Array  # [B, F] int32, fed node above
    units: Array  # [B, F] int32, the unit that a node's children are drawn from
    outputs: Array  # [B, U, k, D]
    carries: Array  # [B, U, L, 2, D]
    sees: Array  # [B, U, U] bool, the units on a unit's path, itself included
    count: Array  # [] units so far
    block: Block  # keys and values of all units


@dataclasses.dataclass(frozen=True)
class Drafter(features.FeatureDrafter):
    """Drafts k tokens per pass, with the target's embedding and head. Lossless.

    The output at slot t stands for feature t + k. A round begins with a unit of the last k pairs,
    wherever units ended before: its slots give the first k tokens.

    Attributes:
        config: shape of the layer.
        tokens_per_step: k. With 1 it is EAGLE-1 with an LSTM in place of its projection.
    """

    config: Config
    target: Config
    num_speculative_tokens: int | None = None
    tree: shapes.Shape = None
    tokens_per_step: int = 2

    def __post_init__(self):
        super().__post_init__()
        check_integer("tokens_per_step", self.tokens_per_step, 1)
        if self.config.d_model != self.target.d_model:
            raise InputError(
                f"d_model: expected the target's {self.target.d_model}, found {self.config.d_model}"
            )

    @property
    def split_like(self):
        return self.config

    def features(self, params, output):
        return output.hidden

    def draft_logits(self, params, outputs_BTD, depth=0):
        weights = params["target"]
        outputs = outputs_BTD.astype(weights["norm"]["scale"].dtype)
        return transformer.head(self.target, weights, outputs)

    def param_shapes(self, dtype):
        return pure.param_shapes(Falcon, self.config, dtype)

    def init_params(self, key, dtype=jnp.float32):
        return pure.init(Falcon, self.config, key, dtype)

    def init(self, params, batch, slots):
        config, dtype = self.config, _dtype(params)
        shape = batch, config.num_kv_heads, slots, config.head_dim
        read = jnp.zeros((batch, self.tokens_per_step, config.d_model), dtype)
        unread = pending.empty(batch, self.num_speculative_tokens, config.d_model, dtype)
        cache = kv.empty(1, shape, dtype, (None,))
        return State(cache, read, self._no_carry(batch, dtype), unread)

    def prefill(self, params, state, chunk, output):
        ends = jnp.minimum(chunk.lengths - 1, chunk.starts + chunk.tokens.shape[1])
        unread = dataclasses.replace(state.pending, pairs=chunk.lengths - 1)
        state = dataclasses.replace(state, pending=unread)
        features = self.features(params, output)
        return self._extended(params, state, chunk.following, features, chunk.starts, ends)

    def sync(self, params, state, now):
        def extended(state, tokens_BT, features_BTD, ends_B):
            starts = state.cache.lengths
            return self._extended(params, state, tokens_BT, features_BTD, starts, ends_B)

        return pending.read(state, now, self.num_speculative_tokens + 1, extended)

    def commit(self, params, state, now, proposal, output, verdict):
        features = tree.along(verdict.path, self.features(params, output))
        unread = pending.add(state.pending, features, now.lengths - 1, state.cache.lengths)
        return dataclasses.replace(state, pending=unread)

    def _extended(self, params, state, tokens_BT, features_BTD, starts_B, pairs_B) -> State:
        """Returns the state of `pairs_B` pairs, the last of which begin at `starts_B`.

        The first of those given may be known already: the LSTM must not read them twice.
        """
        k, T, cache = self.tokens_per_step, tokens_BT.shape[1], state.cache
        slots, known = starts_B[:, None] + jnp.arange(T), cache.lengths[:, None]
        new = slots >= known
        read, carries = self.read(params, tokens_BT, features_BTD, state.carry, new)
        # The outputs are not used, so that the compiler leaves out all but keys and values.
        _, block = self.run(params, read, None, positions_BT=slots)

        def merged(rows_BGTC, buffer_BGSC):
            old = tree.along(jnp.minimum(slots, cache.num_slots - 1), buffer_BGSC, axis=2)
            return jnp.where(new[:, None, :, None], rows_BGTC, old)

        keys, values = block.keys + block.values
        keys, values = merged(keys, cache.keys[0]), merged(values, cache.values[0])
        block = dataclasses.replace(block, keys=(keys,), values=(values,))
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

    def propose(self, params, state, now):
        k, K = self.tokens_per_step, self.num_speculative_tokens
        cache = state.cache.at(jnp.maximum(now.lengths - 1 - k, 0))

        def feed(draft, level):
            """Runs the layer where units begin, at every k-th level (`sample.Feed`)."""
            units = tree.along(level.parents, draft.units)
            draft = dataclasses.replace(
                draft,
                tokens=_put(draft.tokens, level.tokens, level.start),
                parents=_put(draft.parents, level.parents, level.start),
                units=_put(draft.units, units, level.start),
            )

            def begun(draft):
                inputs = state.read[:, None], state.carry[:, None]
                if not level.is_root:
                    inputs = self._continued(params, level, units, draft)
                return self._with_units(params, cache, level, units, *inputs, draft)

            begins = level.depth % k == 0
            if not isinstance(begins, bool):
                draft = lax.cond(begins, begun, lambda same: same, draft)
            elif begins:
                draft = begun(draft)
            units = lax.dynamic_slice_in_dim(draft.units, level.start, units.shape[1], axis=1)
            outputs = lax.dynamic_index_in_dim(draft.outputs, level.depth % k, 2, keepdims=False)
            outputs = tree.along(units, outputs)
            return self.logits(params, outputs, level.depth), outputs, draft

        start = self._no_draft(shapes.fed_levels(self.tree, K), state)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def _no_draft(self, fed_levels: list[int], state: State) -> _Draft:
        config, B, dtype = self.config, len(state.read), state.read.dtype
        k, F = self.tokens_per_step, sum(fed_levels)
        U = sum(fed_levels[::k])
        nodes, shape = jnp.zeros((B, F), jnp.int32), (B, config.num_kv_heads, U * k)
        return _Draft(
            tokens=nodes,
            parents=nodes,
            units=nodes,
            outputs=jnp.zeros((B, U, k, config.d_model), dtype),
            carries=jnp.zeros((B, U, *state.carry.shape[1:]), dtype),
            sees=jnp.zeros((B, U, U), bool),
            count=jnp.zeros((), jnp.int32),
            block=kv.empty_block(1, (*shape, config.head_dim), dtype),
        )

    def _continued(self, params, level, units_BT, draft) -> tuple[Array, Array]:
        """Returns what the layer reads of the last k nodes [B, T, k, D] up to those of a level.

        And the LSTM's carries [B, T, L, 2, D] after them.
        """
        k, (B, T) = self.tokens_per_step, units_BT.shape
        nodes = [jnp.broadcast_to(level.start + jnp.arange(T), (B, T))]
        for _ in range(k - 1):
            nodes.insert(0, tree.along(nodes[0], draft.parents))
        tokens = tree.along(jnp.stack(nodes, axis=2).reshape(B, T * k), draft.tokens)
        # Each token beside the output that it was drawn from.
        above = tree.along(units_BT, draft.outputs).reshape(B * T, k, -1)
        carry = _rows(tree.along(units_BT, draft.carries))
        read, carries = self.read(params, tokens.reshape(B * T, k), above, carry)
        return read.reshape(B, T, k, -1), carries[:, -1].reshape(B, T, *carries.shape[2:])

    def _with_units(self, params, cache, level, units_BT, read_BTkD, carries, draft) -> _Draft:
        """Returns the draft with a unit that ends at each node of a level, below `units_BT`."""
        k, (B, T), U = self.tokens_per_step, units_BT.shape, draft.sees.shape[1]
        units = draft.count + jnp.arange(T, dtype=jnp.int32)
        above = tree.along(units_BT, draft.sees) & (draft.count > 0)
        sees = above | (jnp.arange(U) == units[:, None])
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
            units=_put(draft.units, jnp.broadcast_to(units, (B, T)), level.start),
            outputs=_put(draft.outputs, outputs.reshape(B, T, k, -1), draft.count),
            carries=_put(draft.carries, carries, draft.count),
            sees=_put(draft.sees, sees, draft.count),
            count=draft.count + T,
            block=block,
        )

    def unrolled(
        self,
        params,
        next_BT,
        features_BTD,
        steps,
        detached=False,
        remat=False,
        later=None,
        glanced=None,
    ):
        """As of `FeatureDrafter`: a unit ends at every feature, and slot j of it is step j.

        `glanced` [B, T] bool: the drafts whose first pair is replaced by that of k tokens later,
        which its slot is to predict ("Coupled Sequential Glancing Distillation" of the paper).
        """
        k, (B, T) = self.tokens_per_step, next_BT.shape
        run = jax.checkpoint(self.run) if remat else self.run
        read, carries = self.read(
            params, next_BT, features_BTD, self._no_carry(B, features_BTD.dtype)
        )
        _, text = run(params, read, None)
        read_BTkD = _last(read, k)
        if glanced is not None:
            read_BTkD = self._glancing(params, next_BT, features_BTD, carries, read_BTkD, glanced)

        def unit(read_BLkD, index, block):
            """Returns the outputs [B, L, k, D] of the next unit of each draft, and the block."""
            lengths = jnp.tile(jnp.maximum(index + 1 - k, 0), B)
            cache = kv.KVCache(text.keys, text.values, lengths, (None,))
            positions = lengths[:, None] + block.size + jnp.arange(k)
            everything = jnp.ones((1, k, block.positions.shape[1]), bool)
            rows = _rows(read_BLkD)
            outputs, block = run(params, rows, cache, block, positions, everything)
            return outputs.reshape(read_BLkD.shape), block

        shape = B * T, self.config.num_kv_heads, -(-steps // k) * k, self.config.head_dim
        index = jnp.arange(T)
        outputs, block = unit(read_BTkD, index, kv.empty_block(1, shape, read.dtype))
        yield outputs[:, :, 0]
        if later is not None:

            def kept(array):
                return _rows(array.reshape(B, T, *array.shape[1:])[:, later])

            index, outputs, carries = later, outputs[:, later], carries[:, later]
            block = Block(
                *jax.tree.map(kept, (block.keys, block.values, block.positions)), block.size
            )
        carry = _rows(carries)
        for step in range(1, steps):
            if step % k == 0:
                drafted = lax.stop_gradient(outputs) if detached else outputs
                columns = index[:, None] + step - k + 1 + jnp.arange(k)
                tokens = _rows(jnp.take(next_BT, columns, axis=1, mode="clip"))
                read, carries = self.read(params, tokens, _rows(drafted), carry)
                carry = carries[:, -1]
                outputs, block = unit(read.reshape(outputs.shape), index, block)
            yield outputs[:, :, step % k]

    def _glancing(self, params, next_BT, features_BTD, carries, read_BTkD, glanced_BT) -> Array:
        """Returns what units read if the first pair of some is replaced by that of k later."""
        k = self.tokens_per_step

        def shown(array):
            pairs = _last(array, k)
            flags = glanced_BT.reshape(*glanced_BT.shape, *[1] * (array.ndim - 2))
            first = jnp.where(flags, jnp.roll(array, -1, axis=1), pairs[:, :, 0])
            return _rows(pairs.at[:, :, 0].set(first))

        before = _rows(_last(carries, k + 1)[:, :, 0])
        read, _ = self.read(params, shown(next_BT), shown(features_BTD), before)
        return jnp.where(glanced_BT[..., None, None], read.reshape(read_BTkD.shape), read_BTkD)

    def read(
        self, params: PyTree, tokens_BT: Array, features_BTD: Array, carry: Array, new_BT=None
    ) -> tuple[Array, Array]:
        """Returns what the layer reads of pairs [B, T, D], and the carries [B, T, L, 2, D].

        Pairs that are not `new_BT` leave the carry as it is; None: all are.
        """
        embedded = transformer.embed(self.target, params["target"], tokens_BT)
        pair_BTI = jnp.concatenate([embedded, features_BTD], axis=-1).astype(carry.dtype)
        new_BT = jnp.ones(tokens_BT.shape, bool) if new_BT is None else new_BT
        return self._bind(params).lstm(pair_BTI, carry, new_BT)

    def run(
        self, params, read_BTD, cache, block=None, positions_BT=None, ancestors=None
    ) -> tuple[Array, Block]:
        """Returns the layer's outputs and the grown block; arguments as of `transformer.apply`."""
        layer, T = self._bind(params).layer, read_BTD.shape[1]

        def outputs(*context):
            return layer(read_BTD, read_BTD, *context)

        return features.run_layer(outputs, T, cache, block, positions_BT, ancestors)

    def _bind(self, params) -> Falcon:
        return pure.bind(Falcon, self.config, params["drafter"], _dtype(params))

    def _no_carry(self, batch: int, dtype) -> Array:
        return jnp.zeros((batch, LSTM_LAYERS, 2, self.config.d_model), dtype)


def _dtype(params: PyTree):
    return jax.tree.leaves(params["drafter"])[0].dtype


def _rows(array: Array) -> Array:
    """Returns an array with its first two axes as one."""
    return array.reshape(-1, *array.shape[2:])


def _put(buffer: Array, entries: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(buffer, entries.astype(buffer.dtype), start, axis=1)


def _last(array_BT: Array, k: int) -> Array:
    """Returns the last k entries up to each: [B, T, ...] -> [B, T, k, ...]; 0 before the first."""
    padding = [(0, 0), (k - 1, 0)] + [(0, 0)] * (array_BT.ndim - 2)
    index = jnp.arange(array_BT.shape[1])[:, None] + jnp.arange(k)
    return jnp.pad(array_BT, padding)[:, index]


def from_config(options: Mapping[str, object], target: Config) -> Drafter:
    """Returns the drafter of the section `drafter` of a training's config."""
    layer, others = features.layer_from_config(options, target)
    return build("drafter", Drafter, others, config=layer, target=target)


class _Layout(folders.OwnLayout):
    """Its config.json holds that of the layer."""

    def drafter_fields(self, folder, target):
        fields = super().drafter_fields(folder, target)
        layer = config_json.parse(folder.path / "config.json", folder.fields.get("layer", OBJECT))
        layer = dataclasses.replace(layer, num_layers=1, vocab_size=target.vocab_size, eos_ids=())
        return fields | {"config": layer}

    def to_json(self, drafter, target_name, dtype):
        raw = super().to_json(drafter, target_name, dtype)
        return raw | {"layer": config_json.to_json(drafter.config, dtype)}


LAYOUT = _Layout("falcon", {"tokens_per_step": COUNT})
