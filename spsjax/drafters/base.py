"""The interface of drafters."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from spsjax import draft_shapes
from spsjax.drafters import stopping
from spsjax.errors import InputError
from spsjax.types import Array, ModelOutput, Proposal, PyTree, Round, Verdict

# How deep a loop that chooses the depth of every round drafts chains, if the drafter's own K is not
# greater. With the root these are eight rows of a matrix product. A ninth takes as long as eight
# more.
PACED_TOKENS = 7


class Drafter(abc.ABC):
    """Proposes tokens that the target then verifies: pure functions over pytrees.

    A concrete drafter is a final, frozen, hashable dataclass: it is a static argument of the jitted
    loop. It holds no arrays: parameters and state are arguments. A new value of a field compiles a
    new program, unless the field is declared with `utils.traced.number`. Any drafter leaves the
    output's distribution untouched, because acceptance is the verifier's business. What it must get
    right is that `Proposal.probs` are the distributions from which its tokens were drawn.

    In all functions `params` is `{"target": ..., "drafter": ...}`, with "stop_rule" for a rule that
    has weights and "costs" for a loop that chooses K. A row's committed tokens are its first
    `lengths_B`; after them there may be any token at all. Every leaf of a state has a batch axis
    first, unless it is in a `KVCache`.

    Attributes:
        num_speculative_tokens: K, the most tokens that a round can accept.
        tree: shape of the trees that it grows; None: a chain, or trees that it makes itself.
        num_nodes: N, draft tokens of a proposal; K for a chain.
        trees: whether proposals are trees, which not every verifier takes.
        tap_layers: layers of the target whose input `prefill` and `commit` want to see.
        score_sizes: numbers of draft tokens, beside N, for which a smaller scoring pass is
            compiled; for drafters that often propose fewer than N.
        stop_rule: rule that ends a chain early; None: none does.
        max_steps: greatest K that it can have; None: any.
        varies: whether the time of a draft depends on the text so much that rounds must be measured
            on texts of one kind.
    """

    num_speculative_tokens: int
    tree: draft_shapes.Shape = None
    tap_layers: tuple[int, ...] = ()
    score_sizes: tuple[int, ...] = ()
    stop_rule: stopping.Rule | None = None
    max_steps: int | None = None

    @property
    def varies(self) -> bool:
        return self.stop_rule is not None

    @property
    def trees(self) -> bool:
        return self.tree is not None

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes if self.tree else self.num_speculative_tokens

    def paced(self) -> "Drafter":
        """Returns the drafter for a loop that chooses the depth of every round, up to its K.

        A chain's K is `max_steps`, or else at least `PACED_TOKENS`.
        """
        if self.tree is not None:
            return self
        longest = self.max_steps or max(self.num_speculative_tokens, PACED_TOKENS)
        return dataclasses.replace(self, num_speculative_tokens=longest)

    def nodes_within(self, depth: int) -> int:
        """Returns how many draft tokens can be up to a depth, and come before all deeper ones."""
        if isinstance(self.tree, draft_shapes.Tree):
            return sum(len(level) for level in self.tree.levels[1 : depth + 1])
        if self.trees:
            return self.num_nodes if depth else 0
        return min(depth, self.num_nodes)

    def init_rule(self, batch: int) -> PyTree:
        """Returns the state of its rule that ends chains, before the first round."""
        return () if self.stop_rule is None else self.stop_rule.init(batch)

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        """Returns the state before any token, with room for `slots` tokens per row."""
        return ()

    def prefill(
        self,
        params: PyTree,
        state: PyTree,
        tokens_BT: Array,
        next_BT: Array,
        starts_B: Array,
        lengths_B: Array,
        output: ModelOutput,
    ) -> PyTree:
        """Returns the state after one more chunk of the prompts.

        Chunks come in order. The last one may repeat tokens of the one before, and a chunk has
        padding behind shorter prompts.

        Args:
            params: parameters of target and drafter.
            state: state after the chunks before.
            tokens_BT: the chunk.
            next_BT: the token that follows each of its tokens.
            starts_B: position of the chunk's first token per row.
            lengths_B: lengths of the whole prompts. Their last token counts as not fed yet: it is
                the root of the first round.
            output: what the target made of the chunk.
        """
        return state

    def ready(
        self, params: PyTree, state: PyTree, tokens_BT: Array, lengths_B: Array, cache: PyTree
    ) -> PyTree:
        """Returns the state before the first round, after the prompts were read to their ends.

        For what needs whole prompts.

        Args:
            params: parameters of target and drafter.
            state: what the last `prefill` returned.
            tokens_BT, lengths_B: the prompts.
            cache: the target's, which holds all of their tokens but the last.
        """
        return state

    def catch_up(
        self, params: PyTree, state: PyTree, tokens_BS: Array, lengths_B: Array, depths_B: Array
    ) -> PyTree:
        """Returns the state with what `commit` has left undone in rounds without a draft.

        It is called before every round of a loop that sometimes drafts nothing.

        Args:
            params: parameters of target and drafter.
            state: state between rounds.
            tokens_BS: token buffer.
            lengths_B: committed tokens per row.
            depths_B: `Round.depths` of the round that follows. If all are 0, nothing is drafted.
        """
        return state

    @abc.abstractmethod
    def propose(self, params: PyTree, state: PyTree, now: Round) -> tuple[Proposal, PyTree]:
        """Returns draft tokens, drawn with `sampling.uniforms` of the role DRAFT.

        And any arrays that `commit` needs, with a batch axis first where they are of rows.

        Args:
            params: parameters of target and drafter.
            state: state between rounds, which is only read.
            now: the round. At least one row wants a token.
        """

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        drafted: PyTree,
        tokens_BS: Array,
        lengths_B: Array,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        """Returns the state after a verdict, equal to that of a fresh prefill.

        (States that hold how the text came about, like those of `copy` and `lookahead`, are the
        exceptions.) In a round in which no row wanted a token, `propose` was not called, and
        `drafted` are zeros. What is costly may then be left to `catch_up`.

        Args:
            params: parameters of target and drafter.
            state: state that `propose` has read.
            drafted: arrays that `propose` returned.
            tokens_BS: token buffer with the verdict's tokens.
            lengths_B: committed tokens per row, those of the verdict included.
            proposal: the round's proposal.
            output: what the target made of the proposal's nodes.
            verdict: what was accepted.
        """
        return state


def nothing(shapes: tuple[Proposal, PyTree]) -> tuple[Proposal, PyTree]:
    """Returns what stands for the result of a `propose` that is not called: no tokens, and zeros.

    `shapes` are those of the result, from `jax.eval_shape`.
    """
    proposal, drafted = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(proposal, tokens=proposal.tokens - 1), drafted


def check_proposal(drafter: Drafter, result, batch: int, vocab: int) -> tuple[Proposal, PyTree]:
    """Returns what `propose` returned: a proposal and a state.

    Raises InputError, when traced, for a proposal whose types or shapes do not fit the drafter, the
    batch or the target's vocabulary.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Proposal):
        raise InputError(
            f"drafter: expected propose to return a Proposal and a state, found {_describe(result)}"
        )
    proposal, B, N = result[0], batch, drafter.num_nodes
    K, chain = drafter.num_speculative_tokens, proposal.parents is None
    # In a tree, nodes without children need no distribution, so the number of distributions varies.
    nodes = {N} if chain else set(range(N + 2))
    for name, kind, shapes in (
        ("tokens", jnp.integer, {(B, N)}),
        ("probs", jnp.floating, {(B, count, vocab) for count in nodes}),
        ("parents", jnp.integer, {(B, N)}),
        ("eligible", jnp.bool_, {(B, N)}),
    ):
        value = getattr(proposal, name)
        fits = name != "tokens" if value is None else getattr(value, "shape", None) in shapes
        if not fits or (value is not None and not jnp.issubdtype(value.dtype, kind)):
            advice = ". Load it for this target with load_drafter" if name == "probs" else ""
            raise InputError(
                f"drafter: expected {name} of a proposal as {kind.__name__} {list(max(shapes))}, "
                f"found {_describe(value)}{advice}"
            )
    if chain and N > K:
        raise InputError(f"drafter: expected a chain of at most K = {K} draft tokens, found {N}")
    return result


def _describe(value) -> str:
    """Returns type and shape of an array, or the type of another value, for a message."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {list(shape)}"


class TrainableDrafter(Drafter):
    """A drafter with weights of its own, `params["drafter"]`, that are trained on a target.

    Attributes:
        constants: names of parameters that are not trained.
    """

    constants: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def param_shapes(self, dtype) -> PyTree:
        """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def init_params(self, key: Array, dtype=jnp.float32) -> PyTree:
        """Returns random parameters to start training from."""
