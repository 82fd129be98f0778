"""Checkpoints of a run: written in the background, verified by checksums when they are read."""

import contextlib
import errno
import gc
import hashlib
import json
import logging
import math
import pathlib
import shutil
import sys
import warnings

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from spsjax.errors import InputError, check_integer, one_line
from spsjax.parallel import multihost
from spsjax.types import PyTree
from spsjax.utils import hashing

_MESSAGE_LENGTH = 250  # characters of an error from Orbax, which can fill a page
_SYSTEM = "EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EIO", "ESTALE", "ETIMEDOUT", "ENOBUFS"


class Checkpoints:
    """The newest and the best checkpoints of a run, in a folder that all processes share.

    Orbax writes a checkpoint in the background and renames its folder when it is complete. Orbax
    does not notice files that are damaged later. Every checkpoint therefore holds checksums of its
    arrays, and a damaged one is not resumed. `keep` newest checkpoints are kept, and `keep_best`
    with the highest score.
    """

    def __init__(self, folder: pathlib.Path, keep: int = 2, keep_best: int = 1):
        check_integer("keep", keep, 1)
        check_integer("keep_best", keep_best, 0)
        self.folder = folder.absolute()
        self._damaged = self.folder.parent / "damaged"
        self._unreadable = self._hide_unreadable() if multihost.is_main_process() else []
        multihost.barrier("unreadable checkpoints hidden")
        best = preservation_policy.BestN(
            get_metric_fn=_score, n=keep_best, keep_checkpoints_without_metrics=False
        )
        latest = preservation_policy.LatestN(keep)
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=preservation_policy.AnyPreservationPolicy([latest, best]),
            step_prefix="step",
            cleanup_tmp_directories=True,
        )
        self._quiet = _QuietOrbaxThreads()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        self._quiet.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.wait()
        # On a full disk the save in the background fails, too. Only the first error is reported.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self._manager.close()
        gc.collect()  # failed saves print when they are collected: now, while that is suppressed
        self._quiet.__exit__(None, None, None)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Returns the step with the highest score, or None if there is no checkpoint."""
        scores = {step: _score(self._manager.metrics(step)) for step in self.steps()}
        return max(scores, key=scores.get, default=None)

    def save(
        self, step: int, state: PyTree, iterator_state: dict, score: float = -math.inf
    ) -> None:
        """Begins to write a checkpoint; raises InputError if the previous save failed.

        `iterator_state` is the position in the data (`pipeline.BatchIterator.state`). A higher
        score is better; minus infinity means that it was not measured.
        """
        note = {
            "iterator": iterator_state,
            "iterator_sha256": _digest(iterator_state),
            "checksums": hashing.array_checksums(state),
        }
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note)
        )
        try:
            self._manager.wait_until_finished()
            self._manager.save(step, args=arguments, metrics={"score": float(score)})
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Waits until the last save is complete; raises InputError if it failed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, like: PyTree) -> tuple[int, PyTree, dict] | None:
        """Restores the newest undamaged checkpoint, into the shapes and shardings of `like`.

        Newer, damaged checkpoints are reported in a warning and moved to the folder `damaged`, so
        that their steps can be saved again.

        Returns:
            Step, training state and iterator state, or None if there is no checkpoint.

        Raises:
            InputError: all checkpoints are damaged, or the system refuses to read one, for example
                for lack of memory. Nothing is moved then.
        """
        faults: dict[int, str] = {}
        for step in reversed(self.steps()):
            fault = None
            try:
                state, iterator_state = self._read(step, like)
            except Exception as error:
                fault = one_line(error)[:_MESSAGE_LENGTH]
                if _is_system_error(error):
                    path = self.folder / f"step_{step}"
                    raise InputError(f"{path}: expected to read it, found {fault}") from None
            # All processes take the same checkpoint: one that every process could read.
            if multihost.all_true(fault is None):
                self._remove_damaged(step, faults)
                return step, state, iterator_state
            faults[step] = fault or "another process could not read it"
        if faults:
            text = "; ".join(f"step_{step}: {fault}" for step, fault in faults.items())
            raise _all_damaged(self.folder, text)
        return None

    def read(self, step: int, like: PyTree) -> PyTree:
        """Returns the state of one checkpoint; raises InputError if it is missing or damaged."""
        if step not in self.steps():
            steps = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"{self.folder}: expected a checkpoint of step {step}, found {steps}")
        try:
            return self._read(step, like)[0]
        except Exception as error:
            path = self.folder / f"step_{step}"
            fault = one_line(error)[:_MESSAGE_LENGTH]
            raise InputError(f"{path}: expected an undamaged checkpoint, found {fault}") from None

    def _read(self, step: int, like: PyTree) -> tuple[PyTree, dict]:
        """Returns state and iterator state of a checkpoint; raises an error if it is damaged."""
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), note=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=arguments)
        note = restored.note
        if hashing.array_checksums(restored.state) != note["checksums"]:
            raise ValueError("the arrays do not have their checksums")
        if note["iterator_sha256"] != _digest(note["iterator"]):
            raise ValueError("the iterator state does not have its checksum")
        return restored.state, note["iterator"]

    def _hide_unreadable(self) -> list[int]:
        """Moves away checkpoints that make Orbax fail when it opens the folder.

        Returns their steps. Raises InputError, and moves nothing, if there is no other checkpoint.
        """
        written = self._written()
        hidden = [step for step in written if not _is_readable(self.folder / f"step_{step}")]
        if hidden and hidden == written:
            raise _all_damaged(self.folder, "unreadable metadata")
        for step in hidden:
            self._move(step)
        return hidden

    def _remove_damaged(self, restored: int, faults: dict[int, str]) -> None:
        """Moves and reports the damaged checkpoints that are newer than the restored one."""
        if multihost.is_main_process():
            reports = dict(faults)
            for step in faults:
                self._move(step)
            for step in self._unreadable:
                if step > restored:
                    reports[step] = "unreadable metadata"
                else:  # Orbax was deleting this old checkpoint when the run was killed.
                    shutil.rmtree(self._damaged / f"step_{step}", ignore_errors=True)
            with contextlib.suppress(OSError):  # rmdir fails unless the folder is empty
                self._damaged.rmdir()
            for step, fault in sorted(reports.items()):
                warnings.warn(
                    f"{self.folder / f'step_{step}'}: expected a checkpoint, found it damaged "
                    f"({fault}). It was moved to {self._damaged}",
                    stacklevel=1,
                )
        multihost.barrier("damaged checkpoints removed")
        if faults:  # every process has the same faults, and so reloads or does not
            self._manager.reload()

    def _move(self, step: int) -> None:
        """Moves a checkpoint to the folder of damaged ones."""
        name = f"step_{step}"
        self._damaged.mkdir(exist_ok=True)
        shutil.rmtree(self._damaged / name, ignore_errors=True)
        shutil.move(self.folder / name, self._damaged / name)

    def _written(self) -> list[int]:
        """Returns the steps of complete checkpoints. Until then Orbax uses another folder name."""
        names = (path.name for path in self.folder.glob("step_*"))
        return sorted(int(name[5:]) for name in names if name[5:].isdecimal())

    def _failed(self, error: Exception) -> InputError:
        """Returns the error of a failed save, with the free disk space."""
        steps = ", ".join(map(str, self._written())) or "none"
        free = shutil.disk_usage(self.folder).free / 1e9
        return InputError(
            f"{self.folder}: expected to write a checkpoint, "
            f"found {one_line(error)[:_MESSAGE_LENGTH]} "
            f"({free:.3g} GB are free; complete checkpoints: {steps})"
        )


def _is_readable(path: pathlib.Path) -> bool:
    """Returns whether the files are intact that Orbax reads when it opens a checkpoint's folder.

    Raises OSError if the system refuses to read a file that exists.
    """
    try:
        metadata, metrics = (
            json.loads((path / name).read_text(encoding="utf-8"))
            for name in ("_CHECKPOINT_METADATA", "metrics/metrics")
        )
        return isinstance(metadata, dict) and type(metrics["score"]) is float
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (ValueError, KeyError, TypeError):
        return False


def _all_damaged(folder: pathlib.Path, faults: str) -> InputError:
    return InputError(
        f"{folder}: expected an undamaged checkpoint, found only damaged ones ({faults}). "
        "Choose another --workdir to start over"
    )


def _is_system_error(error: BaseException) -> bool:
    """Returns whether an error comes from the system and not from the file.

    TensorStore reports some of these errors only in the text of another exception.
    """
    while error is not None:
        name = errno.errorcode.get(error.errno) if isinstance(error, OSError) else None
        text = str(error)
        if isinstance(error, MemoryError) or name in _SYSTEM or "RESOURCE_EXHAUSTED" in text:
            return True
        if any(f": {code} " in text or f"({code})" in text for code in _SYSTEM):
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(iterator_state: dict) -> str:
    return hashlib.sha256(json.dumps(iterator_state, sort_keys=True).encode()).hexdigest()


def _score(metrics: dict[str, float] | None) -> float:
    return metrics["score"] if metrics else -math.inf


class _QuietOrbaxThreads:
    """Suppresses the tracebacks that Orbax's threads print after a failed read or write.

    `Checkpoints` raises one InputError instead. The threads report the same failure later, one
    after another.
    """

    def __enter__(self) -> None:
        self._log = logging.getLogger("asyncio")
        self._before = sys.unraisablehook, self._log.level
        sys.unraisablehook = self._hook
        self._log.setLevel(logging.CRITICAL + 1)

    def __exit__(self, *_) -> None:
        sys.unraisablehook, level = self._before
        self._log.setLevel(level)

    def _hook(self, unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._before[0](unraisable)
