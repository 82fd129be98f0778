"""Tables and sentences of a speed benchmark."""

from collections.abc import Iterator, Mapping, Sequence

from spsjax.benchmarks.report import number
from spsjax.benchmarks.speed import SpeedReport
from spsjax.benchmarks.summary import SystemSummary, fastest, largest_k
from spsjax.benchmarks.systems import Role
from spsjax.planning.outcome import Table


def tables(report: SpeedReport, mark: str = "") -> list[Table]:
    """Returns a table of the systems, and one of the acceptance by position at the largest K.

    `mark` is a caveat that every row repeats.
    """
    drafted = [system for system in largest_k(report.systems) if system.acceptance_by_position]
    positions = range(1, 1 + max((s.num_speculative_tokens for s in drafted), default=0))
    rates = []
    for system in drafted:
        name = f"{system.setting}, K = {system.num_speculative_tokens}"
        cells = list(map(_percent, system.acceptance_by_position))
        rates.append([_marked(name, mark), *cells, *[""] * (len(positions) - len(cells))])
    by_position = Table("", ["accepted, if reached, at position", *map(str, positions)], rates)
    return [table(report.systems, mark)] + [by_position] * bool(drafted)


def table(systems: Sequence[SystemSummary], mark: str = "") -> Table:
    """Returns a table of systems; `mark` is a caveat that every row repeats.

    "1st, ms" is the time to the first token, and "cold, s" that of a program that is compiled
    first, or read from the cache on the disk.
    """
    timed = any(system.round_over_cost for system in systems)
    header = ["setting", "system", "K", "ms/ token", "speed-up", "tokens/ call", "accepted"]
    header += ["1st, ms", "cold, s"]  # wider ones would break the names of systems
    header += ["round / costs"] if timed else []
    rows = []
    for system in systems:
        speedup = 1.0 if system.role == Role.BASELINE else system.speedup
        row = [system.setting, _marked(system.system, mark), system.num_speculative_tokens or "-"]
        row += map(number, (system.ms_per_token, speedup, system.block_efficiency))
        row.append(_percent(system.acceptance_rate))
        cold = system.cold_first_token_ms
        row += [number(system.first_token_ms, 1), number(None if cold is None else cold / 1e3, 1)]
        rows.append(row + ([number(system.round_over_cost)] if timed else []))
    return Table("", header, rows, left=2)


def sentences(report: SpeedReport, mark: str = "") -> list[str]:
    """Returns lines about the machine, the lower bound on time, and the best speed-ups."""
    prefix = f"{mark}: " if mark else ""
    compile_seconds = sum(system.compile_seconds for system in report.systems)
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s ({name})" for name, rate in report.bandwidth.items())
    lines = [
        f"{prefix}{conditions(report.machine)} ({compile_seconds:.0f} s in all)",
        f"{prefix}memory: {rates}; weights: {report.weights_bytes / 1e6:.1f} MB; "
        f"lower bound of ArS: {report.lower_bound_ms:.2f} ms/token",
    ]
    best = fastest(report.systems)
    for setting, ratio in report.baseline_over_bound.items():
        rate = report.weights_bytes / (ratio * report.lower_bound_ms * 1e6)
        line = f"{prefix}{setting}: ArS at {ratio:.2f} x the bound, "
        line += f"reading weights at {rate:.1f} GB/s"
        if (system := best.get(setting)) is not None:
            K = system.num_speculative_tokens
            line += f"; SpS at K = {K} is {system.speedup:.2f} x as fast"
        own = [system for system in report.systems if system.setting == setting]
        lines += [line, *_over_peers(own, best.get(setting), prefix)]
    return [*lines, *_predictions(report.systems, prefix)]


def conditions(machine: Mapping[str, object]) -> str:
    """Returns a clause about a machine (`hardware.machine`) and the times to the first token."""
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['dtype']} "
        f"(bfloat16 is {machine['bfloat16']}), "
        f"Python {machine['python']}, jax {machine['jax']}; time to the first token (1st): "
        "warm in ms, cold in s, which alone includes compilation"
    )


def _over_peers(
    systems: Sequence[SystemSummary], best: SystemSummary | None, prefix: str
) -> Iterator[str]:
    """Yields the speed-ups of our systems over each peer at the peer's best K."""
    peers = [system for system in systems if system.role == Role.PEER]
    for name in dict.fromkeys(peer.system for peer in peers):
        own = [peer for peer in peers if peer.system == name]
        peer = min(own, key=lambda peer: peer.ms_per_token)
        line = f"  {prefix}over {name}"
        if peer.num_speculative_tokens:
            line += f" at its best K = {peer.num_speculative_tokens}"
        line += f": ArS {1 / peer.speedup:.2f} x"
        if best:
            line += f", SpS {peer.ms_per_token / best.ms_per_token:.2f} x"
        yield line


def _predictions(systems: Sequence[SystemSummary], prefix: str) -> Iterator[str]:
    """Yields the speed-up that the costs of a round predict, and the measured one."""
    baselines = {system.setting: system for system in systems if system.role == Role.BASELINE}
    for system in systems:
        if system.predicted_speedup is None:
            continue
        K, scoring = system.num_speculative_tokens, baselines[system.setting].round_cost.scoring
        line = (
            f"{prefix}{system.setting}, {system.system}, K = {K}: "
            f"r' = {system.block_efficiency / (K + 1):.4f}, "
            f"t_target = {1e3 * scoring:.2f} ms, "
            f"t_draft = {1e3 * system.round_cost.draft_step:.2f} ms; "
            "speed-up r' (K + 1) t_target / (K t_draft + t_target) = "
            f"{system.predicted_speedup:.2f} predicted, {system.speedup:.2f} measured"
        )
        if system.same_tokens is not None:
            same = "the text is" if system.same_tokens else "THE TEXT IS NOT"
            line += f"; {same} that of plain decoding, token for token"
        yield line


def _marked(name: str, mark: str) -> str:
    return f"{name}, {mark}" if mark else name


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
