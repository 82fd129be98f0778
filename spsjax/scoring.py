"""Scoring passes of few sizes: a round costs what its longest proposal costs."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from spsjax.drafters import base
from spsjax.pacing import scored_depths
from spsjax.types import Array, Block, ModelOutput, Proposal, Verdict


def at_smallest_size(
    drafter: base.Drafter, done: Array, proposal: Proposal, judge, least: Array | None = None
):
    """Calls `judge` on as few of the proposal's nodes as hold the longest proposal of the batch.

    With a pacer, `least` are the depths that are scored in any case, and more sizes are compiled.

    A pass has a static number of rows, so that one is compiled per size and `lax.switch` chooses:
    a round in which nothing was proposed costs what a round of autoregressive sampling costs. The
    branches only read the cache. With the cache as their result it would be copied every round.
    """
    K, N = drafter.num_speculative_tokens, proposal.tokens.shape[1]
    sizes = {*drafter.score_sizes}
    if least is not None:
        # Of a tree, most draft tokens may be of any depth.
        chain = proposal.parents is None
        within = [depth if chain else N * (depth > 0) for depth in range(K + 1)]
        sizes |= {within[depth] for depth in scored_depths(K)}
    sizes = sorted({size for size in sizes if size < N} | {N})

    def branch(size: int):
        output, verdict = judge(_first_nodes(proposal, size))
        return pad_output(output, 1 + N), _fit_verdict(verdict, K + 1)

    if len(sizes) == 1:
        return branch(N)
    offered = (proposal.tokens >= 0) & ~done[:, None]
    used = jnp.max(jnp.where(offered, jnp.arange(1, N + 1), 0))
    if least is not None:
        used = jnp.maximum(used, jnp.asarray(within)[least])
    index = jnp.sum(used > jnp.asarray(sizes[:-1]))
    return lax.switch(index, [functools.partial(branch, size) for size in sizes])


def _first_nodes(proposal: Proposal, count: int) -> Proposal:
    """Cuts off all but the first draft tokens; in a tree, parents come before their children."""

    def cut(array, nodes):
        if array is None:
            return None
        # Nodes without children may have no distribution.
        return lax.slice_in_dim(array, 0, min(nodes, array.shape[1]), axis=1)

    return dataclasses.replace(
        proposal,
        tokens=proposal.tokens[:, :count],
        probs=cut(proposal.probs, count if proposal.parents is None else count + 1),
        parents=cut(proposal.parents, count),
        eligible=cut(proposal.eligible, count),
    )


def pad_output(output: ModelOutput, rows: int) -> ModelOutput:
    """Pads the output of a smaller pass to so many rows, so that all sizes have the same shapes.

    Nodes that were not scored have no position.
    """
    missing = rows - output.block.positions.shape[1]
    if not missing:
        return output

    def pad(array, axis=1, value=0):
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, missing)
        return jnp.pad(array, widths, constant_values=value)

    block = output.block
    keys = tuple(pad(rows, axis=2) for rows in block.keys)
    values = tuple(pad(rows, axis=2) for rows in block.values)
    block = Block(keys, values, pad(block.positions, value=-1), block.size)
    return ModelOutput(pad(output.logits), pad(output.hidden), tuple(map(pad, output.taps)), block)


def _fit_verdict(verdict: Verdict, columns: int) -> Verdict:
    """Pads or cuts tokens and path to K + 1 columns; no path is longer than that."""

    def fit(array):
        array = array[:, :columns]
        missing = columns - array.shape[1]
        return jnp.pad(array, ((0, 0), (0, missing)), constant_values=-1)

    return dataclasses.replace(verdict, tokens=fit(verdict.tokens), path=fit(verdict.path))
