"""A small language model drafts for a large one (Chen et al. 2023; Leviathan et al. 2022)."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import cache as kv
from spsjax import sampling
from spsjax.drafters import base
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.types import Array, Block, Proposal, pytree_dataclass


@pytree_dataclass
class Drafted:
    """State between `propose` and `commit`."""

    cache: kv.KVCache
    block: Block  # the last two committed tokens, then all draft tokens but the last
    first: Array  # [B] int32, 0: the block begins with the last but one token; 1: it has none


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Samples K tokens from a draft model, one after another. Lossless.

    `params["drafter"]` are the draft's parameters; the state is its cache.

    Attributes:
        config: shape of the draft model.
        num_speculative_tokens: K.
        vocab_size: size of the target's vocabulary, which may be padded differently. Tokens that
            only the draft has are never proposed, and those that only the target has get
            probability 0. None: both vocabularies have the same size.
    """

    config: transformer.Config
    num_speculative_tokens: int = 4
    vocab_size: int | None = None

    def init(self, params, batch, slots):
        return transformer.empty_cache(self.config, params["drafter"], batch, slots)

    def prefill(self, params, state, tokens_BT, starts_B, lengths_B, output):
        cache = state.at(starts_B)
        return cache.extend(transformer.apply(self.config, params["drafter"], tokens_BT, cache))

    def propose(self, params, state, tokens_BS, lengths_B, rows, keys_B):
        K, weights = self.num_speculative_tokens, params["drafter"]
        uniforms = sampling.uniforms(keys_B, sampling.DRAFT, 2 * K)
        uniforms = jnp.stack(jnp.split(uniforms, K, axis=1))  # [K, B, 2]
        # The first pass takes the last two tokens, because the cache may lack the last but one: if
        # all K draft tokens were accepted, the last of them was never fed. A prompt of one token
        # has no last but one; its place is then filled with a token that nothing sees.
        first = (lengths_B < 2).astype(jnp.int32)
        cache = state.at(jnp.maximum(lengths_B - 2, 0))
        positions = jnp.maximum(lengths_B[:, None] - 2 + jnp.arange(2), 0)
        pair = jnp.take_along_axis(tokens_BS, positions, axis=1)
        node = jnp.arange(K + 1)

        def ancestors(nodes_T):
            """[B, T, P] each sees itself and all before, but not the filling."""
            before = (node < nodes_T[:, None]) & (node >= first[:, None, None])
            return before | (node == nodes_T[:, None])

        def feed(tokens_BT, positions_BT, block, nodes_T):
            return transformer.apply(
                self.config,
                weights,
                tokens_BT,
                cache,
                block=block,
                positions_BT=positions_BT,
                ancestors=ancestors(nodes_T),
            )

        block = transformer.empty_block(self.config, weights, len(pair), K + 1)
        output = feed(pair, positions, block, jnp.arange(2))
        token, probs = self._draw(output.logits[:, 1], rows, uniforms[0])

        def draft(carry, inputs):
            (last, block), (k, uniforms_B2) = carry, inputs
            output = feed(last[:, None], lengths_B[:, None] + k, block, k[None] + 2)
            token, probs = self._draw(output.logits[:, 0], rows, uniforms_B2)
            return (token, output.block), (token, probs)

        steps = jnp.arange(K - 1, dtype=jnp.int32), uniforms[1:]
        (_, block), (tokens, more) = lax.scan(draft, (token, output.block), steps)
        tokens = jnp.concatenate([token[:, None], tokens.T], axis=1)
        probs = jnp.concatenate([probs[:, None], jnp.moveaxis(more, 0, 1)], axis=1)
        return Proposal(tokens, probs), Drafted(cache, block, first)

    def commit(self, params, state, tokens_BS, lengths_B, proposal, output, verdict):
        # Node n of the path is row n + 1 of the block, whose row 0 is the last but one token.
        path = jnp.pad(verdict.path[:, :-1] + 1, ((0, 0), (1, 0)))
        index = jnp.minimum(jnp.arange(path.shape[1]) + state.first[:, None], path.shape[1] - 1)
        path = jnp.take_along_axis(path, index, axis=1)
        lengths = jnp.maximum(lengths_B - 2, 0)
        return state.cache.write(state.block, path, lengths, output.hidden)

    def _draw(self, logits_BV, rows, uniforms_B2):
        """Draws one token; returns it and its distribution over the target's vocabulary."""
        logits_BV = sharding.gather_vocab(logits_BV)[:, : self.vocab_size]
        probs = sampling.to_probs(logits_BV, rows)
        missing = max((self.vocab_size or 0) - probs.shape[1], 0)
        return sampling.draw(probs, uniforms_B2), jnp.pad(probs, [(0, 0), (0, missing)])
