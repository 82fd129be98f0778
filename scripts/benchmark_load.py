"""Measures how long requests wait that arrive over time, by how many draft tokens a round has.

python scripts/benchmark_load.py --workdir=runs/load
python scripts/benchmark_load.py --workdir=runs/load --config.rates="()" --config.clients="(1,4,8)"
python scripts/benchmark_load.py --workdir=runs/load70b --simulated --config.rows=64 \
    --config.rates="(1.0,10.0,30.0,60.0)" --config.requests=400

Engines of the same pair serve the same requests in turn, in another order in each repetition: plain
decoding (K = 0), fixed K, and K chosen in every round by the tokens per second that it is expected
to give (goodput, SmartSpec, arXiv 2406.14066). Arrivals are a Poisson process of each rate; with
`clients`, each of so many clients asks again as soon as it is answered. With --simulated nothing
runs: an engine whose rounds take as long as the config's `floors` serves the requests. The figures
are in `load.json`, a table in `load.md`, a plot of latency over the rate in `load.png`. All are
written anew after every load.
Every key of the config is a flag; configs/experiments/benchmark_load.py lists them.
"""

import dataclasses
import functools
import json
import pathlib

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

import spsjax
from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.errors import InputError, check_integer, check_number, short_repr
from spsjax.evaluation import load, speed
from spsjax.performance import hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
_TARGET = flags.DEFINE_string("target", None, "Name or folder of the target model.")
_DRAFT = flags.DEFINE_string("draft", None, "Name or folder of the drafter.")
_SIMULATED = flags.DEFINE_bool("simulated", False, "Take times from the config's floors.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the results.")
main.require("workdir")

OUTPUTS = "experiment.json", "load.json", "load.md", "load.png"


def run():
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    if jax.process_count() > 1:
        raise InputError(f"expected one process, found {jax.process_count()}")
    atomic_files.check_outputs(map(workdir.joinpath, OUTPUTS), [workdir])
    configs.choose_pair(config, _TARGET.value, _DRAFT.value)
    main.check_installed("the plot", "matplotlib")
    loads = all_loads(config)
    for field in ("requests", "repetitions"):
        check_integer(field, config[field], 1)
    depths = [configs.draft_length(count) for count in config.num_speculative_tokens]
    names = [name_of(K) for K in depths]
    if not depths:
        raise InputError("num_speculative_tokens: expected at least one, found none")
    prepare = simulated if _SIMULATED.value else measured
    prompts, systems, machine = prepare(config, depths, workdir)
    rows = []
    for kind, value in loads:
        served = {name: [] for name in names}
        for repetition in range(config.repetitions):
            rate, clients = (value, None) if kind == "rate" else (1.0, value)
            seed = config.seed + repetition
            jobs = load.poisson(prompts, rate, config.requests, config.max_new_tokens, seed)
            order = list(zip(names, systems))
            # Each in every place: what drifts on the machine meets all of them.
            for name, serve in order[repetition % len(order) :] + order[: repetition % len(order)]:
                shown = terminal.progress(f"{kind} {value:g}, {name}")
                served[name] += load.later(serve(jobs, clients, shown), served[name])
        for name in names:
            figures = dataclasses.asdict(load.summary(served[name]))
            rows.append({"load": kind, "value": value, "system": name} | figures)
        text = write(rows, machine, workdir)
    print(f"\n{text}\n{workdir / 'load.md'}, {workdir / 'load.png'}")


def measured(config: ConfigDict, depths: list, workdir: pathlib.Path):
    """Returns prompts, for each K what serves jobs, and the machine."""
    sampling = from_config.build("sampling", SamplingParams, config.sampling)
    target = loading.load(
        config.target, configs.mesh(config.mesh), config.dtype, quantize=config.quantize
    )
    drafter = loading.load_drafter(config.draft, target)
    prompts, engines = all_prompts(config, target), []
    for K in depths:
        sizes = {name: config[name] for name in ("rows", "slots", "rounds")}
        engine = spsjax.Engine(target, drafter, K, stop_at_eos=False, **sizes)
        longest = max(prompts, key=len)
        engine.submit(longest, sampling, config.max_new_tokens).cancel()  # fails if it never fits
        engines.append(engine)
    configs.begin(f"Load of {target.name}, drafted by {config.draft}", config, workdir)
    for engine in terminal.progress("engines compiled")(engines):
        engine.warm_up(prompts, sampling)

    def serve(engine, jobs, clients, progress):
        return load.run(engine, jobs, sampling, clients, progress)

    systems = [functools.partial(serve, engine) for engine in engines]
    return prompts, systems, hardware.machine(target)


def simulated(config: ConfigDict, depths: list, workdir: pathlib.Path):
    """Returns what `measured` does, of an engine that takes as long as the config's floors."""
    if config.clients:
        raise InputError("clients: expected none with --simulated, found some")
    check_integer("rows", config.rows, 1)
    for length in config.prompt_lengths:
        check_integer("prompt_lengths", length, 1)
    if not config.acceptance:
        raise InputError("acceptance: expected rates of at least one depth, found none")
    for rate in config.acceptance:
        check_number("acceptance", rate, 0, 1)
    for K in depths:
        if isinstance(K, int) and len(config.acceptance) < K:
            raise InputError(f"acceptance: expected rates of {K} depths, found fewer")
    floors = from_config.build("floors", load.Floors, config.floors)
    model = floors.hardware(config.acceptance, config.rows)
    configs.begin("Simulated load", config, workdir)

    def serve(K, jobs, clients, progress):
        if isinstance(K, int):
            return load.simulate(model, jobs, K, progress=progress)
        return load.simulate(model, jobs, progress=progress, pacer=spsjax.request.pacer_of(K))

    systems = [functools.partial(serve, K) for K in depths]
    return [[0] * length for length in config.prompt_lengths], systems, {"simulated": True}


def all_loads(config: ConfigDict) -> list[tuple[str, float]]:
    """Returns the loads of a config: what they vary, and its value."""
    for rate in config.rates:
        check_number("rates", rate, 1e-6, 1e6)
    for clients in config.clients:
        check_integer("clients", clients, 1)
    loads = [("rate", rate) for rate in config.rates]
    loads += [("clients", clients) for clients in config.clients]
    if not loads:
        raise InputError("rates, clients: expected at least one load, found none")
    return loads


def all_prompts(config: ConfigDict, target: loading.Model) -> list[list[int]]:
    """Returns prompts of all lengths of a config, in turn."""
    if not config.prompt_lengths:
        raise InputError("prompt_lengths: expected at least one, found none")
    by_length = []
    for length in config.prompt_lengths:
        check_integer("prompt_lengths", length, 1)
        one = ConfigDict(config.to_dict() | {"prompt_tokens": length})
        by_length.append(list(speed.prompts_of(one, target).values()))
    return [prompt for group in zip(*by_length) for prompt in group]


def name_of(K: int | str | None) -> str:
    """Returns the name under which an engine is shown."""
    if spsjax.request.pacer_of(K) is not None:
        return "K chosen" if K == spsjax.request.AUTO else f"K by {K}"
    if not isinstance(K, int):
        raise InputError(
            f'num_speculative_tokens: expected numbers or "auto", found {short_repr(K)}'
        )
    return f"K = {K}" if K else "plain"


def table(rows: list[dict]) -> str:
    """Returns a Markdown table."""
    header = ["load", "system", "mean latency, s", "50%", "90%", "99%"]
    header += ["first tokens after, s: 50%", "99%", "tokens per second"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        waits, firsts = row["latency_percentiles"], row["first_percentiles"]
        unit = "requests/s" if row["load"] == "rate" else "clients"
        seconds = [row["latency"], *waits, firsts[0], firsts[2]]
        cells = [f"{row['value']:g} {unit}", row["system"], *(f"{x:.2f}" for x in seconds)]
        lines.append([*cells, f"{row['tokens_per_second']:.0f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: list[dict], machine: dict, workdir: pathlib.Path) -> str:
    """Writes the figures, the table and the plot; returns the table."""
    from spsjax.cli import plots

    text = json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n"
    atomic_files.write(workdir / "load.json", text)
    atomic_files.write(workdir / "load.md", table(rows))
    plots.load(rows, workdir / "load.png")
    return table(rows)


if __name__ == "__main__":
    main.run(run, _CONFIGS / "benchmark_load.py", saves=True)
