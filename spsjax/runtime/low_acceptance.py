"""A warning for trained drafters of which hardly a draft token is accepted."""

import warnings
from collections.abc import Sequence

from spsjax.drafters import base
from spsjax.runtime.setup import Setup

_ROUNDS = 300  # after which the warning may come
_SHARE = 0.05  # of rounds; common tokens are accepted as often by chance
# Rounds that drafted, and those with an accepted token, of the newest drafters; None: warned.
_COUNTS: dict[tuple, tuple[int, int] | None] = {}
_MOST_KEPT = 64


def count(setup: Setup, proposed: int, histogram: Sequence[int]) -> None:
    """Counts the rounds of a call, and warns once if a drafter is right about as often as chance.

    Args:
        setup: target and drafter of the call.
        proposed: draft tokens that were offered.
        histogram: [K+1] rounds per number of accepted draft tokens.
    """
    weights = setup.drafter.params
    if not weights:
        return
    key = setup.drafter.name, id(weights), setup.model.name
    counted = _COUNTS.setdefault(key, (0, 0))
    while len(_COUNTS) > _MOST_KEPT:
        _COUNTS.pop(next(iter(_COUNTS)))  # the oldest
    if counted is None:
        return
    # A drafter with a schedule proposes in some rounds only: these are as many, or fewer.
    drafted = counted[0] + proposed // max(base.num_nodes(setup.program.drafter), 1)
    accepted = counted[1] + int(sum(histogram[1:]))
    _COUNTS[key] = drafted, accepted
    if drafted < _ROUNDS or accepted >= _SHARE * drafted:
        return
    _COUNTS[key] = None
    warnings.warn(
        f"drafter {setup.drafter.name}: in {accepted} of {drafted} rounds a draft token was "
        f"accepted, about as often as by chance. Was it trained for {setup.model.name}, its "
        "vocabulary, and the layers that it reads?",
        stacklevel=3,
    )
