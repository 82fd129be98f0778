"""Writes a page of benchmarks per machine from the JSON files that the scripts wrote.

python docs/benchmarks/pages.py

A folder beside this file is a machine. It has a copy of the `table.json` of each measurement of
`measure.sh`, under the name of an entry of `MEASUREMENTS`. Its page is the Markdown file of the
same name. The folders `tpu` and `gpu` have reports of `scripts/compile.py --json`, one per program,
and their pages have one table of all.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping

from spsjax.benchmarks import report
from spsjax.cli.measurements import drafters, load, rollouts, training, verifiers

FOLDER = pathlib.Path(__file__).resolve().parent
DRAFTING = "sync", "propose", "propose, sampling"  # phases of a round


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Section of a page.

    Attributes:
        title: title of the section.
        meaning: sentence on what the table shows. It states no figures.
        table: function of the content of the JSON file that returns a Markdown table.
    """

    title: str
    meaning: str
    table: Callable[[Mapping], str]


def speed_table(content: Mapping) -> str:
    """Returns the table of a pair over K."""
    columns = {
        "sampling": "setting",
        "sampler": "system",
        "K": lambda row: row["num_speculative_tokens"] or "-",
        "ms per token": report.figure("ms_per_token"),
        "speed-up": speedup,
        "tokens per call": report.figure("block_efficiency"),
        "first token, ms": report.figure("first_token_ms", 0),
        "first token with compilation, ms": report.figure("cold_first_token_ms", 0),
    }
    return report.table(content["systems"], columns)


def speedup(row: Mapping) -> str:
    """Returns a cell: the speed-up over plain decoding, with its interval."""
    if row["role"] == "baseline":
        return "1"
    return report.within(row["speedup"], row["speedup_interval"])


def bound(content: Mapping) -> str:
    """Returns a sentence on the lower bound of plain decoding, "" where it is not measured."""
    if "lower_bound_ms" not in content:
        return ""
    ratios = ", ".join(
        f"{ratio:.2f} ({setting})" for setting, ratio in content["baseline_over_bound"].items()
    )
    return (
        f"Lower bound of plain decoding, from {content['weights_bytes'] / 1e6:.1f} MB of weights "
        f"and {max(content['bandwidth'].values()) / 1e9:.1f} GB/s: "
        f"{content['lower_bound_ms']:.2f} ms per token. Measured over bound: {ratios}.\n"
    )


def drafters_table(content: Mapping) -> str:
    """Returns the table of the fastest draft of every drafter."""
    columns = {
        "sampling": "setting",
        "drafter": "drafter",
        "drafts": "shape",
        "plain, ms per token": report.figure("plain_ms_per_token"),
        "ms per token": report.figure("ms_per_token"),
        "speed-up": lambda row: report.within(row["speedup"], row["speedup_interval"]),
        "tokens per call": report.figure("tokens_per_call"),
        "first token, ms": report.figure("first_token_ms", 0),
        "first token with compilation, ms": report.figure("cold_first_token_ms", 0),
    }
    rows = drafters.fastest(content["rows"])
    if any(row["task"] for row in rows):
        columns = {"task": "task", **columns}
    return report.table(rows, columns)


def accepted_table(content: Mapping) -> str:
    """Returns the table of what every draft yields per call of the target."""

    def rates(row):
        return ", ".join(map(report.number, row["acceptance_by_depth"]))

    columns = {
        "task": "task",
        "sampling": "setting",
        "drafter": "drafter",
        "drafts": "shape",
        "accepted, by depth": rates,
        "tokens per call": report.figure("tokens_per_call"),
    }
    return report.table(content["rows"], columns)


def tables_of(content: Mapping, *subjects: str) -> str:
    """Returns the tables of a report of `scripts/reproduce.py` whose titles have these words."""
    blocks = []
    for table in content["tables"]:
        title = table["title"].partition(": ")[2]
        if any(subject in title for subject in subjects):
            blocks.append(
                f"**{title.capitalize()}**\n\n{report.markdown(table['header'], table['rows'])}"
            )
    return "\n".join(blocks)


MEASUREMENTS = {
    "speed": Measurement(
        "Speed over K",
        "The shipped pair, one text at a time: a speed-up above 1 means that speculative sampling "
        "(SpS) takes less time per token than autoregressive sampling (ArS).",
        speed_table,
    ),
    "smollm2": Measurement(
        "A public chat model",
        "SmolLM2-135M-Instruct on questions of Spec-Bench: the fastest draft of every drafter.",
        drafters_table,
    ),
    "foreign": Measurement(
        "Drafts with another tokenizer",
        "SmolLM2-135M-Instruct, drafted by Gemma 3 270M, which is larger: the pair shows what is "
        "accepted, not speed ([methods](../methods/foreign_vocabularies.md)).",
        accepted_table,
    ),
    "drafters": Measurement(
        "Drafters of one target",
        "The shipped target on the same prompts: the fastest draft of every drafter.",
        drafters_table,
    ),
    "verifiers": Measurement(
        "Rules of verification",
        "The same drafts by every rule: the gain is over the first rule of each draft. *Texts* is "
        "the standard score of their surprise for the target: by a lossless rule, 1 row of 370 is "
        "beyond 3. Rounding moves the edge of the nucleus, so that a token may count as "
        "impossible.",
        lambda content: verifiers.table(content["rows"]),
    ),
    "load": Measurement(
        "Latency under load",
        "Clients that each wait for an answer before they ask again, at an engine of eight rows.",
        lambda content: load.table(content["rows"]),
    ),
    "table1": Measurement(
        "Table 1 of the paper",
        "The shipped pair completes functions of held-out files (Chen et al. 2023, Table 1): time, "
        "the task's scores, and tests that both samplers have one distribution "
        "([how to read it](../reproductions/paper.md#how-to-read-a-report)).",
        lambda content: tables_of(content, "time", "quality"),
    ),
    "figure1": Measurement(
        "Figure 1 of the paper",
        "Functions of held-out files over K (Chen et al. 2023, Figure 1), with the speed-up that "
        "theory expects ([how to read it](../reproductions/paper.md#how-to-read-a-report)).",
        lambda content: tables_of(content, "time", "theory"),
    ),
    "rollouts": Measurement(
        "Rollouts",
        "Reinforcement learning of the shipped target on a toy reward: without a draft, with a "
        "frozen one, and with one that learns from the samples.",
        lambda content: rollouts.table(content["arms"]),
    ),
    "training": Measurement(
        "Cost of training",
        "A few steps of each drafter for the shipped target, in turn: time per training token, "
        "also over that of the first, with the extremes of all turns.",
        lambda content: training.table(content["rows"]),
    ),
}


def page(folder: pathlib.Path) -> str:
    """Returns the page of a machine's folder, or of one of compiled programs, as Markdown."""
    contents = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")
    }
    if folder.name in COMPILED:
        return "\n".join(COMPILED[folder.name](contents))
    pictures = {path.stem: f"{folder.name}/{path.name}" for path in folder.glob("*.png")}
    return "\n".join(_blocks(contents, pictures))


def _reports(contents: Mapping[str, Mapping]) -> list[Mapping]:
    """Returns the reports of compiled programs; shorter names come first."""
    names = sorted(contents, key=lambda name: [(len(part), part) for part in name.split("_")])
    return [contents[name] for name in names]


def _on_gpus(contents: Mapping[str, Mapping]) -> Iterator[str]:
    """Yields the blocks of the page of programs for GPUs."""
    reports = _reports(contents)
    versions, dates = _made(reports)
    yield "# Kernels on a GPU, by XLA's compiler\n"
    yield "<!-- Written by docs/benchmarks/pages.py. -->\n"
    yield (
        f"spsjax {versions}, {dates}. Nothing ran on a GPU: kernels are counted in compiled "
        "programs, for one text, and times are lower bounds from published figures. Where a bound "
        "is small, a step takes the time in which its kernels start. Sampling is counted as with "
        "top-k, top-p and min-p. XLA's choice of products, and with it the count, can differ on a "
        "GPU, where it measures them. *Fused*: with `SPSJAX_KERNELS=on` "
        "([one GPU](../guides/gpus.md)).\n"
    )
    yield gpu_table(reports)
    commands = (
        f"SPSJAX_KERNELS={content['settings']['kernels']} {content['made']['command']}"
        for content in reports
    )
    yield "\n".join(["```bash", *commands, "```\n"])


def gpu_table(reports: Collection[Mapping]) -> str:
    """Returns the table of reports of `scripts/compile.py` for GPUs."""

    def kernels(program, *phases):
        def cell(content):
            counts = content["programs"][program]["kernels"]
            return " + ".join(str(counts.get(phase, 0)) for phase in phases)

        return cell

    columns = {
        "target": lambda content: content["settings"]["target"],
        "drafter": lambda content: content["settings"]["drafter"],
        "K": lambda content: content["settings"]["num_speculative_tokens"],
        "GPU": lambda content: content["settings"]["topology"],
        "fused": lambda content: "yes" if content["settings"]["kernels"] == "on" else "no",
        "plain step: pass + sampling + commit": kernels("ArS", "score", "verify", "commit"),
        "round: draft": kernels("SpS", "propose"),
        "sampling of drafts": kernels("SpS", "propose, sampling"),
        "scoring": kernels("SpS", "score"),
        "verification": kernels("SpS", "verify"),
        "commit": kernels("SpS", "commit"),
        "plain step, at least ms": report.figure("ars_ms"),
        "round, at least ms": report.figure("round_ms"),
    }
    return report.table(reports, columns)


def _on_tpus(contents: Mapping[str, Mapping]) -> Iterator[str]:
    """Yields the blocks of the page of programs for TPU slices."""
    reports = _reports(contents)
    versions, dates = _made(reports)
    acceptance = ", ".join(sorted({f"{content['acceptance']:.0%}" for content in reports}))
    yield "# TPU slices, by the TPU compiler\n"
    yield "<!-- Written by docs/benchmarks/pages.py. -->\n"
    yield (
        f"spsjax {versions}, {dates}. Nothing ran on a TPU: memory and collectives are the TPU "
        "compiler's, and times are lower bounds from published figures, without the time of "
        "sampling and of starting a collective. Speculative sampling (SpS) is faster than "
        "autoregressive sampling (ArS) if a round yields more tokens than *break-even*; its time "
        f"per token is for {acceptance} of draft tokens accepted. *Traffic*: bytes that a plain "
        "step moves to and from memory, over those of its weights and caches. *Cycles*: the "
        "compiler's estimate for that step in millions, without transfers. A tpu7x chip is two "
        "devices.\n"
    )
    yield tpu_table(reports)
    yield "\n".join(["```bash", *(content["made"]["command"] for content in reports), "```\n"])


def tpu_table(reports: Collection[Mapping]) -> str:
    """Returns the table of reports of `scripts/compile.py` for TPUs."""

    def milliseconds(content, drafts):
        passes = content["passes"]
        names = set(passes) - {"target", "scoring"} if drafts else ["scoring"]
        return sum(1e3 * passes[name]["times"] * _bound(passes[name]) for name in names)

    def moved(content, drafts):
        sps = content["programs"]["SpS"]
        chosen = [phase for phase in sps["executed"] if (phase in DRAFTING) == drafts]
        count, size = (sum(sps[of][phase] for phase in chosen) for of in ("executed", "moved"))
        return f"{count}, {size / 1e6:.1f} MB"

    def traffic(content):
        accessed, least = content["programs"]["ArS"].get("accessed"), content["passes"]["target"]
        if not accessed:
            return "-"
        return f"{sum(accessed.values()) / (least['weights'] + least['cache']):.3f}"

    def cycles(content):
        return sum(content["programs"]["ArS"]["cycles"].values())

    columns = {
        "target": lambda content: content["settings"]["target"],
        "devices": "device",
        "drafter": lambda content: content["settings"]["drafter"],
        "K": lambda content: content["settings"]["num_speculative_tokens"],
        "GB per device": lambda content: f"{_needed(content):.1f} of {content['memory'] / 1e9:.1f}",
        "traffic": traffic,
        "cycles": lambda content: f"{cycles(content) / 1e6:.2f}",
        "collectives of a draft": lambda content: moved(content, True),
        "of scoring": lambda content: moved(content, False),
        "draft, ms": lambda content: f"{milliseconds(content, True):.2f}",
        "scoring, ms": lambda content: f"{milliseconds(content, False):.2f}",
        "ArS, ms per token": report.figure("ars_ms"),
        "break-even, tokens per round": lambda row: f"{row['round_ms'] / row['ars_ms']:.2f}",
        "SpS, ms per token": report.figure("sps_ms"),
    }
    return report.table(reports, columns)


def _bound(cost: Mapping) -> float:
    """Returns the lower bound of a pass in seconds (`roofline.PassCost.seconds`)."""
    return max(cost["memory_seconds"], cost["compute_seconds"]) + cost["interconnect_seconds"]


def _needed(content: Mapping) -> float:
    """Returns the GB per device of weights, caches and the most temporaries."""
    most = max(program["temporary"] for program in content["programs"].values())
    return (content["weights"] + content["caches"] + most) / 1e9


# Functions that yield the blocks of pages of compiled programs, by folder.
COMPILED: Mapping[str, Callable[[Mapping], Iterator[str]]] = {"tpu": _on_tpus, "gpu": _on_gpus}


def _made(contents: Collection[Mapping]) -> tuple[str, str]:
    """Returns the versions and the days of files of figures, as texts."""
    versions = sorted({content["made"]["version"] for content in contents})
    dates = sorted({content["made"]["date"] for content in contents})
    return ", ".join(versions), " to ".join(dict.fromkeys((dates[0], dates[-1])))


def _blocks(contents: Mapping[str, Mapping], pictures: Mapping[str, str]) -> Iterator[str]:
    """Yields the blocks of a machine's page, with the pictures of its folder."""
    machine = next(iter(contents.values()))["machine"]
    versions, dates = _made(contents.values())
    yield f"# {machine['device']}, {machine['cores']} cores\n"
    yield "<!-- Written by docs/benchmarks/pages.py. -->\n"
    yield (
        f"spsjax {versions}, Python {machine['python']}, JAX {machine['jax']}; "
        f"measured {dates}. Speed-ups are ratios within one run, with 95% intervals over texts.\n"
    )
    for name, measurement in MEASUREMENTS.items():
        if name not in contents:
            continue
        content = contents[name]
        yield f"## {measurement.title}\n"
        yield f"{measurement.meaning} Compute type: {content['machine']['dtype']}.\n"
        yield f"```bash\n{content['made']['command']}\n```\n"
        yield measurement.table(content)
        if name in pictures:
            yield f"![{measurement.title}]({pictures[name]})\n"
        if sentence := bound(content):
            yield sentence


def folders() -> list[pathlib.Path]:
    """Returns the folders of machines."""
    return sorted(path for path in FOLDER.iterdir() if any(path.glob("*.json")))


if __name__ == "__main__":
    for machine_folder in folders():
        machine_folder.with_suffix(".md").write_text(page(machine_folder), encoding="utf-8")
        print(machine_folder.with_suffix(".md"))
