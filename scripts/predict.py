r"""What speed-up the theory expects over K, and the best K.

python scripts/predict.py --acceptance=0.8 --draft_ms=1.8 --target_ms=14.1
python scripts/predict.py --acceptance=0.9,0.85,0.8,0.8 --draft_ms=1.8 --target_ms=14.1
python scripts/predict.py --measured=runs/figure1/report.json --plot=predicted.png

Acceptance is one rate, the same everywhere, or one per position; --measured takes both from what
reproduce.py has found. Theorem 3.8 of Leviathan et al. 2022 (arXiv 2211.17192).
"""

import json

import numpy as np
from absl import flags

from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.errors import InputError, short_repr
from spsjax.evaluation import theory_check
from spsjax.performance import theory

_RATES = flags.DEFINE_list("acceptance", None, "A rate, or one per position: 0.8 or 0.9,0.85,0.8.")
_DRAFT = flags.DEFINE_float("draft_ms", None, "Of a draft token.", lower_bound=0)
_TARGET = flags.DEFINE_float("target_ms", None, "Of the target's pass.", lower_bound=1e-9)
_MEASURED = flags.DEFINE_string("measured", None, "report.json of reproduce.py.")
_MOST = flags.DEFINE_integer("most", 16, "The largest K, where there is one rate.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "A PNG of the curves.")


def main():
    if _PLOT.value:
        cli.check_installed("--plot", "matplotlib")
        cli.check_writable(_PLOT.value)
    curves = {}
    for name, (rates, *costs) in cases().items():
        curves[name] = curve = predict(rates, *costs)
        if name:
            terminal.heading(name)
        header = ["K", "tokens a call", "speed-up", "target's arithmetic a token"]
        rows = [(K, f"{a:.2f}", f"{b:.2f}", f"{c:.2f}") for K, (a, b, c) in curve.items()]
        terminal.columns(header, rows)
        best, speedup = theory.best_num_speculative_tokens(rates, *costs, max(curve))
        if best:
            print(f"best: K = {best}, {speedup:.2f} x plain sampling")
        else:
            print("best: plain sampling; no K is faster")
    if _PLOT.value:
        from spsjax.cli import plots

        plots.predicted(curves, _PLOT.value)


def predict(rates, drafting, scoring) -> dict[int, tuple[float, float, float]]:
    """K -> tokens a call, speed-up, operations; costs are in passes of the target."""
    counts = range(1, (len(rates) if np.ndim(rates) else _MOST.value) + 1)
    return {
        K: (
            theory.block_efficiency(rates, K),
            theory.speedup(rates, K, drafting(K), scoring(K)),
            theory.operations(rates, K, 0.0),
        )
        for K in counts
    }


def cases() -> dict[str, tuple]:
    """By name: rates, and the costs of a draft token and of scoring as functions of K."""
    given = {"acceptance": _RATES.value, "draft_ms": _DRAFT.value, "target_ms": _TARGET.value}
    if _MEASURED.value:
        for name, value in given.items():
            if value is not None:
                raise InputError(
                    f"--{name}: expected none beside --measured, found {short_repr(value)}"
                )
        return measured(_MEASURED.value)
    for name, value in given.items():
        if value is None:
            raise InputError(f"--{name}: expected a value, or --measured, found none")
        if isinstance(value, float) and not np.isfinite(value):
            raise InputError(f"--{name}: expected milliseconds, found {value}")
    try:
        rates = [float(rate) for rate in _RATES.value]
    except ValueError:
        found = short_repr(",".join(_RATES.value))
        raise InputError(f"--acceptance: expected numbers, found {found}") from None
    cost = _DRAFT.value / _TARGET.value
    return {"": (rates if len(rates) > 1 else rates[0], lambda K: cost, lambda K: 1.0)}


def measured(path: str) -> dict[str, tuple]:
    """From what reproduce.py wrote: by position, and as if all positions were alike."""
    try:
        with open(path, encoding="utf-8") as file:
            tasks = json.load(file)["tasks"]
        found = {}
        for task, each in tasks.items():
            for setting, costs in each["costs"].items():
                drafting = between(costs["draft_step"])
                scoring = between({"0": 1.0} | costs["scoring"])
                rates = theory_check.filled(each["rates"][setting])
                alike = theory.rate_of(theory.block_efficiency(rates, len(rates)), len(rates))
                name = f"{task}, {setting}"
                same = [alike] * len(rates)
                found[name] = rates, drafting, scoring
                found[f"{name}, all positions at {alike:.3f}"] = same, drafting, scoring
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise InputError(f"{path}: expected a report.json of reproduce.py, found {kind}") from None
    if not found:
        raise InputError(f"{path}: expected the timed parts of a draft model's rounds, found none")
    return found


def between(costs: dict[str, float]):
    """A function of K: linear between those that were measured."""
    counts = sorted(costs, key=int)
    return lambda K: float(np.interp(K, list(map(int, counts)), [costs[each] for each in counts]))


if __name__ == "__main__":
    cli.run(main)
