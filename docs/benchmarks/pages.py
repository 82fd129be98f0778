"""Writes a page of benchmarks per machine from the JSON files that the scripts wrote.

python docs/benchmarks/pages.py

A folder beside this file is a machine. It has a copy of the `table.json` of each measurement of
`measure.sh`, under the name of an entry of `MEASUREMENTS`. Its page is the Markdown file of the
same name.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping

from spsjax.benchmarks import report
from spsjax.cli.measurements import drafters, load, verifiers

FOLDER = pathlib.Path(__file__).resolve().parent


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
    "drafters": Measurement(
        "Drafters of one target",
        "The shipped target on the same prompts: the fastest draft of every drafter.",
        drafters_table,
    ),
    "verifiers": Measurement(
        "Rules of verification",
        "The same drafts by every rule: the gain is over the first rule of each draft.",
        lambda content: verifiers.table(content["rows"]),
    ),
    "load": Measurement(
        "Latency under load",
        "Requests that arrive at random at an engine of eight rows: lower latencies are better.",
        lambda content: load.table(content["rows"]),
    ),
}


def page(folder: pathlib.Path) -> str:
    """Returns the page of a machine's folder as Markdown."""
    contents = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")
    }
    return "\n".join(_blocks(contents))


def _blocks(contents: Mapping[str, Mapping]) -> Iterator[str]:
    machine = next(iter(contents.values()))["machine"]
    versions = sorted({content["made"]["version"] for content in contents.values()})
    dates = sorted({content["made"]["date"] for content in contents.values()})
    yield f"# {machine['device']}, {machine['cores']} cores\n"
    yield "<!-- Written by docs/benchmarks/pages.py. -->\n"
    yield (
        f"spsjax {', '.join(versions)}, Python {machine['python']}, JAX {machine['jax']}; "
        f"measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Speed-ups are ratios "
        "within one run, with 95% intervals over texts.\n"
    )
    for name, measurement in MEASUREMENTS.items():
        if name not in contents:
            continue
        content = contents[name]
        yield f"## {measurement.title}\n"
        yield f"{measurement.meaning} Compute type: {content['machine']['dtype']}.\n"
        yield f"```bash\n{content['made']['command']}\n```\n"
        yield measurement.table(content)
        if sentence := bound(content):
            yield sentence


def folders() -> list[pathlib.Path]:
    """Returns the folders of machines."""
    return sorted(path for path in FOLDER.iterdir() if any(path.glob("*.json")))


if __name__ == "__main__":
    for machine_folder in folders():
        machine_folder.with_suffix(".md").write_text(page(machine_folder), encoding="utf-8")
        print(machine_folder.with_suffix(".md"))
