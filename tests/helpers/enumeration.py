"""The exact distribution of spsjax's own loop, by enumeration in float64.

Two things are replaced. A table with the logits of every context stands for the transformer, and is
looked up through the cache of the call. Chosen numbers stand for random ones. The real `prefill`,
drafters, `to_probs`, verifiers, `draw` and `step` run. A draft token is accepted for all numbers
below some threshold, and the next token grows with its number. So bisection gives the probability
of every outcome to the last bit.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from helpers import broken_verifiers, reference

from spsjax import decode, sampling
from spsjax.drafters import draft_model
from spsjax.loading import LoadedDrafter
from spsjax.models import transformer
from spsjax.models.config import Skipped
from spsjax.models.layers import context_of
from spsjax.types import Block, ModelOutput
from spsjax.verifiers import match, rejection
from spsjax.verifiers.base import Verifier

BISECTIONS = 48


def config(vocab: int) -> transformer.Config:
    """Returns a config whose cache holds two numbers per token: room for a token id."""
    return transformer.Config(vocab, 1, 1, 1, 1, 1, 2, 64)


def table(vocab: int, length: int, seed: int, spread: float = 1.5) -> np.ndarray:
    """Returns random logits [contexts, V] of all contexts of up to `length` tokens, float64."""
    contexts = sum(vocab**size for size in range(length + 1))
    return np.random.default_rng(seed).normal(0, spread, (contexts, vocab))


def model_of(table: np.ndarray):
    """Returns the table in the form of the oracle's model: tokens -> logits."""

    def logits(tokens):
        index = 0
        for token in tokens:
            index = index * table.shape[1] + token + 1
        return table[index]

    return logits


def params_of(table: np.ndarray):
    """Returns the table as parameters of `apply`."""
    return {"table": jnp.asarray(table), "norm": {"scale": jnp.ones(1, table.dtype)}}


def apply(
    config,
    params,
    tokens_BT,
    cache=None,
    *,
    block=None,
    tap_layers=(),
    num_logits=None,
    begun=None,
    skipped=Skipped(),
    **where,
):
    """Replaces `transformer.apply`: looks a table up by the tokens that a node can see.

    Caches hold tokens. The real code decides which slots and nodes are visible. The residual stream
    is the target's logits. Without some sub-layers they are another token's: a bad draft.

    Args:
      where: positions and ancestors, as `transformer.apply` takes them.
    """
    B, T = tokens_BT.shape
    settings = {"positions_BT": None, "ancestors": None} | where
    context = context_of(T, cache, block, **settings)
    rows = jnp.tile(tokens_BT[:, None, :, None], (1, 1, 1, 2)).astype(params["table"].dtype)
    if block is not None:
        start = (0, 0, block.size, 0)
        rows = jax.lax.dynamic_update_slice(block.keys[0], rows, [jnp.int32(i) for i in start])
    P = rows.shape[2]
    seen = jnp.broadcast_to(context.block_visible, (B, T, P))
    held = rows[:, 0, :, 0]
    if cache is not None:
        cached = jnp.broadcast_to((cache.positions() >= 0)[:, None], (B, T, cache.num_slots))
        seen = jnp.concatenate([cached, seen], axis=2)
        # With one head of two numbers every layout of a cache is [B, S, 2].
        slots = cache.keys[0].reshape(B, cache.num_slots, 2)[:, :, 0]
        held = jnp.concatenate([slots, held], axis=1)
    index = jnp.zeros(tokens_BT.shape, jnp.int32)
    if config.recent:
        held, seen = _windowed(config, context, cache, held, seen)
    # Slots come in order of positions, and nodes after their parents.
    for column in range(held.shape[1]):
        longer = index * config.vocab_size + held[:, column, None].astype(jnp.int32) + 1
        index = jnp.where(seen[:, :, column], longer, index)
    logits = params["table"][jnp.clip(index, 0, len(params["table"]) - 1)]
    # NaN reveals a wrong position, and a mask that shows too much or too little.
    most = config.sinks + config.recent if config.recent else config.max_positions
    valid = jnp.sum(seen, axis=-1) == jnp.minimum(context.positions + 1, most)
    logits = jnp.where(valid[..., None], logits, jnp.nan)
    positions = jnp.broadcast_to(context.block_positions, (B, P))
    size = jnp.int32(T) + (0 if block is None else block.size)
    extended = Block((rows,), (rows,), positions, size)
    logits = logits if begun is None else begun.stream
    last = logits if num_logits is None else logits[:, -num_logits:]
    last = jnp.roll(last, 1, axis=-1) if skipped.attention else last
    return ModelOutput(last, logits, (logits,) * len(tap_layers), extended)


def _windowed(config, context, cache, held_BP, seen_BTP):
    """Returns tokens in the order of their positions, and which of them each token sees."""
    B, _, P = seen_BTP.shape
    known = jnp.broadcast_to(context.block_positions, (B, P - (cache.num_slots if cache else 0)))
    known = jnp.concatenate([cache.positions(), known], axis=1) if cache else known
    near = known[:, None] > context.positions[:, :, None] - config.recent
    seen_BTP = seen_BTP & (near | (known < config.sinks)[:, None])
    order = jnp.argsort(known, axis=1)
    seen_BTP = jnp.take_along_axis(seen_BTP, order[:, None], axis=2)
    return jnp.take_along_axis(held_BP, order, axis=1), seen_BTP


def embed(config, params, tokens_BT):
    """Replaces `transformer.embed`: one number per token."""
    return jax.nn.one_hot(tokens_BT, config.vocab_size, dtype=params["table"].dtype)


def head(config, params, hidden_BTD):
    """Replaces `transformer.head`: a drafter of features regresses the table's logits."""
    return hidden_BTD


REPLACED = {"apply": apply, "embed": embed, "head": head}


# Tables are arguments, so that loops of one shape share a compiled program.
@functools.lru_cache
def _prefill(program, slots):
    def prefill(*args):
        with mock.patch.multiple(transformer, **REPLACED):
            return decode.prefill(program, slots, *args)

    return jax.jit(prefill)


@functools.lru_cache
def _step(program, mutant):
    def step(params, state, uniforms, fault):
        numbers = dict(zip((sampling.DRAFT, sampling.ACCEPT, sampling.NEXT), uniforms))
        proposals, propose = [], decode.propose

        def watched(*args):
            proposals.append(propose(*args))
            return proposals[-1]

        broken = broken_verifiers.verifier(fault) if mutant else rejection.rejection
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (sampling, "uniforms", lambda keys, role, count: numbers[role][:, :count]),
                (decode, "propose", watched),
                (rejection, "rejection", broken),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(mock.patch.multiple(transformer, **REPLACED))
            return decode.step(program, params, state), proposals[-1][0]

    return jax.jit(step)


def doubled(uniforms):
    """Returns pairs of numbers for `draw`: with one block of tokens, only the second decides."""
    return np.stack([np.full_like(uniforms, 0.5), uniforms], axis=-1).reshape(len(uniforms), -1)


@dataclasses.dataclass
class Loop:
    """spsjax's loop over tables; `distribution` enumerates the texts that it emits."""

    loaded: LoadedDrafter  # parameters None: those of the table `draft`
    target: np.ndarray  # [contexts, V]
    draft: np.ndarray  # [contexts, V]
    limit: int  # number of tokens, prompt included
    eos_ids: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (0,)
    verifier: Verifier = rejection.Verifier()
    mutant: bool = False  # whether the rejection sampler of `mutants` replaces spsjax's

    def __post_init__(self):
        self.drafter = self.loaded.drafter
        self.vocab, self.K = self.target.shape[1], self.drafter.num_speculative_tokens
        self.program = decode.Program(config(self.vocab), self.drafter, self.verifier, self.eos_ids)
        self.params = self.loaded.with_target(params_of(self.target))
        if self.loaded.params is None:
            self.params["drafter"] = params_of(self.draft)

    def _start(self, prefixes, params):
        """Returns the state after the prefixes, one per row."""
        width = max(map(len, prefixes))
        tokens = np.zeros((len(prefixes), width), np.int32)
        for row, prefix in enumerate(prefixes):
            tokens[row, : len(prefix)] = prefix
        lengths = np.asarray(list(map(len, prefixes)), np.int32)
        slots = max(self.limit + self.K + 1, width)
        limits = np.full(len(prefixes), self.limit, np.int32)
        keys = sampling.row_keys(jax.random.key(0), len(prefixes))
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
        rows = sampling.RowParams(
            *(np.full(len(prefixes), float(value)) for value in values.values())
        )
        return _prefill(self.program, slots)(self.params, rows, tokens, lengths, limits, keys)

    def _prefixes(self):
        """Returns every prefix after which a round may begin."""
        ordinary = [token for token in range(self.vocab) if token not in self.eos_ids]
        sizes = range(self.limit - len(self.prompt))
        return [
            (*self.prompt, *new) for n in sizes for new in itertools.product(ordinary, repeat=n)
        ]

    def _paths(self, prefixes, params):
        """Returns every draft path: (prefix, tokens, numbers that draw it, probability).

        The numbers are computed token by token. A token's number lies in the middle of its interval
        of the distribution that the drafter declares.
        """
        K, V = self.K, self.vocab
        probe, one = _step(self.program, self.mutant), self._start(prefixes[:1], params)
        nothing = np.zeros((1, K))
        _, proposal = probe(self.params, one, (doubled(nothing), nothing, np.zeros((1, 2))), 0)
        if proposal.probs is None:
            return [(prefix, (), np.zeros(K), 1.0) for prefix in prefixes]
        paths = [
            (prefix, path) for prefix in prefixes for path in itertools.product(range(V), repeat=K)
        ]
        R = len(paths)
        drafted = np.asarray([path for _, path in paths])
        state = self._start([prefix for prefix, _ in paths], params)
        middles, mass = np.zeros((R, K)), np.ones(R)
        for k in range(K):
            uniforms = doubled(middles), np.zeros((R, K)), np.zeros((R, 2))
            proposal = probe(self.params, state, uniforms, 0)[1]
            probs = np.asarray(proposal.probs)[:, k]
            own = probs[np.arange(R), drafted[:, k]]
            middles[:, k] = np.cumsum(probs, axis=1)[np.arange(R), drafted[:, k]] - own / 2
            # After the end of a chain one path stands for all.
            mass *= np.where(np.asarray(proposal.tokens)[:, k] < 0, drafted[:, k] == 0, own)
        columns = zip(paths, middles, mass)
        return [(prefix, path, middle, share) for (prefix, path), middle, share in columns]

    def distribution(self, fault=0, **params) -> collections.Counter:
        """Enumerates sequence of new tokens -> probability, and asserts the loop's invariants."""
        if isinstance(self.verifier, match.Verifier):
            return self._distribution_of_matches(**params)
        K, V = self.K, self.vocab
        paths = self._paths(self._prefixes(), params)
        # Row (path, a, z) computes the probability of "a draft tokens accepted, then z".
        R = len(paths) * (K + 1) * V
        a, z = (axis.reshape(-1) for axis in np.indices((len(paths), K + 1, V))[1:])
        owner = np.repeat(np.arange(len(paths)), (K + 1) * V)
        prefix_of = [paths[index][0] for index in owner]
        state = self._start(prefix_of, params)
        middles = np.asarray([paths[index][2] for index in owner]).reshape(R, K)
        before = np.asarray(state.lengths)
        step = _step(self.program, self.mutant)

        def run(accept, following):
            uniforms = doubled(middles), accept, doubled(following[:, None])
            output, proposal = step(self.params, state, uniforms, fault)
            accepted = np.argmax(np.asarray(output.accepted), axis=1)
            drawn = np.asarray(output.tokens)[np.arange(R), before + accepted]
            return output, proposal, accepted, drawn

        def bisect(below):
            """Returns thresholds [R] under which `below` holds."""
            low, high = np.zeros(R), np.ones(R)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                holds = below(middle)
                low, high = np.where(holds, middle, low), np.where(holds, high, middle)
            return (low + high) / 2

        column = np.arange(K)

        def accepted_more(uniform):
            accept = np.where(column < a[:, None], 0.0, 1.0)
            accept = np.where(column == a[:, None], uniform[:, None], accept)
            return run(accept, np.zeros(R))[2] > a

        only_a = np.where(column < a[:, None], 0.0, 1.0)
        threshold = bisect(accepted_more).reshape(-1, K + 1, V)[:, :, 0]
        threshold[:, K] = 0  # after K accepted tokens always comes the bonus token
        reach = np.cumprod(np.concatenate([np.ones((len(paths), 1)), threshold], 1), 1)[:, :-1]
        starts = bisect(lambda uniform: run(only_a, uniform)[3] < z).reshape(-1, K + 1, V)
        starts[:, :, 0] = 0
        ends = np.concatenate([starts[:, :, 1:], np.ones((len(paths), K + 1, 1))], axis=2)
        path_mass = np.asarray([path[3] for path in paths])[:, None, None]
        mass = path_mass * (reach * (1 - threshold))[:, :, None] * (ends - starts)
        output, proposal, accepted, drawn = run(only_a, ((starts + ends) / 2).reshape(-1))
        mass = mass.reshape(-1)
        real = mass > 1e-13
        np.testing.assert_array_equal(accepted[real], a[real])
        np.testing.assert_array_equal(drawn[real], z[real])
        if self._is_whole_model():
            self._check_drafts(paths, owner, proposal, params)
        self._check_caches(output)
        return self._joint(prefix_of, mass, output)

    def _distribution_of_matches(self, **params) -> collections.Counter:
        """Enumerates matching: every draw of the target at every node of a proposal."""
        V, M = self.vocab, self.drafter.num_nodes + 1
        prefixes, draws = self._prefixes(), list(itertools.product(range(V), repeat=M))
        prefix_of = [prefix for prefix in prefixes for _ in draws]
        drawn = np.asarray(draws * len(prefixes))
        # A proposal may depend on anything but the draws. Here it depends on its prefix.
        rng = np.random.default_rng(len(prefixes))
        numbers = np.repeat(rng.random((len(prefixes), 3 * M)), len(draws), axis=0)
        state, step = self._start(prefix_of, params), _step(self.program, False)
        nothing = np.zeros((len(drawn), self.K))
        _, proposal = step(self.params, state, (numbers, nothing, doubled(drawn * 0.0)), 0)
        tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.parents)
        middles, mass = np.zeros(drawn.shape), np.ones(len(drawn))
        model = model_of(self.target)
        for row, prefix in enumerate(prefix_of):
            contexts = [prefix]
            for token, parent in zip(tokens[row], parents[row]):
                contexts.append((*contexts[parent], max(int(token), 0)))
            for node, context in enumerate(contexts):
                probs, token = reference.to_probs(model(context), **params), drawn[row, node]
                middles[row, node] = np.cumsum(probs)[token] - probs[token] / 2
                mass[row] *= probs[token]
        output, _ = step(self.params, state, (numbers, nothing, doubled(middles)), 0)
        assert np.asarray(output.accepted)[:, 1:].sum()  # some tokens are accepted
        self._check_caches(output)
        return self._joint(prefix_of, mass, output)

    def _joint(self, prefix_of, mass, output) -> collections.Counter:
        """Returns the distribution of whole sequences, from one round after every prefix."""
        after, tokens = np.asarray(output.lengths), np.asarray(output.tokens)
        done, before = np.asarray(output.done), np.asarray(list(map(len, prefix_of)))
        joint, open_ = collections.Counter(), collections.Counter({self.prompt: 1.0})
        for row in np.argsort(before, kind="stable"):
            arrived = open_[prefix_of[row]] * mass[row]
            if arrived > 0:
                whole = tuple(tokens[row, : after[row]].tolist())
                (joint if done[row] else open_)[whole[len(self.prompt) if done[row] else 0 :]] += (
                    arrived
                )
        return joint

    def _is_whole_model(self) -> bool:
        """Whether a draft model drafts that sees the whole text."""
        return isinstance(self.drafter, draft_model.Drafter) and not self.drafter.config.recent

    def _check_drafts(self, paths, owner, proposal, params):
        """Asserts that tokens and distributions of the proposal are the oracle's."""
        prefixes, drafted, masses = (
            [paths[index][field] for index in owner] for field in (0, 1, 3)
        )
        real, model = np.asarray(masses) > 0, model_of(self.draft)
        tokens = np.asarray(proposal.tokens)[real]
        np.testing.assert_array_equal(tokens[tokens >= 0], np.asarray(drafted)[real][tokens >= 0])
        expected = [
            [reference.to_probs(model([*prefix, *path[:k]]), **params) for k in range(self.K)]
            for prefix, path in zip(prefixes, drafted)
        ]
        probs, expected = np.asarray(proposal.probs)[real], np.asarray(expected)[real]
        np.testing.assert_allclose(probs[tokens >= 0], expected[tokens >= 0], atol=1e-12)

    def _check_caches(self, output):
        """Asserts that the caches hold what a fresh prefill would have written."""
        tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
        caches = [(output.cache, lengths - 1)]
        if self._is_whole_model():  # it feeds its last two tokens
            caches.append((output.drafter, np.maximum(lengths - 2, 0)))
        for cache, expected in caches:
            np.testing.assert_array_equal(cache.lengths, expected)
            valid = np.arange(tokens.shape[1]) < expected[:, None]
            held = np.asarray(cache.keys[0]).reshape(*tokens.shape, 2)[:, :, 0]
            np.testing.assert_array_equal(held[valid], tokens[valid])


def distance(distribution, other) -> float:
    """Returns the largest difference of two distributions at any sequence."""
    return max(
        abs(distribution[sequence] - other[sequence]) for sequence in {*distribution, *other}
    )
