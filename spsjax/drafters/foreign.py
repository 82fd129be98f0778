"""Draft models whose tokenizer is not the target's: base class of `tli` and `slem`.

The draft model reads the committed text as the concatenation of fixed texts: each target token is a
few ids of the draft, by a table. So what it reads does not depend on where rounds end, and can be
cached. It may differ from what the draft's own tokenizer makes of the whole text, which costs
acceptance, and never exactness.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import base, features, sample
from spsjax.drafters.choices import Choices
from spsjax.drafters.sample import Level
from spsjax.models import config_checks, transformer
from spsjax.models.caches import KVCache
from spsjax.parallel import sharding
from spsjax.types import (
    Array,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.utils.fields import integer

MODEL, TABLES, TO_DRAFT = "model", "tables", "to_draft"  # names of parameters
_SYNC_IDS = 8  # least ids per pass of `sync`: a ninth row of a product costs as much as eight more


@pytree_dataclass
class State:
    """The committed text in ids of the draft, of which the cache holds the first ones."""

    ids: Array  # [B, S] int32
    lengths: Array  # [B] int32, number of these ids
    num_tokens: Array  # [B] int32, number of target tokens that became these ids
    fits: Array  # [B] bool, whether the text has fitted so far; other rows draft no more
    cache: KVCache  # of the draft; its lengths are the numbers of ids that were read
    last: Array  # [B, D] final hidden state at the last id that was read


@dataclasses.dataclass(frozen=True)
class ForeignDrafter(base.TrainableDrafter):
    """Draft model with a tokenizer of its own. Lossless.

    `params["drafter"]` has the parameters of the `model`, and `tables`: "to_draft" has the draft's
    ids of the text of each target token [V, L] int32, then -1.

    `commit` stores the ids of new tokens, and `sync` reads those that are unread, as late as
    possible. A text may have more ids than tokens. If it has more than the cache has room for, or
    than the draft's context, its row is not drafted any more.

    Attributes:
        config: shape of the draft model.
        vocab_size: V, size of the target's vocabulary.
        longest: L, the most ids of a target token.
        begin: ids that the draft reads before every text.
        num_speculative_tokens: K, the most tokens of a proposal, and passes of the draft per round.
        ids_per_100_tokens: room in the draft's cache, in ids per 100 tokens of the target's.
    """

    constants: ClassVar[tuple[str, ...]] = (TABLES,)

    config: transformer.Config
    vocab_size: int
    longest: int = 1
    begin: tuple[int, ...] = ()
    num_speculative_tokens: int = integer(4)
    ids_per_100_tokens: int = integer(150, 100, 6400)

    def __post_init__(self) -> None:
        super().__post_init__()
        config_checks.refuse_recurrent("draft model", self.config)

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        to_draft = jax.ShapeDtypeStruct((self.vocab_size, self.longest), jnp.int32)
        tables = {TO_DRAFT: to_draft, **self.table_shapes()}
        return {MODEL: transformer.param_shapes(self.config, dtype), TABLES: tables}

    @abc.abstractmethod
    def table_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the method's own tables."""

    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Returns random parameters of the model, and tables of zeros."""
        shapes = self.param_shapes(dtype)[TABLES]
        tables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return {MODEL: transformer.init(self.config, key, dtype), TABLES: tables}

    def cache_slots(self, slots: int) -> int:
        """Returns the number of slots of the draft's cache for token buffers of `slots`.

        It is a multiple of 8, so that meshes can split it.
        """
        ids = slots * self.ids_per_100_tokens // 100 + len(self.begin)
        return ids + -ids % 8

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        weights, slots = params["drafter"][MODEL], self.cache_slots(slots)
        begin = jnp.asarray(self.begin, jnp.int32)
        zeros = jnp.zeros(batch, jnp.int32)
        return State(
            jnp.zeros((batch, slots), jnp.int32).at[:, : len(begin)].set(begin),
            zeros + len(begin),
            zeros,
            jnp.ones(batch, bool),
            transformer.empty_cache(self.config, weights, batch, slots),
            jnp.zeros((batch, self.config.d_model), weights["norm"]["scale"].dtype),
        )

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        state = self._append(params, state, chunk.tokens, chunk.starts, chunk.lengths)
        # Long passes read most of the chunk, and `sync` reads the rest in short ones.
        width = chunk.tokens.shape[1]
        return self._read(params, state, width, (width + 1) // 2)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        drafts_now = True if now.depths is None else jnp.any(now.depths > 0)
        width = max(_SYNC_IDS, self.num_speculative_tokens + 1)
        return self._read(params, state, width, 1, drafts_now)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        index = state.num_tokens[:, None] + jnp.arange(self.num_speculative_tokens + 1)
        tokens = tree.along(jnp.minimum(index, now.tokens.shape[1] - 1), now.tokens)
        return self._append(params, state, tokens, state.num_tokens, now.lengths)

    def _append(
        self, params: PyTree, state: State, tokens_BT: Array, starts_B: Array, ends_B: Array
    ) -> State:
        """Returns the state with the ids of those tokens that it has not yet.

        Args:
            params: parameters of target and drafter.
            state: state whose text grows.
            tokens_BT: tokens of the target at consecutive positions.
            starts_B: position of the first one.
            ends_B: position per row from which tokens do not belong to the text.
        """
        T, (_, S) = tokens_BT.shape[1], state.ids.shape
        positions = starts_B[:, None] + jnp.arange(T)
        is_new = (positions >= state.num_tokens[:, None]) & (positions < ends_B[:, None])
        table = params["drafter"][TABLES][TO_DRAFT]
        pieces_BTL = table[jnp.clip(tokens_BT, 0, self.vocab_size - 1)]
        counts = jnp.where(is_new, jnp.sum(pieces_BTL >= 0, axis=2, dtype=jnp.int32), 0)
        ids, lengths = concatenated(state.ids, state.lengths, pieces_BTL, counts)
        room = min(S, self.config.max_positions - self.num_speculative_tokens)
        return dataclasses.replace(
            state,
            ids=ids,
            lengths=lengths,
            num_tokens=jnp.maximum(state.num_tokens, jnp.minimum(starts_B + T, ends_B)),
            # A text never fits again: what did not fit was dropped.
            fits=state.fits & (lengths <= room),
        )

    def _read(
        self, params: PyTree, state: State, width: int, least: int, also: Array | bool = True
    ) -> State:
        """Returns the state after passes over unread ids, while a row has `least` of them.

        `width` are the ids of a pass. If `also` is false, nothing is read.
        """
        weights, S = params["drafter"][MODEL], state.ids.shape[1]
        width = min(width, S)

        def unread(state: State) -> Array:
            return jnp.where(state.fits, state.lengths - state.cache.lengths, 0)

        def advance(state: State) -> State:
            # Near its end, the pass moves back and reads ids again: they must fit into the buffer.
            starts = jnp.minimum(state.cache.lengths, S - width)
            ids = tree.along(starts[:, None] + jnp.arange(width), state.ids)
            output = transformer.apply(
                self.config, weights, ids, state.cache.at(starts), num_logits=1
            )
            read = state.cache.lengths
            ends = jnp.where(state.fits, jnp.minimum(starts + width, state.lengths), read)
            last = features.at_index(state.last, output.hidden, ends - 1 - starts)
            cache = state.cache.at(starts).write(output.block, None, ends, output.hidden)
            return dataclasses.replace(state, cache=cache, last=last)

        return lax.while_loop(lambda state: also & jnp.any(unread(state) >= least), advance, state)

    def grow(
        self,
        params: PyTree,
        state: State,
        now: Round,
        choices: Callable[[Array], Choices],
        read_as: Callable[[Array], Array],
    ) -> Proposal:
        """Returns a chain that the draft model samples; rows that do not fit have no tokens.

        Args:
            params, state, now: arguments of `propose`.
            choices: function of the draft's logits [B, 1, V of the draft]; returns what is drawn
                from.
            read_as: function of drawn tokens [B, 1]; returns the ids that the draft reads.
        """
        K, weights = self.num_speculative_tokens, params["drafter"][MODEL]

        def feed(block: PyTree, level: Level) -> tuple[Choices, Array, PyTree]:
            """Runs the draft over one level of the chain (`sample.Feed`)."""
            if level.is_root:  # `sync` has read it
                hidden = state.last[:, None]
                logits = transformer.head(self.config, weights, hidden)
                return choices(sharding.gather_vocab(logits)), hidden, block
            output = transformer.apply(
                self.config,
                weights,
                read_as(level.tokens),
                state.cache,
                block=block,
                positions_BT=state.cache.lengths[:, None] - 1 + level.depth,
                ancestors=level.above[:, :, 1:],  # the block has no row for the root
                num_logits=1,
            )
            logits = sharding.gather_vocab(output.logits)
            return choices(logits), output.hidden, output.block

        start = transformer.empty_block(self.config, weights, len(now.lengths), K - 1)
        proposal = sample.grow(None, K, feed, start, now)[0]
        drafts = state.fits & (state.lengths > 0)  # without an id there is nothing to continue
        return dataclasses.replace(proposal, tokens=jnp.where(drafts[:, None], proposal.tokens, -1))


def concatenated(
    buffer_BS: Array, ends_B: Array, pieces_BTL: Array, counts_BT: Array
) -> tuple[Array, Array]:
    """Returns a buffer with pieces behind what it holds, and its new ends [B].

    What does not fit is dropped, and counts in the ends.

    Args:
        buffer_BS: buffer of numbers.
        ends_B: number of entries that it holds.
        pieces_BTL: pieces in order.
        counts_BT: number of entries of each piece, 0 to L.
    """
    (B, S), L = buffer_BS.shape, pieces_BTL.shape[2]
    starts = ends_B[:, None] + jnp.cumsum(counts_BT, axis=1, dtype=jnp.int32) - counts_BT
    entry = jnp.arange(L)
    index = jnp.where(entry < counts_BT[..., None], starts[..., None] + entry, S)
    put = jax.vmap(lambda row, index, new: row.at[index].set(new, mode="drop"))
    pieces = pieces_BTL.astype(buffer_BS.dtype)
    buffer = put(buffer_BS, index.reshape(B, -1), pieces.reshape(B, -1))
    return buffer, ends_B + jnp.sum(counts_BT, axis=1, dtype=jnp.int32)
