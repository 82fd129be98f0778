"""The exact law of spsjax's own loop, by enumeration in float64.

Two things are replaced, and nothing else: a transformer by a table that holds the logits of every
context, looked up through the very cache it is given; and random numbers by given ones. The real
`prefill`, drafters, `warp`, verifier, `draw` and `step` run. How a round depends on its numbers is
then found out from outside: a draft token stands for all numbers below some threshold, and the
next token grows with its number, so bisection gives the measure of each outcome to the last bit.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import mutants
import numpy as np
import reference
from jax import lax

from spsjax import decode, sampling
from spsjax.drafters import draft_model
from spsjax.models import transformer
from spsjax.types import ModelOutput
from spsjax.verifiers import rejection as verify

BISECTIONS = 48


def config(vocab: int) -> transformer.Config:
    """Its cache has one layer, one head of two numbers: room for a token id."""
    return transformer.Config(vocab, 1, 1, 1, 1, 1, 2, 64)


def table(vocab: int, length: int, seed: int, spread: float = 1.5) -> np.ndarray:
    """Logits [contexts, V] of every context of up to `length` tokens, float64."""
    contexts = sum(vocab**size for size in range(length + 1))
    return np.random.default_rng(seed).normal(0, spread, (contexts, vocab))


def model_of(table: np.ndarray):
    """The table as the oracle's model: tokens -> logits."""

    def logits(tokens):
        index = 0
        for token in tokens:
            index = index * table.shape[1] + token + 1
        return table[index]

    return logits


def params_of(table: np.ndarray):
    return {"table": jnp.asarray(table), "norm": {"scale": jnp.ones(1, table.dtype)}}


def apply(config, params, tokens_BT, positions_BT, mask_BTS, cache, *, dtype=None):
    """`transformer.apply` of a table: its cache holds tokens, and it reads all that it may see."""
    # With one head of two numbers every layout of a cache is [B, S, 2]. `kv.write` mixes int32 with
    # the int64 of 64-bit mode; this is the same write.
    held = cache.keys[0].reshape(len(tokens_BT), cache.num_slots, 2)
    update = jnp.tile(tokens_BT[..., None], (1, 1, 2)).astype(held.dtype)
    held = jax.vmap(lambda *args: lax.dynamic_update_slice_in_dim(*args, axis=0))(
        held, update, cache.lengths
    )
    keys = held.reshape(cache.keys[0].shape)
    index = jnp.zeros(tokens_BT.shape, jnp.int32)
    for slot in range(cache.num_slots):
        grown = index * config.vocab_size + held[:, slot, :1].astype(jnp.int32) + 1
        index = jnp.where(mask_BTS[:, :, slot], grown, index)
    logits = params["table"][jnp.clip(index, 0, len(params["table"]) - 1)]
    # A wrong position, or a mask that shows too much or too little, must not go unseen.
    right = jnp.sum(mask_BTS, axis=-1) == positions_BT + 1
    logits = jnp.where(right[..., None], logits, jnp.nan)
    lengths = cache.lengths + tokens_BT.shape[1]
    return ModelOutput(
        logits, logits, dataclasses.replace(cache, keys=(keys,), values=(keys,), lengths=lengths)
    )


# Tables are arguments, so that loops of one shape share a compiled program.
@functools.lru_cache
def _prefill(program, slots):
    def prefill(*args):
        with mock.patch.object(transformer, "apply", apply):
            return decode.prefill(program, slots, *args)

    return jax.jit(prefill)


@functools.lru_cache
def _step(program, mutant):
    propose = type(program.drafter).propose

    def step(params, rows, state, uniforms, fault):
        given, seen = dict(zip((sampling.DRAFT, sampling.ACCEPT, sampling.NEXT), uniforms)), []

        def watched(*args):
            seen.append(propose(*args))
            return seen[-1]

        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (sampling, "uniforms", lambda keys, role, count: given[role][:, :count]),
                (transformer, "apply", apply),
                (type(program.drafter), "propose", watched),
                (verify, "rejection", mutants.verifier(fault) if mutant else verify.rejection),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            return decode.step(program, params, rows, state), seen[-1][0]

    return jax.jit(step)


def doubled(uniforms):
    """Numbers for `draw`: with a vocabulary of one block, only the second of two decides."""
    return np.stack([np.full_like(uniforms, 0.5), uniforms], axis=-1).reshape(len(uniforms), -1)


@dataclasses.dataclass
class Loop:
    """The loop with one drafter over tables; `law` enumerates what it emits."""

    drafter: object
    target: np.ndarray
    draft: np.ndarray
    limit: int  # tokens in all
    eos_ids: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (0,)
    lenience: float = 1.0
    mutant: bool = False  # replaces the verifier by that of `mutants`

    def __post_init__(self):
        self.vocab, self.K = self.target.shape[1], self.drafter.num_speculative_tokens
        self.program = decode.Program(
            config(self.vocab), self.drafter, self.eos_ids, float(self.lenience)
        )
        self.params = {"target": params_of(self.target), "drafter": params_of(self.draft)}

    def _start(self, rows):
        width = max(map(len, rows))
        tokens = np.zeros((len(rows), width), np.int32)
        for row, prefix in enumerate(rows):
            tokens[row, : len(prefix)] = prefix
        lengths = np.asarray(list(map(len, rows)), np.int32)
        slots = max(self.limit + self.K + 1, width)
        limits = np.full(len(rows), self.limit, np.int32)
        keys = sampling.row_keys(jax.random.key(0), len(rows))
        return _prefill(self.program, slots)(self.params, tokens, lengths, limits, keys)

    def _paths(self, prefix, params):
        """Every draft path: its tokens, the numbers that draw it, its distributions and mass."""
        if not isinstance(self.drafter, draft_model.Drafter):
            return [((), np.zeros(self.K), None, 1.0)]
        paths = []
        for path in itertools.product(range(self.vocab), repeat=self.K):
            laws = [
                reference.warp(model_of(self.draft)([*prefix, *path[:k]]), **params)
                for k in range(self.K)
            ]
            mass = np.prod([law[token] for law, token in zip(laws, path)])
            middles = [np.cumsum(law)[t] - law[t] / 2 for law, t in zip(laws, path)]
            paths.append((path, middles, laws, mass))
        return paths

    def law(self, fault=0, **params) -> collections.Counter:
        """Every sequence of new tokens -> its probability; asserts the loop's invariants too."""
        K, V = self.K, self.vocab
        ordinary = [token for token in range(V) if token not in self.eos_ids]
        sizes = range(self.limit - len(self.prompt))
        prefixes = [
            (*self.prompt, *new) for n in sizes for new in itertools.product(ordinary, repeat=n)
        ]
        paths = [(prefix, *path) for prefix in prefixes for path in self._paths(prefix, params)]
        # Row (path, a, z) studies the outcome "a drafts accepted, then z".
        R = len(paths) * (K + 1) * V
        a, z = (axis.reshape(-1) for axis in np.indices((len(paths), K + 1, V))[1:])
        owner = np.repeat(np.arange(len(paths)), (K + 1) * V)
        prefix_of = [paths[index][0] for index in owner]
        state = self._start(prefix_of)
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
        rows = sampling.RowParams(*(np.full(R, float(value)) for value in values.values()))
        middles = np.asarray([paths[index][2] for index in owner]).reshape(R, K)
        before = np.asarray(state.lengths)

        step = _step(self.program, self.mutant)

        def run(accept, following):
            uniforms = doubled(middles), accept, doubled(following[:, None])
            output, proposal = step(self.params, rows, state, uniforms, fault)
            accepted = np.argmax(np.asarray(output.accepted), axis=1)
            drawn = np.asarray(output.tokens)[np.arange(R), before + accepted]
            return output, proposal, accepted, drawn

        def bisect(below):
            """[R] the threshold under which `below` holds."""
            low, high = np.zeros(R), np.ones(R)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                holds = below(middle)
                low, high = np.where(holds, middle, low), np.where(holds, high, middle)
            return (low + high) / 2

        column = np.arange(K)

        def stands(uniform):
            accept = np.where(column < a[:, None], 0.0, 1.0)
            accept = np.where(column == a[:, None], uniform[:, None], accept)
            return run(accept, np.zeros(R))[2] > a

        only_a = np.where(column < a[:, None], 0.0, 1.0)
        threshold = bisect(stands).reshape(-1, K + 1, V)[:, :, 0]
        threshold[:, K] = 0  # after K drafts comes the bonus token, always
        reach = np.cumprod(np.concatenate([np.ones((len(paths), 1)), threshold], 1), 1)[:, :-1]
        starts = bisect(lambda uniform: run(only_a, uniform)[3] < z).reshape(-1, K + 1, V)
        starts[:, :, 0] = 0
        ends = np.concatenate([starts[:, :, 1:], np.ones((len(paths), K + 1, 1))], axis=2)
        path_mass = np.asarray([path[4] for path in paths])[:, None, None]
        mass = path_mass * (reach * (1 - threshold))[:, :, None] * (ends - starts)
        output, proposal, accepted, drawn = run(only_a, ((starts + ends) / 2).reshape(-1))
        mass = mass.reshape(-1)
        real = mass > 1e-13
        np.testing.assert_array_equal(accepted[real], a[real])
        np.testing.assert_array_equal(drawn[real], z[real])
        self._check(paths, owner, proposal, output)
        after, tokens = np.asarray(output.lengths), np.asarray(output.tokens)
        done = np.asarray(output.done)
        law, open_ = collections.Counter(), collections.Counter({self.prompt: 1.0})
        for row in np.argsort(before, kind="stable"):
            arrived = open_[prefix_of[row]] * mass[row]
            if arrived > 0:
                whole = tuple(tokens[row, : after[row]].tolist())
                (law if done[row] else open_)[whole[len(self.prompt) if done[row] else 0 :]] += (
                    arrived
                )
        return law

    def _check(self, paths, owner, proposal, output):
        """The proposal is what the oracle drafts; the state is what a fresh prefill would give."""
        tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
        if proposal.probs is not None:
            drafted, laws, masses = (
                np.asarray([paths[index][part] for index in owner]) for part in (1, 3, 4)
            )
            np.testing.assert_array_equal(
                np.asarray(proposal.tokens)[masses > 0], drafted[masses > 0]
            )
            np.testing.assert_allclose(
                np.asarray(proposal.probs)[masses > 0], laws[masses > 0], atol=1e-12
            )
        caches = [output.cache] + [output.drafter] * isinstance(self.drafter, draft_model.Drafter)
        for fed_again, cache in enumerate(caches):  # a draft feeds its last two tokens
            np.testing.assert_array_equal(cache.lengths, lengths - 1)
            valid = np.arange(tokens.shape[1]) < lengths[:, None] - 1 - fed_again
            held = np.asarray(cache.keys[0]).reshape(*tokens.shape, 2)[:, :, 0]
            np.testing.assert_array_equal(held[valid], tokens[valid])


def distance(law, other) -> float:
    """The largest difference of two laws at any sequence."""
    return max(abs(law[sequence] - other[sequence]) for sequence in {*law, *other})
