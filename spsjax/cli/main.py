"""What the scripts share: flags into objects, and a user's mistake into one line."""

import importlib.util
import json
import os
import pathlib
import re
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import yaml
from absl import app, flags, logging
from ml_collections import ConfigDict

from spsjax import drafters, loading
from spsjax.drafters import base
from spsjax.errors import InputError, NonFiniteError, Stopped, one_line, short_repr
from spsjax.models import transformer
from spsjax.models.hf import weights as hf_weights
from spsjax.parallel import multihost, sharding
from spsjax.utils import from_config

_GRACE_SECONDS = 5
_PACKAGE = pathlib.Path(__file__).parent

_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the processes that JAX finds: a pod.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "Join by hand: process 0's host:port.")
_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process_id", None, "Which this is, from 0.", lower_bound=0)


def run(
    main: Callable[[], None],
    default_config: str | pathlib.Path | None = None,
    saves: bool = False,
    free: Sequence[str] = (),
) -> NoReturn:
    """Runs a script's `main`; what the user got wrong becomes one line on stderr and exit code 1.

    `default_config` stands in where the command line has no `--config`, and says which keys a
    config must have. (As the flag's own default it would be read first, and refuse every override
    that only the user's file knows.) `saves`: SIGTERM does not end it at once, but makes it save
    first, and end with exit code 143: a scheduler should start it again. `free` are those of a
    config's keys whose values may have any keys.
    """
    argv = list(sys.argv)
    if default_config is not None and not any(map(_config_file, argv[1:])):
        argv.insert(1, f"--config={default_config}")

    def guarded(argv):
        if len(argv) > 1:
            fail(InputError(f"command line: expected flags only, found {argv[1]!r}"))
        for output in (sys.stdout, sys.stderr):  # a model may say what a terminal cannot
            output.reconfigure(errors="replace")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.FATAL)  # libraries tell a lot about themselves
        warnings.showwarning = _warn
        try:
            if default_config is not None:
                default = runpy.run_path(str(default_config))["get_config"]()
                _check_keys(flags.FLAGS["config"].value, default, free=free)
            _join(saves)
            main()
        except (InputError, NonFiniteError, OSError) as error:
            fail(error)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            found = f"process {jax.process_index()}: {one_line(error)}"
            _leave(f"error: expected every process to go on, found one gone or failed ({found})")
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
        except KeyboardInterrupt:
            sys.exit(130)

    app.run(guarded, argv=argv, flags_parser=_parse)


def _join(saves: bool) -> None:
    """Joins the other processes of a run, if there are any; all but the first fall silent."""
    if not (_DISTRIBUTED.value or _COORDINATOR.value):
        for flag in (_PROCESSES, _PROCESS):
            if flag.present:
                raise InputError(f"--{flag.name}: expected --coordinator with it, found none")
        return
    # What libraries write to the standard output themselves, as gloo does, is no result.
    result = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)
    sys.stdout = result
    multihost.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value, saves=saves)
    if not multihost.is_main_process():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (till the end)


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    """Ours are one line; those of libraries are for who writes programs, not for who runs them."""
    if issubclass(category, UserWarning) and pathlib.Path(filename).is_relative_to(_PACKAGE):
        print(f"warning: {message}", file=sys.stderr)


def _leave(message: str) -> NoReturn:
    """Ends a process of several at once: an orderly end would wait for those that are gone."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    if multihost.is_main_process():  # its end aborts the others, who may be about to say the same
        time.sleep(_GRACE_SECONDS)
    os._exit(1)


def shown(config: ConfigDict) -> str:
    """A config as people read it: YAML, without the names of Python's types."""
    return yaml.safe_dump(json.loads(config.to_json()), default_flow_style=None)


def mesh(options: ConfigDict) -> jax.sharding.Mesh | None:
    """The mesh of a config: `data` by `model` devices, `model` 0 for all that there are.

    None for one device of one process.
    """
    data, model = options.data, options.model
    if model == 0 and isinstance(data, int) and data > 0:
        if jax.device_count() % data:
            raise InputError(
                f"mesh: expected a divisor of {jax.device_count()} devices as data, found {data}"
            )
        model = jax.device_count() // data
    if jax.process_count() > 1 and data * model != jax.device_count():
        raise InputError(
            f"mesh: expected all {jax.device_count()} devices of {jax.process_count()} processes, "
            f"found {data} x {model}"
        )
    return None if (data, model) == (1, 1) else sharding.mesh(data, model)


def fail(error: Exception) -> NoReturn:
    """Ends the script with one line."""
    name = f"{error.filename}: " if getattr(error, "filename", None) else ""
    message = f"error: {name}{one_line(error)}"
    if jax.distributed.is_initialized():
        _leave(message)
    print(message, file=sys.stderr)
    sys.exit(1)


def _config_file(argument: str) -> bool:
    name = argument.partition("=")[0]
    return name in ("-config", "--config")


def _parse(argv: list[str]) -> list[str]:
    for argument, following in zip(argv[1:], [*argv[2:], ""]):
        if _config_file(argument):
            _, equals, name = argument.partition("=")
            _check_config(name if equals else following)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        fail(error)
    except (AttributeError, KeyError) as error:  # how ml_collections names an unknown key
        found = one_line(error).strip("\"'")
        fail(InputError(f"--config: expected a key that the config has, found {found}"))


def _check_config(name: str) -> None:
    """Ends the script unless the file gives a config: it is a program, and may fail."""
    name, colon, argument = name.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        fail(InputError(f"--config: expected a config file, found none at {path}"))
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if not callable(get_config):
            raise InputError("none")
        config = get_config(argument) if colon else get_config()
        if type(config) is not ConfigDict:
            raise InputError(f"one that returns {type(config).__name__}")
    except InputError as found:
        fail(InputError(f"--config: {path}: expected get_config for a ConfigDict, found {found}"))
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error)}"
        fail(InputError(f"--config: {path}: expected a Python program, found {found}"))


def _check_keys(
    config: ConfigDict, default: ConfigDict, name: str = "", free: Sequence[str] = ()
) -> None:
    """Raises InputError unless the config has all the keys of the script's own."""
    for key, value in default.items():
        if key not in config:
            raise InputError(f"--config: expected a key {name}{key}, found none")
        if isinstance(value, ConfigDict):
            if not isinstance(config[key], ConfigDict):
                found = type(config[key]).__name__
                raise InputError(f"--config: {name}{key}: expected keys and values, found {found}")
            if name + key not in free:
                _check_keys(config[key], value, f"{name}{key}.")


def load_drafter(name: str, draft: str, options: ConfigDict, dtype=None, mesh=None):
    """What `generate` takes as a drafter.

    Args:
        name: "none"; "model", which loads `draft`; or a module of `spsjax.drafters`.
        draft: name or folder of the draft model.
        options: under the module's name, what its `Drafter` takes.
        dtype, mesh: of the draft model.

    Raises:
        InputError: no such drafter, or one that needs more than these options.
    """
    if name in (None, "none"):
        return None
    if name in ("model", "draft_model"):
        return loading.load(draft, mesh, dtype)
    module = f"{drafters.__name__}.{name}"
    drafter = name.isidentifier() and importlib.util.find_spec(module)
    drafter = drafter and getattr(importlib.import_module(module), "Drafter", None)
    if not drafter or drafter is base.Drafter:
        raise InputError(
            f"drafter: expected 'none', 'model' or a module of spsjax.drafters, found {name!r}"
        )
    return from_config.build(f"drafter {name}", drafter, options.get(name, {}))


def model_config(name: str, folder: pathlib.Path) -> transformer.Config:
    """A model's shape: of a file in `folder`, as "chinchilla_70b" or "llama:2-7b"; or of a model
    folder.

    Raises InputError where there is neither, or what is there describes no model.
    """
    stem, _, size = name.partition(":")
    path = folder / f"{stem}.py"
    if name in model_names(folder):
        args = (size,) if size else ()
        fields = runpy.run_path(str(path))["get_config"](*args)
        return from_config.build(name, transformer.Config, fields)
    if pathlib.Path(name).is_dir():
        return hf_weights.read_config(pathlib.Path(name))
    names = model_names(folder)
    near = [each for each in names if each.partition(":")[0] == stem]
    known = ", ".join(near or dict.fromkeys(re.sub(":.*", ":SIZE", each) for each in names))
    raise InputError(
        f"{short_repr(name)}: expected a model folder or one of {known}, found neither"
    )


def model_names(folder: pathlib.Path) -> list[str]:
    """What `model_config` finds in a folder: files, each with its sizes where it has such."""
    names = []
    for path in sorted(folder.glob("*.py")):
        sizes = runpy.run_path(str(path)).get("SIZES")
        names += [path.stem] if sizes is None else [f"{path.stem}:{size}" for size in sizes]
    return names


def check_writable(path: str | None) -> None:
    """Raises InputError now rather than after the measurement."""
    if not path:
        return
    parent = pathlib.Path(path).absolute().parent
    if not parent.is_dir():
        raise InputError(f"{path}: expected a file in a folder that exists, found no such folder")
    if pathlib.Path(path).is_dir() or not os.access(parent, os.W_OK):
        found = "a folder" if pathlib.Path(path).is_dir() else "a folder that is read-only"
        raise InputError(f"{path}: expected a file that can be written, found {found}")


def check_installed(flag: str, *modules: str) -> None:
    """Raises InputError unless what a flag needs is there."""
    missing = [name for name in modules if not importlib.util.find_spec(name)]
    if missing:
        raise InputError(
            f"{flag}: expected {' and '.join(modules)} to be installed, "
            f"found no {' and no '.join(missing)}"
        )
