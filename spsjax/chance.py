"""A warning for trained drafters of which hardly a draft token is accepted."""

import warnings
from collections.abc import Sequence

from spsjax.request import Request

_ROUNDS = 300  # after which it is told
_SHARE = 0.05  # of rounds; common tokens are accepted so often by chance


def is_near(request: Request, proposed: int, histogram: Sequence[int]) -> bool:
    """Warns, once for each drafter, if its drafts are accepted about as often as by chance.

    Args:
        request: a call.
        proposed: draft tokens that were offered.
        histogram: [K+1] rounds per number of accepted draft tokens.

    Returns:
        whether it warned.
    """
    drafted = proposed // max(request.program.drafter.num_nodes, 1)  # rounds, or fewer
    accepted = int(sum(histogram[1:]))
    if not request.is_trained or drafted < _ROUNDS or accepted >= _SHARE * drafted:
        return False
    warnings.warn(
        f"drafter {request.drafter_name}: in {accepted} of {drafted} rounds a draft token was "
        f"accepted, about as often as by chance. Was it trained for {request.model.name}, its "
        "vocabulary, and the layers that it reads?",
        stacklevel=3,
    )
    return True
