"""Results of a measurement: Markdown tables, their cells, and the files of a folder."""

import datetime
import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from spsjax.parallel import multihost
from spsjax.utils import atomic_files, extras
from spsjax.utils.version import __version__

# Files of a measurement's folder.
OUTPUTS = "experiment.json", "table.json", "table.md", "table.png"

# A column of a table: the name of a field of a record, or a function of a record.
Column = str | Callable[[Mapping], object]


def markdown(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def table(rows: Iterable[Mapping], columns: Mapping[str, Column]) -> str:
    """Returns a Markdown table of records, with the titles of the columns."""
    cells = (
        [row[column] if isinstance(column, str) else column(row) for column in columns.values()]
        for row in rows
    )
    return markdown(list(columns), cells)


def figure(field: str, digits: int = 2) -> Column:
    """Returns a column with a number of a record, "-" where it is None or missing."""
    return lambda row: number(row.get(field), digits)


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number as text, "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def within(value: float, interval: tuple[float, float] | None, digits: int = 2) -> str:
    """Returns a value as text, with its interval unless that is None."""
    if interval is None:
        return number(value, digits)
    low, high = (number(end, digits) for end in interval)
    return f"{number(value, digits)} ({low} to {high})"


def rounded(tree):
    """Rounds the numbers of a tree to four significant digits, because more would be noise."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [rounded(value) for value in tree]
    return float(f"{tree:.4g}") if isinstance(tree, float) else tree


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return extras.installed("matplotlib")


def provenance() -> dict[str, str]:
    """Returns what made a file of figures: the command, the version of the package, and the day."""
    program, *arguments = sys.argv
    script = pathlib.Path(program)
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *arguments])
    today = datetime.datetime.now(datetime.UTC).date()
    return {"command": command, "version": __version__, "date": today.isoformat()}


def write(
    workdir: pathlib.Path, figures: dict, text: str, draw: Callable[[pathlib.Path], None]
) -> str:
    """Writes `table.json`, `table.md` and a plot from the main process; returns the text.

    The JSON file has the figures and, under "made", their `provenance`. `draw` draws `table.png`,
    if matplotlib is installed.
    """
    if multihost.is_main_process():
        workdir.mkdir(parents=True, exist_ok=True)
        content = {"made": provenance(), **figures}
        atomic_files.write(workdir / "table.json", json.dumps(content, indent=2) + "\n")
        atomic_files.write(workdir / "table.md", text)
        if can_draw():
            draw(workdir / "table.png")
    return text
