"""Few sizes of buffers and scoring passes, so that few programs are compiled."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.decode.schedule import Costs
from spsjax.decode.state import DecodeState, Program
from spsjax.errors import InputError
from spsjax.types import Array, Block, ModelOutput, Proposal, Round, Verdict


def num_slots(length: int) -> int:
    """Returns the smallest of 32, 48, 64, 96, 128, 192, ... that is at least `length`.

    Buffers have these sizes, so that a new length rarely needs a new program.
    """
    size = 32
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def worth_scoring(
    program: Program, state: DecodeState, now: Round, proposal: Proposal, costs: Costs | None
) -> Proposal:
    """Drops the ends of chains that the program's schedule does not want to be scored.

    `costs` are those of the program's schedule. Raises InputError as `check_estimates` does.
    """
    if not now.estimates or not proposal.tokens.shape[1]:
        return proposal
    check_estimates(program, proposal)
    rule, depths, estimates = program.schedule, now.depths, proposal.confidence
    assert rule is not None and depths is not None and estimates is not None
    known = (proposal.tokens >= 0) & (estimates > 0)  # nor is it NaN
    confidence = jnp.where(known, estimates, 0)
    count = rule.kept(costs, state.history, depths, confidence)
    kept = node_depths(proposal) <= count[:, None]
    tokens = jnp.where(kept, proposal.tokens, -1)
    return dataclasses.replace(proposal, tokens=tokens, confidence=confidence)


def check_estimates(program: Program, proposal: Proposal) -> None:
    """Raises InputError unless a proposal is a chain with estimates of acceptance."""
    if proposal.parents is not None or proposal.confidence is None:
        name = type(program.drafter).__module__.rpartition(".")[2]
        shape = "" if proposal.parents is None else ", which drafts a tree"
        raise InputError(
            "num_speculative_tokens: expected a drafter of chains that estimates its acceptance, "
            f'for a schedule that reads estimates, found {name}{shape}. Take "auto" or a number.'
        )


def at_smallest_size(
    program: Program,
    done_B: Array,
    proposal: Proposal,
    score_and_verify: Callable[[Proposal], tuple[ModelOutput, Verdict]],
) -> tuple[ModelOutput, Verdict]:
    """Scores and verifies as few nodes as hold the longest proposal of the batch.

    A pass has a static number of rows, so that one is compiled per size and `lax.switch` chooses:
    a round in which nothing was proposed costs what a round of autoregressive sampling costs. The
    branches only read the cache. With the cache as their result it would be copied every round.
    """
    drafter, N = program.drafter, proposal.tokens.shape[1]
    K, counts = drafter.num_speculative_tokens, {*drafter.score_sizes}
    if program.schedule is not None:
        # In a tree, most draft tokens may be of any depth.
        depths = program.schedule.scored_depths(K)
        counts |= {*depths} if proposal.parents is None else {0}
    counts = sorted({count for count in counts if count < N} | {N})

    def branch(count: int) -> tuple[ModelOutput, Verdict]:
        output, verdict = score_and_verify(_first_nodes(proposal, count))
        return pad_output(output, 1 + N), _fit_verdict(verdict, K + 1)

    if len(counts) == 1:
        return branch(N)
    offered = (proposal.tokens >= 0) & ~done_B[:, None]
    used = jnp.max(jnp.where(offered, jnp.arange(1, N + 1), 0))
    index = jnp.sum(used > jnp.asarray(counts[:-1]))
    return lax.switch(index, [functools.partial(branch, count) for count in counts])


def node_depths(proposal: Proposal) -> Array:
    """Returns the depths [B or 1, N] of the draft tokens, 1 for the root's children."""
    if proposal.parents is None:
        return jnp.arange(1, proposal.tokens.shape[1] + 1)[None]
    return tree.depths(proposal.parents)[:, 1:]


def _first_nodes(proposal: Proposal, count: int) -> Proposal:
    """Cuts off all but the first draft tokens; in a tree, parents come before their children."""

    def cut(array: Array | None, nodes: int) -> Array | None:
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
        confidence=None,  # verifiers do not read it
    )


def pad_output(output: ModelOutput, rows: int) -> ModelOutput:
    """Pads the output of a smaller pass to so many rows, so that all sizes have the same shapes.

    Nodes that were not scored have no position.
    """
    missing = rows - output.block.positions.shape[1]
    if not missing:
        return output

    def pad(array: Array, axis: int = 1, value: object = 0) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, missing)
        return jnp.pad(array, widths, constant_values=value)

    block = output.block
    keys, values = jax.tree.map(lambda rows: pad(rows, axis=2), (block.keys, block.values))
    block = Block(keys, values, pad(block.positions, value=-1), block.size)
    return ModelOutput(pad(output.logits), pad(output.hidden), tuple(map(pad, output.taps)), block)


def _fit_verdict(verdict: Verdict, columns: int) -> Verdict:
    """Pads or cuts tokens and path to K + 1 columns; no path is longer than that."""

    def fit(array: Array) -> Array:
        array = array[:, :columns]
        missing = columns - array.shape[1]
        return jnp.pad(array, ((0, 0), (0, missing)), constant_values=-1)

    return dataclasses.replace(verdict, tokens=fit(verdict.tokens), path=fit(verdict.path))
