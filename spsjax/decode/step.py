"""Rounds of the loop: propose, score, verify, commit.

Autoregressive sampling (Chen et al. 2023, Algorithm 1) is this loop with a drafter that proposes
nothing; speculative sampling (Algorithm 2) is this loop with any other. Everything is per row, and
nothing leaves the device before the loop ends. `types.py` has a picture of one round.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import tree
from spsjax.decode import logprobs, sizes
from spsjax.decode.schedule import Costs
from spsjax.decode.state import DecodeState, Program
from spsjax.drafters import base
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.types import Array, ModelOutput, Proposal, PyTree, Round, Verdict


def step(
    program: Program,
    params: PyTree,
    state: DecodeState,
    depths_B: Array | None = None,
    costs: Costs | None = None,
) -> DecodeState:
    """Runs one round: between 1 and K + 1 tokens for every row that is not done.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        state: state between rounds.
        depths_B: how deep each row is drafted; None: K. It is given in all rounds or in none.
        costs: costs by which the program's schedule decides what is scored; None: it needs none.
    """
    # The drafter reads what was committed since its last draft, then drafts.
    state, now = next_round(program, params, state, depths_B)
    with jax.named_scope("propose"):
        proposal = propose(program, params, state, now)
        proposal = sizes.worth_scoring(program, state, now, proposal, costs)

    # The target reads the root and the draft tokens in one pass, and the verifier turns its
    # distributions into accepted tokens and one more token.
    def score_and_verify(proposal: Proposal) -> tuple[ModelOutput, Verdict]:
        with jax.named_scope("score"):
            output = score(program, params, state, proposal)
        with jax.named_scope("verify"):
            return output, program.verifier(now.keys, proposal, output.logits, state.rows)

    output, verdict = sizes.at_smallest_size(program, state.done, proposal, score_and_verify)
    # Until here caches were only read, so that there is nothing to roll back.
    with jax.named_scope("commit"):
        return commit(program, params, state, now, proposal, output, verdict)


def run(
    program: Program,
    params: PyTree,
    state: DecodeState,
    max_rounds: Array | None = None,
    costs: Costs | None = None,
) -> DecodeState:
    """Runs rounds until every row is done, or one has failed.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        state: state between rounds.
        max_rounds: the most rounds; None: any number.
        costs: costs by which the program's schedule decides; None without a schedule.
    """

    def unfinished(carry: PyTree) -> Array:
        return _is_unfinished(carry[1]) & (True if max_rounds is None else carry[0] < max_rounds)

    def depths_of(state: PyTree) -> Array | None:
        schedule = program.schedule
        return None if schedule is None else schedule.depths(costs, state.history, state.done)

    def advance(carry: PyTree, program: Program = program) -> PyTree:
        count, state, depths_B = carry
        state = step(program, params, state, depths_B, costs)
        return count + 1, state, depths_of(state)

    def skips(carry: PyTree) -> Array:
        return unfinished(carry) & jnp.all(carry[2] == 0)

    def skip_then_draft(carry: PyTree) -> PyTree:
        # Rounds in which nothing is drafted are rounds of another program, in a loop of their own:
        # as a branch of `lax.cond`, each of them would copy the caches.
        plain = functools.partial(advance, program=without_drafts(program))
        carry = lax.while_loop(skips, plain, carry)
        return lax.while_loop(lambda carry: unfinished(carry) & ~skips(carry), advance, carry)

    body = advance if program.schedule is None else skip_then_draft
    start = jnp.zeros((), jnp.int32), state, depths_of(state)
    return lax.while_loop(unfinished, body, start)[1]


def rest(program: Program, params: PyTree, state: DecodeState, max_rounds: Array) -> DecodeState:
    """Does what `run` does with a schedule that never drafts; the program has any schedule."""
    plain, nothing = without_drafts(program), jnp.zeros_like(state.lengths)

    def advance(carry: PyTree) -> PyTree:
        return carry[0] + 1, step(plain, params, carry[1], nothing)

    start = jnp.zeros((), jnp.int32), state
    unfinished = lambda carry: _is_unfinished(carry[1]) & (carry[0] < max_rounds)  # noqa: E731
    return lax.while_loop(unfinished, advance, start)[1]


def _is_unfinished(state: DecodeState) -> Array:
    return ~jnp.all(state.done) & ~jnp.any(state.failed)


def without_drafts(program: Program) -> Program:
    """Returns the program of rounds in which nothing is drafted: of autoregressive sampling."""
    return dataclasses.replace(program, drafter=base.Resting(program.drafter))


def round_keys(state: DecodeState) -> Array:
    """Returns [B] keys of this round.

    The committed length grows every round, so no key is used twice. A row's keys do not depend on
    the other rows.
    """
    return jax.vmap(jax.random.fold_in)(state.keys, state.lengths)


def next_round(
    program: Program, params: PyTree, state: DecodeState, depths_B: Array | None = None
) -> tuple[DecodeState, Round]:
    """Returns the state whose drafter is ready to draft, and the next round's inputs.

    Arguments are those of `step`.
    """
    now = Round(
        tokens=state.tokens,
        lengths=state.lengths,
        rows=state.rows,
        keys=round_keys(state),
        cache=state.cache,
        depths=depths_B,
        done=state.done,
        estimates=program.schedule is not None and program.schedule.reads_confidence,
    )
    with jax.named_scope("sync"):
        drafter = program.drafter.sync(params, state.drafter, now)
    return dataclasses.replace(state, drafter=drafter), now


def propose(program: Program, params: PyTree, state: DecodeState, now: Round) -> Proposal:
    """Returns what the drafter proposes, without tokens deeper than the round wants.

    Args:
        program, params: static configuration of the loop; parameters of target and drafter.
        state, now: results of `next_round`. If no row wants a token, the drafter is not called.

    Raises:
        InputError: when traced, for a proposal that target, drafter or verifier do not allow.
    """
    drafter = program.drafter

    def draft() -> Proposal:
        proposal = drafter.propose(params, state.drafter, now)
        return base.check_proposal(drafter, proposal, len(now.tokens), program.target.vocab_size)

    if now.depths is None:
        proposal = draft()
    else:
        nothing = functools.partial(base.no_tokens, jax.eval_shape(draft))
        proposal = lax.cond(jnp.any(now.depths > 0), draft, nothing)
        too_deep = sizes.node_depths(proposal) > now.depths[:, None]
        if proposal.eligible is not None:  # the other tokens are there to be scored
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
    eligible = sizes.node_depths(proposal) <= drafter.num_speculative_tokens
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
    known = state.logprobs
    if known is not None:
        new = logprobs.of_verdict(output.logits, verdict, state.rows, known.top.shape[-1])
        known = logprobs.write(known, new, state.lengths)
    after = dataclasses.replace(now, tokens=tokens, lengths=lengths)
    return dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        done=state.done | failed | ended | (lengths >= state.limits),
        cache=state.cache.write(output.block, path, lengths - 1, output.hidden),
        drafter=program.drafter.commit(params, state.drafter, after, proposal, output, verdict),
        history=_next_history(program, state, now, proposal, accepted),
        failed=state.failed | failed,
        rounds=state.rounds + active,
        proposed=state.proposed + jnp.where(active, number, 0),
        accepted=state.accepted + jnp.where(active[:, None], histogram, 0),
        logprobs=known,
    )


def _next_history(
    program: Program, state: DecodeState, now: Round, proposal: Proposal, accepted_B: Array
) -> PyTree:
    """Returns the schedule's state after a round, unchanged in rows that are done."""
    if program.schedule is None or now.depths is None:
        return state.history
    scored = proposal.tokens >= 0  # tokens that may not be accepted cost as much
    deepest = jnp.max(jnp.where(scored, sizes.node_depths(proposal), 0), axis=1, initial=0)
    decided = now.depths, deepest, accepted_B
    if now.estimates:
        decided += (proposal.confidence,)
    history = program.schedule.update(state.history, *decided)
    return jax.tree.map(functools.partial(_unless_done, state.done), history, state.history)


def _unless_done(done_B: Array, new: Array, old: Array) -> Array:
    return jnp.where(done_B.reshape(-1, *[1] * (new.ndim - 1)), old, new)
