"""Data that crosses module boundaries, and the one legend of shape letters.

Shape letters, used in names (`logits_BTV`) and in docstrings (`[B, T, V]`) everywhere:

    B  rows of the batch                       D  model width
    T  tokens of one forward pass              F  feed-forward width
    S  slots of a cache or token buffer        H  query heads
    K  most draft tokens a round can accept    G  key-value heads
    N  draft tokens of a proposal              C  head size
    M  nodes of a proposal, N + 1: the root    E  experts
    P  nodes of a block; nodes with children   V  vocabulary

A round's *nodes* are numbered: node 0, the root, is the last committed token, and node 1 + n is
draft token n. A round of a row with n committed tokens, which proposes a chain of K = 3 and accepts
two of its tokens:

    position               n-2   n-1    n    n+1   n+2
    token                   a     b     c     d     e
    node                          0     1     2     3      b is the root; c, d, e were drafted
    target's cache          x                              holds what is before the root
    scoring pass                  x     x     x     x      reads M = 4 nodes, writes no cache
    its distribution of           c     d     e     f      the token that follows each node
    Verdict.path                  0     1     2    -1      c and d are accepted, e is not
    Verdict.tokens                      c     d     g      g is drawn in the place of e
    target's cache after    x     x     x     x            g is the next root, at n+2
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any


def pytree_dataclass(cls):
    """Makes a frozen dataclass whose fields are pytrees of arrays, unless they are static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree_dataclass
class Block:
    """Keys and values of one round's nodes, in node order, that are not in a cache yet.

    A chunk of a prompt is a block, too.
    """

    keys: tuple[Array, ...]  # one [B, G, P, C] per layer
    values: tuple[Array, ...]  # one [B, G, P, C] per layer
    positions: Array  # [B, P] int32; -1: no node is here, or not yet
    size: Array  # [] int32, nodes so far; the next ones go behind them


@pytree_dataclass
class ModelOutput:
    """Output of one forward pass of a model."""

    logits: Array  # [B, T, V] float32
    hidden: Array  # [B, T, D] after the final norm
    taps: tuple[Array, ...]  # one [B, T, D] per tapped layer: the residual stream that enters it
    block: Block  # the block that was given, if any, then these T tokens


@pytree_dataclass
class Chunk:
    """A chunk of the prompts, which the target has read.

    Chunks come in order. The last one may repeat tokens of the one before, and a chunk has padding
    behind shorter prompts.
    """

    tokens: Array  # [B, T] int32
    following: Array  # [B, T] int32, the token after each
    starts: Array  # [B] int32, position of the first token
    lengths: Array  # [B] int32, lengths of the whole prompts. Their last token is the root of the
    #   first round, and counts as not read yet
    cache: PyTree  # the target's `caches.KVCache`, with this chunk


@pytree_dataclass
class Round:
    """Inputs of one round of a drafter, which it only reads."""

    tokens: Array  # [B, S] int32, the token buffer
    lengths: Array  # [B] int32, committed tokens per row
    rows: PyTree  # sampling parameters per row, `sampling.RowParams`
    keys: Array  # [B] keys of the round
    cache: PyTree  # the target's `caches.KVCache`, which holds all tokens before the root
    depths: Array | None = None  # [B] int32, the greatest depth at which a row wants a token; None:
    #   K in every round. Deeper tokens are dropped, so that a drafter need not look at it unless
    #   that saves time
    done: Array | None = None  # [B] bool, rows that want nothing any more; None: none
    stops: Any = None  # `sample.Stops` that end chains early, which no `jit` takes as an argument;
    #   None: none does

    def wanted(self, most: int) -> Array:
        """Returns [B] int32, how many tokens each row wants, at most `most`."""
        depths = jnp.full_like(self.lengths, most)
        if self.depths is not None:
            depths = jnp.minimum(depths, self.depths)
        return depths if self.done is None else jnp.where(self.done, 0, depths)

    @property
    def root(self) -> Array:
        """The last committed tokens [B]."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]


@pytree_dataclass
class Proposal:
    """N draft tokens per row: a chain, or a tree whose root is the last committed token.

    A parent comes before its children. The children of one node are in the order in which they
    were drawn, without replacement: each from what the earlier ones have left of the distribution.
    """

    tokens: Array  # [B, N] int32; -1: no token here, and nothing below it can be accepted
    probs: Array | None  # [B, P, V] float32: the children of node p were drawn from probs[:, p];
    #   for a chain P = N. None: every token is a point mass
    parents: Array | None = None  # [B, N] int32, a node in [0, N]; None: a chain
    eligible: Array | None = None  # [B, N] bool: may be accepted; None: all may
    aux: PyTree = ()  # arrays for the drafter's own `commit`, which nothing else looks at


@pytree_dataclass
class Independent(Proposal):
    """A proposal whose siblings were drawn independently of each other, so that some may be equal.

    It is a type because this is a property of the compiled program, on which rules depend.
    """


@pytree_dataclass
class Verdict:
    """Decision of a verifier about one proposal; K is the greatest depth of a node."""

    tokens: Array  # [B, K+1] int32: accepted tokens, the residual or bonus token, then -1
    num_tokens: Array  # [B] int32, 1..K+1; 0..K, without the last token, if the row is not valid
    path: Array  # [B, K+1] int32: the root, the accepted nodes, then -1
    valid: Array  # [B] bool: False if no next token could be drawn: its distribution was
    #   non-finite or all zeros
