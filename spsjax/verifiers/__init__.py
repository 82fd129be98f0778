"""Verifiers: one module per acceptance rule, with a class `Verifier`."""

from spsjax.errors import InputError, did_you_mean, short_repr
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

_RULES = block, kseq, match, multipath, recursive, rejection, top_k, traversal, typical
_BY_NAME = {module.__name__.rpartition(".")[2]: module for module in _RULES}
NAMES = tuple(_BY_NAME)


def by_name(name: str) -> Verifier:
    """Returns the verifier of a name with its defaults; raises InputError for another name."""
    if name not in NAMES:
        raise InputError(
            f"verifier: expected {', '.join(NAMES)}, found {short_repr(name)}"
            f"{did_you_mean(str(name), NAMES)}"
        )
    return _BY_NAME[name].Verifier()
