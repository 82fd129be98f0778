"""Key-value cache of a window and of selected tokens (SnapKV; Li et al. 2024, 2404.14469)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spsjax.models.caches.dense import KVCache, Segment
from spsjax.models.caches.window import WindowCache
from spsjax.parallel import sharding
from spsjax.types import Array, pytree_dataclass


@pytree_dataclass
class ChosenCache(WindowCache):
    """Window cache with earlier tokens that were selected once, per key-value head."""

    chosen_keys: tuple[Array, ...]  # one [B, G, N, C] per layer
    chosen_values: tuple[Array, ...]  # one [B, G, N, C] per layer
    chosen: Array  # [B, N] bool, whether a slot has a token
    complete: Array  # [B] bool, whether the tokens of a row were selected

    def segments(self):
        """Returns each layer's window and its selected tokens."""
        visible, whole = self.chosen[:, None], sharding.whole_heads
        return [
            (*window, Segment(whole(keys), whole(values), visible, None, None))
            for window, keys, values in zip(
                super().segments(), self.chosen_keys, self.chosen_values
            )
        ]

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

        new = tuple(zip(*map(gather, scores, cache.keys, cache.values)))
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

    def zeros(buffer):
        return jnp.zeros((*buffer.shape[:-2], count, buffer.shape[-1]), buffer.dtype)

    keys, values = jax.tree.map(zeros, (window.keys, window.values))
    B = len(window.lengths)
    return ChosenCache(
        **fields,
        chosen_keys=keys,
        chosen_values=values,
        chosen=jnp.zeros((B, count), bool),
        complete=jnp.zeros(B, bool),
    )
