"""Names of models and drafters, with their folders and layouts."""

import functools
import pathlib
from typing import Any

from spsjax import drafters, tokenization
from spsjax.drafters import speculators_folders
from spsjax.errors import InputError, check_path, did_you_mean, one_line, short_repr
from spsjax.loading import public
from spsjax.models.hf import hub
from spsjax.models.hf import weights as hf_weights
from spsjax.models.hf.fields import read_json

_SHIPPED = pathlib.Path(__file__).parent.parent / "pretrained"


def path_of(name: str | pathlib.Path, weights: bool = False) -> pathlib.Path:
    """Returns the folder or the file of a model by name; from the hub, with weights or without.

    A folder or a file of the user comes before a shipped or a public model of its name. A file may
    be of any kind. Raises InputError if there is none, or if a public model was not downloaded.
    """
    check_path("name", name)
    if str(name).startswith(hub.PREFIX):
        return hub.download(str(name), tokenization.NAMES, weights)
    names = _shipped_names()
    try:
        if pathlib.Path(name).is_dir() or pathlib.Path(name).is_file():
            return pathlib.Path(name)
        actual = "none"
    except OSError as error:  # too long, or not to be read
        actual = one_line(error)
    if pathlib.Path(name).as_posix() in names:
        return _SHIPPED / name
    if str(name) in public.MODELS:
        return public.find(str(name))
    names += public.MODELS
    raise InputError(
        f"{short_repr(str(name))}: expected a model folder, a GGUF file or one of "
        f"{', '.join(names)}, found {actual}{did_you_mean(str(name), names)}"
    )


def fetch(name: str) -> None:
    """Downloads the public model of a name if it is missing; other names need no download.

    Raises InputError if the download fails.
    """
    if name in public.MODELS and not pathlib.Path(name).exists():
        public.fetch(name)


def _shipped_names() -> list[str]:
    """Returns the names of the shipped models and drafters."""
    files = _SHIPPED.rglob("config.json")
    return sorted(path.parent.relative_to(_SHIPPED).as_posix() for path in files)


def is_shipped(folder: pathlib.Path) -> bool:
    """Returns whether a folder is that of a shipped model or drafter."""
    return _SHIPPED in folder.parents


def shipped_drafter(target: str | pathlib.Path, models: bool = False) -> str | None:
    """Returns the name of the shipped drafter of a shipped target, or None.

    Draft models are preferred. With `models`, other drafters do not count.
    """
    path = pathlib.PurePath(target)
    if path.as_posix() not in _shipped_names() or pathlib.Path(target).is_dir():
        return None  # a folder of the user, or none
    others = [pathlib.PurePath(name) for name in _shipped_names() if name != path.as_posix()]
    siblings = [other for other in others if other.parent == path.parent]  # "draft" is the first
    drafts = [other for other in siblings if other.name == "draft" or not models]
    return drafts[0].as_posix() if drafts else None


def default_drafter(
    target: str | pathlib.Path, draft: str = "", models: bool = False, weights: bool = False
) -> tuple[str, str]:
    """Returns the drafter of a target for which none is named, and the reason, a clause.

    It is one that fits any target, if a config has that as its default; else the one that is
    shipped for the target; else "suffix". The default of another target is never taken.

    Args:
        target: name or folder of the target.
        draft: default of the config, meant for its own target; empty: no drafter.
        models: whether it must be a draft model.
        weights: whether it must be a drafter with weights.

    Raises:
        InputError: no drafter of the wanted kind is shipped for the target.
    """
    if not (models or weights) and draft in ("", *drafters.methods_with("from_name")):
        return draft, "which the config has for any target"
    shipped = shipped_drafter(target, models)
    if shipped is not None:
        return shipped, f"which is shipped for {target}"
    if models or weights:
        wanted = "a draft model" if models else "a drafter with weights"
        raise InputError(f"draft: expected {wanted} for {target}, found none")
    return "suffix", f"which needs no weights, as no drafter is shipped for {target}"


def method_of(folder: pathlib.Path):
    """Returns the module of the drafter in a folder; None: a model, a file, or nothing.

    Raises InputError if several layouts fit, or for a method of `speculators` that is not here.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    raw = read_json(path)

    @functools.cache
    def tensors():
        try:
            return hf_weights.shards(folder).keys()
        except InputError:
            return frozenset()

    modules = drafters.methods_with("LAYOUT")
    fitting = [name for name in modules if modules[name].LAYOUT.recognizes(raw, tensors)]
    if len(fitting) > 1:
        raise InputError(f"{path}: expected keys of one drafter, found those of {fitting}")
    if not fitting and (kind := raw.get(speculators_folders.KEY)) is not None:
        raise InputError(
            f"{path}: {speculators_folders.KEY}: expected one of "
            f"{', '.join(speculators_folders.METHODS)}, found {short_repr(kind)}"
        )
    return modules[fitting[0]] if fitting else None


def heads_in_target() -> dict[str, Any]:
    """Returns the modules of the methods whose weights are in the target's own folder, by name."""
    modules = drafters.methods_with("LAYOUT")
    return {name: module for name, module in modules.items() if module.LAYOUT.in_target}


def is_feature_drafter(name: str | pathlib.Path) -> bool:
    """Returns whether a name or folder is a drafter of a target's features, not a model.

    Raises InputError if there is neither.
    """
    if isinstance(name, str) and name.partition(":")[0] in heads_in_target():
        return True
    return method_of(path_of(name, weights=True)) is not None
