"""Terminal output of the scripts: tables, and coloured text that is printed as it is generated."""

import functools
import sys
import time
from collections.abc import Iterable, Sequence

from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from spsjax import generation
from spsjax.parallel import multihost
from spsjax.planning.outcome import Table as PlainTable
from spsjax.runtime import rounds
from spsjax.runtime.rounds import Totals
from spsjax.utils import compile_line
from spsjax.utils.progress import Bar, Progress

_STYLES = {
    rounds.DRAFT: ("green", "accepted draft token"),
    rounds.RESIDUAL: ("bold red", "residual token, after a rejection"),
    rounds.BONUS: ("bold blue underline", "bonus token, after no rejection"),
}


def paint(console: Console, text: str, style: str) -> None:
    """Prints a text unchanged; Rich would expand tabs and drop other control characters."""
    if console.color_system:
        system = COLOR_SYSTEMS[console.color_system]
        text = Style.parse(style).render(text, color_system=system)
    print(text, end="", flush=True)


def legend() -> Text:
    """Returns the legend of the colours."""
    return Text("  ").join(Text(meaning, style) for style, meaning in _STYLES.values())


def stream(
    model, prompt, shown: str, drafter, num_speculative_tokens, *, colour: bool, **options
) -> Totals:
    """Prints a prompt and its continuation as it is generated, and returns its counts and times.

    `shown` is printed for the prompt. With `colour`, a token's style shows its kind: accepted,
    residual or bonus. Other arguments are those of `generate`.
    """
    console, totals = Console(highlight=False), Totals()
    start = time.perf_counter()
    _, steps = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
    next(steps, None)
    totals.warm_up = time.perf_counter() - start
    ids, steps = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
    with compile_line.off():  # it would be written over the text
        paint(console, shown, "dim" if colour else "")
        for text, kind in rounds.pieces(model.tokenizer, ids, totals.count(steps)):
            paint(console, text, _STYLES[kind][0] if colour else "")
        print(flush=True)
    if colour and totals.proposed:
        console.print(legend(), soft_wrap=True)
    return totals


def progress(description: str) -> Progress:
    """Returns a wrapper of a list that shows the progress on stderr."""
    silent = not multihost.is_main_process()
    return functools.partial(Bar, desc=description, leave=False, disable=silent)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence], left: Sequence[int] = (0,)
) -> None:
    """Prints a plain table, whose lines break between words only.

    `left` has the indices of the columns that are aligned to the left.
    """
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    lines = [list(map(str, row)) for row in (header, *rows)]
    for index, cells in enumerate(zip(*lines)):
        side = "left" if index in left else "right"
        longest = max(len(word) for cell in cells for word in ["", *cell.split()])
        table.add_column(cells[0], justify=side, min_width=longest)
    for line in lines[1:]:
        table.add_row(*line)
    Console().print(table, crop=False)  # a narrow terminal breaks lines, but shows all figures
    print()


def heading(text: str) -> None:
    """Prints a title."""
    Console().print(f"\n[bold]{text}[/bold]", highlight=False)


def print_tables(tables: Iterable[PlainTable]) -> None:
    """Prints tables with their titles and notes."""
    for table in tables:
        if table.title:
            heading(table.title)
        print_table(table.header, table.rows, range(table.left))
        if table.note:
            print(table.note)


def note(text: str) -> None:
    """Prints a line to stderr, so that stdout holds only the result."""
    if multihost.is_main_process():
        print(text, file=sys.stderr, flush=True)
