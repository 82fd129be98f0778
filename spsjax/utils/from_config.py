"""Construction of objects from sections of a config file."""

import contextlib
from collections.abc import Callable, Collection, Iterator

from spsjax.errors import InputError


def build(name: str, cls: Callable, options, **more):
    """Returns `cls(**options, **more)`.

    Args:
        name: name of the config section, for the error message.
        cls: class or function to call.
        options: keyword arguments from the config section.
        **more: keyword arguments from elsewhere.

    Raises:
        InputError: `cls` does not take these arguments.
    """
    try:
        return cls(**options, **more)
    except TypeError as error:
        # Python's message without the name of the function, which means nothing to the user.
        problem = str(error).rpartition("() ")[2]
        raise InputError(
            f"{name}: expected the fields of {cls.__name__}, found {problem}"
        ) from None


def build_section(name: str, cls: Callable, options, **more):
    """Returns the result of `build`; errors about fields have full keys, such as `mesh.data`."""
    with whole_keys(name, options):
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
