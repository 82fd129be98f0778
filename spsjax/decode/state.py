"""The static configuration of the loop, and the state that it carries."""

import dataclasses

from spsjax.decode.logprobs import LogProbs
from spsjax.decode.schedule import Schedule
from spsjax.drafters import base
from spsjax.models import caches as kv
from spsjax.models import transformer
from spsjax.sampling import RowParams
from spsjax.types import Array, PyTree, pytree_dataclass
from spsjax.verifiers.base import Verifier

PREFILL_TOKENS = 1024  # the most tokens of a prompt in one pass


@dataclasses.dataclass(frozen=True)
class Program:
    """Static configuration of the compiled loop: every choice that is not data.

    Attributes:
        target, drafter, verifier: what a round calls.
        eos_ids: tokens that end a row.
        prefill_tokens: the most tokens of a prompt in one pass.
        schedule: rule that decides how deep each round is drafted; None: K in every round.
        logprobs: None, or log-probabilities of emitted tokens are kept, and at each of them those
            of so many most probable tokens.
    """

    target: transformer.Config
    drafter: base.Drafter
    verifier: Verifier
    eos_ids: tuple[int, ...] = ()
    prefill_tokens: int = PREFILL_TOKENS
    schedule: Schedule | None = None
    logprobs: int | None = None


@pytree_dataclass
class DecodeState:
    """State between two rounds. Rows are independent of each other.

    With n = `lengths[b]` committed tokens of row b:
      * `tokens[b, :n]` are the prompt and what was emitted; later slots hold stale tokens;
      * the target's cache holds the first n - 1; the last one, the root, is fed to the target with
        the next proposal;
      * `tokens` and the caches have at least K + 1 slots beyond `limits[b]`: no write is cut off.
    """

    # Evolving.
    tokens: Array  # [B, S] int32
    lengths: Array  # [B] int32, committed tokens, the prompt's included
    done: Array  # [B] bool
    cache: kv.KVCache  # the target's
    drafter: PyTree  # the drafter's own state
    history: PyTree  # the schedule's own state
    # Fixed.
    rows: RowParams  # sampling parameters per row
    limits: Array  # [B] int32, where `lengths` must stop
    keys: Array  # [B] keys
    # Outcome.
    failed: Array  # [B] bool: a distribution was not finite
    rounds: Array  # [B] int32, target calls while the row was not done
    proposed: Array  # [B] int32, draft tokens offered
    accepted: Array  # [B, K+1] int32, rounds per number of accepted draft tokens
    logprobs: LogProbs | None = None  # [B, S] of emitted tokens, if the program keeps them


def outcome(state: DecodeState) -> dict[str, PyTree]:
    """Returns what the host reads of a state: everything but caches, keys and what is fixed."""
    names = "tokens", "lengths", "done", "failed", "rounds", "proposed", "accepted", "logprobs"
    return {name: getattr(state, name) for name in names}
