"""Rules that decide from past rounds how deep the next one is drafted.

**Lossless.** A rule knows which tokens were accepted in the rounds before, and never a token of the
round that it decides about. But the samples drawn with one seed change with its decisions, which a
row may share with the other rows of its batch.
"""

from spsjax.pacing.base import Costs, Pacer, forced, scored_depths
from spsjax.pacing.fastest import Fastest, History

# Rules by the names that stand for a number of draft tokens.
NAMES = {"auto": Fastest}

__all__ = [
    "NAMES",
    "Costs",
    "Fastest",
    "History",
    "Pacer",
    "forced",
    "scored_depths",
]
