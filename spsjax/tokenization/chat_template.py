"""Chat templates, which turn a conversation into the text format of a model."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from spsjax.errors import InputError, one_line, printable, short_repr

_CHILD = pathlib.Path(__file__).with_name("_template_child.py")
# Limits of a template: seconds of computing, bytes of memory, and characters of text (beside ten
# per character of the conversation). The template of a published model takes milliseconds.
_SECONDS, _MEMORY, _CHARACTERS = 5, 1 << 30, 1_000_000
_MOST_REASON = 200  # characters of a reason that an error shows


def render(
    template: str,
    messages: Sequence[dict[str, str]],
    tokens: dict[str, str | None],
    folder: pathlib.Path,
) -> str:
    """Returns the text of a conversation, up to the beginning of the answer.

    Templates come with downloaded checkpoints, so they run in a sandbox, and in a process of its
    own: only the operating system can bound the time and the memory of every operation of Jinja.
    macOS bounds the time alone. Templates have the functions that `transformers` offers:
    `raise_exception`, `strftime_now` and the filter `tojson`.

    Args:
        template: source of the Jinja template.
        messages: conversation, as `[{"role": "user", "content": "Hello"}]`.
        tokens: text of the special tokens by name, as `bos_token`.
        folder: folder of the template, for errors.

    Raises:
        InputError: the template is invalid, refuses the messages or exceeds its limits.
    """
    _check_messages(messages)
    special = {name: text for name, text in tokens.items() if text is not None}
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    variables = {"messages": messages, **options, **special}
    try:
        most = _CHARACTERS + 10 * len(json.dumps(variables))
        request = json.dumps({"template": template, "variables": variables, "most": most})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages: expected data for JSON, found {one_line(error)}") from None
    result = _run_child(request)
    if "text" in result:
        return result["text"]
    found = printable(result["error"])[:_MOST_REASON]
    if result.get("refused"):
        wanted = f"a conversation for the chat template of {folder}"
        raise InputError(f"messages: expected {wanted}, found {found}")
    raise InputError(f"{folder}: expected a chat template for the messages, found {found}")


def _run_child(request: str) -> dict:
    """Returns the answer of the child process to a request, or the error that ended the child."""
    # The child must find Jinja where this process has found it. -P: not in the child's own folder.
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


def _check_messages(messages) -> None:
    """Raises InputError unless each message has the texts `role` and `content`."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list of messages, found {short_repr(messages)}")
    for number, message in enumerate(messages):
        fields = (
            [message.get(field) for field in ("role", "content")]
            if isinstance(message, dict)
            else []
        )
        if not fields or not all(isinstance(field, str) for field in fields):
            raise InputError(
                f"messages[{number}]: expected a role and a content, found {short_repr(message)}"
            )
