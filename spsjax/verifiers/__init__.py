"""Verifiers: one module per acceptance rule, with a class `Verifier`."""

from spsjax.errors import InputError, short_repr
from spsjax.verifiers import (
    block,
    kseq,
    match,
    multipath,
    recursive,
    rejection,
    top_k,
    traversal,
    typical,
)
from spsjax.verifiers.base import Verifier

__all__ = [
    "block",
    "kseq",
    "match",
    "multipath",
    "recursive",
    "rejection",
    "top_k",
    "traversal",
    "typical",
]
NAMES = tuple(__all__)


def by_name(name: str) -> Verifier:
    """Returns the verifier of a name with its defaults; raises InputError for another name."""
    if name not in NAMES:
        raise InputError(f"verifier: expected {', '.join(NAMES)}, found {short_repr(name)}")
    return globals()[name].Verifier()
