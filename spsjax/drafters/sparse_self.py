"""Self-speculation with a sparse cache (MagicDec; Chen et al. 2024, arXiv 2408.11049).

With long texts and large batches, a decoding step mostly reads the cache. A draft step of the
target with a few hundred cache slots costs little more than reading the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spsjax import tree
from spsjax.drafters import base, sample, shapes
from spsjax.drafters.base import Target
from spsjax.drafters.sample import Level
from spsjax.errors import InputError, short_repr
from spsjax.models import caches, config_checks, transformer
from spsjax.models.caches.chosen import ChosenCache
from spsjax.parallel import sharding
from spsjax.types import Array, Block, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict
from spsjax.utils.fields import derived, integer


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Drafts with the target over the first, last and chosen tokens of a text. Lossless.

    It needs no weights. Its cache takes the keys and values from the target's scoring pass, which
    attends to the whole text. So committed tokens need no further pass, and no token is pending
    after rounds without a draft. (MagicDec keeps the keys and values of the draft.)

    The window is that of StreamingLLM: the first and the last tokens. `chosen` adds the selection
    of SnapKV (Li et al. 2024, arXiv 2404.14469): for each key-value head, the prompt tokens that
    receive most attention from the last prompt tokens, the *observed* ones. The selection does not
    change afterwards. The window begins with the observed tokens, and moves when it is full.

    Attributes:
        target: shape of the target.
        num_speculative_tokens: K. None: 4, or the depth of the tree.
        sinks: number of first tokens in the cache; unused if `chosen` is above 0, because the
            selection may include them.
        recent: number of last tokens in the cache.
        chosen: number of selected prompt tokens per key-value head; 0: no selection.
        observed: number of last prompt tokens whose attention counts, at most `recent`.
        pooled: odd number of neighbours over which attention is averaged before the selection, so
            that it prefers passages to single tokens.
        tree: shape of the tree; None: a chain.
    """

    target: transformer.Config
    num_speculative_tokens: int = derived()
    sinks: int = integer(4)
    recent: int = integer(252, 1)
    chosen: int = integer(0)
    observed: int = integer(32, 1)
    pooled: int = integer(5, 1)
    tree: shapes.Shape = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config_checks.refuse_recurrent("sparse_self", self.target)
        K = shapes.checked_depth(self.tree, self.num_speculative_tokens, self.target.vocab_size)
        object.__setattr__(self, "num_speculative_tokens", K)
        if self.pooled % 2 == 0:
            raise InputError(f"pooled: expected an odd number, found {self.pooled}")
        if self.chosen and self.observed > self.recent:
            raise InputError(
                f"observed: expected at most recent={self.recent}, found {self.observed}"
            )
        differ = any(self.target.windows) or self.target.changes
        if self.chosen and (self.target.positions == "relative" or differ):
            raise InputError(
                f"chosen: expected 0 for a target with relative positions, with windows of its "
                f"own or with layers that differ, found {self.chosen}"
            )

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return shapes.score_sizes(self.tree, self.num_speculative_tokens)

    @property
    def config(self) -> transformer.Config:
        """Shape of the target with the attention window of the draft."""
        sinks = 0 if self.chosen else self.sinks
        return dataclasses.replace(self.target, sinks=sinks, recent=self.recent)

    def param_shapes(self, dtype: DTypeLike) -> PyTree:
        return {}  # it drafts with the target's weights

    def shardings(self, mesh: Mesh | None, replicate: bool = False) -> Callable[[tuple], Sharding]:
        return sharding.param_shardings(mesh, self.target, replicate)

    def cache_slots(self, slots: int) -> int:
        return transformer.num_slots(self.config, slots) + self.chosen

    def passes(self, params: PyTree) -> dict[str, base.Pass]:
        K = self.num_speculative_tokens
        return {"draft": base.Pass(params["target"], times=K, reads_cache=True)}

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        cache: Any = transformer.empty_cache(self.config, params["target"], batch, slots)
        return caches.with_chosen_slots(cache, self.chosen) if self.chosen else cache

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        ends = jnp.minimum(chunk.starts + chunk.tokens.shape[1], chunk.lengths - 1)
        return state.at(chunk.starts).write(output.block, None, ends, output.hidden)

    def sync(self, params: PyTree, state: PyTree, now: Round) -> PyTree:
        if not self.chosen:
            return state
        # Tokens are selected once per text, before the first draft. It is a loop, because `cond`
        # would copy the cache in every round.
        return jax.lax.while_loop(
            lambda state: jnp.any(~state.complete),
            lambda state: self._select(params, state, now),
            state,
        )

    def _select(self, params: PyTree, state: PyTree, now: Round) -> ChosenCache:
        """Returns the cache with the prompt tokens that the observed tokens attend to most."""
        ends = now.lengths - 1
        starts = jnp.maximum(ends - self.observed, 0)
        index = starts[:, None] + jnp.arange(min(self.observed, now.tokens.shape[1]))
        counted = index < ends[:, None]
        tokens = tree.along(jnp.minimum(index, now.tokens.shape[1] - 1), now.tokens)
        weights, cache = params["target"], now.cache
        received = transformer.attention_received(
            self.target, weights, tokens, counted, cache.at(starts)
        )
        pooled = [_averaged(scores, self.pooled) for scores in received]
        return state.choose(cache, pooled, starts)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        K, weights, before = self.num_speculative_tokens, params["target"], now.lengths[:, None] - 1
        config = self.config

        def feed(block: Block, level: Level) -> tuple[Array, Array | None, PyTree]:
            """Runs the target over one level of nodes, with the sparse cache (`sample.Feed`)."""
            output = transformer.apply(
                config,
                weights,
                level.tokens,
                state,
                block=block,
                positions_BT=jnp.broadcast_to(before + level.depth, level.tokens.shape),
                ancestors=level.above,
            )
            return sharding.gather_vocab(output.logits), output.hidden, output.block

        num_fed = shapes.num_fed(self.tree, K)
        start = transformer.empty_block(config, weights, len(now.lengths), num_fed)
        return sample.grow(self.tree, K, feed, start, now)[0]

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        path = None if proposal.parents is None else verdict.path
        return state.write(output.block, path, now.lengths - 1, output.hidden)


def _averaged(scores_BGS: Array, width: int) -> Array:
    """Returns scores averaged over `width` neighbouring slots; scores beyond the ends are 0."""
    padded = jnp.pad(scores_BGS, ((0, 0), (0, 0), (width // 2, width // 2)))
    S = scores_BGS.shape[-1]
    shifted = (padded[..., shift : shift + S] for shift in range(width))
    return sum(shifted, jnp.zeros_like(scores_BGS)) / width


def by_name(text: str, target: transformer.Config) -> Drafter:
    """Returns the drafter with a cache of 256 tokens ("256"), or with a selection ("256:chosen").

    A selection takes half of the slots. Raises InputError for another text, and if the target does
    not support a selection.
    """
    number, colon, choice = text.partition(":")
    slots = num_slots(f"sparse_self:{text}", number, target)
    if colon and choice != "chosen":
        raise InputError(
            f'sparse_self:{number}: expected nothing or ":chosen" behind it, found '
            f"{short_repr(colon + choice)}"
        )
    if not choice:
        return Drafter(target, recent=slots - Drafter.sinks)
    recent = slots - slots // 2
    observed = min(Drafter.observed, recent)
    return Drafter(target, recent=recent, chosen=slots // 2, observed=observed)


def from_name(text: str, target: Target) -> tuple[Drafter, PyTree]:
    """Returns the drafter of `by_name`, and an empty dict: it has no weights."""
    return by_name(text, target.config), {}


def num_slots(name: str, number: str, config: transformer.Config) -> int:
    """Returns the number of tokens in a model's cache from a text.

    Raises InputError if the text is not a number, or if the number is too low for sinks and a
    window or exceeds the context.
    """
    least, most = 2 * Drafter.sinks + 2, config.max_positions
    digits = number.isascii() and number.isdecimal() and len(number) < 12
    if not digits or not least <= int(number) <= most:
        raise InputError(
            f"{name}: expected a number of slots in [{least}, {most}], up to the context, found "
            f"{short_repr(number)}"
        )
    return int(number)


def windowed(config: transformer.Config, slots: int) -> transformer.Config:
    """Returns the shape of a model that attends to `slots` tokens: the first and the last ones."""
    return dataclasses.replace(config, sinks=Drafter.sinks, recent=slots - Drafter.sinks)
