"""Drafting with a small language model (Chen et al. 2023; Leviathan et al. 2022)."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import base, sample, shapes
from spsjax.drafters.sample import Level
from spsjax.errors import InputError
from spsjax.models import config_checks, transformer
from spsjax.models.caches import KVCache
from spsjax.parallel import sharding
from spsjax.types import (
    Array,
    Block,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.utils.fields import derived

_SYNC_TOKENS = 16  # tokens per pass when `sync` processes the tokens of rounds without a draft


@pytree_dataclass
class Drafted:
    """Arrays that `propose` passes to `commit`."""

    block: Block  # keys and values of the second-to-last token, then of the nodes that were fed
    rows: Array  # [B, M] int32, row of the block that belongs to each node
    first: Array  # [B] int32, first valid row of the block: 1 if there is no second-to-last token
    starts: Array  # [B] int32, number of cached tokens before the block
    valid: Array  # [B] bool; False: nothing was drafted


@dataclasses.dataclass(frozen=True)
class Drafter(base.TrainableDrafter):
    """Proposes a chain or a tree of tokens from a draft model. Lossless.

    A chain is sampled token by token. `params["drafter"]` are the parameters of the draft model,
    and the state is its cache. If its `config` limits attention to recent tokens
    (`Config.recent`), the cache is a window.

    Attributes:
        config: shape of the draft model.
        num_speculative_tokens: K. None: 4, or the depth of the tree.
        vocab_size: size of the target's vocabulary, which may be padded differently. The drafter
            never proposes tokens that only the draft model has, and gives probability 0 to tokens
            that only the target has. None: both vocabularies have the same size.
        tree: shape of the tree; None: a chain.
    """

    config: transformer.Config
    num_speculative_tokens: int = derived()
    vocab_size: int | None = None
    tree: shapes.Shape = None

    def __post_init__(self) -> None:
        config_checks.refuse_recurrent("draft model", self.config)
        vocab = min(self.config.vocab_size, self.vocab_size or self.config.vocab_size)
        K = shapes.checked_depth(self.tree, self.num_speculative_tokens, vocab)
        object.__setattr__(self, "num_speculative_tokens", K)

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        return transformer.param_shapes(self.config, dtype)

    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        return transformer.init(self.config, key, dtype)

    def shardings(self, mesh: Mesh | None, replicate: bool = False) -> Callable[[tuple], Sharding]:
        return sharding.param_shardings(mesh, self.config, replicate)

    def cache_slots(self, slots: int) -> int:
        return transformer.num_slots(self.config, slots)

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        K = self.num_speculative_tokens
        return {"draft": base.Pass(params["drafter"], times=K, reads_cache=True)}

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return shapes.score_sizes(self.tree, self.num_speculative_tokens)

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return transformer.empty_cache(self.config, params["drafter"], batch, slots)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        cache = state.at(chunk.starts)
        output = transformer.apply(self.config, params["drafter"], chunk.tokens, cache)
        # The padding after a shorter prompt must not take slots of a window.
        ends = jnp.minimum(chunk.starts + chunk.tokens.shape[1], chunk.lengths)
        return cache.write(output.block, None, ends, output.hidden)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        if now.depths is None:  # every round drafts, so `commit` has cached all tokens
            return state
        # `propose` feeds the last two tokens, so the cache needs all tokens before them.
        needed, width = jnp.maximum(now.lengths - 2, 0), min(_SYNC_TOKENS, now.tokens.shape[1])
        drafts_now = jnp.any(now.depths > 0)

        def read(cache: KVCache) -> KVCache:
            # Near its end, the pass moves back and reads cached tokens again: `width` tokens must
            # fit into the buffer.
            starts = jnp.minimum(cache.lengths, jnp.maximum(needed - width, 0))
            tokens = tree.along(starts[:, None] + jnp.arange(width), now.tokens)
            cache = cache.at(starts)
            output = transformer.apply(self.config, params["drafter"], tokens, cache, num_logits=1)
            ends = jnp.minimum(starts + width, needed)
            return cache.write(output.block, None, ends, output.hidden)

        return lax.while_loop(
            lambda cache: drafts_now & jnp.any(cache.lengths < needed),
            read,
            state.at(jnp.minimum(state.lengths, needed)),
        )

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, weights, lengths_B = self.num_speculative_tokens, params["drafter"], now.lengths
        num_fed = shapes.num_fed(self.tree, K)
        # The first pass takes the last two tokens. The cache may lack the second-to-last token: if
        # all K draft tokens were accepted, the last of them was never fed to the draft model. A
        # prompt of one token has no second-to-last token, and row 0 of the block is then masked.
        first = (lengths_B < 2).astype(jnp.int32)
        cache = state.at(jnp.maximum(lengths_B - 2, 0))
        before = jnp.maximum(lengths_B[:, None] - 2, 0)
        row = jnp.arange(1 + num_fed)
        before_last = jnp.take_along_axis(now.tokens, before, axis=1)

        def feed(block: Block, level: Level) -> tuple[Array, Array | None, PyTree]:
            """Runs the draft over one level of nodes (`sample.Feed`)."""
            tokens_BT, T = level.tokens, level.tokens.shape[1]
            positions = jnp.broadcast_to(lengths_B[:, None] - 1 + level.depth, tokens_BT.shape)
            visible = jnp.pad(level.above, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            visible &= row >= first[:, None, None]
            if level.is_root:
                tokens_BT = jnp.concatenate([before_last, tokens_BT], axis=1)
                positions = jnp.concatenate([before, positions], axis=1)
                itself = jnp.broadcast_to(row == 0, (len(visible), 1, len(row)))
                visible = jnp.concatenate([itself, visible], axis=1)
            output = transformer.apply(
                self.config,
                weights,
                tokens_BT,
                cache,
                block=block,
                positions_BT=positions,
                ancestors=visible,
                num_logits=T,
            )
            logits = sharding.gather_vocab(output.logits)
            return logits[..., : self.vocab_size], output.hidden[:, -T:], output.block

        start = transformer.empty_block(self.config, weights, len(lengths_B), 1 + num_fed)
        proposal, fed_numbers, block = sample.grow(self.tree, K, feed, start, now)
        if proposal.probs is not None:
            missing = max((self.vocab_size or 0) - proposal.probs.shape[2], 0)
            probs = jnp.pad(proposal.probs, [(0, 0), (0, 0), (0, missing)])
            proposal = dataclasses.replace(proposal, probs=probs)
        # The model also ran over rows that skip drafting. Their block must not be committed.
        valid = jnp.ones_like(first, bool) if now.depths is None else now.depths > 0
        drafted = Drafted(block, 1 + fed_numbers, first, cache.lengths, valid)
        return dataclasses.replace(proposal, aux=drafted)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        drafted = proposal.aux
        if drafted == ():  # nothing was drafted
            return state
        # The path's last column is dropped: that node may not have been fed. `propose` feeds the
        # last two committed tokens, so the cache does not need it.
        path = tree.along(verdict.path[:, :-1], drafted.rows)
        path = jnp.pad(path, ((0, 0), (1, 0)))
        index = jnp.minimum(jnp.arange(path.shape[1]) + drafted.first[:, None], path.shape[1] - 1)
        path = jnp.take_along_axis(path, index, axis=1)
        lengths = jnp.where(drafted.valid, jnp.maximum(now.lengths - 2, 0), state.lengths)
        state = state.at(jnp.where(drafted.valid, drafted.starts, state.lengths))
        return state.write(drafted.block, path, lengths, output.hidden)


def checked(name: str, drafter: base.Drafter) -> Drafter:
    """Returns the drafter; raises InputError unless it is a draft model."""
    if not isinstance(drafter, Drafter):
        raise InputError(f"{name}: expected a draft model behind the number, found another drafter")
    return drafter
