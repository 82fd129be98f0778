"""Contract of drafters: base classes, and checks of proposals."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spsjax.errors import InputError, short_repr
from spsjax.models.config import Config
from spsjax.tokenization.base import Tokenizer
from spsjax.types import Array, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict
from spsjax.utils import fields

# Greatest draft length of a loop that chooses the length per round, unless the drafter's own K is
# greater. With the root these are eight rows of a matrix product, and a ninth row costs as much as
# eight more.
SCHEDULED_TOKENS = 7


class Target(Protocol):
    """Loaded target, as far as a drafter's name or config depends on it."""

    @property
    def config(self) -> Config:
        """Shape of the model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer; None: there is none."""


class Drafter(fields.Checked, abc.ABC):
    """Proposes draft tokens that the target then verifies.

    A concrete drafter is a final, frozen, hashable dataclass, because it is a static argument of
    the jitted loop. It holds no arrays: parameters and state are arguments of its pure functions. A
    new value of a field compiles a new program, unless the field is declared with
    `utils.traced.number`. Fields of `utils.fields` are checked. No drafter can change the
    distribution of the output, because the verifier decides on acceptance. A drafter must only
    ensure that `Proposal.probs` are the distributions from which its tokens were drawn.

    Only `propose` must be written. In all functions `params` is
    `{"target": ..., "drafter": ...}`. The first `Round.lengths` tokens of a row are committed, and
    later entries of the buffer are arbitrary. Every leaf of a state begins with a batch axis,
    unless it is in a `KVCache`.

    Attributes:
        num_speculative_tokens: K, the most tokens that a round can accept.
        tap_layers: layers of the target whose input `prefill` and `commit` read.
        score_sizes: numbers of draft tokens for which a scoring pass is compiled. The last one is
            N, the size of a full proposal (K for a chain). Smaller sizes save time for drafters
            that often propose fewer tokens.
    """

    num_speculative_tokens: int

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

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
            state: state after the previous chunks.
            chunk: chunk of the prompts.
            output: output of the target for the chunk.
        """
        return state

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        """Returns the state after the drafter has processed the tokens that are still pending.

        The loop calls it before every round. After rounds without a draft, more tokens are pending.
        If no row drafts in this round (`now.depths`), they may stay pending.
        """
        return state

    @abc.abstractmethod
    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        """Returns draft tokens, drawn with `sampling.uniforms` of the role DRAFT.

        It does not change the state. The loop calls it only if at least one row drafts.
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
        """Returns the state after a verdict.

        After the next `sync` the state equals that of a fresh prefill. The exceptions are states
        that depend on earlier rounds, such as those of `copy` and `lookahead`.

        In a round without a draft, `propose` was not called: `aux` is () if the proposal has no
        nodes, and zeros if none of its nodes has a token. Rows that skipped drafting while other
        rows drafted have an `aux`, although their tokens were dropped (`now.depths`).

        Args:
            params: parameters of target and drafter.
            state: state that `propose` has read.
            now: the round; its tokens and lengths already include the verdict's tokens.
            proposal: proposal of the round.
            output: output of the target for the proposal's nodes.
            verdict: decision of the verifier.
        """
        return state


class TrainableDrafter(Drafter):
    """Drafter with weights of its own, `params["drafter"]`, which are trained for a target.

    Attributes:
        constants: names of parameters that are not trained.
    """

    constants: ClassVar[tuple[str, ...]] = ()

    @property
    def max_steps(self) -> int | None:
        """Greatest K that the weights allow; None: any."""
        return None

    @abc.abstractmethod
    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        """Returns the parameters' shapes as a nested dict of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def init_params(self, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Returns random parameters for the start of training."""

    def constants_from(self, counts_V: np.ndarray) -> PyTree:
        """Returns the parameters that are not trained.

        Args:
            counts_V: number of occurrences of each token in the training corpus.
        """
        return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """Equal passes of a drafter in one round, as `planning` counts them.

    Attributes:
        weights: arrays that each pass reads and multiplies with.
        times: number of passes, one after another.
        tokens: number of tokens per row and pass.
        reads_cache: whether each pass reads the drafter's cache.
        phase: phase of the round in which they run, "propose" or "sync".
    """

    weights: PyTree
    times: int = 1
    tokens: int = 1
    reads_cache: bool = False
    phase: str = "propose"


class Planned(Protocol):
    """Drafter whose rounds `planning` can cost before it has weights.

    Attributes:
        num_speculative_tokens: K.
        config: shape of the model or layers, and of the cache that they read.
    """

    num_speculative_tokens: int
    config: Config

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        """Returns the shapes of the drafter's own weights; {}: it has none."""

    def shardings(self, mesh: Mesh | None, replicate: bool) -> Callable[[tuple], Sharding]:
        """Returns a function from the path of a weight to its sharding."""

    def cache_slots(self, slots: int) -> int:
        """Returns the number of slots of the drafter's cache for token buffers of `slots`."""

    def passes(self, params: PyTree) -> dict[str, Pass]:
        """Returns the kinds of passes of one round by name, with arrays of `params`."""


class Wrapper(Drafter):
    """Drafter that proposes all or some tokens of another drafter.

    It defines its own `num_speculative_tokens`, `score_sizes` and `propose`.

    Attributes:
        drafter: wrapped drafter.
    """

    drafter: Drafter

    def replace_length(self) -> Drafter:
        """Gives the wrapped drafter this one's K, or this one its K if that is None; returns it."""
        inner, K = self.drafter, self.num_speculative_tokens
        if K is not None:
            inner = dataclasses.replace(inner, num_speculative_tokens=K)
        object.__setattr__(self, "drafter", inner)
        object.__setattr__(self, "num_speculative_tokens", inner.num_speculative_tokens)
        return inner

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.drafter.tap_layers

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return self.drafter.init(params, batch, slots)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        return self.drafter.prefill(params, state, chunk, output)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        return self.drafter.sync(params, state, now)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        return self.drafter.commit(params, state, now, proposal, output, verdict)


@dataclasses.dataclass(frozen=True)
class Resting(Wrapper):
    """Skips drafting, but updates the state of a drafter. Lossless.

    The loop of rounds without a draft is the same `step`, with this wrapper in its program.
    """

    drafter: Drafter
    num_speculative_tokens: int = 0

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        return Proposal(jnp.zeros((len(now.lengths), 0), jnp.int32), None)


def by_name_alone(drafter: type[Drafter]) -> Callable[[str, Target], tuple[Drafter, PyTree]]:
    """Returns the `from_name` of a drafter without weights whose name takes no argument."""

    def from_name(text: str, target: Target) -> tuple[Drafter, PyTree]:
        check_alone(drafter.__module__.rpartition(".")[2], text)
        return drafter(), {}

    return from_name


def check_alone(name: str, text: str) -> None:
    """Raises InputError if the name of a method that takes no argument has one."""
    if text:
        raise InputError(f"{name}: expected nothing behind it, found {short_repr(':' + text)}")


def unwrapped(drafter: Drafter) -> Drafter:
    """Returns the drafter inside all wrappers."""
    while isinstance(drafter, Wrapper):
        drafter = drafter.drafter
    return drafter


def max_steps(drafter: Drafter) -> int | None:
    """Returns the greatest K that a drafter supports; None: any."""
    inner = unwrapped(drafter)
    return inner.max_steps if isinstance(inner, TrainableDrafter) else None


def num_nodes(drafter: Drafter) -> int:
    """Returns N, the draft tokens of a proposal."""
    return drafter.score_sizes[-1]


def no_tokens(shapes: Proposal) -> Proposal:
    """Returns a proposal without tokens, in place of a call of `propose`.

    `shapes` are the shapes of that call's result, from `jax.eval_shape`.
    """
    proposal = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(proposal, tokens=proposal.tokens - 1)


def check_proposal(drafter: Drafter, proposal: Proposal, batch: int, vocab: int) -> Proposal:
    """Returns the result of `propose` after a check, which runs when the loop is traced.

    Raises InputError unless it is a proposal whose types and shapes fit the drafter, the batch and
    the target's vocabulary.
    """
    if not isinstance(proposal, Proposal):
        raise InputError(
            f"drafter: expected propose to return a Proposal, found {_describe(proposal)}"
        )
    B, N, K = batch, num_nodes(drafter), drafter.num_speculative_tokens
    chain = proposal.parents is None
    # In a tree, nodes without children need no distribution, so the number of distributions varies.
    nodes = {N} if chain else set(range(N + 2))
    kind: Any  # whose types differ between versions of JAX
    for name, kind, allowed in (
        ("tokens", jnp.integer, {(B, N)}),
        ("probs", jnp.floating, {(B, count, vocab) for count in nodes}),
        ("parents", jnp.integer, {(B, N)}),
        ("eligible", jnp.bool_, {(B, N)}),
        ("confidence", jnp.floating, {(B, N)}),
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


def _describe(value: Any) -> str:
    """Returns a description of a value for messages: type, and shape of an array."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {list(shape)}"
