"""Flags that set the keys of a config: unknown ones, and errors that name them as a whole."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ml_collections import ConfigDict

from spsjax.errors import InputError, short_repr

_FLAG = "--config."


def check(arguments: Iterable[str], config: ConfigDict) -> None:
    """Raises InputError unless a config has all keys that flags set, naming the nearest ones."""
    known = [key for key, _ in keys(config)]
    for argument in arguments:
        if not re.fullmatch(r"--?config\.[\w.\[\]]+(=.*)?", argument, re.DOTALL):
            continue  # another flag, or the value of one
        key = argument.partition("=")[0].lstrip("-").removeprefix("config.")
        if re.sub(r"\[\d+\]", "", key) in known:
            continue
        near = nearest(key, known)
        hint = f". Did you mean {' or '.join(map(_FLAG.__add__, near))}?" if near else ""
        raise InputError(f"{_FLAG}{key}: expected a key of the config, found no such key{hint}")


def nearest(key: str, known: Sequence[str]) -> list[str]:
    """Returns up to three known keys whose last part is like that of a key, the nearest first."""
    lasts = {name: name.rpartition(".")[2] for name in known}
    alike = difflib.get_close_matches(key.rpartition(".")[2], {*lasts.values()}, 3, 0.75)
    near = [name for name in known if lasts[name] in alike]
    return difflib.get_close_matches(key, near, 3, 0)


def whole(message: str, config: ConfigDict, flags: Mapping[str, object]) -> str:
    """Returns an error's message with the whole flag of the value that it is about.

    A check knows only the last part of a key, or the value itself. Of several keys that end in that
    part, those are meant whose value the message quotes. `flags` are the values of flags that
    replace keys of the config.
    """
    values = {_FLAG + key: value for key, value in keys(config)}
    name = r"[a-z_]\w*(?:\.\w+)*(?:\[\d+\])?"
    names = rf"(?P<names>{name}(?:, {name})*)(?=: )"
    for label in ("", r"[\w -]+: "):  # what a value belongs to, such as "n-gram: "
        match = re.match(label + names, message)
        listed = match["names"].split(", ") if match else []
        whole_names = [_flags_of(name, values, message) or name for name in listed]
        if whole_names != listed:
            return message[: match.start("names")] + ", ".join(whole_names) + message[match.end() :]
    for flag, value in [*flags.items(), *values.items()]:
        texts = value if isinstance(value, list | tuple) else [value]
        texts = [text for text in texts if isinstance(text, str) and text]
        starts = [f"{shown}: " for text in texts for shown in (text, short_repr(text))]
        if message.startswith(tuple(starts)):
            return f"{flag}: {message}"
    return message


def _flags_of(name: str, values: Mapping[str, object], message: str) -> str:
    """Returns the flags whose key ends in a name, those alone whose value a message quotes."""
    matching = {flag: value for flag, value in values.items() if flag.endswith(f".{name}")}

    def is_quoted(value) -> bool:
        return re.search(rf"found {re.escape(short_repr(value))}(?!\w|\.\d)", message) is not None

    quoted = [
        flag
        for flag, value in matching.items()
        if is_quoted(value) or (isinstance(value, list | tuple) and any(map(is_quoted, value)))
    ]
    if len(quoted) > 1 and _FLAG + name in quoted:  # errors about sections name them, too
        return _FLAG + name
    return " or ".join(quoted or matching)


def keys(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the keys of a config on all levels, as `optimization.warmup`, and their values."""
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, ConfigDict):
            yield from keys(value, f"{prefix}{key}.")
