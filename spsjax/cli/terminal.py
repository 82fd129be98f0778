"""How the scripts show things: text in colour as it grows, tables."""

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.console import COLOR_SYSTEMS, Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from spsjax import generation
from spsjax.parallel import multihost

_STYLES = {
    "accepted draft token": "green",
    "residual token, after a rejection": "bold red",
    "bonus token, after no rejection": "bold blue underline",
}
_DRAFT, _RESIDUAL, _BONUS = _STYLES


def paint(console: Console, text: str, style: str) -> None:
    """Prints a text as it is. (Rich would expand its tabs and drop other control characters.)"""
    if console.color_system:
        system = COLOR_SYSTEMS[console.color_system]
        text = Style.parse(style).render(text, color_system=system)
    print(text, end="", flush=True)


def legend() -> Text:
    """What the colours mean."""
    return Text("  ").join(Text(kind, style) for kind, style in _STYLES.items())


def pieces(tokenizer, prompt: Sequence[int], rounds: Iterable[generation.Round]) -> Iterator:
    """(text, style) as it grows; a character that spans tokens is held back until it is whole."""
    tokens, sent, style = [], 0, None
    for each in rounds:
        # An end of sequence or the budget may have cut the block off before its last token.
        drafted = min(each.accepted, len(each.tokens))
        last = _BONUS if each.accepted == each.proposed else _RESIDUAL
        for kind, part in ((_DRAFT, each.tokens[:drafted]), (last, each.tokens[drafted:])):
            tokens += part.tolist()
            style = _STYLES[kind]
            text = generation.continuation(tokenizer, prompt, tokens).rstrip("\ufffd")
            if len(text) > sent:
                yield text[sent:], style
                sent = len(text)
    text = generation.continuation(tokenizer, prompt, tokens)
    if len(text) > sent:
        yield text[sent:], style


@dataclasses.dataclass
class Figures:
    """Figures of one text."""

    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    seconds: float = 0.0
    warm_up: float = 0.0

    def count(self, rounds: Iterable[generation.Round]) -> Iterator[generation.Round]:
        """Counts what passes through, and the time that it takes to come."""
        start = time.perf_counter()
        for each in rounds:
            self.seconds += time.perf_counter() - start
            self.tokens += len(each.tokens)
            self.rounds += 1
            self.accepted += each.accepted
            self.proposed += each.proposed
            yield each
            start = time.perf_counter()

    def __str__(self):
        line = f"{self.tokens} tokens in {self.rounds} target calls"
        if self.rounds:
            line += f", {self.tokens / self.rounds:.2f} a call"
        if self.proposed:
            line += f"; {self.accepted / self.proposed:.0%} of draft tokens accepted"
        if self.tokens:
            line += f"; {1e3 * self.seconds / self.tokens:.2f} ms a token"
        return line + f" (compiling and a first round apart: {self.warm_up:.1f} s)"


def stream(
    model, prompt, shown: str, drafter, num_speculative_tokens, *, colour: bool, **options
) -> Figures:
    """Prints `shown` and the prompt's continuation as it grows; in colour, what each token was."""
    console, figures = Console(highlight=False), Figures()
    start = time.perf_counter()
    with Console(stderr=True).status("compiling"):
        _, rounds = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
        next(rounds, None)
    figures.warm_up = time.perf_counter() - start
    ids, rounds = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
    paint(console, shown, "dim" if colour else "")
    for text, style in pieces(model.tokenizer, ids, figures.count(rounds)):
        paint(console, text, style if colour else "")
    print(flush=True)
    if colour and figures.proposed:
        console.print(legend(), soft_wrap=True)
    return figures


def progress(description: str):
    """Wraps a list: a bar on stderr while it is gone through."""

    def wrap(items: Sequence) -> Iterator:
        columns = (TextColumn(description), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
        ) as bar:
            yield from bar.track(items)

    return wrap


def table(lines, mark: str = "", console: Console | None = None) -> None:
    """One row a contender, a block a setting; the best speed-up of a block in bold.

    `mark` is what must be known of all figures; it is in every row.
    """
    shown = Table(show_edge=False, pad_edge=False, header_style="dim")
    parts = any(line.loop_over_parts for line in lines)
    columns = ("setting", "sampler", "K", "ms a\ntoken", "speed-\nup", "tokens\na call", "accepted")
    for index, name in enumerate((*columns, *(("loop /\nparts",) if parts else ()))):
        shown.add_column(name, justify="left" if index < 2 else "right")
    best = best_lines(lines)
    for index, line in enumerate(lines):
        if index and line.setting != lines[index - 1].setting:
            shown.add_section()
        cells = [
            line.setting,
            f"{line.name}, {mark}" if mark else line.name,
            str(line.num_speculative_tokens or "-"),
            f"{line.ms_per_token:.2f}",
            _cell(line.speedup, "{:.2f}"),
            _cell(line.block_efficiency, "{:.2f}"),
            _cell(line.acceptance_rate, "{:.0%}"),
            *([_cell(line.loop_over_parts, "{:.2f}")] if parts else []),
        ]
        shown.add_row(*cells, style="bold" if best.get(line.setting) is line else None)
    (console or Console()).print(shown)


def columns(header: Sequence[str], rows: Iterable[Sequence], left: Sequence[int] = (0,)) -> None:
    """A plain table, its columns to the right but for those in `left`."""
    shown = Table(show_edge=False, pad_edge=False, header_style="dim")
    for index, name in enumerate(header):
        side = "left" if index in left else "right"
        shown.add_column(name, justify=side, overflow="fold")  # no figure is cut
    for row in rows:
        shown.add_row(*map(str, row))
    Console().print(shown)
    print()


def positions(lines, mark: str = "") -> None:
    """Acceptance by position: P(accepted | reached), at the largest K of each setting."""
    lines = longest(lines)
    if not lines:
        return
    shown = Table(show_edge=False, pad_edge=False, header_style="dim")
    shown.add_column("accepted, if reached, at position")
    for position in range(max(line.num_speculative_tokens for line in lines)):
        shown.add_column(str(position + 1), justify="right")
    for line in lines:
        cells = (_cell(value, "{:.0%}") for value in line.acceptance_by_position)
        name = f"{line.setting}, K = {line.num_speculative_tokens}"
        shown.add_row(f"{name}, {mark}" if mark else name, *cells)
    Console().print(shown)


def summary(report, mark: str = "") -> None:
    """The floor, and who is how much faster than whom."""
    machine, mark = report.machine, f"{mark}: " if mark else ""
    print(
        f"{mark}{machine['device']}, {machine['cores']} cores, {machine['dtype']}, "
        f"Python {machine['python']}, jax {machine['jax']}; compiling, which no figure contains, "
        f"took {sum(line.compile_seconds or 0 for line in report.lines):.0f} s"
    )
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s ({name})" for name, rate in report.bandwidth.items())
    print(
        f"{mark}memory: {rates}; weights: {report.weights_bytes / 1e6:.1f} MB; "
        f"floor of an ArS token: {report.floor_ms:.2f} ms"
    )
    best, peers = best_lines(report.lines), [x for x in report.lines if x.name.startswith("HF")]
    for setting, ratio in report.ars_over_floor.items():
        speed = report.weights_bytes / (ratio * report.floor_ms * 1e6)
        text = (
            f"{mark}{setting}: ArS at {ratio:.2f} x the floor, reading weights at {speed:.1f} GB/s"
        )
        if setting in best:
            line = best[setting]
            text += f"; SpS at K = {line.num_speculative_tokens} is {line.speedup:.2f} x as fast"
        print(text)
        for name in dict.fromkeys(line.name for line in peers):
            rivals = [x for x in peers if (x.name, x.setting) == (name, setting)]
            rival = min(rivals, key=lambda line: line.ms_per_token)
            text = f"  {mark}over {name}"
            if rival.num_speculative_tokens:
                text += f" at its best K = {rival.num_speculative_tokens}"
            text += f": ArS {1 / rival.speedup:.2f} x"
            if setting in best:
                text += f", SpS {rival.ms_per_token / best[setting].ms_per_token:.2f} x"
            print(text)


def prediction(lines, mark: str = "") -> None:
    """What the parts of a round let one expect, beside what was measured."""
    mark = f"{mark}: " if mark else ""
    for line in lines:
        if line.predicted_speedup is None:
            continue
        K, base = line.num_speculative_tokens, next(x for x in lines if x.setting == line.setting)
        text = (
            f"{mark}{line.setting}, K = {K}: r' = {line.block_efficiency / (K + 1):.4f}, "
            f"t_target = {1e3 * base.parts.scoring:.2f} ms, "
            f"t_draft = {1e3 * line.parts.draft_step:.2f} ms; "
            "speed-up r' (K + 1) t_target / (K t_draft + t_target) = "
            f"{line.predicted_speedup:.2f} predicted, {line.speedup:.2f} measured"
        )
        if line.same_text is not None:
            same = "the text is" if line.same_text else "THE TEXT IS NOT"
            text += f"; {same} that of plain decoding, token for token"
        print(text)


def best_lines(lines) -> dict:
    """Setting -> its fastest line of speculative sampling with the draft model."""
    best = {}
    for line in lines:
        if line.name == "SpS" and line.speedup:
            best[line.setting] = max(best.get(line.setting, line), line, key=lambda x: x.speedup)
    return best


def longest(lines) -> list:
    """The line of the largest K of each setting."""
    found = {}
    for line in lines:
        if line.name == "SpS":
            found[line.setting] = max(
                found.get(line.setting, line), line, key=lambda x: x.num_speculative_tokens
            )
    return list(found.values())


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def heading(text: str) -> None:
    """A title over what follows."""
    Console().print(f"\n[bold]{text}[/bold]", highlight=False)


def note(text: str) -> None:
    """A line beside the result: stderr, so that stdout stays what was asked for."""
    if multihost.is_main_process():
        print(text, file=sys.stderr, flush=True)
