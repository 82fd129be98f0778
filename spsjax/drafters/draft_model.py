"""A small language model drafts for a large one (Chen et al. 2023; Leviathan et al. 2022)."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from spsjax import cache as kv
from spsjax import sampling
from spsjax.drafters import base
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Samples K tokens from a draft model, one after another. Lossless.

    `params["drafter"]` are the draft's parameters; the state is its cache. `vocab_size` is the
    target's, which may be padded otherwise: the draft gives tokens of its own alone no probability,
    and those of the target alone zero. None: both have the same.
    """

    config: transformer.Config
    num_speculative_tokens: int = 4
    vocab_size: int | None = None

    def init(self, params, tokens_BT, lengths_B, slots):
        B, T = tokens_BT.shape
        cache = transformer.empty_cache(self.config, params["drafter"], B, slots)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        cache = self._apply(params, tokens_BT, positions, cache).cache
        return cache.at(lengths_B - 1)

    def propose(self, params, state, tokens_BS, lengths_B, rows, keys_B):
        uniforms = sampling.uniforms(keys_B, sampling.DRAFT, 2 * self.num_speculative_tokens)
        uniforms = jnp.stack(jnp.split(uniforms, self.num_speculative_tokens, axis=1))  # [K, B, 2]

        def pick(logits_BV, uniforms_B2):
            logits_BV = sharding.shard_batch(logits_BV)[:, : self.vocab_size]
            probs = sampling.to_probs(logits_BV, rows)
            missing = (self.vocab_size or 0) - probs.shape[1]
            wide = jnp.pad(probs, [(0, 0), (0, max(missing, 0))])
            return sampling.draw(probs, uniforms_B2), wide

        # The first step feeds the last two tokens: if all K drafts were accepted, the last of them
        # was never fed; if not, its slot is written again with the same values. A prompt of one
        # token has no second last: slot 1 is then filled with a stranger, masked and overwritten.
        start = jnp.maximum(lengths_B - 2, 0)
        positions = start[:, None] + jnp.arange(2)
        pair = jnp.take_along_axis(tokens_BS, positions, axis=1)
        output = self._apply(params, pair, positions, state.at(start))
        newest = (lengths_B - 1 - start)[:, None, None]
        logits = jnp.take_along_axis(output.logits, newest, axis=1)[:, 0]
        first, first_probs = pick(logits, uniforms[0])

        def step(carry, uniforms_B2):
            token, cache = carry
            output = self._apply(params, token[:, None], cache.lengths[:, None], cache)
            token, probs = pick(output.logits[:, 0], uniforms_B2)
            return (token, output.cache), (token, probs)

        carry = first, output.cache.at(lengths_B)
        (_, cache), (tokens, probs) = lax.scan(step, carry, uniforms[1:])
        tokens = jnp.concatenate([first[:, None], tokens.T], axis=1)
        probs = jnp.concatenate([first_probs[:, None], jnp.moveaxis(probs, 0, 1)], axis=1)
        return Proposal(tokens, probs), cache

    def commit(self, params, state, lengths_B):
        return state.at(lengths_B - 1)

    def _apply(self, params, tokens_BT, positions_BT, cache):
        mask = kv.causal_mask(positions_BT, cache.num_slots)
        return transformer.apply(
            self.config, params["drafter"], tokens_BT, positions_BT, mask, cache
        )
