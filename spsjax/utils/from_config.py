"""Construction of objects from sections of a config file."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator

from spsjax.errors import InputError, did_you_mean, short_repr


def build(name: str, cls: Callable, options, **more):
    """Returns `cls(**options, **more)`.

    Args:
        name: name of the config section, for the error message.
        cls: class or function to call.
        options: keyword arguments from the config section.
        **more: keyword arguments from elsewhere.

    Raises:
        InputError: `cls` does not take these arguments, or the options are no section.
    """
    if not hasattr(options, "keys"):
        raise InputError(f"{name}: expected keys and values, found {short_repr(options)}")
    parameters = inspect.signature(cls).parameters.values()
    if inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters}:
        check_known(name, options, [parameter.name for parameter in parameters])
    try:
        return cls(**options, **more)
    except TypeError as error:
        # Python's message without the name of the function, which means nothing to the user.
        problem = str(error).rpartition("() ")[2]
        raise InputError(
            f"{name}: expected the fields of {cls.__name__}, found {problem}"
        ) from None


def check_known(name: str, options: Collection[str], known: Collection[str]) -> None:
    """Raises InputError unless the keys of a section are known ones; it names the nearest one."""
    section = "" if name == "config" else f"{name}."
    for key in options:
        if key not in known:
            hint = did_you_mean(key, known, section)
            raise InputError(
                f"{section}{key}: expected a key of the config, found no such key{hint}"
            )


def build_section(name: str, cls: Callable, options, **more):
    """Returns the result of `build`; errors about fields have full keys, such as `mesh.data`."""
    with whole_keys(name, options if hasattr(options, "keys") else ()):
        return build(name, cls, options, **more)


@contextlib.contextmanager
def whole_keys(section: str, keys: Collection[str]) -> Iterator[None]:
    """Completes the keys at the beginning of errors: `data: ...` becomes `mesh.data: ...`.

    Args:
        section: name of the config section that the block reads.
        keys: keys of that section; errors about other keys stay as they are.
    """
    try:
        yield
    except InputError as error:
        names, colon, text = str(error).partition(": ")
        if not all(name in keys for name in names.split(", ")):
            raise
        names = ", ".join(f"{section}.{name}" for name in names.split(", "))
        raise InputError(names + colon + text) from None
