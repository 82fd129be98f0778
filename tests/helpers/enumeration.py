"""The exact distribution of spsjax's own loop, by enumeration in float64.

Two things are replaced. A table with the logits of every context stands for the transformer
(`table_model`). Chosen numbers stand for random ones. The real `prefill`,
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
from helpers import reference, table_model
from helpers.table_model import REPLACED
from helpers.tree_enumeration import doubled, in_parts, joined

from spsjax import decode, sampling
from spsjax.drafters import base, draft_model
from spsjax.loading import LoadedDrafter
from spsjax.models import transformer
from spsjax.verifiers import match, rejection
from spsjax.verifiers.base import Verifier

BISECTIONS = 43
# Sizes of the compiled programs, the same for all loops: slots of a text, tokens of the longest
# prefix, prefixes, and rows of a round.
SLOTS, WIDTH, PREFIXES, ROWS = 12, 8, 16, 256


# Tables are arguments, so that loops of one shape share a compiled program.
@functools.lru_cache
def _prefill(program):
    def prefill(*args):
        with mock.patch.multiple(transformer, **REPLACED):
            return decode.prompt.prefill(program, SLOTS, *args)

    return jax.jit(prefill)


@functools.lru_cache
def _step(program):
    """Returns a jitted round of some rows of `starts` with chosen numbers.

    It returns the number of accepted tokens, the token after them, the proposal, the new state, and
    the verdict, if there is one size of scoring passes.
    """
    one_size = len(program.drafter.score_sizes) == 1

    def step(params, costs, starts, rows, uniforms):
        numbers = dict(zip((sampling.DRAFT, sampling.ACCEPT, sampling.NEXT), uniforms))
        propose, rule = decode.step.propose, type(program.verifier)
        proposals, verdicts, verify = [], [], rule.verify

        def watched(*args):
            proposals.append(propose(*args))
            return proposals[-1]

        def verifying(*args):
            verdicts.append(verify(*args))
            return verdicts[-1]

        state = decode.rows.take(starts, rows)
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (sampling, "uniforms", lambda keys, role, count: numbers[role][:, :count]),
                (decode.step, "propose", watched),
                (rule, "verify", verifying),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(mock.patch.multiple(transformer, **REPLACED))
            depths = None
            if program.schedule is not None:
                depths = program.schedule.depths(costs, state.history, state.done)
            output = decode.step.step(program, params, state, depths, costs)
        accepted = jnp.argmax(output.accepted, axis=1)
        position = jnp.minimum(state.lengths + accepted, SLOTS - 1)
        drawn = jnp.take_along_axis(output.tokens, position[:, None], axis=1)[:, 0]
        output = dataclasses.replace(output, keys=())  # NumPy cannot hold them
        proposal = dataclasses.replace(proposals[-1], aux=())
        return accepted, drawn, proposal, output, verdicts[-1] if one_size else None

    return jax.jit(step)


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
    costs: object = None  # by which the schedule of `program` decides, if it is given one

    def __post_init__(self):
        self.drafter = self.loaded.drafter
        self.vocab, self.K = self.target.shape[1], self.drafter.num_speculative_tokens
        assert self.limit + max(self.K, base.num_nodes(self.drafter)) < SLOTS
        self.program = decode.Program(
            table_model.config(self.vocab), self.drafter, self.verifier, self.eos_ids
        )
        self.params = self.loaded.with_target(table_model.params_of(self.target))
        if self.loaded.params is None:
            self.params["drafter"] = table_model.params_of(self.draft)

    def starts(self, params):
        """Returns the prefixes after which a round may begin, and the state after each of them."""
        prefixes = self.prefixes()
        tokens = np.zeros((PREFIXES, WIDTH), np.int32)
        lengths = np.full(PREFIXES, len(self.prompt), np.int32)
        for row, prefix in enumerate(prefixes):
            tokens[row, : len(prefix)] = prefix
            lengths[row] = len(prefix)
        limits = np.full(PREFIXES, self.limit, np.int32)
        keys = sampling.row_keys(jax.random.key(0), PREFIXES)
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
        rows = sampling.RowParams(*(np.full(PREFIXES, float(value)) for value in values.values()))
        return prefixes, _prefill(self.program)(self.params, rows, tokens, lengths, limits, keys)

    def prefixes(self):
        """Returns every prefix after which a round may begin."""
        ordinary = [token for token in range(self.vocab) if token not in self.eos_ids]
        sizes = range(self.limit - len(self.prompt))
        prefixes = [
            (*self.prompt, *new) for n in sizes for new in itertools.product(ordinary, repeat=n)
        ]
        assert len(prefixes) <= PREFIXES and len(prefixes[-1]) <= WIDTH
        return prefixes

    def step(self, starts, rows, draft, accept, draws):
        """Runs a round of some rows with chosen numbers, in parts of one size; see `_step`."""
        step, arrays = _step(self.program), (rows, draft, accept, draws)
        parts = [
            step(self.params, self.costs, starts, part[0], tuple(part[1:]))
            for part in in_parts(arrays, ROWS)
        ]
        return joined(parts, len(rows))

    def _paths(self, prefixes, starts):
        """Returns every draft path: row of its prefix, tokens, numbers that draw it, probability.

        The numbers are computed token by token. A token's number lies in the middle of its interval
        of the distribution that the drafter declares.
        """
        K, V = self.K, self.vocab
        rows = np.arange(len(prefixes))
        paths = np.asarray(list(itertools.product(range(V), repeat=K)), int).reshape(V**K, K)
        start, drafted = np.repeat(rows, len(paths)), np.tile(paths, (len(rows), 1))
        R = np.arange(len(start))
        middles, mass = np.zeros((len(start), K)), np.ones(len(start))
        for k in range(K):
            numbers = doubled(middles), np.zeros((len(start), K)), np.zeros((len(start), 2))
            proposal = self.step(starts, start, *numbers)[2]
            if proposal.probs is None:
                return rows, np.zeros((len(rows), 0), int), np.zeros((len(rows), K)), rows * 0 + 1.0
            probs = proposal.probs[:, k]
            own = probs[R, drafted[:, k]]
            middles[:, k] = np.cumsum(probs, axis=1)[R, drafted[:, k]] - own / 2
            # After the end of a chain one path stands for all.
            mass *= np.where(proposal.tokens[:, k] < 0, drafted[:, k] == 0, own)
        return start, drafted, middles, mass

    def distribution(self, **params) -> collections.Counter:
        """Enumerates sequence of new tokens -> probability, and asserts the loop's invariants."""
        if isinstance(self.verifier, match.Verifier):
            return self._distribution_of_matches(**params)
        K, V = self.K, self.vocab
        prefixes, starts = self.starts(params)
        start, drafted, middles, path_mass = self._paths(prefixes, starts)
        # Row (path, a, z) computes the probability of "a draft tokens accepted, then z".
        shape = len(start), K + 1, V
        owner, a, z = (axis.reshape(-1) for axis in np.indices(shape))
        only_a = np.where(np.arange(K) < a[:, None], 0.0, 1.0)  # its tokens are accepted, no other

        def run(some, accept, following):
            numbers = doubled(middles[owner[some]]), accept, doubled(following[:, None])
            return self.step(starts, start[owner[some]], *numbers)

        def bisect(some, below):
            """Returns the numbers of some rows under which `below` holds, and 0 of the others."""
            low, high = np.zeros(some.sum()), np.ones(some.sum())
            for _ in range(BISECTIONS if some.any() else 0):
                middle = (low + high) / 2
                holds = below(some, middle)
                low, high = np.where(holds, middle, low), np.where(holds, high, middle)
            actual = np.zeros(len(some))
            actual[some] = (low + high) / 2
            return actual.reshape(shape)

        def accepts_more(some, uniform):
            accept = np.where(np.arange(K) == a[some, None], uniform[:, None], only_a[some])
            return run(some, accept, 0 * uniform)[0] > a[some]

        def draws_less(some, uniform):
            return run(some, only_a[some], uniform)[1] < z[some]

        # After K accepted tokens always comes the bonus token.
        threshold = bisect((z == 0) & (a < K), accepts_more)[:, :, 0]
        reach = np.cumprod(np.concatenate([np.ones((len(start), 1)), threshold], 1), 1)[:, :-1]
        begin = bisect(z > 0, draws_less)
        end = np.concatenate([begin[:, :, 1:], np.ones((len(start), K + 1, 1))], axis=2)
        mass = (path_mass[:, None] * reach * (1 - threshold))[:, :, None] * (end - begin)
        everything = np.ones(len(owner), bool)
        mass, last = mass.reshape(-1), run(everything, only_a, ((begin + end) / 2).reshape(-1))
        real = mass > 1e-13
        np.testing.assert_array_equal(last[0][real], a[real])
        np.testing.assert_array_equal(last[1][real], z[real])
        prefix_of, output = [prefixes[row] for row in start[owner]], last[3]
        if self._is_whole_model():
            possible = path_mass[owner] > 0
            drafts = [prefixes[row] for row in start[owner][possible]], drafted[owner][possible]
            self._check_drafts(*drafts, jax.tree.map(lambda x: x[possible], last[2]), params)
        self.check_caches(output)
        return self.joint(prefix_of, mass, output)

    def _distribution_of_matches(self, **params) -> collections.Counter:
        """Enumerates matching: every draw of the target at every node of a proposal."""
        V, M = self.vocab, base.num_nodes(self.drafter) + 1
        prefixes, starts = self.starts(params)
        draws = np.asarray(list(itertools.product(range(V), repeat=M)))
        start, drawn = (
            np.repeat(np.arange(len(prefixes)), len(draws)),
            np.tile(draws, (len(prefixes), 1)),
        )
        # A proposal may depend on anything but the draws. Here it depends on its prefix.
        rng = np.random.default_rng(len(prefixes))
        numbers = rng.random((len(prefixes), 3 * M))[start]
        nothing = np.zeros((len(drawn), self.K))
        proposal = self.step(starts, start, numbers, nothing, doubled(drawn * 0.0))[2]
        middles, mass = np.zeros(drawn.shape), np.ones(len(drawn))
        model = table_model.model_of(self.target)
        for row, prefix in enumerate(prefixes):
            of_prefix = np.flatnonzero(start == row)  # all of them have one proposal
            contexts = [prefix]
            one = of_prefix[0]
            for token, parent in zip(proposal.tokens[one], proposal.parents[one]):
                contexts.append((*contexts[parent], max(int(token), 0)))
            for node, context in enumerate(contexts):
                probs = reference.to_probs(model(context), **params)
                token = drawn[of_prefix, node]
                middles[of_prefix, node] = np.cumsum(probs)[token] - probs[token] / 2
                mass[of_prefix] *= probs[token]
        last = self.step(starts, start, numbers, nothing, doubled(middles))
        assert last[0].sum()  # some tokens are accepted
        output = last[3]
        self.check_caches(output)
        return self.joint([prefixes[row] for row in start], mass, output)

    def joint(self, prefix_of, mass, output) -> collections.Counter:
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

    def _check_drafts(self, prefixes, drafted, proposal, params):
        """Asserts that tokens and distributions of the proposal are the oracle's."""
        tokens, model = proposal.tokens, table_model.model_of(self.draft)
        np.testing.assert_array_equal(tokens[tokens >= 0], drafted[tokens >= 0])
        expected = {}
        for prefix, path in zip(prefixes, map(tuple, drafted)):
            for k in range(self.K):
                context = (*prefix, *path[:k])
                if context not in expected:
                    expected[context] = reference.to_probs(model(context), **params)
        probs = [
            [expected[(*prefix, *path[:k])] for k in range(self.K)]
            for prefix, path in zip(prefixes, map(tuple, drafted))
        ]
        probs = np.asarray(probs).reshape(proposal.probs.shape)
        np.testing.assert_allclose(proposal.probs[tokens >= 0], probs[tokens >= 0], atol=1e-12)

    def check_caches(self, output):
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
