"""A tiny instance of every drafter over the tables of `table_model`, with a vocabulary of three."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from helpers import drafting, foreign, table_model, toy_drafters

from spsjax.drafters import base, draft_model, hybrid, ngram, none, sparse_self, successors, suffix
from spsjax.drafters.contrib import copy, early_exit, lookahead
from spsjax.loading import LoadedDrafter
from spsjax.models.config import Skipped

VOCAB, END = 3, 2


@dataclasses.dataclass(frozen=True)
class Seeded(lookahead.Drafter):
    """Lookahead whose pool has n-grams from the beginning, some of which begin alike."""

    def prefill(self, params, state, chunk, output):
        state = super().prefill(params, state, chunk, output)
        values = np.random.default_rng(8).integers(0, VOCAB, (self.pool, base.num_nodes(self)))
        values = jnp.asarray(values[:, : self.num_speculative_tokens], jnp.int32)
        keys = jnp.arange(self.pool, dtype=jnp.int32) % VOCAB
        return dataclasses.replace(
            state,
            keys=jnp.broadcast_to(keys, state.keys.shape),
            values=jnp.broadcast_to(values, state.values.shape),
        )


@dataclasses.dataclass(frozen=True)
class Looked(hybrid.Drafter):
    """A hybrid that expects so little of its model that it takes what was looked up."""

    def init(self, params, batch, slots):
        state = super().init(params, batch, slots)
        return dataclasses.replace(state, expected=jnp.full_like(state.expected, 0.7))


def build(name: str, K: int) -> LoadedDrafter:
    """Returns a drafter of `drafting.NAMES`; parameters None: those of the draft's table."""
    config = table_model.config(VOCAB)
    if name in drafting.HEADS:
        return head(name, K)
    if name in foreign.NAMES:
        return foreign.of_table(name, K, foreign.pair_of(config), 1)
    if name == "tapped":
        heads = np.random.default_rng(5).normal(0, 1, (K, 2 * VOCAB, VOCAB))
        drafter = toy_drafters.Tapped(VOCAB, VOCAB, K)
        return LoadedDrafter("", drafter, {"heads": jnp.asarray(heads)})
    if name == "early_exit":  # leaves out all of the target, whose stream is the table's logits
        whole = dataclasses.replace(config, d_model=VOCAB)
        return LoadedDrafter("", early_exit.Drafter(whole, Skipped((0,), (0,)), K), {})
    small = dataclasses.replace(config, sinks=1, recent=1)
    own_model = {
        "draft_model": lambda: draft_model.Drafter(config, K),
        "hybrid": lambda: Looked(draft_model.Drafter(config, K), suffix.Drafter(K)),
        "random_tree": lambda: toy_drafters.RandomTree(config, K, 4),
        "windowed": lambda: draft_model.Drafter(small, K),
    }
    no_weights = {
        "copy": lambda: copy.Drafter(K),
        "lookahead": lambda: Seeded(K, window=1, num_guesses=2, pool=9),
        "ngram": lambda: ngram.Drafter(K, max_ngram=2),
        "none": none.Drafter,
        "sparse_self": lambda: sparse_self.Drafter(config, K, sinks=1, recent=1),
        "successors": lambda: successors.Drafter(K),
        "suffix": lambda: suffix.Drafter(K),
    }
    if name in own_model:
        return LoadedDrafter("", own_model[name](), None)
    return LoadedDrafter("", no_weights[name](), {})


def head(name: str, K: int, **fields) -> LoadedDrafter:
    """Returns a drafter that reads a table's logits as features, with random weights.

    EAGLE-3 drafts two of the three tokens only.
    """
    config = dataclasses.replace(table_model.config(VOCAB), d_model=VOCAB, d_ff=4)
    drafter = drafting.head(name, config, num_speculative_tokens=K, **fields)
    params = jax.jit(drafter.init_params, static_argnums=1)(jax.random.key(6), jnp.float64)
    rng = np.random.default_rng(7)

    def filled(leaf):  # matrices that training begins with at 0
        return 0.1 * rng.standard_normal(leaf.shape) if leaf.ndim > 1 and not leaf.any() else leaf

    params = jax.tree.map(filled, params)
    grown = {
        key: jax.tree.map(lambda leaf: 8 * leaf, value)
        for key, value in params.items()
        if key not in ("ids", "norm", "embed_norm", "feature_norm", "hidden_norm")
    }
    return LoadedDrafter("", drafter, params | grown)
