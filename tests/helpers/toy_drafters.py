"""Drafters for tests: a tree and target features, which no drafter of the package has."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

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

    @property
    def score_sizes(self):
        return (self.num_nodes,)

    def propose(self, params, state, now):
        tokens_BS, lengths_B = now.tokens, now.lengths
        config, weights, N = self.config, params["drafter"], self.num_nodes
        (B, S), K = tokens_BS.shape, self.num_speculative_tokens
        cache = transformer.empty_cache(config, weights, B, S)
        output = transformer.apply(config, weights, tokens_BS)
        cache = cache.extend(output, lengths_B - 1).at(lengths_B - 1)
        uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 3 * N).reshape(B, N, 3)
        row = jnp.arange(B)

        def add(node, carry):
            """Adds a node, the root first, and the draft's tokens in order of probability."""
            tokens, parents, depths, above, best, block = carry
            index = jnp.maximum(node - 1, 0)
            of_parent, of_token, _ = jnp.moveaxis(uniforms[:, index], 1, 0)
            parent = (of_parent * node).astype(jnp.int32)
            parent = jnp.where(depths[row, parent] < K, parent, 0)
            earlier = jnp.arange(N) < index
            siblings = jnp.sum((parents == parent[:, None]) & earlier, axis=1)
            rank = jnp.maximum(siblings - (of_token < 0.15), 0) % config.vocab_size
            token = jnp.where(node == 0, now.root, best[row, parent, rank])
            depth = jnp.where(node == 0, 0, depths[row, parent] + 1)
            seen = (above[row, parent] & (node > 0)) | (jnp.arange(N + 1) == node)
            output = transformer.apply(
                config,
                weights,
                token[:, None],
                cache,
                block=block,
                positions_BT=(lengths_B - 1 + depth)[:, None],
                ancestors=seen[:, None],
            )
            ranked = jnp.argsort(-output.logits[:, 0], axis=-1).astype(jnp.int32)
            return (
                tokens.at[:, index].set(token),  # the root's is replaced by that of node 1
                parents.at[:, index].set(parent),
                depths.at[:, node].set(depth),
                above.at[:, node].set(seen),
                best.at[:, node].set(ranked),
                output.block,
            )

        nodes = jnp.zeros((B, N + 1), jnp.int32)
        start = (
            nodes[:, 1:],
            nodes[:, 1:],
            nodes,
            jnp.zeros((B, N + 1, N + 1), bool),
            jnp.zeros((B, N + 1, config.vocab_size), jnp.int32),
            transformer.empty_block(config, weights, B, N + 1),
        )
        tokens, parents, *_ = lax.fori_loop(0, N + 1, add, start)
        tokens = jnp.where(uniforms[:, :, 2] < 0.1, -1, tokens)
        return Proposal(tokens, None, parents, uniforms[:, :, 2] < 0.9)


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

    def prefill(self, params, state, chunk, output):
        T = chunk.tokens.shape[1]
        index = chunk.lengths - 2 - chunk.starts  # the last token is not fed yet
        features = jnp.concatenate(output.taps, axis=-1)
        index_B11 = jnp.clip(index, 0, T - 1)[:, None, None]
        chosen = jnp.take_along_axis(features, index_B11, axis=1)[:, 0]
        return jnp.where(((index >= 0) & (index < T))[:, None], chosen, state)

    def propose(self, params, state, now):
        K = self.num_speculative_tokens
        logits = jnp.einsum("bd,kdv->bkv", state, params["drafter"]["heads"])
        probs = sampling.to_probs(logits, now.rows)
        uniforms = sampling.uniforms(now.keys, sampling.DRAFT, 2 * K).reshape(-1, K, 2)
        return Proposal(sampling.draw(probs, uniforms), probs)

    def commit(self, params, state, now, proposal, output, verdict):
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
