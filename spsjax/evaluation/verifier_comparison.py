"""Rules of verification on the same drafts: tokens per call, time, and a test of their law."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from spsjax import decode, sampling, verifiers
from spsjax.drafters import base
from spsjax.drafters.shapes import DynamicTree, Shape, Tree
from spsjax.evaluation import samplers
from spsjax.execution import prefill
from spsjax.loading import LoadedDrafter, Model, as_drafter
from spsjax.parallel import multihost
from spsjax.performance import tree_theory
from spsjax.request import Request
from spsjax.sampling import SamplingParams
from spsjax.utils.compilation import compiled


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A kind of draft, and the rules that fit it.

    Attributes:
        name: name shown in reports.
        drafter: the draft model that drafts it.
        rules: names of the rules; the first one is what the others are compared with.
    """

    name: str
    drafter: LoadedDrafter
    rules: tuple[str, ...]

    @property
    def num_nodes(self) -> int:
        return base.num_nodes(self.drafter.drafter)

    @property
    def depth(self) -> int:
        return self.drafter.drafter.num_speculative_tokens

    def systems(self, target: Model) -> list[samplers.System]:
        """Returns speculative sampling by each rule."""
        return [
            samplers.spsjax_system(
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
) -> list[Draft]:
    """Returns the kinds of drafts of so many tokens: a chain, and four kinds of trees.

    Args:
        target: target model.
        draft: draft model.
        rates: the probability that the b-th child of a node is accepted, if the node is.
        num_nodes: draft tokens.
        levels: most levels of a tree below its root.
        longest_chain: longest chain that is of interest.
    """

    def of_model(**fields) -> LoadedDrafter:
        loaded = as_drafter(draft, target)
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **fields))

    kinds = []
    if num_nodes <= longest_chain:
        chain = of_model(num_speculative_tokens=num_nodes)
        kinds.append(Draft("chain", chain, ("rejection", "block", "match", "typical")))
    if num_nodes <= levels:
        return kinds  # a tree of so few tokens would be a chain
    shape = tree_theory.plan_tree(rates, num_nodes, levels)
    independent = dataclasses.replace(shape, replacement=True)
    width = max(2, -(-num_nodes // levels))
    dynamic = DynamicTree(num_nodes, levels, min(width, target.config.vocab_size))
    of_trees = "recursive", "traversal"
    kinds += [
        Draft("tree", _with_tree(of_model, shape), (*of_trees, "match", "typical")),
        Draft("independent tree", _with_tree(of_model, independent), (*of_trees, "kseq")),
        Draft("dynamic tree", _with_tree(of_model, dynamic), ("match", "typical")),
    ]
    if num_nodes % levels == 0:
        count = num_nodes // levels
        paths = Tree.branching(count, *[1] * (levels - 1), replacement=True)
        rules = *of_trees, "kseq", "multipath"
        kinds.append(Draft("paths", _with_tree(of_model, paths), rules))
    return kinds


def _with_tree(of_model, shape: Shape) -> LoadedDrafter:
    return of_model(tree=shape, num_speculative_tokens=shape.depth)


def expected_tokens(
    target: Model,
    draft: Draft,
    prompt: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed: int,
) -> np.ndarray:
    """Returns [rounds, rules]: the tokens that each rule would emit in each round, in the mean.

    All rules judge the same drafts: those of the rounds of one text that the first rule decides.
    Their own draws are averaged out (`accept_probs`), so that small differences show.
    """
    request = Request(
        "expected_tokens",
        target,
        [list(prompt)],
        draft.drafter,
        None,
        params,
        max_new_tokens,
        seed,
        draft.rules[0],
        False,
    )
    rules = tuple(verifiers.by_name(rule) for rule in draft.rules)
    state, _ = prefill(request)
    judge = compiled(_judge, request.program, rules)
    step = compiled(decode.step, request.program, donate=1)
    rounds = []
    with target.in_mesh():
        while not multihost.to_host(state.done).all():
            tokens, _ = judge(request.params, state)
            rounds.append(multihost.to_host(tokens)[0])
            state, _ = step(request.params, state)
    return np.stack(rounds)


def _judge(program, rules, params, state):
    """Returns [B, rules] expected tokens of the next round."""
    state, now = decode.next_round(program, params, state)
    proposal = decode.propose(program, params, state, now)
    output = decode.score(program, params, state, proposal)
    probs = sampling.to_probs(output.logits, state.rows)
    return jnp.stack(
        [1 + jnp.sum(rule.accept_probs(proposal, probs), axis=1) for rule in rules], axis=1
    )
