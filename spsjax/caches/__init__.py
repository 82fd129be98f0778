"""Key-value caches: of all tokens, of a window of them, and of a choice."""

from spsjax.caches.chosen import ChosenCache, with_chosen_slots
from spsjax.caches.dense import KVCache, Segment, empty, empty_block
from spsjax.caches.rows import insert_row, take_rows
from spsjax.caches.window import SLACK, WindowCache, empty_window

__all__ = [
    "SLACK",
    "ChosenCache",
    "KVCache",
    "Segment",
    "WindowCache",
    "empty",
    "empty_block",
    "empty_window",
    "insert_row",
    "take_rows",
    "with_chosen_slots",
]
