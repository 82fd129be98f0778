"""Terminal output of the scripts: tables, and coloured text that is printed as it is generated."""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from spsjax import generation, rounds
from spsjax.evaluation.samplers import Role
from spsjax.evaluation.speed import SpeedReport
from spsjax.evaluation.summary import SystemSummary
from spsjax.parallel import multihost
from spsjax.performance.tree_theory import Plan
from spsjax.rounds import Totals
from spsjax.utils.progress import Bar

_STYLES = {
    rounds.DRAFT: ("green", "accepted draft token"),
    rounds.RESIDUAL: ("bold red", "residual token, after a rejection"),
    rounds.BONUS: ("bold blue underline", "bonus token, after no rejection"),
}


def paint(console: Console, text: str, style: str) -> None:
    """Prints a text unchanged. (Rich would expand tabs and drop other control characters.)"""
    if console.color_system:
        system = COLOR_SYSTEMS[console.color_system]
        text = Style.parse(style).render(text, color_system=system)
    print(text, end="", flush=True)


def legend() -> Text:
    """Returns the meaning of the colours."""
    return Text("  ").join(Text(meaning, style) for style, meaning in _STYLES.values())


def stream(
    model, prompt, shown: str, drafter, num_speculative_tokens, *, colour: bool, **options
) -> Totals:
    """Prints a prompt and its continuation as it is generated, and returns its counts and times.

    Args:
        model: target model.
        prompt: text or token ids.
        shown: text that is printed for the prompt.
        drafter, num_speculative_tokens: arguments of `generate`.
        colour: whether the style of a token shows how it was made.
        options: further arguments of `generate`.
    """
    console, totals = Console(highlight=False), Totals()
    start = time.perf_counter()
    with Console(stderr=True).status("compiling"):
        _, steps = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
        next(steps, None)
    totals.warm_up = time.perf_counter() - start
    ids, steps = generation.rounds(model, prompt, drafter, num_speculative_tokens, **options)
    paint(console, shown, "dim" if colour else "")
    for text, kind in rounds.pieces(model.tokenizer, ids, totals.count(steps)):
        paint(console, text, _STYLES[kind][0] if colour else "")
    print(flush=True)
    if colour and totals.proposed:
        console.print(legend(), soft_wrap=True)
    return totals


def progress(description: str) -> Callable[[Sequence], Iterable]:
    """Returns a wrapper of a list that shows the progress on stderr."""
    silent = not multihost.is_main_process()
    return functools.partial(Bar, desc=description, leave=False, disable=silent)


def speed_table(
    systems: Sequence[SystemSummary], mark: str = "", console: Console | None = None
) -> None:
    """Prints one row per system and one block per setting; the best speed-up is in bold.

    Args:
        systems: summaries.
        mark: caveat that is printed in every row.
        console: console to print to.
    """
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    timed = any(system.round_over_cost for system in systems)
    header = ["setting", "system", "K", "ms/\ntoken", "speed-\nup", "tokens\nper call", "accepted"]
    header += ["round /\nits costs"] if timed else []
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 2 else "right")
    best = fastest(systems)
    for index, system in enumerate(systems):
        if index and system.setting != systems[index - 1].setting:
            table.add_section()
        speedup = 1.0 if system.role == Role.BASELINE else system.speedup
        cells = [
            system.setting,
            f"{system.system}, {mark}" if mark else system.system,
            str(system.num_speculative_tokens or "-"),
            f"{system.ms_per_token:.2f}",
            _cell(speedup, "{:.2f}"),
            _cell(system.block_efficiency, "{:.2f}"),
            _cell(system.acceptance_rate, "{:.0%}"),
            *([_cell(system.round_over_cost, "{:.2f}")] if timed else []),
        ]
        table.add_row(*cells, style="bold" if best.get(system.setting) is system else None)
    (console or Console()).print(table)


def print_table(
    header: Sequence[str], rows: Iterable[Sequence], left: Sequence[int] = (0,)
) -> None:
    """Prints a plain table, whose lines break between words only.

    Args:
        header: titles of the columns.
        rows: cells of the rows.
        left: indices of the columns that are aligned to the left, others to the right.
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


def plan_table(plans: Mapping[str, Plan], target_ms: float) -> None:
    """Prints what trees of draft tokens are worth, by name; `target_ms` is a pass of the target."""
    rows = [
        (
            name,
            plan.tree.num_nodes,
            plan.tree.depth,
            f"{plan.tokens_per_call:.2f}",
            f"{target_ms * plan.tokens_per_call / plan.speedup:.2f}",
            f"{plan.speedup:.2f}",
        )
        for name, plan in plans.items()
    ]
    header = ["shape", "draft tokens", "levels", "tokens per call", "ms per round", "speed-up"]
    print_table(header, rows)


def position_table(systems: Sequence[SystemSummary], mark: str = "") -> None:
    """Prints the acceptance rates by position at the largest K of each setting."""
    drafted = [system for system in largest_k(systems) if system.acceptance_by_position]
    if not drafted:
        return
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("accepted, if reached, at position")
    for position in range(max(system.num_speculative_tokens for system in drafted)):
        table.add_column(str(position + 1), justify="right")
    for system in drafted:
        cells = (_cell(value, "{:.0%}") for value in system.acceptance_by_position)
        name = f"{system.setting}, K = {system.num_speculative_tokens}"
        table.add_row(f"{name}, {mark}" if mark else name, *cells)
    Console().print(table)


def speed_summary(report: SpeedReport, mark: str = "") -> None:
    """Prints the machine, the lower bound on time, and the best speed-ups."""
    machine, mark = report.machine, f"{mark}: " if mark else ""
    compile_seconds = sum(system.compile_seconds for system in report.systems)
    print(
        f"{mark}{machine['device']}, {machine['cores']} cores, {machine['dtype']} "
        f"(bfloat16 is {machine['bfloat16']}), "
        f"Python {machine['python']}, jax {machine['jax']}; no figure includes compilation "
        f"({compile_seconds:.0f} s here)"
    )
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s ({name})" for name, rate in report.bandwidth.items())
    print(
        f"{mark}memory: {rates}; weights: {report.weights_bytes / 1e6:.1f} MB; "
        f"lower bound of ArS: {report.lower_bound_ms:.2f} ms/token"
    )
    best = fastest(report.systems)
    for setting, ratio in report.baseline_over_bound.items():
        rate = report.weights_bytes / (ratio * report.lower_bound_ms * 1e6)
        text = (
            f"{mark}{setting}: ArS at {ratio:.2f} x the bound, reading weights at {rate:.1f} GB/s"
        )
        if setting in best:
            system = best[setting]
            text += (
                f"; SpS at K = {system.num_speculative_tokens} is {system.speedup:.2f} x as fast"
            )
        print(text)
        _print_peers(report.systems, setting, best.get(setting), mark)


def _print_peers(
    systems: Sequence[SystemSummary], setting: str, best: SystemSummary | None, mark: str
) -> None:
    """Prints how much faster than each peer, at the peer's best K, our systems are."""
    peers = [system for system in systems if system.role == Role.PEER and system.setting == setting]
    for name in dict.fromkeys(peer.system for peer in peers):
        peer = min(
            (peer for peer in peers if peer.system == name), key=lambda peer: peer.ms_per_token
        )
        text = f"  {mark}over {name}"
        if peer.num_speculative_tokens:
            text += f" at its best K = {peer.num_speculative_tokens}"
        text += f": ArS {1 / peer.speedup:.2f} x"
        if best:
            text += f", SpS {peer.ms_per_token / best.ms_per_token:.2f} x"
        print(text)


def speed_prediction(systems: Sequence[SystemSummary], mark: str = "") -> None:
    """Prints the speed-up that the costs of a round predict, and the measured one."""
    mark = f"{mark}: " if mark else ""
    for system in systems:
        if system.predicted_speedup is None:
            continue
        K = system.num_speculative_tokens
        base = next(
            base
            for base in systems
            if base.role == Role.BASELINE and base.setting == system.setting
        )
        text = (
            f"{mark}{system.setting}, {system.system}, K = {K}: "
            f"r' = {system.block_efficiency / (K + 1):.4f}, "
            f"t_target = {1e3 * base.round_cost.scoring:.2f} ms, "
            f"t_draft = {1e3 * system.round_cost.draft_step:.2f} ms; "
            "speed-up r' (K + 1) t_target / (K t_draft + t_target) = "
            f"{system.predicted_speedup:.2f} predicted, {system.speedup:.2f} measured"
        )
        if system.same_tokens is not None:
            same = "the text is" if system.same_tokens else "THE TEXT IS NOT"
            text += f"; {same} that of plain decoding, token for token"
        print(text)


def fastest(systems: Sequence[SystemSummary]) -> dict[str, SystemSummary]:
    """Returns the fastest speculative system of each setting."""
    best: dict[str, SystemSummary] = {}
    for system in systems:
        if system.role == Role.SPECULATIVE and system.speedup:
            known = best.get(system.setting, system)
            best[system.setting] = max(known, system, key=lambda summary: summary.speedup)
    return best


def largest_k(systems: Sequence[SystemSummary]) -> list[SystemSummary]:
    """Returns the speculative system of the largest K of each setting."""
    largest: dict[str, SystemSummary] = {}
    for system in systems:
        if system.role == Role.SPECULATIVE:
            known = largest.get(system.setting, system)
            largest[system.setting] = max(
                known, system, key=lambda summary: summary.num_speculative_tokens
            )
    return list(largest.values())


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def heading(text: str) -> None:
    """Prints a title."""
    Console().print(f"\n[bold]{text}[/bold]", highlight=False)


def note(text: str) -> None:
    """Prints a line to stderr, so that stdout holds only the result."""
    if multihost.is_main_process():
        print(text, file=sys.stderr, flush=True)
