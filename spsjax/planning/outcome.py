"""Tables, and the result of a plan, as scripts print and write them."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report or of a plan."""

    title: str  # title; "": none
    header: Sequence[str]  # titles of the columns
    rows: Sequence[Sequence[object]]  # cells of the rows
    note: str = ""  # line below the table; "": none
    left: int = 1  # number of leading columns of text, aligned to the left


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a plan."""

    tables: Sequence[Table]  # tables, in the order of printing
    figures: dict | list  # all figures, for JSON
    summary: str = ""  # lines that follow the tables; "": none
    plot: str = ""  # function of `cli.plots` that draws the figures; "": none
