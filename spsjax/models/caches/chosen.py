"""Key-value cache of a window and of selected tokens (SnapKV; Li et al. 2024, 2404.14469)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models.caches import layered
from spsjax.models.caches.dense import KVCache, Segment
from spsjax.models.caches.layered import Layered
from spsjax.models.caches.window import WindowCache
from spsjax.parallel import sharding
from spsjax.types import Array, pytree_dataclass


@pytree_dataclass
class ChosenCache(WindowCache):
    """Window cache with earlier tokens that were selected once, per key-value head."""

    chosen_keys: Layered  # one [B, G, N, C] per layer, or [B, L, G, N, C]
    chosen_values: Layered  # one [B, G, N, C] per layer, or [B, L, G, N, C]
    chosen: Array  # [B, N] bool, whether a slot has a token
    complete: Array  # [B] bool, whether the tokens of a row were selected

    def by_layer(self):
        """Returns a function from a layer to its window and its selected tokens."""
        window_of = super().by_layer()

        def segments(layer):
            keys, values = (
                sharding.whole_heads(layered.of_layer(array, layer))
                for array in (self.chosen_keys, self.chosen_values)
            )
            return (*window_of(layer), Segment(keys, values, self.chosen[:, None], None, None))

        return segments

    def choose(self, cache: KVCache, scores: list[Array], ends_B: Array) -> "ChosenCache":
        """Returns the cache with the tokens of highest score, and a window without earlier tokens.

        Rows that are complete do not change.

        Args:
            cache: cache of all tokens.
            scores: scores [B, G, S] of the tokens in that cache, per layer.
            ends_B: position per row before which tokens are selected, and at which the window
                begins. The sinks stay in the window.
        """
        slot, N = jnp.arange(cache.num_slots), self.chosen.shape[1]
        selectable = (slot >= self.sinks) & (slot < ends_B[:, None])

        def gather(score_BGS, keys, values):
            scores = jnp.where(selectable[:, None], score_BGS, -jnp.inf)
            best = lax.top_k(scores, min(N, cache.num_slots))[1]
            best = jnp.pad(best, ((0, 0), (0, 0), (0, N - best.shape[2])))[..., None]
            return tuple(jnp.take_along_axis(array, best, axis=2) for array in (keys, values))

        def unless_complete(old, new):
            return jnp.where(self.complete.reshape(-1, *[1] * (old.ndim - 1)), old, new)

        rows = zip(scores, layered.as_list(cache.keys), layered.as_list(cache.values))
        stacked = layered.is_stacked(self.chosen_keys)
        keys_values = zip(*(gather(*row) for row in rows))
        new = tuple(layered.joined(layers, stacked) for layers in keys_values)
        chosen_keys, chosen_values = jax.tree.map(
            unless_complete, (self.chosen_keys, self.chosen_values), new
        )
        positions = self.slot_positions
        in_window = (positions < self.sinks) | (positions >= ends_B[:, None])
        return dataclasses.replace(
            self,
            slot_positions=unless_complete(positions, jnp.where(in_window, positions, -1)),
            chosen_keys=chosen_keys,
            chosen_values=chosen_values,
            chosen=unless_complete(
                self.chosen, jnp.arange(N) < jnp.sum(selectable, axis=1)[:, None]
            ),
            complete=jnp.ones_like(self.complete),
        )


def with_chosen_slots(window: WindowCache, count: int) -> ChosenCache:
    """Returns a window cache with `count` more slots per head for selected tokens."""
    fields = {field.name: getattr(window, field.name) for field in dataclasses.fields(window)}

    def zeros(keys):
        return jnp.zeros((*keys.shape[:-2], count, keys.shape[-1]), keys.dtype)

    empty, B = jax.tree.map(zeros, window.keys), len(window.lengths)
    return ChosenCache(
        **fields,
        chosen_keys=empty,
        chosen_values=empty,
        chosen=jnp.zeros((B, count), bool),
        complete=jnp.zeros(B, bool),
    )
