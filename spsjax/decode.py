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
import time

import jax
import jax.numpy as jnp
from jax import lax

from spsjax import cache as kv
from spsjax import sampling
from spsjax.drafters.base import Drafter
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.sampling import RowParams
from spsjax.types import Array, PyTree, pytree_dataclass
from spsjax.verifiers import rejection as verify


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled in: every choice that is not data."""

    target: transformer.Config
    drafter: Drafter
    eos_ids: tuple[int, ...] = ()
    lenience: float = 1.0


@pytree_dataclass
class DecodeState:
    """One decoding in progress. Rows are independent of each other."""

    # Evolving.
    tokens: Array  # [B, S] int32
    lengths: Array  # [B] int32, committed tokens, the prompt's included
    done: Array  # [B] bool
    cache: kv.KVCache  # the target's
    drafter: PyTree  # the drafter's own state
    # Fixed.
    limits: Array  # [B] int32, where `lengths` must stop
    keys: Array  # [B] keys
    # Outcome.
    failed: Array  # [B] bool: a distribution was not finite
    rounds: Array  # [B] int32, target calls while the row was not done
    proposed: Array  # [B] int32, draft tokens offered
    accepted: Array  # [B, K+1] int32, rounds by how many drafts were accepted


def prefill(
    program: Program,
    slots: int,
    params: PyTree,
    tokens_BT: Array,
    lengths_B: Array,
    limits_B: Array,
    keys_B: Array,
) -> DecodeState:
    """State after the prompts `tokens_BT[b, :lengths_B[b]]`, with buffers of `slots` tokens."""
    B, T = tokens_BT.shape
    cache = transformer.empty_cache(program.target, params["target"], B, slots)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    mask = kv.causal_mask(positions, slots)
    output = transformer.apply(program.target, params["target"], tokens_BT, positions, mask, cache)
    tokens_BS = jnp.pad(tokens_BT, ((0, 0), (0, slots - T)), mode="edge")
    zeros = jnp.zeros(B, jnp.int32)
    return DecodeState(
        tokens=tokens_BS,
        lengths=lengths_B,
        done=lengths_B >= limits_B,
        cache=output.cache.at(lengths_B - 1),
        drafter=program.drafter.init(params, tokens_BT, lengths_B, slots),
        limits=limits_B,
        keys=keys_B,
        failed=jnp.zeros(B, bool),
        rounds=zeros,
        proposed=zeros,
        accepted=jnp.zeros((B, program.drafter.num_speculative_tokens + 1), jnp.int32),
    )


def score(program: Program, params: PyTree, block_BM: Array, cache: kv.KVCache):
    """The target's pass over the root and K drafts: one distribution for each, and one more."""
    positions = cache.lengths[:, None] + jnp.arange(block_BM.shape[1])
    mask = kv.causal_mask(positions, cache.num_slots)
    return transformer.apply(program.target, params["target"], block_BM, positions, mask, cache)


def step(program: Program, params: PyTree, rows: RowParams, state: DecodeState) -> DecodeState:
    """One round: between 1 and K + 1 tokens for every row that is not done."""
    # The committed length grows every round, so no key serves twice; and a row's keys know nothing
    # of the other rows.
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.lengths)
    with jax.named_scope("propose"):
        proposal, drafter_state = program.drafter.propose(
            params, state.drafter, state.tokens, state.lengths, rows, keys
        )
    with jax.named_scope("score"):
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        drafts = jnp.where(proposal.tokens >= 0, proposal.tokens, root)
        block = jnp.concatenate([root, drafts], axis=1)
        output = score(program, params, block, state.cache)
        logits = sharding.gather_vocab(output.logits)
    with jax.named_scope("verify"):
        target_probs = sampling.to_probs(logits, rows)
        if program.lenience < 1:
            target_probs = verify.relax_greedy(
                target_probs,
                logits,
                proposal.tokens,
                rows.temperature == 0,
                program.lenience,
            )
        verdict = verify.rejection(keys, proposal, target_probs, program.lenience)
    with jax.named_scope("commit"):
        active = ~state.done
        ends = functools.reduce(
            jnp.logical_or,
            (verdict.tokens == eos for eos in program.eos_ids),
            jnp.zeros_like(verdict.tokens, bool),
        )
        room = state.limits - state.lengths
        count = jnp.where(active, jnp.minimum(verdict.num_tokens, room), 0)
        first_end = jnp.argmax(ends, axis=1).astype(jnp.int32)
        until_end = jnp.where(jnp.any(ends, axis=1), first_end + 1, count)
        ended = jnp.any(ends & (jnp.arange(ends.shape[1]) < count[:, None]), axis=1)
        lengths = state.lengths + jnp.minimum(count, until_end)
        tokens = jax.vmap(lax.dynamic_update_slice)(
            state.tokens, verdict.tokens, state.lengths[:, None]
        )
        # What would not have been emitted may be anything.
        failed = active & ~verdict.valid & ~ended & (lengths < state.limits)
        accepted = verdict.num_tokens - verdict.valid
        accepted = jax.nn.one_hot(accepted, block.shape[1], dtype=jnp.int32)
        offered = jnp.sum(proposal.tokens >= 0, axis=1, dtype=jnp.int32)
        return DecodeState(
            tokens=tokens,
            lengths=lengths,
            done=state.done | failed | ended | (lengths >= state.limits),
            cache=output.cache.at(lengths - 1),
            drafter=program.drafter.commit(params, drafter_state, lengths),
            limits=state.limits,
            keys=state.keys,
            failed=state.failed | failed,
            rounds=state.rounds + active,
            proposed=state.proposed + jnp.where(active, offered, 0),
            accepted=state.accepted + jnp.where(active[:, None], accepted, 0),
        )


def run(program: Program, params: PyTree, rows: RowParams, state: DecodeState) -> DecodeState:
    """Rounds until every row is done, or one has failed."""
    return lax.while_loop(
        lambda state: ~jnp.all(state.done) & ~jnp.any(state.failed),
        lambda state: step(program, params, rows, state),
        state,
    )


def num_slots(length: int) -> int:
    """Returns the smallest of 32, 48, 64, 96, 128, 192, ... that is at least `length`.

    Buffers have these sizes, so that a new length rarely needs a new program.
    """
    size = 32
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


_compiled = {}


def compiled(function, *static, donate: int | None = None):
    """`function(*static, ...)` as a jitted function, its compile time apart from its run time.

    Returns a function of the remaining arguments that returns `(result, compile_seconds)`; the
    second is 0 when a program for these shapes and shardings was there already. `donate` is the
    index of a remaining argument whose buffers the result may take over.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        key = (function, static, donate, mesh, structure, *map(_signature, leaves))
        seconds = 0.0
        if key not in _compiled:
            start = time.perf_counter()
            jitted = jax.jit(
                functools.partial(function, *static),
                donate_argnums=() if donate is None else donate,
            )
            _compiled[key] = jitted.lower(*args).compile()
            seconds = time.perf_counter() - start
        return _compiled[key](*args), seconds

    return call


def _signature(leaf: Array):
    return leaf.shape, leaf.dtype, leaf.sharding
