"""The contract of drafters."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from spsjax.errors import InputError, short_repr
from spsjax.types import Array, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict

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

    Only `propose` must be written. In all functions `params` is
    `{"target": ..., "drafter": ...}`. A row's committed tokens are its first `Round.lengths`; after
    them there may be any token at all. Every leaf of a state has a batch axis first, unless it is
    in a `KVCache`.

    Attributes:
        num_speculative_tokens: K, the most tokens that a round can accept.
        tap_layers: layers of the target whose input `prefill` and `commit` want to see.
        score_sizes: numbers of draft tokens for which a scoring pass is compiled, the last of which
            is N, all of a proposal: K for a chain. More than one serve drafters that often propose
            fewer than N.
    """

    num_speculative_tokens: int
    tap_layers: tuple[int, ...] = ()

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return (self.num_speculative_tokens,)

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        """Returns the state before any token, with room for `slots` tokens per row."""
        return ()

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        """Returns the state after one more chunk of the prompts.

        Args:
            params: parameters of target and drafter.
            state: state after the chunks before.
            chunk: the chunk.
            output: the target's output for it.
        """
        return state

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        """Returns the state before a round's draft, after what `commit` has left unread was read.

        It is called before every round, and after rounds without a draft there is more to read. If
        no row wants a token (`now.depths`), it may be left unread for longer.
        """
        return state

    @abc.abstractmethod
    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        """Returns draft tokens, drawn with `sampling.uniforms` of the role DRAFT.

        The state is only read. At least one row wants a token.
        """

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        """Returns the state after a verdict. With the next `sync` it equals a fresh prefill's.

        (States that hold how the text came about, like those of `copy` and `lookahead`, are the
        exceptions.) In a round without a draft, `propose` was not called: `aux` is () if the
        proposal has no nodes, and zeros if none of its nodes has a token. Rows that wanted no token
        in a round of others have their `aux`, though their tokens were dropped (`now.depths`).

        Args:
            params: parameters of target and drafter.
            state: state that `propose` has read.
            now: the round, whose tokens and lengths have grown by the verdict's.
            proposal: the round's proposal.
            output: the target's output for the proposal's nodes.
            verdict: what was accepted.
        """
        return state


class TrainableDrafter(Drafter):
    """A drafter with weights of its own, `params["drafter"]`, that are trained on a target.

    Attributes:
        constants: names of parameters that are not trained.
        max_steps: greatest K that the weights allow; None: any.
    """

    constants: ClassVar[tuple[str, ...]] = ()
    max_steps: int | None = None

    @abc.abstractmethod
    def param_shapes(self, dtype) -> PyTree:
        """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def init_params(self, key: Array, dtype=jnp.float32) -> PyTree:
        """Returns random parameters to start training from."""


class Wrapper(Drafter):
    """A drafter that proposes what another one does, or some of it.

    `num_speculative_tokens`, `score_sizes` and `propose` are its own.

    Attributes:
        drafter: the other drafter.
    """

    drafter: Drafter

    @property
    def tap_layers(self):
        return self.drafter.tap_layers

    def init(self, params, batch, slots):
        return self.drafter.init(params, batch, slots)

    def prefill(self, params, state, chunk, output):
        return self.drafter.prefill(params, state, chunk, output)

    def sync(self, params, state, now):
        return self.drafter.sync(params, state, now)

    def commit(self, params, state, now, proposal, output, verdict):
        return self.drafter.commit(params, state, now, proposal, output, verdict)


@dataclasses.dataclass(frozen=True)
class Resting(Wrapper):
    """Keeps the state of a drafter in rounds that draft nothing. Lossless."""

    drafter: Drafter
    num_speculative_tokens: int = 0

    def propose(self, params, state, now):
        return Proposal(jnp.zeros((len(now.lengths), 0), jnp.int32), None)


def check_alone(name: str, text: str) -> None:
    """Raises InputError if anything stands behind the name of a method that takes nothing."""
    if text:
        raise InputError(f"{name}: expected nothing behind it, found {short_repr(':' + text)}")


def unwrapped(drafter: Drafter) -> Drafter:
    """Returns the drafter inside all wrappers."""
    while isinstance(drafter, Wrapper):
        drafter = drafter.drafter
    return drafter


def max_steps(drafter: Drafter) -> int | None:
    """Returns the greatest K that a drafter can have; None: any."""
    inner = unwrapped(drafter)
    return inner.max_steps if isinstance(inner, TrainableDrafter) else None


def num_nodes(drafter: Drafter) -> int:
    """Returns N, the draft tokens of a proposal."""
    return drafter.score_sizes[-1]


def nothing(shapes: Proposal) -> Proposal:
    """Returns a proposal without tokens, for a `propose` that is not called.

    `shapes` are those of its result, from `jax.eval_shape`.
    """
    proposal = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(proposal, tokens=proposal.tokens - 1)


def check_proposal(drafter: Drafter, proposal, batch: int, vocab: int) -> Proposal:
    """Returns what `propose` returned.

    Raises InputError, when traced, for anything but a proposal whose types and shapes fit the
    drafter, the batch and the target's vocabulary.
    """
    if not isinstance(proposal, Proposal):
        raise InputError(
            f"drafter: expected propose to return a Proposal, found {_describe(proposal)}"
        )
    B, N, K = batch, num_nodes(drafter), drafter.num_speculative_tokens
    chain = proposal.parents is None
    # In a tree, nodes without children need no distribution, so the number of distributions varies.
    nodes = {N} if chain else set(range(N + 2))
    for name, kind, allowed in (
        ("tokens", jnp.integer, {(B, N)}),
        ("probs", jnp.floating, {(B, count, vocab) for count in nodes}),
        ("parents", jnp.integer, {(B, N)}),
        ("eligible", jnp.bool_, {(B, N)}),
    ):
        value = getattr(proposal, name)
        fits = name != "tokens" if value is None else getattr(value, "shape", None) in allowed
        if not fits or (value is not None and not jnp.issubdtype(value.dtype, kind)):
            advice = ". Load it for this target with load_drafter" if name == "probs" else ""
            raise InputError(
                f"drafter: expected {name} of a proposal as {kind.__name__} {list(max(allowed))}, "
                f"found {_describe(value)}{advice}"
            )
    if chain and N > K:
        raise InputError(f"drafter: expected a chain of at most K = {K} draft tokens, found {N}")
    return proposal


def _describe(value) -> str:
    """Returns type and shape of an array, or the type of another value, for a message."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {list(shape)}"
