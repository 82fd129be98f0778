"""SPiRE: the target's last layers with a sparse cache and a memory (Neelam et al., 2504.06419).

The draft is built for throughput. It has few weights, its cache does not grow with the text, and
it reads the target's own activations at committed tokens.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from spsjax.drafters import features, folders, sample, shapes
from spsjax.drafters.choices import Choices
from spsjax.drafters.contrib import sequences
from spsjax.drafters.folders import Folder
from spsjax.drafters.sample import Level
from spsjax.errors import InputError
from spsjax.models import caches, config_checks, transformer
from spsjax.models.caches import KVCache, Segment
from spsjax.models.config import Config
from spsjax.models.context import Context, KeysValues, context_of
from spsjax.models.hf.fields import COUNT, NUMBER
from spsjax.models.layers import DecoderBlock
from spsjax.models.norm import Norm
from spsjax.models.quantization import Quantized
from spsjax.types import Array, Block, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict
from spsjax.utils.fields import derived, integer

# Initial logit of a layer's own input in its memory: e^4 times the weight of each other stream.
_OWN = 4.0


class Memory(nnx.Module):
    """Learned mixtures of the residual streams, one per layer, as the layer's memory of a token."""

    def __init__(self, num_layers: int, dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(_OWN * jnp.eye(num_layers, num_layers + 1, dtype=dtype))

    def __call__(self, streams: list[Array]) -> list[Array]:
        """Returns a memory [B, T, D] per layer, from the streams before and after all layers."""
        stacked, dtype = jnp.stack(streams), streams[0].dtype
        shares = jax.nn.softmax(self.kernel[...].astype(jnp.float32), axis=-1)
        return list(jnp.einsum("is,sbtd->ibtd", shares, stacked).astype(dtype))


class Spire(nnx.Module):
    """Decoder layers that attend to their memories of earlier tokens."""

    def __init__(self, drafter: "Drafter", *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        config = drafter.config
        self.layers = nnx.List(
            [
                DecoderBlock(config.layer(index), dtype=dtype, rngs=rngs)
                for index in range(config.num_layers)
            ]
        )
        self.memory = Memory(config.num_layers, dtype)
        self.norm = Norm(config, config.d_model, dtype=dtype)

    def __call__(
        self,
        x_BTD: Array,
        context: Context,
        cached: Sequence[Segment],
        earlier: Sequence[KeysValues],
    ) -> tuple[Array, list[KeysValues]]:
        """Returns the outputs, and the block's keys and values with the memories of these tokens.

        A token attends to its own layer inputs, because its memory is known only when all layers
        have run.
        """
        streams = [x_BTD]
        inputs = zip(self.layers, cached, earlier, strict=True)
        for layer, segments, block in inputs:
            x_BTD, _ = layer(x_BTD, context, segments, block)
            streams.append(x_BTD)
        return self.norm(x_BTD), self.remembered(self.memory(streams), context, earlier)

    def remembered(
        self, memories: Sequence[Array], context: Context, earlier: Sequence[KeysValues | None]
    ) -> list[KeysValues]:
        """Returns the block's keys and values with those of memories, one per layer, appended."""
        rows, inputs = [], zip(self.layers, memories, earlier, strict=True)
        for layer, memory, block in inputs:
            normed = layer.attention_norm(memory)
            rows.append(context.append(block, *layer.attention.keys_values(normed, context)))
        return rows


@dataclasses.dataclass(frozen=True)
class Drafter(features.FeatureDrafter):
    """Drafts with copies of the target's last layers, trained further. Lossless.

    The memory of a committed token in layer i is the input of the target's layer of which layer i
    is a copy. The memory of a drafted token is a learned mixture of the draft's residual streams,
    and is dropped at the end of the round. Embedding and head are the target's.

    Attributes:
        num_layers: number of layers, which are initialised with the target's last layers.
        sinks, recent: numbers of first and last tokens in the attention window (`Config.sinks`), in
            training and in use.
    """

    module = Spire
    target: Config
    num_speculative_tokens: int = derived()
    num_layers: int = integer(2, 1)
    sinks: int = integer(1)
    recent: int = integer(64, 1)
    tree: shapes.Shape = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config_checks.refuse_recurrent("spire", self.target)
        if self.target.num_experts:
            raise InputError("target: expected one without experts for SPiRE, found a mixture")
        if self.target.changes or self.target.layer_inputs:
            raise InputError(
                "target: expected one of equal layers without inputs of their own for SPiRE, "
                "found another"
            )
        if self.num_layers > self.target.num_layers:
            raise InputError(
                f"num_layers: expected at most the target's {self.target.num_layers}, "
                f"found {self.num_layers}"
            )

    @property
    def config(self) -> Config:
        """Shape of the draft's layers."""
        first, last = self.tap_layers[0], self.target.num_layers
        return dataclasses.replace(
            self.target,
            num_layers=self.num_layers,
            windows=tuple(self.target.window(layer) for layer in range(first, last)),
            sinks=self.sinks,
            recent=self.recent,
        )

    @property
    def tap_layers(self) -> tuple[int, ...]:
        count = self.target.num_layers
        return tuple(range(count - self.num_layers, count))

    @property
    def sharding_config(self) -> Config:
        return self.config

    @property
    def module_config(self) -> Hashable:
        """The drafter with only the fields on which its weights depend."""
        return Drafter(
            self.target, num_layers=self.num_layers, sinks=self.sinks, recent=self.recent
        )

    def from_target(self, weights: PyTree, params: PyTree) -> PyTree:
        target, copies = params["target"], {}
        for index, layer in enumerate(self.tap_layers):
            copies[index] = jax.tree.map(
                lambda leaf: leaf.values() if isinstance(leaf, Quantized) else leaf,
                target["layers"][layer],
                is_leaf=lambda leaf: isinstance(leaf, Quantized),
            )
        copies = {"layers": copies, "norm": target["norm"]}
        initial = {name: weights[name] for name in copies}
        return weights | jax.tree.map(lambda old, new: new.astype(old.dtype), initial, copies)

    def features(self, params: PyTree, output: ModelOutput) -> Array:
        return jnp.concatenate(output.taps, axis=-1)

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        layers = self.bind(params).layers
        return transformer.cache_of_layers(self.config, layers, self.dtype(params), batch, slots)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        ends = jnp.minimum(chunk.starts + chunk.tokens.shape[1], chunk.lengths - 1)
        block = self._of_target(params, output.taps, output.block.positions)
        return state.at(chunk.starts).write(block, None, ends, output.hidden)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, before = self.num_speculative_tokens, now.lengths[:, None] - 1

        def feed(block: Block, level: Level) -> tuple[Choices, Array | None, PyTree]:
            """Runs the layers over one level of nodes (`sample.Feed`)."""
            positions = jnp.broadcast_to(before + level.depth, level.tokens.shape)
            outputs, block = self._run(params, level.tokens, state, block, positions, level.above)
            return self.choices(params, outputs, level.depth), outputs, block

        num_fed = shapes.num_fed(self.tree, K)
        start = transformer.empty_block(self.config, params["drafter"], len(before), num_fed)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        block = self._of_target(params, output.taps, output.block.positions)
        path = None if proposal.parents is None else verdict.path
        return state.write(block, path, now.lengths - 1, output.hidden)

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
        (B, T), count = next_BT.shape, self.num_layers
        taps = jnp.split(features_BTD, count, axis=-1)
        memory = self._of_target(params, taps, jnp.arange(T)[None])
        distances = (None,) * count
        if self.target.positions == "relative":
            distances = transformer.distances_of(self.bind(params).layers, T)
        run = jax.checkpoint(self._run) if remat else self._run
        # Every index is a row of its own, which drafts after its prefix of the text.
        index = jnp.arange(T) if anchors is None else anchors
        rows = B * index.shape[-1]
        block = transformer.empty_block(self.config, params["drafter"], rows, steps)
        for step in range(steps):
            if step == 1 and later is not None:
                index, block = later, sequences.at_indices(block, B, later)
            lengths = features.lengths_before(index, B)
            cache = caches.KVCache(memory.keys, memory.values, lengths, distances)
            tokens = features.entries(next_BT, index + step)
            block = lax.stop_gradient(block) if detached else block
            outputs, block = run(params, tokens.reshape(-1, 1), cache, block)
            yield outputs.reshape(B, index.shape[-1], -1)

    def _run(
        self,
        params: PyTree,
        tokens_BT: Array,
        cache: KVCache,
        block: Block,
        positions_BT: Array | None = None,
        ancestors: Array | None = None,
    ) -> tuple[Array, Block]:
        """Returns the outputs and the extended block (see `transformer.apply`)."""
        embedded = transformer.embed(self.target, params["target"], tokens_BT)
        context = context_of(tokens_BT.shape[1], cache, block, positions_BT, ancestors)
        module, earlier = self.bind(params), [*zip(block.keys, block.values)]
        x_BTD = embedded.astype(self.dtype(params))
        outputs, rows = module(x_BTD, context, cache.segments(), earlier)
        return outputs, context.block(rows, len(tokens_BT))

    def _of_target(self, params: PyTree, taps: Sequence[Array], positions_BT: Array) -> Block:
        """Returns the memories of tokens that the target has read, as a block."""
        context = context_of(taps[0].shape[1], None, positions_BT=positions_BT)
        memories = [tap.astype(self.dtype(params)) for tap in taps]
        rows = self.bind(params).remembered(memories, context, [None] * len(memories))
        return context.block(rows, len(memories[0]))


class _Layout(folders.OwnLayout[Drafter]):
    def drafter_fields(self, folder: Folder, target: Config) -> dict[str, Any]:
        fields = super().drafter_fields(folder, target)
        if fields["num_layers"] > target.num_layers:
            raise InputError(
                f"{folder.path / 'config.json'}: expected num_layers up to the target's "
                f"{target.num_layers}, found {fields['num_layers']}"
            )
        return fields


LAYOUT = _Layout("spire", {"num_layers": COUNT, "sinks": NUMBER, "recent": COUNT})
