"""Chat templates, which turn a conversation into the text format of a model."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from spsjax.errors import InputError, one_line, printable, short_repr

_CHILD = pathlib.Path(__file__).with_name("_template_child.py")
# Limits of a template: CPU seconds, bytes of memory, and characters of text (plus ten per character
# of the conversation). Templates of published models take milliseconds.
_SECONDS, _MEMORY, _CHARACTERS = 5, 1 << 30, 1_000_000
_MOST_REASON = 200  # characters of a template's error that a message quotes


def render(
    template: str,
    messages: Sequence[dict[str, str]],
    tokens: dict[str, str | None],
    folder: pathlib.Path,
    more: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Returns the text of a conversation, up to the beginning of the answer.

    Templates come with downloaded checkpoints, so they run in a sandbox in a separate process. Only
    the operating system can limit time and memory of all operations of Jinja (on macOS only the
    time). Templates can use the functions that `transformers` offers: `raise_exception`,
    `strftime_now` and the filter `tojson`.

    Args:
        template: source of the Jinja template.
        messages: conversation, as `[{"role": "user", "content": "Hello"}]`.
        tokens: text of the special tokens by name, as `bos_token`.
        folder: folder of the template, for errors.
        more: further variables of the template, as `{"enable_thinking": False}`.

    Raises:
        InputError: the template is invalid, refuses the messages or exceeds its limits.
    """
    messages = conversation(messages)
    special = {name: text for name, text in tokens.items() if text is not None}
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    variables = {**options, **special, **more, "messages": messages}
    try:
        most = _CHARACTERS + 10 * len(json.dumps(variables))
        request = json.dumps({"template": template, "variables": variables, "most": most})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages: expected data for JSON, found {one_line(error)}") from None
    result = _run_child(request)
    if "text" in result:
        return result["text"]
    reason = printable(result["error"])[:_MOST_REASON]
    if result.get("refused"):
        expected = f"a conversation for the chat template of {folder}"
        raise InputError(f"messages: expected {expected}, found {reason}")
    raise InputError(f"{folder}: expected a chat template for the messages, found {reason}")


def _run_child(request: str) -> dict:
    """Returns the response of the child process, or the error that ended it."""
    # The child imports Jinja from this process's path. -P: it ignores its own folder.
    child = subprocess.run(
        [sys.executable, "-P", str(_CHILD), str(_SECONDS), str(_MEMORY)],
        input=request,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        return json.loads(child.stdout)
    except ValueError:  # the child failed, or reached a limit
        limits = f"one that needs more than {_SECONDS} s or {_MEMORY >> 20} MiB"
        return {"error": [limits, *child.stderr.splitlines()][-1]}


def conversation(messages: Sequence[Mapping]) -> list[dict]:
    """Returns messages in the form that templates take: text parts are joined, nulls are removed.

    Other fields, such as `name` and `reasoning_content`, stay as they are.

    Raises:
        InputError: a message has no role, or its content is not a text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list of messages, found {short_repr(messages)}")
    return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _message(name: str, message) -> dict:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"{name}: expected a role and a content, found {short_repr(message)}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        texts = (_text(f"{name}.content[{number}]", part) for number, part in enumerate(content))
        content = "".join(texts)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InputError(
            f"{name}.content: expected a text or a list of text parts, "
            f"found {'none' if content is None else short_repr(content)}"
        )
    named = {**message, "content": content}
    return {key: value for key, value in named.items() if value is not None or key == "content"}


def _text(name: str, part) -> str:
    """Returns the text of a content part; other fields are ignored, as they are for caching."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        value = short_repr(part if kind in (None, "text") else kind)
        raise InputError(f'{name}: expected a part of type "text" with a text, found {value}')
    return part["text"]
