"""Chat templates, which turn a conversation into the text format of a model."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from spsjax.errors import InputError, one_line, short_repr

_CHILD = pathlib.Path(__file__).with_name("_template_child.py")
# Limits of a template: seconds of computing, bytes of memory, and characters of text (beside ten
# per character of the conversation). The template of a published model takes milliseconds.
_SECONDS, _MEMORY, _CHARACTERS = 5, 1 << 30, 1_000_000


def render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str | None]) -> str:
    """Returns the text of a conversation, up to the beginning of the answer.

    Templates come with downloaded checkpoints, so they run in a sandbox, and in a process of its
    own: only the operating system can bound the time and the memory of every operation of Jinja.
    macOS bounds the time alone. Templates have the functions that `transformers` offers:
    `raise_exception`, `strftime_now` and the filter `tojson`.

    Args:
        template: source of the Jinja template.
        messages: conversation, as `[{"role": "user", "content": "Hello"}]`.
        tokens: text of the special tokens by name, as `bos_token`.

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
        raise _error(one_line(error)) from None
    # The child must find Jinja where this process has found it. -P: not in the child's own folder.
    child = subprocess.run(
        [sys.executable, "-P", str(_CHILD), str(_SECONDS), str(_MEMORY)],
        input=request,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        result = json.loads(child.stdout)
    except ValueError:  # the child failed, or the system ended it
        limits = f"one that needs more than {_SECONDS} s or {_MEMORY >> 20} MiB"
        raise _error([limits, *child.stderr.splitlines()][-1][:200]) from None
    if "error" in result:
        raise _error(result["error"])
    return result["text"]


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


def _error(text: str) -> InputError:
    return InputError(f"messages: expected a conversation for the chat template, found {text}")
