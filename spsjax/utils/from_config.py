"""Construction of objects from sections of a config file."""

from collections.abc import Callable

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
        # Python's message without the name of the function, which the user has not written.
        problem = str(error).rpartition("() ")[2]
        raise InputError(
            f"{name}: expected the fields of {cls.__name__}, found {problem}"
        ) from None
