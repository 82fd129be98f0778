"""Comparison of verifiers on the same drafts: kinds of drafts, and expected tokens per call."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from spsjax import decode, sampling, verifiers
from spsjax.benchmarks.systems import System, spsjax_system
from spsjax.drafters import base
from spsjax.drafters.shapes import DynamicTree, Shape, Tree
from spsjax.loading import LoadedDrafter, Model, as_drafter
from spsjax.parallel import multihost
from spsjax.planning import trees
from spsjax.runtime.setup import Setup
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class DraftKind:
    """A kind of draft, and the rules that support it."""

    name: str  # name shown in reports
    drafter: LoadedDrafter  # draft model with the shape of the drafts
    rules: tuple[str, ...]  # names of the rules; the first is the reference of the comparison

    @property
    def num_nodes(self) -> int:
        return base.num_nodes(self.drafter.drafter)

    @property
    def depth(self) -> int:
        return self.drafter.drafter.num_speculative_tokens

    def systems(self, target: Model) -> list[System]:
        """Returns speculative sampling by each rule."""
        return [
            spsjax_system(
                f"{rule}, {self.name} of {self.num_nodes}",
                target,
                self.drafter,
                self.depth,
                verifier=rule,
            )
            for rule in self.rules
        ]


def drafts(
    target: Model,
    draft: Model,
    rates: Sequence[float],
    num_nodes: int,
    levels: int,
    longest_chain: int,
) -> list[DraftKind]:
    """Returns the kinds of drafts of `num_nodes` tokens: a chain, and four kinds of trees.

    Args:
        target, draft: the pair.
        rates: probability that the b-th child of an accepted node is accepted.
        num_nodes: number of draft tokens.
        levels: maximum number of levels of a tree below its root.
        longest_chain: maximum length of a chain.
    """

    def of_model(**fields) -> LoadedDrafter:
        loaded = as_drafter(draft, target)
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **fields))

    kinds = []
    if num_nodes <= longest_chain:
        chain = of_model(num_speculative_tokens=num_nodes)
        kinds.append(DraftKind("chain", chain, ("rejection", "block", "match", "typical")))
    if num_nodes <= levels:
        return kinds  # the trees would be chains
    shape = trees.plan_tree(rates, num_nodes, levels)
    independent = dataclasses.replace(shape, replacement=True)
    width = max(2, -(-num_nodes // levels))
    dynamic = DynamicTree(num_nodes, levels, min(width, target.config.vocab_size))
    of_trees = "recursive", "traversal"
    kinds += [
        DraftKind("tree", _with_tree(of_model, shape), (*of_trees, "match", "typical")),
        DraftKind("independent tree", _with_tree(of_model, independent), (*of_trees, "kseq")),
        DraftKind("dynamic tree", _with_tree(of_model, dynamic), ("match", "typical")),
    ]
    if num_nodes % levels == 0:
        count = num_nodes // levels
        paths = Tree.branching(count, *[1] * (levels - 1), replacement=True)
        rules = *of_trees, "kseq", "multipath"
        kinds.append(DraftKind("paths", _with_tree(of_model, paths), rules))
    return kinds


def _with_tree(of_model, shape: Shape) -> LoadedDrafter:
    return of_model(tree=shape, num_speculative_tokens=shape.depth)


def expected_tokens(
    target: Model,
    draft: DraftKind,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed: int,
) -> np.ndarray:
    """Returns [rounds, rules]: the expected number of tokens per round and rule.

    The drafts are those of one text that the first rule verifies. The rules' own draws are averaged
    out (`accept_probs`), so that small differences show.
    """
    setup = Setup(target, draft.drafter, None, draft.rules[0], False)
    batch = setup.batch([list(prompt)], params, max_new_tokens, seed, "prompt")
    loop = setup.loop_for(batch, "expected_tokens")
    rules = tuple(verifiers.by_name(rule) for rule in draft.rules)
    compare = loop.call(_expected, loop.program, rules)
    state, rounds = loop.read(batch), []
    while not multihost.to_host(state.done).all():
        rounds.append(multihost.to_host(compare(loop.params, state))[0])
        state = loop.run(state, 1)
    return np.stack(rounds)


def _expected(program, rules, params, state):
    """Returns [B, rules] expected tokens of the next round."""
    state, now = decode.step.next_round(program, params, state)
    proposal = decode.step.propose(program, params, state, now)
    output = decode.step.score(program, params, state, proposal)
    probs = sampling.to_probs(output.logits, state.rows)
    return jnp.stack(
        [1 + jnp.sum(rule.accept_probs(proposal, probs), axis=1) for rule in rules], axis=1
    )
