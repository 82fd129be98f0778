"""Caches of all tokens, of a window and of selected tokens, and recurrent states."""

from spsjax.models.caches.chosen import ChosenCache, with_chosen_slots
from spsjax.models.caches.dense import KVCache, Segment, empty, empty_block, shapes
from spsjax.models.caches.recurrent import Nodes, State, with_nodes, with_states
from spsjax.models.caches.rows import insert_row, take_rows
from spsjax.models.caches.window import SLACK, WindowCache, empty_window

__all__ = [
    "SLACK",
    "ChosenCache",
    "KVCache",
    "Nodes",
    "Segment",
    "State",
    "WindowCache",
    "empty",
    "empty_block",
    "empty_window",
    "insert_row",
    "shapes",
    "take_rows",
    "with_chosen_slots",
    "with_nodes",
    "with_states",
]
