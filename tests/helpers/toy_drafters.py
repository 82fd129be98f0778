"""Drafters for tests: a tree and target features, which no drafter of the package has."""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax import sampling
from spsjax.drafters import base
from spsjax.models import transformer
from spsjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class RandomTree(base.Drafter):
    """A draft model's best tokens on a tree whose parents are drawn at random in every round.

    It extends the tree node by node, in a block beside its cache. Some nodes have no token, some
    are not eligible, and some repeat a sibling's token.
    """

    config: transformer.Config
    num_speculative_tokens: int = 3
    num_nodes: int = 6

    def propose(self, params, state, now):
        tokens_BS, lengths_B = now.tokens, now.lengths
        config, weights, N = self.config, params["drafter"], self.num_nodes
        (B, S), K = tokens_BS.shape, self.num_speculative_tokens
        cache = transformer.empty_cache(config, weights, B, S)
        cache = cache.extend(transformer.apply(config, weights, tokens_BS)).at(lengths_B - 1)
        block = transformer.empty_block(config, weights, B, N + 1)
        uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 3 * N).reshape(B, N, 3)
        row = jnp.arange(B)
        token = now.root
        above = jnp.zeros((B, N + 1, N + 1), bool).at[:, 0, 0].set(True)
        depths = jnp.zeros((B, N + 1), jnp.int32)
        parents, tokens = jnp.zeros((B, N), jnp.int32), jnp.zeros((B, N), jnp.int32)
        best = []  # per node, the draft's tokens in order of probability
        for node in range(N + 1):
            if node:
                parent = (uniforms[:, node - 1, 0] * node).astype(jnp.int32)
                parent = jnp.where(depths[row, parent] < K, parent, 0)
                siblings = jnp.sum(parents[:, : node - 1] == parent[:, None], axis=1)
                repeats = uniforms[:, node - 1, 1] < 0.15
                rank = jnp.maximum(siblings - repeats, 0) % config.vocab_size
                token = jnp.stack(best, axis=1)[row, parent, rank]
                parents = parents.at[:, node - 1].set(parent)
                tokens = tokens.at[:, node - 1].set(token)
                depths = depths.at[:, node].set(depths[row, parent] + 1)
                above = above.at[:, node].set(above[row, parent]).at[:, node, node].set(True)
            output = transformer.apply(
                config,
                weights,
                token[:, None],
                cache,
                block=block,
                positions_BT=(lengths_B - 1 + depths[:, node])[:, None],
                ancestors=above[:, node : node + 1],
            )
            block = output.block
            best.append(jnp.argsort(-output.logits[:, 0], axis=-1).astype(jnp.int32))
        tokens = jnp.where(uniforms[:, :, 2] < 0.1, -1, tokens)
        return Proposal(tokens, None, parents, uniforms[:, :, 2] < 0.9), ()


@dataclasses.dataclass(frozen=True)
class Tapped(base.TrainableDrafter):
    """Linear heads on the target's residual stream at the last fed token, sampled independently."""

    width: int
    vocab_size: int
    num_speculative_tokens: int = 3
    tap_layers: tuple[int, ...] = (0, 1)

    @property
    def max_steps(self):
        return self.num_speculative_tokens

    def init(self, params, batch, slots):
        return jnp.zeros((batch, 2 * self.width), params["drafter"]["heads"].dtype)

    def prefill(self, params, state, tokens_BT, next_BT, starts_B, lengths_B, output):
        T = tokens_BT.shape[1]
        index = lengths_B - 2 - starts_B  # the last token is not fed yet
        features = jnp.concatenate(output.taps, axis=-1)
        index_B11 = jnp.clip(index, 0, T - 1)[:, None, None]
        chosen = jnp.take_along_axis(features, index_B11, axis=1)[:, 0]
        return jnp.where(((index >= 0) & (index < T))[:, None], chosen, state)

    def propose(self, params, state, now):
        K = self.num_speculative_tokens
        logits = jnp.einsum("bd,kdv->bkv", state, params["drafter"]["heads"])
        probs = sampling.to_probs(logits, now.rows)
        uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 2 * K).reshape(-1, K, 2)
        return Proposal(sampling.draw(probs, uniforms), probs), ()

    def commit(self, params, state, drafted, tokens_BS, lengths_B, proposal, output, verdict):
        # The last fed token of the new state is the last accepted node: the path's last.
        last = jnp.max(verdict.path, axis=1)
        features = jnp.concatenate(output.taps, axis=-1)
        return jnp.take_along_axis(features, last[:, None, None], axis=1)[:, 0]

    def param_shapes(self, dtype):
        shape = (self.num_speculative_tokens, 2 * self.width, self.vocab_size)
        return {"heads": jax.ShapeDtypeStruct(shape, dtype)}

    def init_params(self, key, dtype=jnp.float32):
        shapes = self.param_shapes(dtype)
        return jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape, leaf.dtype), shapes)
