"""The loop: propose, score, verify, commit.

Autoregressive sampling (Chen et al. 2023, Algorithm 1) is this loop with a drafter that proposes
nothing; speculative sampling (Algorithm 2) is this loop with any other. Everything is per row, and
nothing leaves the device before the loop ends.

Between rounds, with n = `lengths[b]` committed tokens of row b:
  * `tokens[b, :n]` are the prompt and what was emitted; what lies beyond is stale;
  * the target's cache holds the first n - 1: the last, the root, is fed with the next proposal;
  * `tokens` and the caches have at least K + 1 slots beyond `limits[b]`: no write is cut off.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import caches as kv
from spsjax import scoring, tree
from spsjax.drafters import base
from spsjax.errors import InputError
from spsjax.models import transformer
from spsjax.pacing import Pacer
from spsjax.parallel import sharding
from spsjax.sampling import RowParams
from spsjax.types import (
    Array,
    Chunk,
    ModelOutput,
    Proposal,
    PyTree,
    Round,
    Verdict,
    pytree_dataclass,
)
from spsjax.verifiers.base import Verifier

# The most tokens of a prompt in one pass, and the most scores (tokens x slots) per head and row.
PREFILL_TOKENS = 1024
PREFILL_SCORES = 2**22


@dataclasses.dataclass(frozen=True)
class Program:
    """Static configuration of the compiled loop: every choice that is not data.

    With a pacer, each round is drafted as deep as it says, and `params["costs"]` are its costs.
    """

    target: transformer.Config
    drafter: base.Drafter
    verifier: Verifier
    eos_ids: tuple[int, ...] = ()
    prefill_tokens: int = PREFILL_TOKENS
    pacer: Pacer | None = None


@pytree_dataclass
class DecodeState:
    """State of a decoding in progress. Rows are independent of each other."""

    # Evolving.
    tokens: Array  # [B, S] int32
    lengths: Array  # [B] int32, committed tokens, the prompt's included
    done: Array  # [B] bool
    cache: kv.KVCache  # the target's
    drafter: PyTree  # the drafter's own state
    pace: PyTree  # the pacer's own state
    # Fixed.
    rows: RowParams  # sampling parameters per row
    limits: Array  # [B] int32, where `lengths` must stop
    keys: Array  # [B] keys
    # Outcome.
    failed: Array  # [B] bool: a distribution was not finite
    rounds: Array  # [B] int32, target calls while the row was not done
    proposed: Array  # [B] int32, draft tokens offered
    accepted: Array  # [B, K+1] int32, rounds by how many draft tokens were accepted


def step(
    program: Program, params: PyTree, state: DecodeState, depths_B: Array | None = None
) -> DecodeState:
    """Runs one round: between 1 and K + 1 tokens for every row that is not done.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        state: state between rounds.
        depths_B: how deep each row is drafted; None: as the pacer says, or K without one. Without
            a pacer it is given in all rounds or in none, because drafters rely on K.
    """
    # The drafter reads what was committed since its last draft.
    state, now = next_round(program, params, state, depths_B)
    with jax.named_scope("propose"):
        proposal = propose(program, params, state, now)
    # The target reads the root and the draft tokens in one pass, of the smallest size that holds
    # them, and the verifier turns its distributions into accepted tokens and one more.

    def judge(proposal: Proposal) -> tuple[ModelOutput, Verdict]:
        with jax.named_scope("score"):
            output = score(program, params, state, proposal)
        with jax.named_scope("verify"):
            return output, program.verifier(now.keys, proposal, output.logits, state.rows)

    least = None if program.pacer is None else params["costs"].least
    output, verdict = scoring.at_smallest_size(program.drafter, state.done, proposal, judge, least)
    # Until here caches were only read by this round's tokens: there is nothing to roll back.
    with jax.named_scope("commit"):
        return commit(program, params, state, now, proposal, output, verdict)


def run(
    program: Program, params: PyTree, state: DecodeState, max_rounds: Array | None = None
) -> DecodeState:
    """Runs rounds until every row is done, or one has failed; at most `max_rounds`, if given.

    Rounds in which a pacer drafts nothing are rounds of another program, whose drafter rests.
    """
    resting = without_drafts(program)

    def goes_on(carry):
        count, state, _ = carry
        unfinished = ~jnp.all(state.done) & ~jnp.any(state.failed)
        return unfinished if max_rounds is None else unfinished & (count < max_rounds)

    def advance(carry, program=program):
        count, state, depths_B = carry
        state = step(program, params, state, depths_B)
        return count + 1, state, wanted_depths(program, params, state)

    def may_rest(carry):
        # Measurements that score more than is drafted need other rounds.
        return goes_on(carry) & jnp.all(carry[2] == 0) & (params["costs"].least == 0)

    def rest_then_draft(carry):
        carry = lax.while_loop(may_rest, functools.partial(advance, program=resting), carry)
        return lax.while_loop(lambda carry: goes_on(carry) & ~may_rest(carry), advance, carry)

    start = jnp.zeros((), jnp.int32), state, wanted_depths(program, params, state)
    body = advance if program.pacer is None else rest_then_draft
    return lax.while_loop(goes_on, body, start)[1]


def without_drafts(program: Program) -> Program:
    """Returns the program of rounds in which nothing is drafted: of autoregressive sampling."""
    return dataclasses.replace(program, drafter=base.Resting(program.drafter))


def round_keys(state: DecodeState) -> Array:
    """Returns [B] keys of this round.

    The committed length grows every round, so no key is used twice. A row's keys do not depend on
    the other rows.
    """
    return jax.vmap(jax.random.fold_in)(state.keys, state.lengths)


def wanted_depths(program: Program, params: PyTree, state: DecodeState) -> Array | None:
    """Returns [B], how deep each row is drafted in this round; None without a pacer: K."""
    if program.pacer is None:
        return None
    costs = params["costs"]
    depths = program.pacer.depths(costs, state.pace, state.done)
    return jnp.where((costs.fixed < 0) | state.done, depths, costs.fixed)


def next_round(
    program: Program, params: PyTree, state: DecodeState, depths_B: Array | None = None
) -> tuple[DecodeState, Round]:
    """Returns the state whose drafter is ready to draft, and the next round's inputs.

    Arguments are those of `step`.
    """
    if depths_B is None:
        depths_B = wanted_depths(program, params, state)
    now = Round(
        tokens=state.tokens,
        lengths=state.lengths,
        rows=state.rows,
        keys=round_keys(state),
        cache=state.cache,
        depths=depths_B,
        done=state.done,
    )
    with jax.named_scope("sync"):
        drafter = program.drafter.sync(params, state.drafter, now)
    return dataclasses.replace(state, drafter=drafter), now


def propose(program: Program, params: PyTree, state: DecodeState, now: Round) -> Proposal:
    """Returns what the drafter proposes, without what the round does not want.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        state, now: what `next_round` returned. If no row wants a token, nothing is run.

    Raises:
        InputError: when traced, for a proposal that target, drafter or verifier do not allow.
    """
    drafter = program.drafter

    def draft():
        proposal = drafter.propose(params, state.drafter, now)
        return base.check_proposal(drafter, proposal, len(now.tokens), program.target.vocab_size)

    if now.depths is None:
        proposal = draft()
    else:
        nothing = functools.partial(base.nothing, jax.eval_shape(draft))
        proposal = lax.cond(jnp.any(now.depths > 0), draft, nothing)
        too_deep = _node_depths(proposal) > now.depths[:, None]
        if proposal.eligible is not None:  # others are there to be scored
            too_deep &= proposal.eligible
        tokens = jnp.where(too_deep, -1, proposal.tokens)
        proposal = dataclasses.replace(proposal, tokens=tokens)
    if proposal.tokens.shape[1]:
        program.verifier.check(proposal)
    if proposal.parents is None:
        if proposal.eligible is not None:
            tokens = jnp.where(proposal.eligible, proposal.tokens, -1)
            proposal = dataclasses.replace(proposal, tokens=tokens, eligible=None)
        return proposal
    # A round cannot commit more than K draft tokens, so deeper nodes are not eligible.
    eligible = _node_depths(proposal) <= drafter.num_speculative_tokens
    eligible &= proposal.tokens >= 0
    if proposal.eligible is not None:
        eligible &= proposal.eligible
    eligible = tree.reached(proposal.parents, eligible)[:, 1:]  # as all nodes above are
    return dataclasses.replace(proposal, eligible=eligible)


def score(program: Program, params: PyTree, state: DecodeState, proposal: Proposal) -> ModelOutput:
    """Runs the target over the root and N draft tokens: one distribution after each of them."""
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    drafts = jnp.where(proposal.tokens >= 0, proposal.tokens, root)
    ancestors = positions = None
    if proposal.parents is not None:
        ancestors = tree.ancestors(proposal.parents)
        positions = state.cache.lengths[:, None] + tree.depths(proposal.parents)
    output = transformer.apply(
        program.target,
        params["target"],
        jnp.concatenate([root, drafts], axis=1),
        state.cache,
        positions_BT=positions,
        ancestors=ancestors,
        tap_layers=program.drafter.tap_layers,
    )
    return dataclasses.replace(output, logits=sharding.gather_vocab(output.logits))


def commit(
    program: Program,
    params: PyTree,
    state: DecodeState,
    now: Round,
    proposal: Proposal,
    output: ModelOutput,
    verdict: Verdict,
) -> DecodeState:
    """Appends the verdict's tokens, up to an end of sequence or the row's limit."""
    active = ~state.done
    room = state.limits - state.lengths
    count = jnp.where(active, jnp.minimum(verdict.num_tokens, room), 0)
    is_end = functools.reduce(
        jnp.logical_or,
        (verdict.tokens == eos for eos in program.eos_ids),
        jnp.zeros_like(verdict.tokens, bool),
    )
    is_end &= jnp.arange(is_end.shape[1]) < count[:, None]
    ended = jnp.any(is_end, axis=1)
    count = jnp.where(ended, jnp.argmax(is_end, axis=1).astype(jnp.int32) + 1, count)
    lengths = state.lengths + count
    tokens = jax.vmap(lax.dynamic_update_slice)(
        state.tokens, verdict.tokens, state.lengths[:, None]
    )
    # Ignore non-finite distributions beyond an end of sequence or the limit: nothing is emitted
    # from them.
    failed = active & ~verdict.valid & ~ended & (lengths < state.limits)
    accepted = verdict.num_tokens - verdict.valid
    histogram = jax.nn.one_hot(accepted, state.accepted.shape[1], dtype=jnp.int32)
    offered = proposal.tokens >= 0
    if proposal.eligible is not None:
        offered &= proposal.eligible
    number = jnp.sum(offered, axis=1, dtype=jnp.int32)
    path = None if proposal.parents is None else verdict.path
    after = dataclasses.replace(now, tokens=tokens, lengths=lengths)
    return dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        done=state.done | failed | ended | (lengths >= state.limits),
        cache=state.cache.write(output.block, path, lengths - 1, output.hidden),
        drafter=program.drafter.commit(params, state.drafter, after, proposal, output, verdict),
        pace=_learned(program, params, state, now, proposal, accepted),
        failed=state.failed | failed,
        rounds=state.rounds + active,
        proposed=state.proposed + jnp.where(active, number, 0),
        accepted=state.accepted + jnp.where(active[:, None], histogram, 0),
    )


def _learned(
    program: Program,
    params: PyTree,
    state: DecodeState,
    now: Round,
    proposal: Proposal,
    accepted_B: Array,
) -> PyTree:
    """Returns the state of the pacer, which learns from every round."""
    if program.pacer is None:
        return state.pace
    scored = proposal.tokens >= 0  # those that may not be accepted cost as much
    deepest = jnp.max(jnp.where(scored, _node_depths(proposal), 0), axis=1, initial=0)
    pace = program.pacer.update(params["costs"], state.pace, now.depths, deepest, accepted_B)
    return jax.tree.map(functools.partial(_unless_done, state.done), pace, state.pace)


def _unless_done(done_B: Array, new: Array, old: Array) -> Array:
    return jnp.where(done_B.reshape(-1, *[1] * (new.ndim - 1)), old, new)


def prefill(
    program: Program,
    slots: int,
    params: PyTree,
    rows: RowParams,
    tokens_BT: Array,
    lengths_B: Array,
    limits_B: Array,
    keys_B: Array,
) -> DecodeState:
    """Returns the state after prompts, read in chunks that bound the memory of attention scores.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        slots: size of the token buffer and of the caches.
        rows: sampling parameters per row.
        tokens_BT: prompts `tokens_BT[b, :lengths_B[b]]`, padded with any tokens.
        lengths_B: lengths of the prompts.
        limits_B: lengths at which rows are done.
        keys_B: one key per row.
    """
    B, T = tokens_BT.shape
    width = chunk_width(T, most_read(program, slots))
    count = -(-T // width)
    if count == 1:
        carry = read_first(program, slots, width, params, tokens_BT, lengths_B)
    else:

        def chunk(index, carry):
            return read(program, width, params, tokens_BT, lengths_B, index * width, carry)

        carry = lax.fori_loop(0, count, chunk, unread(program, slots, B, params))
    return begin(program, params, carry, rows, tokens_BT, lengths_B, limits_B, keys_B)


def most_read(program: Program, slots: int) -> int:
    """Returns the most tokens of a prompt that may be read at once."""
    return min(program.prefill_tokens, max(PREFILL_SCORES // slots, 1))


def chunk_width(tokens: int, most: int) -> int:
    """Returns the width of the chunks in which prompts are read, at most `most`.

    Where chunks do not add up to all tokens, the last one repeats some of the one before: no more
    than a window can be set back by, if a width above half of `most` allows it.
    """
    if tokens <= most:
        return tokens
    widths = range(most, most // 2, -1)
    return min(widths, key=lambda width: max(-tokens % width - kv.SLACK, 0))


def read_first(
    program: Program, slots: int, width: int, params: PyTree, tokens_BT: Array, lengths_B: Array
) -> tuple[kv.KVCache, PyTree]:
    """Returns cache and drafter state after the first chunk of prompts; see `read`."""
    carry = unread(program, slots, len(tokens_BT), params)
    return read(program, width, params, tokens_BT, lengths_B, 0, carry, first=True)


def unread(program: Program, slots: int, batch: int, params: PyTree) -> tuple[kv.KVCache, PyTree]:
    """Returns the target's cache and the drafter's state before anything is read."""
    cache = transformer.empty_cache(program.target, params["target"], batch, slots)
    return cache, program.drafter.init(params, batch, slots)


def read(
    program: Program,
    width: int,
    params: PyTree,
    tokens_BT: Array,
    lengths_B: Array,
    start: Array,
    carry: tuple[kv.KVCache, PyTree],
    first: bool = False,
) -> tuple[kv.KVCache, PyTree]:
    """Returns cache and drafter state after one more chunk of prompts.

    Args:
        program, params: those of the loop.
        width: tokens of a chunk, at most T.
        tokens_BT, lengths_B: the prompts, as in `prefill`.
        start: tokens that were read before.
        carry: what `read_first`, or this for the chunk before, returned.
        first: whether nothing was read before, which need not be known.
    """
    (cache, drafter), (B, T) = carry, tokens_BT.shape
    # The last chunk repeats tokens of the one before rather than exceed the buffers.
    start = jnp.minimum(start, T - width)
    tokens, following = (
        lax.dynamic_slice_in_dim(array, start, width, axis=1)
        for array in (tokens_BT, jnp.roll(tokens_BT, -1, axis=1))
    )
    # Without the barrier the compiler evaluates an empty cache's masks itself: up to 30 s.
    starts = lax.optimization_barrier(jnp.full(B, start, jnp.int32))
    past, taps = None if first else cache.at(starts), program.drafter.tap_layers
    output = transformer.apply(program.target, params["target"], tokens, past, tap_layers=taps)
    cache = cache.at(starts).extend(output)
    chunk = Chunk(tokens, following, starts, lengths_B, cache)
    return cache, program.drafter.prefill(params, drafter, chunk, output)


def begin(
    program: Program,
    params: PyTree,
    carry: tuple[kv.KVCache, PyTree],
    rows: RowParams,
    tokens_BT: Array,
    lengths_B: Array,
    limits_B: Array,
    keys_B: Array,
) -> DecodeState:
    """Returns the state before the first round, after all chunks of the prompts were read.

    `carry` is what the last `read` returned; the other arguments are those of `prefill`.
    """
    cache, drafter = carry
    (B, T), K = tokens_BT.shape, program.drafter.num_speculative_tokens
    cache = cache.at(lengths_B - 1)
    zeros = jnp.zeros(B, jnp.int32)
    return DecodeState(
        tokens=jnp.pad(tokens_BT, ((0, 0), (0, cache.num_slots - T)), mode="edge"),
        lengths=lengths_B,
        done=lengths_B >= limits_B,
        cache=cache,
        drafter=drafter,
        pace=() if program.pacer is None else program.pacer.init(params.get("costs"), B, K),
        rows=rows,
        limits=limits_B,
        keys=keys_B,
        failed=jnp.zeros(B, bool),
        rounds=zeros,
        proposed=zeros,
        accepted=jnp.zeros((B, K + 1), jnp.int32),
    )


def insert(state: DecodeState, row: Array, fresh: DecodeState) -> DecodeState:
    """Returns the state with the first row of `fresh` in the place of row `row`, in [0, B).

    Both come from `prefill` of one program. The row keeps what its pacer has learned from the text
    before, because requests are alike. Raises InputError if `fresh` has more slots or, unless
    traced by `jit`, if there is no such row.
    """
    if not isinstance(row, jax.core.Tracer) and not 0 <= row < len(state.tokens):
        raise InputError(f"row: expected a row in [0, {len(state.tokens)}), found {row}")
    if (found := fresh.tokens.shape[1]) > (slots := state.tokens.shape[1]):
        raise InputError(f"fresh: expected a state of at most {slots} slots, found {found}")
    return dataclasses.replace(kv.insert_row(state, row, fresh), pace=state.pace)


def take(state: DecodeState, rows_B: Array) -> DecodeState:
    """Returns a state of some rows of another; where the row is -1, one that is done."""
    taken, nothing = kv.take_rows(state, jnp.maximum(rows_B, 0)), rows_B < 0
    done, failed = taken.done | nothing, taken.failed & ~nothing
    return dataclasses.replace(taken, done=done, failed=failed)


def stop(state: DecodeState, row: Array) -> DecodeState:
    """Returns the state with a row that is done, and has not failed."""
    done, failed = state.done.at[row].set(True), state.failed.at[row].set(False)
    return dataclasses.replace(state, done=done, failed=failed)


def num_slots(length: int) -> int:
    """Returns the smallest of 32, 48, 64, 96, 128, 192, ... that is at least `length`.

    Buffers have these sizes, so that a new length rarely needs a new program.
    """
    size = 32
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def _node_depths(proposal: Proposal) -> Array:
    """Returns the depths [B or 1, N] of the draft tokens, 1 for the root's children."""
    if proposal.parents is None:
        return jnp.arange(1, proposal.tokens.shape[1] + 1)[None]
    return tree.depths(proposal.parents)[:, 1:]
