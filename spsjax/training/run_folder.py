"""The folder of a run: what made it, its log, its curves; and what is seen while it goes on."""

import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
import time
from typing import Any

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from spsjax.errors import InputError, NonFiniteError, one_line, short_repr
from spsjax.parallel import multihost
from spsjax.performance import hardware
from spsjax.training import events
from spsjax.utils import atomic_files

# A run may go on with others of these: they change no result, but for rounding.
_FREE = "mesh", "cache", "keep", "keep_best", "log_every"
_PACKAGES = "spsjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"


class Folder:
    """A run's folder. What only one may do, the first process does.

    `config.json` is the whole config, `environment.json` the rest of what a figure may depend on,
    `log.jsonl` has a line for every measurement, `events.*` is the same for TensorBoard.

    Args:
        path: the folder; made when the run begins.
        config: of the run. A folder whose run had another one is refused.

    Attributes:
        begun: whether there is a run to go on with.
    """

    def __init__(self, path: str | pathlib.Path, config: ConfigDict):
        self.path = pathlib.Path(path).absolute()
        self._events = None
        self._config = json.loads(config.to_json())
        multihost.check_same_everywhere(self._config)
        known = self.path / "config.json"
        self.begun = multihost.all_true(known.exists())
        if self.begun:
            _check_same(known, self._config, pinned=False)

    def hold(self) -> None:
        """Keeps others from the run: they would remove what it saves."""
        multihost.lock_folder(self.path)

    def pin(self, **facts: str) -> None:
        """What the run depends on beside its config, as its target's weights: part of it now.

        Raises InputError where the run that is there had others.
        """
        self._config |= {"pinned": facts}
        multihost.check_same_everywhere(facts)
        if self.begun:
            _check_same(self.path / "config.json", self._config)

    def go_on(self, step: int) -> None:
        """The run begins, or goes on after `step`; what was logged later is forgotten."""
        if not multihost.is_main_process():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_files.write(self.path / "config.json", json.dumps(self._config, indent=2) + "\n")
        starts = _starts(self.path / "environment.json") if step else []
        starts.append({"step": step, **_environment()})
        atomic_files.write(self.path / "environment.json", json.dumps(starts, indent=2) + "\n")
        kept = [record for record in records(self.path) if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        atomic_files.write(self.path / "log.jsonl", lines)
        self._events = events.Writer(self.path, step + 1)

    def log(self, step: int, group: str, **record: Any) -> None:
        """Appends a line; numbers in it become curves, those of a mean with its interval one.

        Raises NonFiniteError where one of them is not finite.
        """
        if not multihost.is_main_process():
            return
        try:
            line = json.dumps({"step": step, "group": group, **record}, allow_nan=False) + "\n"
        except ValueError:
            found = "a NaN or an infinity"
            raise NonFiniteError(
                f"step {step}: expected finite figures of {group}, found {found}"
            ) from None
        curves = {
            f"{group}/{name}": value.get("mean") if isinstance(value, dict) else value
            for name, value in record.items()
        }
        curves = {name: y for name, y in curves.items() if isinstance(y, (int, float))}
        try:
            with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(line)
            self._events.add(step, **curves)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


class Progress:
    """A bar on standard error: steps, time left, the loss, tokens a second, share of the peak.

    Args:
        start, steps: where the run begins and ends.
        tokens: of one step.
        flops: operations of one step, of all devices.
    """

    def __init__(self, start: int, steps: int, tokens: int, flops: float):
        self._tokens, self._flops = tokens, flops
        self._seconds, self._steps, self._since = 0.0, 0, time.perf_counter()
        tty = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps,
            initial=start,
            unit="step",
            disable=not multihost.is_main_process(),
            mininterval=0.5 if tty else 30,
            dynamic_ncols=True,
        )

    def advance(self) -> None:
        """One step more."""
        self._steps += 1
        self._bar.update()

    def pause(self) -> None:
        """The clock stops: what follows is no training."""
        self._seconds += time.perf_counter() - self._since

    def go_on(self) -> None:
        """The clock runs again."""
        self._since = time.perf_counter()

    def measure(self, loss: float) -> dict[str, float]:
        """Speed since the last call, which the bar shows beside the loss."""
        self.pause()
        self.go_on()
        rate = self._steps / max(self._seconds, 1e-9)
        self._seconds, self._steps = 0.0, 0
        speed = {"tokens_per_second": rate * self._tokens}
        shown = f"loss {loss:.3f}, {speed['tokens_per_second']:,.0f} tokens/s"
        peak = hardware.peak(jax.devices()[0])
        if peak:
            speed["share_of_peak"] = rate * self._flops / (peak * jax.device_count())
            shown += f", {speed['share_of_peak']:.0%} of peak"
        self._bar.set_postfix_str(shown, refresh=False)
        return speed

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()


def records(folder: str | pathlib.Path) -> list[dict]:
    """A run's log, but for damaged lines, such as a last one that was cut off."""
    path, found = pathlib.Path(folder) / "log.jsonl", []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                found += [record] if type(record["step"]) is int and record["group"] else []
            except (ValueError, KeyError, TypeError):
                continue
    return found


def plot(folder: Folder) -> bool:
    """Draws loss and acceptance over the steps to `curves.png`; False without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return False
    if not multihost.is_main_process():
        return True
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    log = records(folder.path)
    names = {name for record in log for name in record}
    panels = [name for name in ("loss", "acceptance", "block_efficiency") if name in names]
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")  # of no screen
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, name in zip(axes, panels):
        for group in dict.fromkeys(record["group"] for record in log):
            some = [each for each in log if each["group"] == group and name in each]
            if not some:
                continue
            steps, values = [each["step"] for each in some], [each[name] for each in some]
            if isinstance(values[0], dict):
                means = [value["mean"] for value in values]
                spread = [value["interval"] or 0.0 for value in values]
                axis.errorbar(steps, means, spread, label=group, capsize=2)
            else:
                axis.plot(steps, values, label=group, linewidth=1)
        axis.set(xlabel="step", title=name.replace("_", " "))
        axis.legend()
    with atomic_files.atomic_write(folder.path / "curves.png") as partial:
        figure.savefig(partial, format="png", dpi=120)
    return True


def _starts(path: pathlib.Path) -> list[dict]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _check_same(path: pathlib.Path, wanted: dict, pinned: bool = True) -> None:
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        if not pinned:
            found.pop("pinned", None)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: expected a config, found {one_line(error)}") from None
    for name in sorted(_flat(wanted).keys() | _flat(found).keys()):
        before, now = _flat(found).get(name), _flat(wanted).get(name)
        if json.dumps(before) != json.dumps(now) and name.split(".")[0] not in _FREE:
            raise InputError(
                f"{path.parent}: expected the config of the run that is there, with "
                f"{name}={short_repr(before)}, found {short_repr(now)}"
            )


def _flat(config: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _environment() -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
