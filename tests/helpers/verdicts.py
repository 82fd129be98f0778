"""Verdicts of verifiers on proposals that a test makes, in NumPy."""

import jax

from spsjax import sampling
from spsjax.types import Proposal, Verdict
from spsjax.utils.compilation import compiled
from spsjax.verifiers.base import Verifier


def verdict_of(verifier: Verifier, proposal: Proposal, target_probs, seed: int = 0) -> Verdict:
    """Returns the verdict of one compiled round, with the random numbers of a seed."""
    verdict, _ = compiled(_verify, verifier)(seed, proposal, target_probs)
    return jax.device_get(verdict)


def _verify(verifier, seed, proposal, target_probs):
    keys = sampling.row_keys(jax.random.key(seed), len(target_probs))
    return verifier.verify(keys, proposal, target_probs)
