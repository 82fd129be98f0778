"""Checkpoints of a run: written beside the training, checked when they are read."""

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

from spsjax.errors import InputError, one_line
from spsjax.parallel import multihost
from spsjax.types import PyTree
from spsjax.utils import hashing


class Checkpoints:
    """The newest few and the best few checkpoints of a run, in a folder that all processes share.

    A save goes on in the background. A checkpoint is there whole or not at all, and holds sums of
    the bits of all its arrays, so that one whose files were damaged later is not gone on from.

    Args:
        folder: where they are.
        keep: how many of the newest.
        keep_best: how many of those with the highest score.
    """

    def __init__(self, folder: pathlib.Path, keep: int = 2, keep_best: int = 1):
        for name, value, least in (("keep", keep, 1), ("keep_best", keep_best, 0)):
            if type(value) is not int or value < least:
                raise InputError(f"{name}: expected an integer >= {least}, found {value!r}")
        self.folder = folder.absolute()
        self._aside = self.folder.parent / "damaged"
        self._unreadable = self._hide_unreadable() if multihost.is_main_process() else []
        multihost.barrier("checkpoints looked at")
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
        self._silence = _Silence()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        self._silence.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.wait()
        # On a full disk a save in the background fails, too: the first error is the one to tell.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self._manager.close()
        gc.collect()  # what failed is told to nobody now
        self._silence.__exit__(None, None, None)

    def steps(self) -> list[int]:
        """Those that are there, in order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step with the highest score; None if there is no checkpoint."""
        scores = {step: _score(self._manager.metrics(step)) for step in self.steps()}
        return max(scores, key=scores.get, default=None)

    def save(self, step: int, state: PyTree, feed: dict, score: float = -math.inf) -> None:
        """Begins to write a checkpoint; an earlier one's failure is raised here.

        Args:
            step: its name.
            state: arrays.
            feed: what `data.Feed.state` gave.
            score: the higher, the better; minus infinity where it was not measured.
        """
        note = {"feed": feed, "feed_sha256": _digest(feed), "sums": hashing.array_checksums(state)}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note)
        )
        try:
            self._manager.wait_until_finished()
            self._manager.save(step, args=arguments, metrics={"score": float(score)})
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Until what was begun is written; raises InputError if it could not be."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error

    def restore(self, like: PyTree) -> tuple[int, PyTree, dict] | None:
        """The newest sound checkpoint: its step, its state and the feed's; None if there is none.

        Newer ones are damaged then: they are named in a warning, and moved out of the way, so that
        their steps can be saved again.

        Args:
            like: arrays or their shapes, with the shardings that the state's are to have.

        Raises:
            InputError: there are checkpoints, and all are damaged; or the system refuses to read
                them. Nothing is moved.
        """
        faults: dict[int, str] = {}
        for step in reversed(self.steps()):
            found = None
            try:
                state, feed = self._read(step, like)
            except Exception as error:
                found = one_line(error)[:200]
                if _of_the_system(error):
                    path = self.folder / f"step_{step}"
                    raise InputError(f"{path}: expected to read it, found {found}") from None
            if multihost.all_true(found is None):
                self._set_aside(step, faults)
                return step, state, feed
            faults[step] = found or "another process could not read it"
        if faults:
            found = "; ".join(f"step_{step}: {fault}" for step, fault in faults.items())
            raise _none_sound(self.folder, found)
        return None

    def read(self, step: int, like: PyTree) -> PyTree:
        """The state of one checkpoint; raises InputError where it is not there, or damaged."""
        if step not in self.steps():
            found = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"{self.folder}: expected a checkpoint of step {step}, found {found}")
        try:
            return self._read(step, like)[0]
        except Exception as error:
            path = self.folder / f"step_{step}"
            found = one_line(error)[:200]
            raise InputError(f"{path}: expected a sound checkpoint, found {found}") from None

    def _read(self, step: int, like: PyTree) -> tuple[PyTree, dict]:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), note=ocp.args.JsonRestore()
        )
        read = self._manager.restore(step, args=arguments)
        if hashing.array_checksums(read.state) != read.note["sums"]:
            raise ValueError("arrays are not those that were saved")
        if read.note["feed_sha256"] != _digest(read.note["feed"]):
            raise ValueError("the place in the data is not the one that was saved")
        return read.state, read.note["feed"]

    def _hide_unreadable(self) -> list[int]:
        """Moves aside those that Orbax would fail on when it opens the folder; their steps.

        Raises InputError where there is no other; nothing is moved then.
        """
        written = self._written()
        hidden = [step for step in written if not _readable(self.folder / f"step_{step}")]
        if hidden and hidden == written:
            raise _none_sound(self.folder, "descriptions that are none")
        for step in hidden:
            self._move(step)
        return hidden

    def _set_aside(self, sound: int, faults: dict[int, str]) -> None:
        """What stood in the way of a checkpoint that was read."""
        if multihost.is_main_process():
            told = dict(faults)
            for step in faults:
                self._move(step)
            for step in self._unreadable:
                if step > sound:
                    told[step] = "its description is none"
                else:  # it was being removed when the run was killed
                    shutil.rmtree(self._aside / f"step_{step}", ignore_errors=True)
            with contextlib.suppress(OSError):
                self._aside.rmdir()  # if there is nothing in it
            for step, fault in sorted(told.items()):
                warnings.warn(
                    f"{self.folder / f'step_{step}'}: expected a checkpoint, found it damaged "
                    f"({fault}); it is in {self._aside} now",
                    stacklevel=1,
                )
        multihost.barrier("damaged checkpoints set aside")
        if faults:  # the same ones in every process
            self._manager.reload()

    def _move(self, step: int) -> None:
        name = f"step_{step}"
        self._aside.mkdir(exist_ok=True)
        shutil.rmtree(self._aside / name, ignore_errors=True)
        shutil.move(self.folder / name, self._aside / name)

    def _written(self) -> list[int]:
        """The steps whose folders are complete: until then they have another name."""
        names = (path.name for path in self.folder.glob("step_*"))
        return sorted(int(name[5:]) for name in names if name[5:].isdecimal())

    def _failed(self, error: Exception) -> InputError:
        kept = ", ".join(map(str, self._written())) or "none"
        free = shutil.disk_usage(self.folder).free / 1e9
        return InputError(
            f"{self.folder}: expected to write a checkpoint, found {one_line(error)[:300]} "
            f"({free:.3g} GB are free; whole ones: {kept})"
        )


def _readable(path: pathlib.Path) -> bool:
    """Whether what Orbax reads of a checkpoint when it opens a folder can be read.

    Raises OSError where the system refuses to read what is there.
    """
    try:
        description, metrics = (
            json.loads((path / name).read_text(encoding="utf-8"))
            for name in ("_CHECKPOINT_METADATA", "metrics/metrics")
        )
        return isinstance(description, dict) and type(metrics["score"]) is float
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (ValueError, KeyError, TypeError):
        return False


def _none_sound(folder: pathlib.Path, found: str) -> InputError:
    return InputError(
        f"{folder}: expected a sound checkpoint, found only damaged ones ({found}); "
        "to begin anew, take another --workdir"
    )


# Errors that say nothing of a file. Orbax's libraries give some of them as a text only.
_SYSTEM = "EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EIO", "ESTALE", "ETIMEDOUT", "ENOBUFS"


def _of_the_system(error: BaseException) -> bool:
    while error is not None:
        name = errno.errorcode.get(error.errno) if isinstance(error, OSError) else None
        text = str(error)
        if isinstance(error, MemoryError) or name in _SYSTEM or "RESOURCE_EXHAUSTED" in text:
            return True
        if any(f": {each} " in text or f"({each})" in text for each in _SYSTEM):
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(feed: dict) -> str:
    return hashlib.sha256(json.dumps(feed, sort_keys=True).encode()).hexdigest()


def _score(metrics: dict[str, float] | None) -> float:
    return metrics["score"] if metrics else -math.inf


class _Silence:
    """Keeps off the screen what Orbax's threads say when a read or a write failed, pages of it.

    We say it in a line of our own. They find out one after another, when nobody listens any more.
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
