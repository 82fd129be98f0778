"""Draft tokens are drawn from the distributions that the drafter reports, for every drafter.

This is the drafters' share of the proof that sampling is lossless. A token is the inverse of its
reported distribution at a random number of its own. The distribution depends on the prefix and on
the tokens above it, and on no later number. Nothing but draft numbers is asked for. Then a verifier
that is lossless for any such proposal (`exactness_test`) is lossless with this drafter.
"""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import confident, drafting, enumeration, table_drafters, table_model
from helpers.table_drafters import VOCAB
from helpers.tree_enumeration import doubled, in_parts, joined

from spsjax import DynamicTree, Tree, decode, sampling
from spsjax.drafters import base, draft_model, stopping
from spsjax.loading import LoadedDrafter
from spsjax.models import transformer
from spsjax.types import Independent, Proposal
from spsjax.verifiers import match

K, ROWS = 2, 256
EDGE = 1e-12  # how far from the ends of a token's interval its numbers are chosen
WARM = {"temperature": 1.5}
FILTERS = WARM | {"top_k": 2, "top_p": 0.9003}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drafted(name: str, **fields) -> LoadedDrafter:
    """Returns a drafter of the tables with some fields changed."""
    if name in drafting.HEADS:
        return table_drafters.head(name, K, **fields)
    loaded = table_drafters.build(name, K)
    return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **fields))


class Drafts:
    """A drafter's proposals as a function of chosen numbers, after some prefixes."""

    def __init__(self, loaded: LoadedDrafter, params, schedule=None):
        tables = (table_model.table(VOCAB, seed) for seed in (3, 4))
        verifier = match.Verifier()  # takes chains and trees
        self.loop = enumeration.Loop(loaded, *tables, 5, (), (0, 1, 0), verifier=verifier)
        self.loop.program = dataclasses.replace(self.loop.program, schedule=schedule)
        self.drafter, self.roles = self.loop.drafter, set()
        self.prefixes, self.starts = self.loop.starts(params)
        # Filters are the same code for all drafters, and take long to compile.
        propose = self._propose if "top_k" in params else drafting.small(self._propose)
        self._jitted = jax.jit(propose)

    def _propose(self, params, starts, rows, numbers):
        def chosen(keys, role, count):
            self.roles.add(role)
            return numbers[:, :count]

        state = decode.rows.take(starts, rows)
        with (
            mock.patch.object(sampling, "uniforms", chosen),
            mock.patch.object(decode.step, "round_keys", lambda state: state.keys),
            mock.patch.multiple(transformer, **table_model.REPLACED),
        ):
            program = self.loop.program
            depths = None if program.schedule is None else jnp.full(len(rows), K)
            state, now = decode.step.next_round(program, params, state, depths)
            proposal = decode.step.propose(program, params, state, now)
            arguments = program, state, now, proposal, confident.COSTS
            return dataclasses.replace(decode.sizes.worth_scoring(*arguments), aux=())

    def check_numbers(self, count: int) -> Proposal:
        """Asserts that no numbers are asked for but `count` of the draft's, nor others computed.

        It is traced, but not compiled. Returns the proposal's shapes.
        """
        numbers = _spread(np.full((ROWS, count), 0.5))
        traced = self._jitted.trace(self.loop.params, self.starts, np.zeros(ROWS, int), numbers)
        operations = str(traced.jaxpr)
        assert self.roles <= {sampling.DRAFT}
        assert "random" not in operations and "threefry" not in operations
        return traced.out_info

    def __call__(self, rows, numbers):
        """Returns the proposals in NumPy: [R] rows of prefixes, [R, N] numbers of the tokens."""
        parts = []
        for rows_R, numbers_RN in in_parts([rows, numbers], ROWS):
            numbers_RM = _spread(numbers_RN)
            parts.append(self._jitted(self.loop.params, self.starts, rows_R, numbers_RM))
        return joined(parts, len(rows))


def _spread(numbers):
    """Returns the numbers [R, 2 N] that `draw` takes, with room for drafters that ask for more."""
    pairs = doubled(numbers)
    return np.pad(pairs, ((0, 0), (0, 8)), constant_values=0.5)


def check_draws(loaded: LoadedDrafter, params=WARM, schedule=None):
    """Asserts that tokens of all paths invert their distributions at both ends of intervals.

    With a schedule, chains end where it wants no more of them to be scored.
    """
    drafts = Drafts(loaded, params, schedule)
    N = base.num_nodes(drafts.drafter)
    drafts.check_numbers(N)
    nodes = range(N)
    prefixes = np.arange(min(len(drafts.prefixes), 4))
    cases = itertools.product(prefixes, itertools.product(range(VOCAB), repeat=N), (0, 1))
    rows, paths, sides = map(np.asarray, zip(*cases))
    numbers, mass = np.full((len(rows), N), 0.5), np.ones(len(rows))
    seen = []
    for n in nodes:
        proposal = drafts(rows, numbers)
        left = weights(proposal, n, paths)
        total = left.sum(axis=1)
        share = left / np.where(total == 0, 1, total)[:, None]
        own = share[np.arange(len(rows)), paths[:, n]]
        ends = np.cumsum(share, axis=1)[np.arange(len(rows)), paths[:, n]]
        numbers[:, n] = np.where(sides == 0, ends - own + EDGE, ends - EDGE)
        numbers[:, n] = np.clip(numbers[:, n], 0, np.nextafter(1, 0))
        there = proposal.tokens[:, n] >= 0
        mass *= np.where(there, own, 1)
        seen.append((left, there))
    proposal = drafts(rows, numbers)
    for n, (left, there) in zip(nodes, seen):
        possible = mass > 1e-9
        # Neither the distribution nor whether there is a token depends on this or a later number.
        np.testing.assert_array_equal((proposal.tokens[:, n] >= 0)[possible], there[possible])
        now = weights(proposal, n, paths)
        np.testing.assert_allclose(now[possible & there], left[possible & there], atol=1e-13)
        drawn = possible & there
        np.testing.assert_array_equal(proposal.tokens[drawn, n], paths[drawn, n])
    if schedule is not None:
        assert 0 < np.mean(proposal.tokens < 0) < 1
    assert (mass > 1e-9).sum() > len(rows) / 20
    assert drafts.roles == {sampling.DRAFT}


def weights(proposal, n, paths):
    """Returns what a token is drawn from [R, V]: its node's distribution, or what siblings left."""
    R = np.arange(len(paths))
    if proposal.parents is None:
        return proposal.probs[:, n]
    left = proposal.probs[R, proposal.parents[:, n]].copy()
    for sibling in range(n):
        if not isinstance(proposal, Independent):
            twin = proposal.parents[:, sibling] == proposal.parents[:, n]
            left[R[twin], paths[twin, sibling]] = 0
    return left


SAMPLED = (
    *("draft_model", "early_exit", "sparse_self", "windowed", "tapped", "hybrid", "tli"),
    *drafting.HEADS,
)
CHOSEN = sorted({*drafting.NAMES} - {*SAMPLED})  # whose tokens are point masses


def test_filtered_draft_draws_from_what_it_reports():
    check_draws(drafted("draft_model"), FILTERS)


@pytest.mark.parametrize("name", SAMPLED)
def test_drafter_draws_from_what_it_reports(name):
    check_draws(drafted(name))


def test_recurrent_draft_draws_from_what_it_reports():
    """Its state depends on all draft tokens before, and on no later one."""
    check_draws(drafted("dspark", markov_kind="rnn"))


@pytest.mark.slow
@pytest.mark.parametrize("replacement", (False, True))
@pytest.mark.parametrize("name", drafting.BLOCKS)
def test_tree_of_a_block_draws_from_what_it_reports(name, replacement):
    """In a tree of DSpark, each node has the recurrent state of its own path."""
    recurrent = {"markov_kind": "rnn"} if name == "dspark" else {}
    check_draws(drafted(name, tree=Tree((0, 0, 1), replacement=replacement), **recurrent))


@pytest.mark.parametrize("replacement", (False, True))
def test_tree_draws_from_what_it_reports(replacement):
    """Without replacement, siblings are drawn in order, each from what the earlier ones left."""
    check_draws(drafted("draft_model", tree=Tree((0, 0, 1), replacement=replacement)))


def test_chain_that_ends_early_draws_from_what_it_reports():
    loaded = drafted("draft_model")
    drafter = stopping.Drafter(loaded.drafter, stopping.Confidence(0.5))
    check_draws(dataclasses.replace(loaded, drafter=drafter))


@pytest.mark.parametrize(("name", "rule", "biased"), confident.CASES)
def test_chain_that_is_cut_by_estimates_draws_from_what_it_reports(name, rule, biased):
    """No token is dropped by anything that depends on it. If one is, the test fails."""
    check_draws(drafted(name), schedule=rule)
    with pytest.raises(AssertionError):
        check_draws(drafted(name), schedule=biased)


@pytest.mark.parametrize("name", CHOSEN)
def test_drafter_that_chooses_asks_for_draft_numbers_only(name):
    """Its tokens are point masses. Numbers of another role would tie them to the verdict."""
    assert_chooses(drafted(name))


@pytest.mark.parametrize("tree", (Tree((0, 0, 1), chosen=True), DynamicTree(3, 2, 2)), ids=str)
def test_chosen_tree_asks_for_draft_numbers_only(tree):
    assert_chooses(drafted("eagle3", tree=tree))


def assert_chooses(loaded: LoadedDrafter):
    """Asserts that a drafter reports no distribution, and asks for draft numbers at most."""
    proposal = Drafts(loaded, WARM).check_numbers(28)  # lookahead asks for most
    assert proposal.probs is None or proposal.tokens.shape[1] == 0


def _reports_another(proposal):
    return dataclasses.replace(proposal, probs=proposal.probs + 1e-9 * jnp.arange(VOCAB))


def _drops_improbable_tokens(proposal):
    chosen = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
    kept = jnp.cumprod(chosen >= 0.3, axis=1) > 0
    return dataclasses.replace(proposal, tokens=jnp.where(kept, proposal.tokens, -1))


def _reports_it_after_the_draw(proposal):
    drawn = jax.nn.one_hot(proposal.tokens, VOCAB, dtype=proposal.probs.dtype)
    return dataclasses.replace(proposal, probs=0.9 * proposal.probs + 0.1 * drawn)


@pytest.mark.parametrize(
    "fault", (_reports_another, _drops_improbable_tokens, _reports_it_after_the_draw)
)
def test_broken_draft_is_rejected(monkeypatch, fault):
    """Another distribution; a token that decides that there is none; a sharpened distribution."""
    propose = draft_model.Drafter.propose

    def broken(*args):
        return fault(propose(*args))

    monkeypatch.setattr(draft_model.Drafter, "propose", broken)
    with pytest.raises(AssertionError):
        check_draws(drafted("draft_model"))


@pytest.mark.parametrize("role", ("the verdict's", "one for two tokens"))
def test_draft_with_a_shared_number_is_rejected(monkeypatch, role):
    """The numbers of the verdict, or one number for two tokens."""
    uniforms = sampling.uniforms

    def shared(keys, role_, count):
        numbers = uniforms(keys, sampling.ACCEPT if role == "the verdict's" else role_, count)
        return numbers if role == "the verdict's" else jnp.tile(numbers[:, :2], (1, count // 2))

    propose = draft_model.Drafter.propose

    def broken(self, params, state, now):
        with mock.patch.object(sampling, "uniforms", functools.partial(shared)):
            return propose(self, params, state, now)

    monkeypatch.setattr(draft_model.Drafter, "propose", broken)
    with pytest.raises(AssertionError):
        check_draws(drafted("draft_model"))
