"""Keys of a user's config, and types of their values, against those of the script's own config."""

from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from spsjax import drafters
from spsjax.errors import InputError, did_you_mean, short_repr

_METHODS = tuple(drafters.methods_with("from_name"))
# Keys that a config may have beyond the script's own, and sections whose readers check the keys.
_OPTIONAL = "mesh.slots", *_METHODS
_OPEN = "settings", "tasks", "head", "measured.shape", *_METHODS
# Types by the default's type, with their names. A number may be one per position.
_TYPES = {
    bool: ("True or False", (bool,)),
    int: ("an integer", (int,)),
    float: ("a number", (float, int, tuple, list)),
    str: ("a text", (str,)),
    tuple: ("a tuple", (tuple, list)),
}


def check_unknown(
    config: ConfigDict, default: ConfigDict, free: Sequence[str] = (), section: str = ""
) -> None:
    """Raises InputError if a config has keys that the script's own config has not.

    Args:
        config: config of the user.
        default: config with all keys.
        free: names of sections that may have any keys.
        section: name of the section that is checked, with a dot at its end.
    """
    for key, value in config.items():
        name = section + key
        if key not in default:
            if name in _OPTIONAL:
                continue
            hint = did_you_mean(key, default, f"--config.{section}")
            raise InputError(
                f"--config.{name}: expected a key of the config, found no such key{hint}"
            )
        both = isinstance(value, ConfigDict) and isinstance(default[key], ConfigDict)
        if both and name not in (*free, *_OPEN):
            check_unknown(value, default[key], free, f"{name}.")


def check_missing(config: ConfigDict, default: ConfigDict, free: Sequence[str] = ()) -> None:
    """Raises InputError unless a config has all keys of the script's own config."""
    for name, here, key, _ in _keys(config, default, free):
        if key not in here:
            raise InputError(f"--config: expected a key {name}, found none")


def check_types(
    config: ConfigDict, default: ConfigDict, free: Sequence[str] = (), section: str = ""
) -> None:
    """Raises InputError unless a config's values have the types of the script's own config.

    Keys may be missing. The arguments are those of `check_unknown`.
    """
    for name, here, key, own in _keys(config, default, free, section):
        if key not in here:
            continue
        value = here[key]
        if isinstance(own, ConfigDict):
            fits, wanted = isinstance(value, ConfigDict), "keys and values"
        else:
            wanted, types = _TYPES.get(type(own), ("", (object,)))
            if own == "auto":
                wanted, types = 'an integer or "auto"', (int, str)
            fits = isinstance(value, types) and (isinstance(value, bool) <= (bool in types))
        if not fits:
            raise InputError(f"--config.{name}: expected {wanted}, found {short_repr(value)}")


def _keys(
    config: ConfigDict, default: ConfigDict, free: Sequence[str], section: str = ""
) -> Iterator[tuple[str, ConfigDict, str, object]]:
    """Yields keys of the script's own config: the whole key, the user's section, key, own value."""
    for key, own in default.items():
        name = section + key
        yield name, config, key, own
        value = config.get(key)
        if isinstance(own, ConfigDict) and isinstance(value, ConfigDict) and name not in free:
            yield from _keys(value, own, free, f"{name}.")
