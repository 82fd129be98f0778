"""Objects from the sections of a config, and checks of config files."""

import dataclasses
import json
import pathlib
import re
import runpy

import jax
import yaml
from absl import flags
from ml_collections import ConfigDict

from spsjax import drafters, loading
from spsjax.cli import terminal
from spsjax.drafters import shapes, stopping
from spsjax.drafters.contrib import learned_stopping
from spsjax.errors import InputError, check_integer, did_you_mean, one_line, short_repr
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.utils import atomic_files, from_config

# Values of a config's `drafter` that load `draft`.
OF_DRAFT = "model", "draft_model"


def of_file(name: str) -> ConfigDict:
    """Returns the config of a config file, which is a program and may fail.

    `name` is the file's path, with an optional argument of `get_config` after a colon. Raises
    InputError if the file yields no config.
    """
    name, colon, argument = name.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        raise InputError(f"--config: expected a config file, found none at {path}")
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        config = None
        if callable(get_config):
            config = get_config(argument) if colon else get_config()
    except Exception as error:  # whatever the user's program raises
        text = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--config: {path}: expected a Python program, found {text}") from None
    if type(config) is not ConfigDict:
        result = f"one that returns {type(config).__name__}" if callable(get_config) else "none"
        raise InputError(f"--config: {path}: expected get_config for a ConfigDict, found {result}")
    return config


def to_yaml(config: ConfigDict) -> str:
    """Returns a config as YAML, without the names of Python's types."""
    return yaml.safe_dump(json.loads(config.to_json()), default_flow_style=None)


def begin(title: str, config: ConfigDict, workdir: pathlib.Path) -> None:
    """Writes the config of an experiment to its folder; prints a title and the config's path."""
    path = workdir / "experiment.json"
    if multihost.is_main_process():
        workdir.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, config.to_json(indent=2) + "\n")
    print(f"{title}\nThe whole config is in {path}", flush=True)


def choose_pair(
    config: ConfigDict,
    target: str | None = None,
    draft: str | None = None,
    models: bool = False,
    weights: bool = False,
    section: str = "",
) -> None:
    """Sets `target` and `draft` of a config, or of a section, from their flags, if not None.

    A config's draft is meant for the config's own target. Another target without a draft gets that
    of `loading.default_drafter`, and a line says so.

    Args:
        config: config, or the section of it that has the pair.
        target: value of --target.
        draft: value of --draft.
        models: whether the draft must be a model.
        weights: whether the draft must be a drafter with weights.
        section: name of the section with a dot at its end; empty: the whole config.

    Raises:
        InputError: the target has no drafter of the wanted kind, and none is named.
    """
    of_config = {key for key in ("target", "draft") if f"config.{section}{key}" in flags.FLAGS}
    is_own = target in (None, config.target) and "target" not in of_config
    config.target = target or config.target
    config.draft = config.draft if draft is None else draft
    if is_own or draft is not None or "draft" in of_config:
        return
    if config.get("drafter", "model") in OF_DRAFT:
        config.draft, why = loading.default_drafter(config.target, config.draft, models, weights)
        if config.draft:
            terminal.note(f"No draft is named: {config.draft} drafts, {why}")


def mesh(options: ConfigDict) -> jax.sharding.Mesh | None:
    """Returns the mesh of `data` by `model` devices, or None for one device of one process.

    The section has `data` and `model`, where model = 0 means all devices, and may have `slots`.
    Raises InputError if the devices cannot be split so.
    """
    if not isinstance(options, ConfigDict):
        raise InputError(f"mesh: expected keys and values, found {short_repr(options)}")
    data, model, slots = options.get("data", 1), options.get("model", 1), options.get("slots", 1)
    for name, size, least in (("data", data, 1), ("model", model, 0), ("slots", slots, 1)):
        check_integer(f"mesh.{name}", size, least)
    if model == 0:
        if jax.device_count() % (data * slots):
            times = "" if slots == 1 else " times slots"
            raise InputError(
                f"mesh: expected a divisor of {jax.device_count()} devices as data{times}, "
                f"found {data * slots}"
            )
        model = jax.device_count() // (data * slots)
    if jax.process_count() > 1 and data * model * slots != jax.device_count():
        raise InputError(
            f"mesh: expected all {jax.device_count()} devices of {jax.process_count()} processes, "
            f"found {' x '.join(map(str, (data, model) if slots == 1 else (data, model, slots)))}"
        )
    return None if (data, model, slots) == (1, 1, 1) else sharding.mesh(data, model, slots=slots)


def load_drafter(name: str, draft: str, options: ConfigDict, target: loading.Model, dtype=None):
    """Returns the drafter argument of `generate`.

    `name` is "none"; "model", which loads `draft`; "early_exit:4", "sparse_self:256" or
    "suffix:FILE", as `loading.load_drafter` takes them; or the name of a module of
    `spsjax.drafters`, whose options are in the config's section of that name. Raises InputError if
    the drafter does not exist, or needs other options.
    """
    if name in (None, "none"):
        return None
    methods = drafters.methods_with("from_name")
    if name in OF_DRAFT:
        method, _, rest = draft.partition(":")
        named = method in methods or (rest and method in drafters.methods_with("from_pair"))
        if draft.startswith(("suffix+", "window:")) or named:
            return loading.load_drafter(draft, target)
        if loading.is_feature_drafter(draft):
            return loading.load_drafter(draft, target)  # in the target's type
        model = loading.load(draft, target.mesh, dtype)
        return loading.of_model(model, target) if loading.are_foreign(model, target) else model
    method = str(name).partition(":")[0]
    if method not in methods:
        known = ["model", *methods]
        raise InputError(
            f"drafter: expected {', '.join(known)}, found {short_repr(name)}"
            f"{did_you_mean(str(name), known)}"
        )
    loaded = loading.load_drafter(name, target)
    fields = {key: value for key, value in options.get(method, {}).items() if value is not None}
    known = [field.name for field in dataclasses.fields(loaded.drafter)]
    from_config.check_known(method, fields, known)
    with from_config.whole_keys(method, fields):
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **fields))


def draft_length(text: int | str | None) -> int | str | None:
    """Returns K as `generate` takes it, from a flag's text, or from a config's number."""
    digits = isinstance(text, str) and text.isascii() and text.isdigit()
    return int(text) if digits else text


def read_tree(path: str) -> shapes.Tree:
    """Returns the tree of a file that plan.py wrote; raises InputError for another file."""
    try:
        tree = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        parents, flags = tree["parents"], (tree["replacement"], tree.get("chosen", False))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"tree: {path}: expected a tree that plan.py wrote, found {one_line(error)}"
        ) from None
    return shapes.Tree(tuple(parents) if isinstance(parents, list) else parents, *flags)


def with_tree(drafter, target: loading.Model, path: str):
    """Returns a drafter with weights that drafts the tree of a file; chains for an empty path."""
    if not path:
        return drafter
    tree = read_tree(path)
    if isinstance(drafter, loading.Model):
        return loading.as_drafter(drafter, target, tree)
    fields = dataclasses.fields(drafter.drafter) if drafter else ()
    if "tree" not in {field.name for field in fields}:
        raise InputError("tree: expected none without a draft model, found one")
    shaped = dataclasses.replace(drafter.drafter, tree=tree, num_speculative_tokens=tree.depth)
    return dataclasses.replace(drafter, drafter=shaped)


def with_stop_rule(drafter, target: loading.Model, name: str):
    """Returns a drafter that ends chains early by a rule; an empty name is no rule.

    `name` is the name of a rule such as "entropy:0.5", or the file of a trained rule.
    """
    if not name:
        return drafter
    trained = name.endswith(learned_stopping.SUFFIX)
    rule = learned_stopping.read(name) if trained else stopping.by_name(name)
    if isinstance(drafter, loading.Model):
        drafter = loading.as_drafter(drafter, target)
    if not isinstance(drafter, loading.LoadedDrafter):
        raise InputError("stop_rule: expected none without a draft that can end early, found one")
    return loading.with_stop_rule(drafter, target, rule)


def model_config(name: str, folder: pathlib.Path) -> transformer.Config:
    """Returns the config of a model by name, or of a model folder by path.

    A name is that of a file in `folder` with an optional size, such as "chinchilla_70b" or
    "llama:2-7b". Raises InputError if there is neither, or if it does not describe a model.
    """
    stem, _, size = name.partition(":")
    path = folder / f"{stem}.py"
    if name in model_names(folder):
        args = (size,) if size else ()
        fields = runpy.run_path(str(path))["get_config"](*args)
        return from_config.build(name, transformer.Config, fields)
    if pathlib.Path(name).exists():
        return loading.load_config(name)
    names = model_names(folder)
    near = [known for known in names if known.partition(":")[0] == stem]
    known = ", ".join(near or dict.fromkeys(re.sub(":.*", ":SIZE", known) for known in names))
    raise InputError(
        f"{short_repr(name)}: expected a model folder, a GGUF file or one of {known}, found none"
        f"{did_you_mean(name, names)}"
    )


def model_names(folder: pathlib.Path) -> list[str]:
    """Returns the names that `model_config` knows in a folder, one per file and size."""
    names = []
    for path in sorted(folder.glob("*.py")):
        sizes = runpy.run_path(str(path)).get("SIZES")
        names += [path.stem] if sizes is None else [f"{path.stem}:{size}" for size in sizes]
    return names
