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
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
AnyArray = jax.Array | np.ndarray  # on devices, or on the host
PyTree = Any
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Returns a class as a frozen dataclass and pytree; its fields are pytrees or static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree_dataclass
class Block:
    """Keys and values of one round's nodes, in node order, before they are written to a cache.

    The keys and values of a prompt's chunk are also passed as a block.
    """

    keys: tuple[Any, ...]  # one [B, G, P, C] per layer; None: the layer has no keys
    values: tuple[Any, ...]  # one [B, G, P, C] per layer
    positions: Array  # [B, P] int32; -1: an empty place
    size: Array  # [] int32, number of nodes so far; new nodes are appended at this index


@pytree_dataclass
class ModelOutput:
    """Output of one forward pass of a model."""

    logits: Array  # [B, T, V] float32
    hidden: Array  # [B, T, D] after the final norm
    taps: tuple[Array, ...]  # one [B, T, D] per tapped layer: the residual stream that enters it
    block: Block  # the input block, if there was one, followed by these T tokens


@pytree_dataclass
class Chunk:
    """Chunk of the prompts that the target has read.

    Chunks come in order. The last chunk may repeat tokens of the previous one. Shorter prompts are
    padded at their end.
    """

    tokens: Array  # [B, T] int32
    following: Array  # [B, T] int32, the token after each
    starts: Array  # [B] int32, position of the first token
    lengths: Array  # [B] int32, lengths of the whole prompts. A prompt's last token is the root of
    #   the first round, so its key and value do not count as cached
    cache: PyTree  # the target's `caches.KVCache`, which includes this chunk


@pytree_dataclass
class Round:
    """Inputs of one round of a drafter. The drafter does not change them."""

    tokens: Array  # [B, S] int32, the token buffer
    lengths: Array  # [B] int32, committed tokens per row
    rows: PyTree  # sampling parameters per row, `sampling.RowParams`
    keys: Array  # [B] keys of the round
    cache: PyTree  # the target's `caches.KVCache`, which holds all tokens before the root
    depths: Array | None = None  # [B] int32, draft length per row; None: K in every round. The loop
    #   drops deeper tokens, so a drafter uses `depths` only to save time
    done: Array | None = None  # [B] bool, rows that are finished; None: no row is
    estimates: bool = dataclasses.field(default=False, metadata={"static": True})  # whether the
    #   round needs `Proposal.confidence`
    stops: Any = None  # `sample.Stops`, a rule that ends chains early; None: no rule. It holds
    #   functions, so a round with a rule cannot be an argument of `jit`

    def wanted(self, most: int) -> Array:
        """Returns the number of draft tokens per row [B] int32, at most `most`."""
        depths = jnp.full_like(self.lengths, most)
        if self.depths is not None:
            depths = jnp.minimum(depths, self.depths)
        return depths if self.done is None else jnp.where(self.done, 0, depths)

    @property
    def root(self) -> Array:
        """The last committed token per row [B]."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]


@pytree_dataclass
class Proposal:
    """N draft tokens per row: a chain, or a tree whose root is the last committed token.

    A parent comes before its children. The children of a node were drawn without replacement, and
    are in the order of drawing. Each was drawn from the distribution without the earlier siblings'
    tokens, renormalised.
    """

    tokens: Array  # [B, N] int32; -1: no token here, and nothing below it can be accepted
    probs: Array | None  # [B, P, V] float32: the children of node p were drawn from probs[:, p];
    #   for a chain P = N. None: every token is a point mass
    parents: Array | None = None  # [B, N] int32, a node in [0, N]; None: a chain
    eligible: Array | None = None  # [B, N] bool, whether a token may be accepted; None: all may
    confidence: Array | None = None  # [B, N] float32, for a chain: estimate of the probability that
    #   a token is accepted if those above it are. It may depend on these and on the distribution of
    #   the token, and never on the token itself. None: unknown, or not needed (`Round.estimates`)
    aux: PyTree = ()  # arrays for the drafter's own `commit`; no other code reads them


@pytree_dataclass
class Independent(Proposal):
    """Proposal whose siblings were drawn independently of each other, so that some may be equal.

    It is a type, not a field: verifiers choose their rule by it when the program is traced.
    """


@pytree_dataclass
class Verdict:
    """Decision of a verifier about one proposal; K is the greatest depth of a node."""

    tokens: Array  # [B, K+1] int32: accepted tokens, the residual or bonus token, then -1
    num_tokens: Array  # [B] int32, 1..K+1. An invalid row has no last token: 0..K
    path: Array  # [B, K+1] int32: the root, the accepted nodes, then -1
    valid: Array  # [B] bool; False: the next token's distribution was not finite or all zeros, so
    #   that no token could be drawn
