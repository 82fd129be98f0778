"""The folder of a training run: its config, environment, log and TensorBoard events."""

import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from spsjax.errors import (
    InputError,
    NonFiniteError,
    check_integer,
    check_number,
    one_line,
    short_repr,
)
from spsjax.parallel import multihost
from spsjax.utils import atomic_files

_PACKAGES = "spsjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"
_FILES = "config.json", "environment.json", "log.jsonl"
_LARGEST = 3.4e38  # of float32, in which metrics are computed


class Folder:
    """The folder of a run, to which only the main process writes.

    `config.json` holds the whole config, `environment.json` everything else that a result may
    depend on. `log.jsonl` has one line per measurement and is the durable record. `events.*` holds
    the same measurements for TensorBoard.

    Args:
        path: folder; created when the run begins.
        config: all values of the run's config. A folder whose run had another config is refused.
        free_keys: top-level keys of the config that may change when a run is resumed.
        defaults: values of keys that a config lacks because an older version wrote it.

    Attributes:
        path: absolute path of the folder.
        name: path of the folder as the caller wrote it, for output.
        resumable: whether the folder holds a run that can be resumed.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        config: Mapping[str, Any],
        free_keys: Sequence[str] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.name = pathlib.Path(path)
        self.path = self.name.absolute()
        atomic_files.check_outputs(map(self.path.joinpath, _FILES), [self.path])
        self._free_keys = free_keys
        self._defaults = _flatten(json.loads(json.dumps(dict(defaults))))
        self._events: _EventFile | None = None
        self._config = json.loads(json.dumps(config))  # tuples become lists, as in the file
        multihost.check_same_everywhere(self._config)
        self.resumable = multihost.all_true((self.path / "config.json").exists())
        if self.resumable:
            self._check_stored_config(pinned=False)

    def lock(self) -> None:
        """Locks the folder for this run; raises InputError if another process uses it."""
        # Another run would remove the checkpoints that this one writes.
        multihost.lock_folder(self.path)

    def pin(self, **facts: str) -> None:
        """Adds facts that the run depends on, such as a hash of its target, to the stored config.

        Raises InputError if the run to resume had other facts.
        """
        self._config |= {"pinned": facts}
        multihost.check_same_everywhere(facts)
        if self.resumable:
            self._check_stored_config(pinned=True)

    def begin(self, step: int) -> None:
        """Begins the run, or resumes it after `step` and removes later log records."""
        if not multihost.is_main_process():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        _write_json(self.path / "config.json", self._config)
        environments = _read_list(self.path / "environment.json") if step else []
        environments.append({"step": step, **_environment()})
        _write_json(self.path / "environment.json", environments)
        lines = [json.dumps(record) for record in read_log(self.path) if record["step"] <= step]
        atomic_files.write(self.path / "log.jsonl", "".join(f"{line}\n" for line in lines))
        self._events = _EventFile(self.path, step + 1)
        print(f"The whole config is written to {self.path / 'config.json'}", flush=True)

    def log(self, step: int, group: str, **record: Any) -> None:
        """Appends a record to the log and its numbers, or means, to the TensorBoard curves.

        Every value is a number, or a `metrics.MetricSummary` as a dict. Raises NonFiniteError if a
        number is not finite.
        """
        if not multihost.is_main_process():
            return
        try:
            line = json.dumps({"step": step, "group": group, **record}, allow_nan=False) + "\n"
        except ValueError:
            raise NonFiniteError(
                f"step {step}: expected finite metrics of {group}, found a NaN or an infinity"
            ) from None
        curves = {
            f"{group}/{name}": value.get("mean") if isinstance(value, dict) else value
            for name, value in record.items()
        }
        curves = {name: y for name, y in curves.items() if isinstance(y, (int, float))}
        try:
            with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(line)
            self._events.add(step, curves)
        except OSError as error:
            error.filename = error.filename or str(self.path)  # a full disk gives no path
            raise

    def _check_stored_config(self, pinned: bool) -> None:
        """Raises InputError if the stored config differs in a key that may not change."""
        path = self.path / "config.json"
        try:
            stored = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: expected a config, found {one_line(error)}") from None
        if not pinned:
            stored.pop("pinned", None)
        now = _flatten(self._config)
        before = {name: self._defaults.get(name) for name in now} | _flatten(stored)
        for name in sorted(before.keys() | now.keys()):
            if name.split(".")[0] in self._free_keys:
                continue
            # As JSON, because 1 == 1.0 == True in Python.
            if json.dumps(before.get(name)) != json.dumps(now.get(name)):
                raise InputError(
                    f"{self.path}: expected the stored config of the run to resume, with "
                    f"{name}={short_repr(before.get(name))}, found {short_repr(now.get(name))}. "
                    "Restore the value or choose another --workdir"
                )


class _EventFile:
    """A TensorBoard event file.

    It uses the synchronous writer of tensorboardX. `SummaryWriter` writes in a thread of its own:
    on a full disk that thread dies with a traceback, the training loop then blocks on its queue,
    and a killed run loses up to two minutes of events. TensorBoard hides points of earlier files
    from the first step of this file on.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        # The suffix keeps a run that restarts within a second from truncating the earlier file.
        self._writer = EventsWriter(str(folder / "events"), f".{step}.{os.getpid()}")
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=step, session_log=start))
        self._writer.flush()

    def add(self, step: int, values: dict[str, float]) -> None:
        """Writes one point per curve; raises OSError if the disk is full."""
        for name, value in values.items():
            summary = scalar(name, value)
            self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def read_log(folder: str | pathlib.Path) -> list[dict]:
    """Returns the log records of a run, without damaged lines such as a torn last one."""
    path, records = pathlib.Path(folder) / "log.jsonl", []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                _check_record(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            records.append(record)
    return records


def _check_record(record: dict) -> None:
    """Raises ValueError, KeyError or TypeError unless a record is as `Folder.log` writes it."""
    check_integer("step", record["step"], 0)
    check_number("step", record["step"], 0, _LARGEST)
    if not isinstance(record["group"], str):
        raise ValueError("group")
    for name in record.keys() - {"step", "group"}:
        value = record[name]
        summary = value if isinstance(value, dict) else {"mean": value, "interval": None}
        check_number(name, summary["mean"], -_LARGEST, _LARGEST)
        if summary["interval"] is not None:
            check_number(name, summary["interval"], 0, _LARGEST)


def _write_json(path: pathlib.Path, value) -> None:
    atomic_files.write(path, json.dumps(value, indent=2) + "\n")


def _read_list(path: pathlib.Path) -> list[dict]:
    """Returns the list in a JSON file, or an empty one if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return value if isinstance(value, list) else []


def _flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """Returns a nested config with dotted names."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _environment() -> dict[str, Any]:
    """Returns the command, versions and devices of this process."""
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
