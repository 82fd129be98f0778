r"""Prints the speed-up that theory predicts over K, and the best K.

python scripts/predict.py --acceptance=0.8 --draft_ms=1.8 --target_ms=14.1
python scripts/predict.py --acceptance=0.9,0.85,0.8,0.8 --draft_ms=1.8 --target_ms=14.1
python scripts/predict.py --report=runs/figure1/report.json --plot=predicted.png
python scripts/predict.py --children=0.84,0.07,0.02 --draft_ms=0.4 --target_ms=3.6 --row_ms=0.2

Acceptance is one rate for all positions, or one rate per position. --report takes rates and costs
from a report of reproduce.py. Theorem 3.8 of Leviathan et al. 2022 (arXiv 2211.17192). --children
takes the rates at which plan_tree.py found the children of a node accepted, and predicts trees.
"""

import _environment  # noqa: F401 (must be first: names a package that is missing)
import numpy as np
from absl import flags

from spsjax.cli import main, terminal
from spsjax.errors import InputError, short_repr
from spsjax.evaluation import report_file
from spsjax.performance import theory, tree_theory

_MOST_K = 1000  # the table has a row per K, and a row's time grows with K

_RATES = flags.DEFINE_list(
    "acceptance", None, "Acceptance rate, or rates by position: 0.8 or 0.9,0.85,0.8."
)
_DRAFT = flags.DEFINE_float("draft_ms", None, "Time per draft token.", lower_bound=0)
_TARGET = flags.DEFINE_float("target_ms", None, "Time per pass of the target.", lower_bound=1e-9)
_REPORT = flags.DEFINE_string("report", None, "Path of a report.json that reproduce.py wrote.")
_MAX_K = flags.DEFINE_integer(
    "max_k", 16, "Largest K, if there is one rate.", lower_bound=1, upper_bound=_MOST_K
)
_CHILDREN = flags.DEFINE_list("children", None, "Acceptance by child of a tree: 0.84,0.07,0.02.")
_ROW = flags.DEFINE_float(
    "row_ms", 0.0, "Time per further token of the target's pass, for trees.", lower_bound=0
)
_NODES = flags.DEFINE_multi_integer(
    "num_nodes", [2, 4, 8, 16, 32, 64], "Draft tokens of the trees.", lower_bound=1, upper_bound=256
)
_PLOT = flags.DEFINE_string("plot", None, "Write a PNG of the curves to this file.")


def run():
    if _PLOT.value:
        main.check_installed("--plot", "matplotlib")
        main.check_writable(_PLOT.value)
    if _CHILDREN.value is not None:
        refuse([_RATES, _REPORT, _PLOT, _MAX_K], "expected none beside --children")
        return predict_trees()
    refuse([_ROW, _NODES], "expected it only with --children")
    curves = {}
    for name, (rates, *costs) in cases().items():
        curves[name] = curve = predict(rates, *costs)
        if name:
            terminal.heading(name)
        header = ["K", "tokens per call", "speed-up", "target's arithmetic per token"]
        rows = [(K, f"{a:.2f}", f"{b:.2f}", f"{c:.2f}") for K, (a, b, c) in curve.items()]
        terminal.print_table(header, rows)
        best, speedup = theory.best_num_speculative_tokens(rates, *costs, max(curve))
        if best:
            print(f"best: K = {best}, {speedup:.2f} x plain sampling")
        else:
            print("best: plain sampling; no K is faster")
    if _PLOT.value:
        from spsjax.cli import plots

        plots.predicted(curves, _PLOT.value)


def predict_trees() -> None:
    """Prints the best tree of each size."""
    rates = parse_rates("children", _CHILDREN.value)
    one, drafting = cost("target_ms", _TARGET.value), cost("draft_ms", _DRAFT.value)
    row = cost("row_ms", _ROW.value)
    plans = tree_theory.plans(
        rates,
        _NODES.value,
        lambda _: drafting / one,
        lambda tokens: 1 + row * (tokens - 1) / one,
    )
    terminal.plan_table(plans, one)
    best = max(plans, key=lambda name: plans[name].speedup)
    print(f"best: {best}, {plans[best].speedup:.2f} x plain sampling")


def refuse(unused: list[flags.FlagHolder], expected: str) -> None:
    """Raises InputError for a flag that was given, but would have no effect."""
    for flag in unused:
        if flags.FLAGS[flag.name].present:
            raise InputError(f"--{flag.name}: {expected}, found {short_repr(flag.value)}")


def predict(rates, drafting, scoring) -> dict[int, tuple[float, float, float]]:
    """Returns tokens per call, speed-up and operations by K; costs are in passes of the target."""
    counts = range(1, (len(rates) if np.ndim(rates) else _MAX_K.value) + 1)
    return {
        K: (
            theory.block_efficiency(rates, K),
            theory.speedup(rates, K, drafting(K), scoring(K)),
            theory.operations(rates, K, 0.0),
        )
        for K in counts
    }


def cases() -> dict[str, tuple]:
    """Returns by name: rates, and the costs of a draft token and of scoring as functions of K."""
    if _REPORT.value:
        refuse([_RATES, _DRAFT, _TARGET], "expected none beside --report")
        return cases_of_report(_REPORT.value)
    if _RATES.value is None:
        raise InputError("--acceptance: expected a value, or --report, found none")
    drafting = cost("draft_ms", _DRAFT.value) / cost("target_ms", _TARGET.value)
    rates = parse_rates("acceptance", _RATES.value)
    check_count("--acceptance", rates)
    return {"": (rates if len(rates) > 1 else rates[0], lambda K: drafting, lambda K: 1.0)}


def cost(name: str, value: float | None) -> float:
    """Returns the milliseconds of a flag; raises InputError if there are none."""
    if value is None:
        raise InputError(f"--{name}: expected a value, found none")
    if not np.isfinite(value):
        raise InputError(f"--{name}: expected milliseconds, found {value}")
    return value


def parse_rates(name: str, texts: list[str]) -> list[float]:
    """Returns the numbers of a flag; raises InputError if they are none."""
    try:
        return [float(rate) for rate in texts or [""]]
    except ValueError:
        text = short_repr(",".join(texts))
        raise InputError(f"--{name}: expected numbers, found {text}") from None


def cases_of_report(path: str) -> dict[str, tuple]:
    """Returns the cases of a report: rates by position, and one rate for all positions."""
    cases = {}
    for name, measured in report_file.read(path).items():
        rates, count = measured.rates, len(measured.rates)
        check_count(f"{path}: {name}", rates)
        drafting, scoring = between(measured.draft_step), between({0: 1.0} | measured.scoring)
        cases[name] = rates, drafting, scoring
        mean = theory.rate_of(theory.block_efficiency(rates, count), count)
        cases[f"{name}, all positions at {mean:.3f}"] = [mean] * count, drafting, scoring
    if not cases:
        raise InputError(
            f"{path}: expected costs of a draft model's rounds, found none. "
            "Reproduce with plan.timed above 0."
        )
    return cases


def between(costs: dict[int, float]):
    """Returns the cost as a function of K, linear between the values of K that were measured."""
    counts = sorted(costs)
    return lambda K: float(np.interp(K, counts, [costs[count] for count in counts]))


def check_count(name: str, rates: list[float]) -> None:
    """Raises InputError if there are more rates than values of K that are tried."""
    if len(rates) > _MOST_K:
        raise InputError(f"{name}: expected at most {_MOST_K} rates, found {len(rates)}")


if __name__ == "__main__":
    main.run(run)
