"""Look-up of the target's most probable next tokens at earlier occurrences of a token."""

import dataclasses

import jax
import jax.numpy as jnp

from spsjax.drafters import base
from spsjax.types import Array, Chunk, ModelOutput, Proposal, PyTree, Round, Verdict


@dataclasses.dataclass(frozen=True)
class Drafter(base.Drafter):
    """Follows the target's most probable token after the latest occurrence of each token.

    A chain form of Token Recycling (arXiv:2408.08696) in a row's own text. **Lossless**. The state
    [B, S] holds the target's most probable token after each token that it has read.
    """

    num_speculative_tokens: int = 4

    @property
    def score_sizes(self) -> tuple[int, ...]:
        return 0, self.num_speculative_tokens  # a round without a match proposes nothing

    def init(self, params: PyTree, batch: int, slots: int) -> PyTree:
        return jnp.zeros((batch, slots), jnp.int32)

    def prefill(self, params: PyTree, state: PyTree, chunk: Chunk, output: ModelOutput) -> PyTree:
        return _write(state, _best(output.logits), chunk.starts)

    def propose(self, params: PyTree, state: PyTree, now: Round) -> Proposal:
        slots = jnp.arange(now.tokens.shape[1])
        is_read = slots < now.lengths[:, None] - 1  # what follows the root is unknown

        def step(token_B: Array, _: object) -> tuple[Array, Array]:
            matches = is_read & (now.tokens == token_B[:, None])
            latest = jnp.max(jnp.where(matches, slots, -1), axis=1)
            following = jnp.take_along_axis(state, jnp.maximum(latest, 0)[:, None], axis=1)[:, 0]
            token_B = jnp.where(latest < 0, -1, following)  # nothing matches a -1
            return token_B, token_B

        _, tokens = jax.lax.scan(step, now.root, length=self.num_speculative_tokens)
        return Proposal(tokens.T, None)

    def commit(
        self,
        params: PyTree,
        state: PyTree,
        now: Round,
        proposal: Proposal,
        output: ModelOutput,
        verdict: Verdict,
    ) -> PyTree:
        # The root and the accepted tokens, in order. Later slots hold stale tokens, as in `tokens`.
        along = jnp.take_along_axis(_best(output.logits), jnp.maximum(verdict.path, 0), axis=1)
        return _write(state, along, now.cache.lengths)


def _best(logits_BTV: Array) -> Array:
    return jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32)


def _write(state_BS: Array, tokens_BT: Array, starts_B: Array) -> Array:
    return jax.vmap(jax.lax.dynamic_update_slice)(state_BS, tokens_BT, starts_B[:, None])


from_name = base.by_name_alone(Drafter)
