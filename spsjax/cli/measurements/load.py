"""Latency of requests that arrive over time, by the number of draft tokens per round.

Engines of one pair alternate on the same requests, in another order per repetition: plain decoding
(K = 0), fixed K, and K chosen in every round for the highest expected tokens per second (goodput,
SmartSpec, arXiv 2406.14066), without or with the drafter's estimates ("auto", "confidence"). With
`simulated` nothing runs: a model of an engine, whose rounds take the times of the config's
`floors`, serves the requests.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from spsjax import loading
from spsjax.benchmarks import load, report, workloads
from spsjax.cli import configs, terminal
from spsjax.cli.measurements import plot
from spsjax.errors import InputError, check_flag, check_integer, check_number, short_repr
from spsjax.planning import hardware
from spsjax.runtime import drafting
from spsjax.runtime.batch import check_seed
from spsjax.runtime.engine import Engine
from spsjax.sampling import SamplingParams
from spsjax.utils import from_config


@dataclasses.dataclass(frozen=True)
class LoadSystems:
    """Engines under test, or models of engines."""

    prompts: Sequence[Sequence[int]]  # prompts of the requests, used cyclically
    # Functions of jobs, clients and a progress bar that serve the jobs, one per K.
    serve: Sequence[Callable]
    machine: dict  # description of the machine


def run(config: ConfigDict, workdir: pathlib.Path) -> str:
    """Measures every load of a config like configs/experiments/load.py, and returns the table.

    The table is written after every load.
    """
    loads = loads_of(config)
    for field in ("requests", "repetitions", "max_new_tokens"):
        check_integer(field, config[field], 1)
    check_seed(config.seed)
    check_flag("simulated", config.simulated)
    depths = [configs.draft_length(count) for count in config.num_speculative_tokens]
    names = [name_of(K) for K in depths]
    if not depths:
        raise InputError("num_speculative_tokens: expected at least one, found none")
    systems = (simulated if config.simulated else engines)(config, depths, workdir)
    rows, text = [], ""
    for kind, value in loads:
        served = served_by(config, kind, value, names, systems)
        for name in names:
            figures = dataclasses.asdict(load.summary(served[name]))
            rows.append({"load": kind, "value": value, "system": name} | figures)
        figures = {"machine": systems.machine, "rows": rows}
        text = report.write(workdir, figures, table(rows), plot("plots.load", rows))
    return text


def served_by(config, kind: str, value: float, names, systems: LoadSystems) -> dict[str, list]:
    """Returns the served requests of one load by system, over all repetitions."""
    served = {name: [] for name in names}
    for repetition in range(config.repetitions):
        rate, clients = (value, None) if kind == "rate" else (1.0, value)
        seed = config.seed + repetition
        jobs = load.poisson(systems.prompts, rate, config.requests, config.max_new_tokens, seed)
        order = list(zip(names, systems.serve))
        first = repetition % len(order)
        # The order rotates, so that a machine that slows down slows all systems.
        for name, serve in order[first:] + order[:first]:
            progress = terminal.progress(f"{kind} {value:g}, {name}")
            served[name] += load.later(serve(jobs, clients, progress), served[name])
    return served


def engines(config: ConfigDict, depths: list, workdir: pathlib.Path) -> LoadSystems:
    """Returns a compiled engine per K, and prompts that fit into its slots."""
    sampling = from_config.build_section("sampling", SamplingParams, config.sampling)
    target = loading.load(
        config.target, configs.mesh(config.mesh), config.dtype, quantize=config.quantize
    )
    drafter = loading.load_drafter(config.draft, target)
    prompts, all_engines = prompts_of(config, target), []
    for K in depths:
        sizes = {name: config[name] for name in ("rows", "slots", "rounds")}
        engine = Engine(target, drafter, K, stop_at_eos=False, **sizes)
        longest = max(prompts, key=len)
        engine.submit(longest, sampling, config.max_new_tokens).cancel()  # fails if it cannot fit
        all_engines.append(engine)
    configs.begin(f"Load of {target.name}, drafted by {config.draft}", config, workdir)
    for engine in terminal.progress("engines compiled")(all_engines):
        engine.warm_up(prompts[0], sampling)

    def serve(engine, jobs, clients, progress):
        return load.run(engine, jobs, sampling, clients, progress)

    serving = [functools.partial(serve, engine) for engine in all_engines]
    return LoadSystems(prompts, serving, hardware.machine(target))


def simulated(config: ConfigDict, depths: list, workdir: pathlib.Path) -> LoadSystems:
    """Returns a model of an engine per K, whose rounds take the times of the config's floors."""
    if config.clients:
        raise InputError("clients: expected none with simulated = True, found some")
    check_integer("rows", config.rows, 1)
    for length in config.prompt_lengths:
        check_integer("prompt_lengths", length, 1)
    if not config.acceptance:
        raise InputError("acceptance: expected rates of at least one depth, found none")
    for rate in config.acceptance:
        check_number("acceptance", rate, 0, 1)
    for K in depths:
        rule = drafting.schedule_of(K)
        if rule is not None and rule.reads_confidence:
            raise InputError(
                'num_speculative_tokens: expected numbers or "auto" with simulated = True, as '
                f"simulated drafters have no estimates, found {short_repr(K)}"
            )
        if isinstance(K, int) and len(config.acceptance) < K:
            raise InputError(f"acceptance: expected rates of {K} depths, found fewer")
    floors = from_config.build_section("floors", load.Floors, config.floors)
    model = floors.hardware(config.acceptance, config.rows)
    configs.begin("Simulated load", config, workdir)

    def serve(K, jobs, clients, progress):
        if isinstance(K, int):
            return load.simulate(model, jobs, K, progress=progress)
        return load.simulate(model, jobs, progress=progress, schedule=drafting.schedule_of(K))

    prompts = [[0] * length for length in config.prompt_lengths]
    return LoadSystems(prompts, [functools.partial(serve, K) for K in depths], {"simulated": True})


def loads_of(config: ConfigDict) -> list[tuple[str, float]]:
    """Returns the loads of a config, as "rate" or "clients" and its value."""
    for rate in config.rates:
        check_number("rates", rate, 1e-6, 1e6)
    for clients in config.clients:
        check_integer("clients", clients, 1)
    loads = [("rate", rate) for rate in config.rates]
    loads += [("clients", clients) for clients in config.clients]
    if not loads:
        raise InputError("rates, clients: expected at least one load, found none")
    return loads


def prompts_of(config: ConfigDict, target: loading.Model) -> list[list[int]]:
    """Returns prompts of all lengths of a config, alternating between lengths."""
    if not config.prompt_lengths:
        raise InputError("prompt_lengths: expected at least one, found none")
    by_length = []
    for length in config.prompt_lengths:
        check_integer("prompt_lengths", length, 1)
        of_length = ConfigDict(config.to_dict() | {"prompt_tokens": length})
        by_length.append(list(workloads.prompts_of(of_length, target).values()))
    return [prompt for group in zip(*by_length) for prompt in group]


def name_of(K: int | str | None) -> str:
    """Returns the title of an engine."""
    if drafting.schedule_of(K) is not None:
        return "K chosen" if K == drafting.AUTO else f"K by {K}"
    if not isinstance(K, int):
        raise InputError(
            f'num_speculative_tokens: expected numbers or "auto", found {short_repr(K)}'
        )
    return f"K = {K}" if K else "plain"


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    header = ["load", "system", "mean latency, s", "50%", "90%", "99%"]
    header += ["first tokens after, s: 50%", "99%", "tokens per second"]
    lines = []
    for row in rows:
        waits, firsts = row["latency_percentiles"], row["first_percentiles"]
        unit = "requests/s" if row["load"] == "rate" else "clients"
        seconds = map(report.number, [row["latency"], *waits, firsts[0], firsts[2]])
        cells = [f"{row['value']:g} {unit}", row["system"], *seconds]
        lines.append([*cells, report.number(row["tokens_per_second"], 0)])
    return report.markdown(header, lines)
