"""Entry point of the scripts: flags, a pod's processes, and mistakes reported in one line."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from spsjax.benchmarks import report
from spsjax.cli import config_flags, config_keys, configs, terminal
from spsjax.errors import InputError, NonFiniteError, Stopped, one_line, short_repr
from spsjax.parallel import multihost
from spsjax.utils import atomic_files, extras

DRAFT_HELP = "Name, folder or GGUF file of the drafter. Another --target alone gets one that fits."
_GRACE_SECONDS = 5
_PACKAGE = pathlib.Path(__file__).parent.parent

_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the processes of the pod that JAX detects."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Join processes by hand: host:port of process 0."
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.", lower_bound=1)
_PROCESS = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0.", lower_bound=0
)


def run(
    script: Callable[[], None],
    default_config: str | pathlib.Path | None = None,
    saves: bool = False,
    free: Sequence[str] = (),
    others: Mapping[str, str | pathlib.Path] = {},
) -> NoReturn:
    """Runs a script. A user's mistake becomes one line on stderr and exit code 1.

    Args:
        script: the script's own entry function.
        default_config: config file used without `--config`. It also defines the keys that a config
            must have. As the flag's own default it would be read first, and would refuse every
            override that only the user's file has. None: the script has no config, or requires one
            and checks its keys.
        saves: whether SIGTERM makes the script save and end with exit code 143, for a restart.
        free: keys of the config whose values may have any keys.
        others: config files that define the keys of configs of another kind, by a key and its
            value: "plan=tree".
    """
    argv = list(sys.argv)
    own = None if default_config is None else _OwnConfigs(default_config, others, free)
    if own and not any(map(_is_config_flag, argv[1:])):
        argv.insert(1, f"--config={default_config}")

    def guarded(argv):
        if len(argv) > 1:
            fail(InputError(f"command line: expected flags only, found {argv[1]!r}"))
        _prepare_streams()
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.FATAL)  # hide the libraries' informational messages
        warnings.showwarning = _warn
        try:
            if own:
                own.check(flags.FLAGS["config"].value)
            _join(saves)
            _find_devices()
            script()
        except (InputError, OSError) as error:
            message = _message(error)
            if "config" in flags.FLAGS:
                config = flags.FLAGS["config"].value
                message = config_flags.whole(message, config, _present_flags())
            fail(InputError(message))
        except NonFiniteError as error:
            fail(error)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            _leave(
                "error: a process of this run has ended or failed "
                f"(process {jax.process_index()}: {one_line(error)}). Restart all processes."
            )
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
        except KeyboardInterrupt:
            sys.exit(130)

    app.run(guarded, argv=argv, flags_parser=functools.partial(_parse, own=own))


def _present_flags() -> dict[str, object]:
    """Returns the values of the command line's flags, without those of the config."""
    names = [name for name in flags.FLAGS if not name.startswith("config")]
    return {f"--{name}": flags.FLAGS[name].value for name in names if flags.FLAGS[name].present}


def _prepare_streams() -> None:
    """Ends the script if stdout or stderr is closed; lets both print any text."""
    if None in (sys.stdout, sys.stderr):
        fail(
            InputError(
                "output: expected stdout and stderr to be open, found one of them closed. "
                "Redirect it to /dev/null."
            )
        )
    for output in (sys.stdout, sys.stderr):  # a text may have characters that a terminal lacks
        output.reconfigure(errors="replace")


def _join(saves: bool) -> None:
    """Joins the other processes of a run, if any. Only the main process writes to stdout."""
    if not (_DISTRIBUTED.value or _COORDINATOR.value):
        for flag in (_PROCESSES, _PROCESS):
            if flag.present:
                raise InputError(f"--{flag.name}: expected --coordinator with it, found none")
        return
    # Libraries such as gloo write to the standard output, which must hold results only: point
    # file descriptor 1 to stderr, and keep a copy of it for our own output.
    result = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)
    sys.stdout = result
    multihost.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, saves=saves)
    if not multihost.is_main_process():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the end)


def _find_devices() -> None:
    """Initializes JAX's devices, without what libtpu prints where it finds no TPU.

    The TPU compiler (extra `tpu-compiler`) is libtpu, so that it is installed on machines without
    a TPU, too. JAX then looks for one, falls back, and libtpu writes errors from C++. JAX names
    its platforms where it sees a TPU; all messages are shown there.
    """
    config: Any = jax.config  # some versions leave the options out of its type
    if config.jax_platforms or not extras.installed("libtpu"):
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        jax.devices()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    """Prints a warning of this package in one line, and none of libraries."""
    if issubclass(category, UserWarning) and pathlib.Path(filename).is_relative_to(_PACKAGE):
        print(f"warning: {message}", file=sys.stderr)


def _leave(message: str) -> NoReturn:
    """Ends one process of several at once: an orderly exit would wait for the other processes."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    if multihost.is_main_process():
        # The end of the main process aborts the others. Give them time to report their own error.
        time.sleep(_GRACE_SECONDS)
    os._exit(1)


def fail(error: Exception) -> NoReturn:
    """Ends the script with one line on stderr."""
    message = f"error: {_message(error)}"
    if jax.distributed.is_initialized():
        _leave(message)
    print(message, file=sys.stderr)
    sys.exit(1)


def _message(error: Exception) -> str:
    """Returns an error's message on one line, with the name of its file."""
    name = getattr(error, "filename", None)
    return (f"{name}: " if name else "") + one_line(error)


def _is_config_flag(argument: str) -> bool:
    name = argument.partition("=")[0]
    return name in ("-config", "--config")


def _parse(argv: list[str], own: "_OwnConfigs | None") -> list[str]:
    """Parses the flags. A config file is tested first, because ml_collections shows a traceback."""
    for argument, following in zip(argv[1:], [*argv[2:], ""]):
        if _is_config_flag(argument):
            _, equals, name = argument.partition("=")
            try:
                config = configs.of_file(name if equals else following)
                if own:
                    own.check_unknown(config)
                    own.check_kind_flags(argv[1:], config)
                config_flags.check(argv[1:], config)
            except InputError as error:
                fail(error)
    own = list(flags.FLAGS)  # keys of a config become flags when they are parsed
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        fail(error)
    except (AttributeError, KeyError) as error:  # of ml_collections
        fail(InputError(f"--config: expected a config, found {one_line(error)}"))
    for name in own:
        # An unset shell variable gives an empty value, and the default would run something else.
        if flags.FLAGS[name].present and flags.FLAGS[name].value == "":
            fail(InputError(f"--{name}: expected a value, found none"))
    return rest


@dataclasses.dataclass(frozen=True)
class _OwnConfigs:
    """The script's own configs, which define the keys of a config of each kind; see `run`."""

    default: str | pathlib.Path
    others: Mapping[str, str | pathlib.Path]
    free: Sequence[str]

    def check(self, config: ConfigDict) -> None:
        """Raises InputError unless a config has the keys and the types of its kind."""
        path = self._path(config)
        own = self._of(path, config)
        with _advice(path):
            config_keys.check_missing(config, own, self.free)
        config_keys.check_types(config, own, self.free)

    def check_unknown(self, config: ConfigDict) -> None:
        """Raises InputError if a config, as its file has it, has keys that are not of its kind."""
        path = self._path(config)
        if own := self._of(path, config):
            with _advice(path):
                config_keys.check_unknown(config, own, self.free)

    def check_kind_flags(self, arguments: Sequence[str], config: ConfigDict) -> None:
        """Raises InputError if flags change a config's kind, and some key is not of the new kind.

        `config` is that of the file alone, without what the flags set.
        """
        kind = {key: config.get(key) for key in self._kind_keys()}
        for argument, following in zip(arguments, [*arguments[1:], ""]):
            name, equals, value = argument.partition("=")
            key = name.lstrip("-").removeprefix("config.")
            if name.startswith("-") and name.lstrip("-") == f"config.{key}" and key in kind:
                kind[key] = value if equals else following
        path = self._path(kind)
        own = self._of(path, kind)
        if path == self._path(config) or not own:
            return  # the kind of the file, or one that `kind_of` refuses
        with _advice(path):
            config_flags.check(arguments, own)
            config_keys.check_missing(config, own, self.free)

    def _kind_keys(self) -> set[str]:
        return {condition.partition("=")[0] for condition in self.others}

    def _path(self, kind: Mapping[str, object]) -> str | pathlib.Path:
        """Returns the file of the own config of a kind, the default for an unknown one."""
        for condition, path in self.others.items():
            key, _, value = condition.partition("=")
            if kind.get(key) == value:
                return path
        return self.default

    def _of(self, path: str | pathlib.Path, kind: Mapping[str, object]) -> ConfigDict:
        """Returns the config of a file, without keys if it is not of a kind."""
        own = runpy.run_path(str(path))["get_config"]()
        differs = any(kind.get(key) not in (None, own.get(key)) for key in self._kind_keys())
        return ConfigDict() if differs else own


@contextlib.contextmanager
def _advice(path: str | pathlib.Path) -> Iterator[None]:
    """Adds to an error about keys which config has those of the kind."""
    try:
        yield
    except InputError as error:
        stop = "" if str(error).endswith("?") else "."
        raise InputError(f"{error}{stop} {path} has all keys of its kind") from None


def kind_of(key: str, config, kinds: Mapping[str, Sequence[str]]) -> str:
    """Returns the kind of measurement of a config, and refuses flags of other kinds.

    `kinds` has the flags that only some kinds take, by kind.
    """
    kind = config[key]
    if kind not in kinds:
        raise InputError(f"{key}: expected one of {', '.join(kinds)}, found {short_repr(kind)}")
    for name in dict.fromkeys(name for names in kinds.values() for name in names):
        if flags.FLAGS[name].present and name not in kinds[kind]:
            raise InputError(f"--{name}: expected no value with {key} = {kind}, found one")
    return kind


def check_one_process() -> None:
    """Raises InputError unless this is the only process of a run."""
    if jax.process_count() > 1:
        raise InputError(f"expected one process, found {jax.process_count()}")


def require(*names: str) -> None:
    """Makes flags required. An empty value counts as none: an empty path is the current folder."""
    for name in names:
        flags.register_validator(name, bool, "expected a value, found none")


def check_writable(path: str | None) -> None:
    """Raises InputError unless a file can be written, before a long measurement begins."""
    if not path:
        return
    parent = pathlib.Path(path).absolute().parent
    if not parent.is_dir():
        raise InputError(f"{path}: expected a file in a folder that exists, found no such folder")
    if pathlib.Path(path).is_dir() or not os.access(parent, os.W_OK):
        obstacle = "a folder" if pathlib.Path(path).is_dir() else "a folder that is read-only"
        raise InputError(f"{path}: expected a file that can be written, found {obstacle}")


def check_folder(workdir: pathlib.Path) -> None:
    """Raises InputError unless a folder can hold results; says if there will be no plot."""
    atomic_files.check_outputs(map(workdir.joinpath, report.OUTPUTS), [workdir])
    if not report.can_draw():
        terminal.note(f"no {workdir / 'table.png'}: {extras.NO_PLOT}")
