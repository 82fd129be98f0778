"""The exact distribution that a verifier emits for trees of draft tokens, in float64.

Every tree of a shape is enumerated with its probability, and every verdict on it. A verifier is a
black box: it is given chosen numbers in the place of random ones. A draft token is accepted for all
numbers below some threshold, and a drawn token grows with its number. So bisection gives the
probability of every verdict to the last bit.
"""

import collections
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from helpers.environment import OFTEN

from spsjax import sampling
from spsjax.types import Independent, Proposal

BISECTIONS = 41
ROWS = 128  # of a compiled program
IMPOSSIBLE = 1e-14


@dataclasses.dataclass(frozen=True)
class Tree:
    """Shape of a tree: the parent of each draft token, in the order in which they are drawn."""

    parents: tuple[int, ...]

    def __str__(self):
        return "-".join(map(str, self.parents))

    def contexts(self, tokens):
        """Returns the tokens from the root to each node, the root's own left out."""
        contexts = [()]
        for token, parent in zip(tokens, self.parents):
            contexts.append((*contexts[parent], token))
        return contexts

    def children(self, node):
        return [n + 1 for n, parent in enumerate(self.parents) if parent == node]

    def leaves_first(self, node=0):
        """Returns the nodes in the order in which a depth-first walk leaves them."""
        below = [n for child in self.children(node) for n in self.leaves_first(child)]
        return [*below, node] if node else below


def branching(*counts):
    """Returns the tree whose nodes at each depth have so many children: (2, 2) has 6 nodes."""
    parents, level, size = [], [0], 0
    for count in counts:
        parents += [node for node in level for _ in range(count)]
        level = list(range(size + 1, size + 1 + len(level) * count))
        size += len(level)
    return Tree(tuple(parents))


def trees(tree, draft, distinct):
    """Yields the tokens of every tree, and the probability that the draft draws them.

    `draft` maps a context to a distribution. With `distinct`, siblings are drawn without
    replacement; a node without a token left gets -1.
    """
    vocab = len(draft(()))
    for tokens in itertools.product(range(-1 if distinct else 0, vocab), repeat=len(tree.parents)):
        mass, left = 1.0, {}
        contexts = tree.contexts(tokens)
        for token, parent in zip(tokens, tree.parents):
            if -1 in contexts[parent]:
                mass *= token == -1  # nothing hangs below a node without a token
                continue
            probs = left.setdefault(parent, np.array(draft(contexts[parent]), float))
            if probs.sum() == 0:
                mass *= token == -1
                continue
            mass *= probs[token] / probs.sum() if token >= 0 else 0
            if distinct:
                probs[token] = 0
            if not mass:
                break
        if mass > IMPOSSIBLE:
            yield tokens, mass


def proposal_of(parents, distinct, deterministic, tokens, draft, eligible):
    """Returns a proposal as a drafter makes it: chains have no parents."""
    N = len(parents)
    is_chain = parents == tuple(range(N))
    draft = None if deterministic else draft[:, :N] if is_chain else draft
    parents_BN = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape)
    kind = Proposal if distinct else Independent
    return kind(tokens, draft, None if is_chain else parents_BN, eligible)


@functools.lru_cache
def verify_function(verifier, parents, distinct, deterministic):
    """Returns a jitted function of tokens, distributions and numbers, which returns verdicts."""

    def verify(tokens, draft, target, eligible, accept, following):
        proposal = proposal_of(parents, distinct, deterministic, tokens, draft, eligible)
        verifier.check(proposal)
        numbers = {sampling.ACCEPT: accept, sampling.NEXT: following}
        chosen = mock.Mock(side_effect=lambda keys, role, count: numbers[role][:, :count])
        with mock.patch.object(sampling, "uniforms", chosen):
            return verifier.verify(None, proposal, target)

    return jax.jit(verify, compiler_options=OFTEN)


@functools.lru_cache
def accepted_function(verifier, parents, distinct, deterministic):
    """Returns a jitted function: the mean number of accepted tokens by the rule's own formula."""

    def accepted(tokens, draft, target, eligible):
        proposal = proposal_of(parents, distinct, deterministic, tokens, draft, eligible)
        return jnp.sum(verifier.accept_probs(proposal, target), axis=1)

    return jax.jit(accepted)


class Verification:
    """A verifier's verdicts on many trees at once, as a function of chosen numbers.

    Attributes:
        tree: shape of the trees.
        masses: probability of each tree.
        vocab: size of the vocabulary.
    """

    def __init__(self, verifier, tree, draft, target, distinct=False, tokens=None, eligible=None):
        """`tokens`: those of the one tree that the drafter chooses, instead of drawing them."""
        drawn = trees(tree, draft, distinct) if tokens is None else [(tokens, 1.0)]
        self._tokens, self.masses = map(np.asarray, zip(*drawn))
        self.tree, self.vocab, M = tree, len(target(())), len(tree.parents) + 1
        shape = len(self._tokens), M, self.vocab
        self._draft, self._target = np.zeros(shape), np.full(shape, 1 / self.vocab)
        for row, drawn in enumerate(self._tokens.tolist()):
            for node, context in enumerate(tree.contexts(drawn)):
                if -1 not in context:
                    self._draft[row, node] = draft(context)
                    self._target[row, node] = target(context)
        self._eligible = np.ones(self._tokens.shape, bool) if eligible is None else eligible
        self._eligible = np.broadcast_to(self._eligible, self._tokens.shape)
        self._program = verifier, tree.parents, distinct, tokens is not None
        self._rows, self._parts = None, []

    def _trees(self, rows):
        """Returns tokens, distributions and eligibility of some trees, in parts of one size."""
        arrays = self._tokens, self._draft, self._target, self._eligible
        return in_parts([array[rows] for array in arrays])

    def __call__(self, rows, accept, draws):
        """Returns the verdicts on some trees: [R] rows, [R, N] and [R, M] numbers."""
        if rows is not self._rows:
            self._rows, self._parts = rows, jax.device_put(self._trees(rows))
        numbers, verify = in_parts([accept, doubled(draws)]), verify_function(*self._program)
        verdicts = [verify(*trees, *own) for trees, own in zip(self._parts, numbers)]
        return joined(verdicts, len(rows))

    def mean_length(self):
        """Returns the mean number of emitted tokens that the rule's own formula gives."""
        accepted, trees = accepted_function(*self._program), self._trees(slice(None))
        return float(
            self.masses @ (1 + joined([accepted(*part) for part in trees], len(self.masses)))
        )


def doubled(numbers):
    """Returns pairs of numbers for `draw`: with one block of tokens, only the second decides."""
    return np.stack([np.full_like(numbers, 0.5), numbers], axis=-1).reshape(len(numbers), -1)


def in_parts(arrays, size=ROWS):
    """Returns arrays [R, ...] in parts of `size` rows, so that one program is compiled."""
    starts = range(0, max(len(arrays[0]), 1), size)
    parts = [[array[start : start + size] for array in arrays] for start in starts]
    parts[-1] = [np.resize(array, (size, *array.shape[1:])) for array in parts[-1]]
    return parts


def joined(parts, rows):
    """Returns the first rows of what was computed in parts, in NumPy."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:rows], *parts)


def bisect(below, count):
    """Returns the thresholds [count] under which `below` holds."""
    low, high = np.zeros(count), np.ones(count)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        holds = below(middle)
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    middle = (low + high) / 2
    return np.where(middle > 1 - 1e-12, 1, np.where(middle < 1e-12, 0, middle))


NEVER = np.nextafter(1.0, 0.0)  # the number that accepts the least


@dataclasses.dataclass
class Cases:
    """Trees with numbers that decide some of their tests, and the probability of each case."""

    row: np.ndarray  # [R]
    mass: np.ndarray  # [R]
    accept: np.ndarray  # [R, N]
    draws: np.ndarray  # [R, M]

    @classmethod
    def undecided(cls, verification):
        R, N = len(verification.masses), len(verification.tree.parents)
        accept, draws = np.full((R, N), NEVER), np.zeros((R, N + 1))
        return cls(np.arange(R), np.array(verification.masses, float), accept, draws)

    def __len__(self):
        return len(self.row)

    def take(self, index):
        return Cases(self.row[index], self.mass[index], self.accept[index], self.draws[index])

    def times(self, count):
        return self.take(np.repeat(np.arange(len(self)), count))

    def join(self, other):
        mine, theirs = (dataclasses.astuple(cases) for cases in (self, other))
        return Cases(*map(np.concatenate, zip(mine, theirs)))

    def accepting(self, child, number):
        """Returns the cases with another number for a child."""
        accept = self.accept.copy()
        accept[:, child - 1] = number
        return dataclasses.replace(self, accept=accept)

    def split(self, child, threshold):
        """Returns the cases that accept a child, and those that do not."""
        sides = []
        for share, number in ((threshold, threshold / 2), (1 - threshold, (1 + threshold) / 2)):
            side = self.accepting(child, number)
            side = dataclasses.replace(side, mass=share * side.mass)
            sides.append(side.take(side.mass > IMPOSSIBLE))
        return sides

    def verdict(self, verification):
        return verification(self.row, self.accept, self.draws)


def decided(verification, order):
    """Returns the cases of a rule that tests the nodes in a given order, and draws one token.

    As long as all later tests fail, whether a node passes shows in the path.
    """
    cases = Cases.undecided(verification)
    for node in order:
        refused = cases.accepting(node, NEVER).verdict(verification).path
        changes = functools.partial(_changes_path, verification, cases, node, refused)
        accepted, refused = cases.split(node, bisect(changes, len(cases)))
        cases = accepted.join(refused)
    return _drawn(verification, cases, 0, walks=False)


def decided_by_walk(verification):
    """Returns the cases of a rule that walks down from the root.

    At each node it tests the children in turn. If all fail it draws, and goes on to a child that
    equals the draw.
    """
    tree, start = verification.tree, Cases.undecided(verification)
    ended = start.take(slice(0))
    arrived = {0: start} | {node + 1: ended for node in range(len(tree.parents))}
    for node in range(len(tree.parents) + 1):  # parents come first
        if not (cases := arrived[node]):
            continue
        for child in tree.children(node):
            reaches = functools.partial(_reaches, verification, cases, node, child)
            accepted, cases = cases.split(child, bisect(reaches, len(cases)))
            arrived[child] = arrived[child].join(accepted)
        cases = _drawn(verification, cases, node, walks=True)
        path = cases.verdict(verification).path
        ended = ended.join(cases.take(np.max(path, axis=1) == node))
        for child in tree.children(node):
            arrived[child] = arrived[child].join(cases.take(np.any(path == child, axis=1)))
    return ended


def _changes_path(verification, cases, node, refused, number):
    """Returns [R] whether the path is another one than if the node is refused."""
    return np.any(cases.accepting(node, number).verdict(verification).path != refused, axis=1)


def _reaches(verification, cases, node, child, number):
    """Returns [R] whether a child is reached, whichever token is drawn at the node."""
    reached = True
    for drawn in (0.0, NEVER):
        tried = cases.accepting(child, number)
        tried.draws = tried.draws.copy()
        tried.draws[:, node] = drawn
        reached &= np.any(tried.verdict(verification).path == child, axis=1)
    return reached


def _drawn(verification, cases, number, walks):
    """Splits cases by the token that is drawn, with the random number of an index."""
    V, row = verification.vocab, np.arange(len(cases) * (verification.vocab - 1))
    tried, token = cases.times(V - 1), np.tile(np.arange(1, V), len(cases))
    tried.draws[:, number] = 0.5
    # A drawn token stands behind the accepted ones of the path, which the draw may make longer.
    path = cases.verdict(verification).path
    depth = np.argmax(path == number, axis=1) if walks else np.sum(path >= 0, axis=1) - 1
    start = np.repeat(depth, V - 1)

    def below(middle):
        tried.draws[:, number] = middle
        return tried.verdict(verification).tokens[row, start] < token

    starts = bisect(below, len(token)).reshape(-1, V - 1)
    edge = np.ones((len(cases), 1))
    edges = np.concatenate([0 * edge, starts, edge], axis=1)
    cases = cases.times(V)
    cases.mass *= np.diff(edges).reshape(-1)
    cases.draws[:, number] = ((edges[:, 1:] + edges[:, :-1]) / 2).reshape(-1)
    return cases.take(cases.mass > IMPOSSIBLE)


def emitted(verification, cases):
    """Returns emitted tokens -> probability."""
    distribution, verdict = collections.Counter(), cases.verdict(verification)
    for tokens, number, mass in zip(verdict.tokens, verdict.num_tokens, cases.mass):
        distribution[tuple(tokens[:number].tolist())] += mass
    return distribution


def continued(distribution, target, length):
    """Returns the distribution of the first `length` tokens, continued by the target's own law."""
    joint = collections.Counter()
    for tokens, mass in distribution.items():
        stack = [(tokens[:length], mass)]
        while stack:
            prefix, share = stack.pop()
            if len(prefix) == length:
                joint[prefix] += share
                continue
            stack += [((*prefix, z), share * p) for z, p in enumerate(target(prefix)) if p]
    return joint


def expected_length(distribution):
    """Returns the mean number of emitted tokens."""
    return sum(len(tokens) * mass for tokens, mass in distribution.items())
