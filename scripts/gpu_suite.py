r"""Single part of scripts/gpu_suite.sh, which runs the parts beside each other.

python scripts/gpu_suite.py --part=loop --pair=gpt2_xl --out=runs/gpu   # times of the loop
python scripts/gpu_suite.py --part=huggingface --pair=gpt2_xl --out=runs/gpu
python scripts/gpu_suite.py --part=flips --out=runs/gpu   # greedy texts in bfloat16 and float32
python scripts/gpu_suite.py --part=report --out=runs/gpu   # tables and plot of what is there

Parts that share a --lock prepare beside each other and measure one after another.
"""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Iterator

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from spsjax import loading
from spsjax.cli import configs, main, terminal
from spsjax.data.documents import Sources
from spsjax.errors import InputError, check_integer, one_line
from spsjax.evaluation import flips, hf_times, speed
from spsjax.models import transformer
from spsjax.performance import decode_times, hardware
from spsjax.sampling import SamplingParams
from spsjax.utils import atomic_files, from_config
from spsjax.utils.turns import Turns

_CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "experiments"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
_PARTS = "pairs", "loop", "huggingface", "flips", "report"
_PART = flags.DEFINE_enum("part", None, _PARTS, "What to run; pairs: print their names.")
_PAIR = flags.DEFINE_string("pair", None, "Name of a pair in the config.")
_OUT = flags.DEFINE_string("out", None, "Folder of the results.")
_PROFILE = flags.DEFINE_bool("profile", False, "Trace the first two programs of the loop, too.")
_LOCK = flags.DEFINE_string("lock", None, "File that parts share which measure in turn.")


def run():
    config = _CONFIG.value
    if _PART.value is None:
        raise InputError(f"--part: expected one of {', '.join(_PARTS)}, found none")
    if _PART.value == "pairs":
        print(*config.pairs)
        return
    if _OUT.value is None:
        raise InputError("--out: expected a folder, found none")
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    if _PART.value == "report":
        report(out)
        return
    measure = {"loop": loop, "huggingface": huggingface, "flips": texts_that_flip}[_PART.value]
    name = "-".join(filter(None, (_PART.value, _PAIR.value)))
    path = out / f"part-{name}.json"
    main.check_writable(str(path))
    rows = []
    for row in measure(config, Turns(_LOCK.value), out):
        rows.append(dataclasses.asdict(row))
        result = {"part": _PART.value, "pair": _PAIR.value, **machine(), "rows": rows}
        # After each row, because time may run out.
        atomic_files.write(path, json.dumps(result, indent=1) + "\n")
    print(f"{name}: {len(rows)} rows in {path}", flush=True)


def machine() -> dict[str, object]:
    """Returns what times depend on."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def pair_shapes(config: ConfigDict) -> tuple[transformer.Config, transformer.Config]:
    """Returns the shapes of the pair that --pair names."""
    if _PAIR.value not in config.pairs:
        known = ", ".join(config.pairs)
        raise InputError(f"--pair: expected one of {known}, found {_PAIR.value}")
    shapes = []
    for role in ("target", "draft"):
        shape = config.pairs[_PAIR.value][role]
        if isinstance(shape, ConfigDict):
            shape = from_config.build(role, transformer.Config, shape)
        else:
            shape = configs.model_config(shape, _CONFIGS.parent / "models")
        shapes.append(dataclasses.replace(shape, **config.changes))
    return tuple(shapes)


def sampling_of(config: ConfigDict) -> SamplingParams:
    return from_config.build("sampling", SamplingParams, config.sampling)


def loop(config: ConfigDict, turns: Turns, out: pathlib.Path) -> Iterator[decode_times.Times]:
    """Yields the times of rounds, of drafts and of scoring passes."""
    pair = decode_times.Pair(
        *pair_shapes(config), config.acceptance, config.new_tokens, sampling_of(config)
    )
    for field in ("threads", "repetitions", "new_tokens"):
        check_integer(field, config[field], 1)
    left = loop_cells(config)
    compiled = decode_times.compile_all(pair, left, config.threads, config.compile_seconds)
    profile = out / f"profile-{_PAIR.value}" if _PROFILE.value else None
    with turns.alone():
        bandwidth = hardware.bandwidth(jax.devices()[0])
        print(f"lower bounds at {bandwidth / 1e9:.0f} GB/s")
        times = decode_times.time_cells(
            pair, compiled, bandwidth, config.repetitions, config.seconds, profile
        )
        for row in times:
            left.remove(row.cell)
            yield row
    if left:
        print("left out:", "; ".join(cell.title for cell in left))


def loop_cells(config: ConfigDict) -> list[decode_times.Cell]:
    """Returns what is timed, the most important first: time may run out."""
    for field in ("batches", "contexts", "num_speculative_tokens", "scored"):
        for number in config[field]:
            check_integer(field, number, 1)
        if field != "scored" and not config[field]:
            raise InputError(f"{field}: expected at least one, found none")
    Cell, first, (K, *others) = decode_times.Cell, config.contexts[0], config.num_speculative_tokens
    cells = [Cell("rounds", 1, first), Cell("rounds", 1, first, K)]
    cells += [Cell("score", 1, first), Cell("score", 1, first, K), Cell("draft", 1, first, K)]
    cells += [
        Cell("rounds", batch, context, count)
        for context in config.contexts
        for batch in config.batches
        for count in (0, K)
    ]
    cells += [Cell("rounds", 1, first, count) for count in others]
    cells += [Cell("rounds", 1, first, branching=tuple(tree)) for tree in config.trees]
    cells += [Cell("score", 1, first, count - 1) for count in config.scored]
    return list(dict.fromkeys(cells))


def huggingface(config: ConfigDict, turns: Turns, out: pathlib.Path) -> Iterator[hf_times.Times]:
    """Yields the times of Hugging Face `generate`."""
    options = config.huggingface
    main.check_installed("--part=huggingface", "torch", "transformers")
    pair = hf_times.Pair(
        *pair_shapes(config),
        sampling_of(config),
        options.num_speculative_tokens,
        config.acceptance,
    )
    cells = hf_times.cells(options.variants, options.batches, options.contexts)
    # Only what compiles has to be called before the turn.
    slow = [cell for cell in cells if cell[0] == "compiled"]
    warmed = hf_times.warm_all(pair, slow, options.new_tokens, options.compile_seconds)
    with turns.alone():
        quick = [cell for cell in cells if cell[0] != "compiled"]
        warmed |= hf_times.warm_all(pair, quick, options.new_tokens, options.seconds)
        yield from hf_times.time_all(
            pair, warmed, options.new_tokens, options.repetitions, options.seconds
        )


def texts_that_flip(config: ConfigDict, turns: Turns, out: pathlib.Path) -> Iterator[flips.Flips]:
    """Yields how greedy texts of a trained pair differ by compute type and by speculation."""
    options = config.flips
    # GPUs round the factors of float32 products otherwise.
    with turns.alone(), jax.default_matmul_precision("highest"):
        names, dtypes = (options.target, options.draft), ("float32", "bfloat16")
        pairs = {
            dtype: tuple(loading.load(name, dtype=dtype) for name in names) for dtype in dtypes
        }
        tokenizer = pairs["float32"][0].tokenizer
        if tokenizer is None:
            raise InputError(
                f"flips.target: expected a model with a tokenizer, found {options.target}"
            )
        prompts = speed.held_out_prompts(
            tokenizer, options.prompts, options.prompt_tokens, Sources(("stdlib",))
        )
        yield from flips.compare(pairs, list(prompts.values()), options.new_tokens)


def report(out: pathlib.Path) -> None:
    """Prints tables of all parts in a folder, and writes results.json and a plot."""
    results, tables = [], []
    for path in sorted(out.glob("part-*.json")):
        try:
            result = json.loads(path.read_text())
            title = f"{result['part']} {result['pair'] or ''} on {result['device']}"
            tables.append((title, *_TABLES[result["part"]](result["rows"])))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            text = f"{path}: expected the results of a part, found {one_line(error)}"
            raise InputError(text) from None
        results.append(result)
    if not results:
        raise InputError(f"{out}: expected results of other parts, found none")
    atomic_files.write(out / "results.json", json.dumps(results, indent=1) + "\n")
    for title, header, rows in tables:
        terminal.heading(title)
        terminal.print_table(header, rows, left=(0,))
    if importlib.util.find_spec("matplotlib") is None:
        terminal.note(f"no plot in {out}: matplotlib is not installed")
        return
    from spsjax.cli import plots

    plots.decoding(results, out / "results.png")


def _loop_table(rows) -> tuple:
    header = "program", "batch", "context", "ms", "from", "to", "bound", "x bound", "ms/token"
    return header, [
        [
            decode_times.Cell(**row["cell"]).name,
            row["cell"]["batch"],
            row["cell"]["context"],
            f"{row['ms']:.3f}",
            f"{row['fastest_ms']:.3f}",
            f"{row['slowest_ms']:.3f}",
            f"{row['lower_bound_ms']:.3f}",
            f"{row['ms'] / row['lower_bound_ms']:.2f}",
            f"{row['ms'] / row['tokens']:.3f}" if row["tokens"] else "",
        ]
        for row in rows
    ]


def _huggingface_table(rows) -> tuple:
    header = "variant", "batch", "context", "ms/call", "ms/token", "first call, s"
    return header, [
        [
            row["variant"],
            row["batch"],
            row["context"],
            f"{row['ms']:.2f}",
            f"{row['ms'] / row['tokens']:.2f}",
            f"{row['first_seconds']:.1f}",
        ]
        for row in rows
    ]


def _flips_table(rows) -> tuple:
    header = "compared", "texts", "differ", "tokens", "largest margin"
    return header, [
        [
            row["compared"],
            row["texts"],
            row["differ"],
            row["tokens"],
            f"{max(row['margins'], default=0):.2g}",
        ]
        for row in rows
    ]


_TABLES = {"loop": _loop_table, "huggingface": _huggingface_table, "flips": _flips_table}


if __name__ == "__main__":
    main.run(run, _CONFIGS / "gpu_suite.py", free=("pairs", "changes"))
