"""Chat templates, which turn a conversation into the text format of a model."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Text of a conversation, and the parts of it that the template marks as answers.

    Attributes:
        text: text of the conversation.
        answers: first and last character, exclusive, of each `{% generation %}` block.
    """

    text: str
    answers: tuple[tuple[int, int], ...] = ()


def render(
    template: str,
    messages: Sequence[dict[str, str]],
    tokens: dict[str, str | None],
    folder: pathlib.Path,
    more: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Returns the text of a conversation, up to the beginning of the answer.

    Args:
        template: source of the Jinja template.
        messages: conversation, as `[{"role": "user", "content": "Hello"}]`.
        tokens: text of the special tokens by name, as `bos_token`.
        folder: folder of the template, for errors.
        more: further variables of the template, as `{"enable_thinking": False}`.

    Raises:
        InputError: the template is invalid, refuses the messages or exceeds its limits.
    """
    (result,) = render_all(template, [{**more, "messages": messages}], tokens, folder)
    if isinstance(result, InputError):
        raise result
    return result.text


def render_all(
    template: str,
    conversations: Sequence[Mapping[str, object]],
    tokens: dict[str, str | None],
    folder: pathlib.Path,
) -> list[Rendered | InputError]:
    """Returns the text of each conversation, or the error that `render` raises for it.

    Templates come with downloaded checkpoints, so they run in a sandbox in a separate process. Only
    the operating system can limit time and memory of all operations of Jinja (on macOS only the
    time). Templates can use the functions that `transformers` offers: `raise_exception`,
    `strftime_now` and the filter `tojson`. One process renders all conversations, because to start
    it takes longer than a template.

    Args:
        template, tokens, folder: as in `render`.
        conversations: variables of the template, of which `messages` is one. Unless
            `add_generation_prompt` is false, the text ends with the beginning of an answer.
    """
    results, jobs = {}, {}
    special = {name: text for name, text in tokens.items() if text is not None}
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    for index, more in enumerate(conversations):
        try:
            variables = {**options, **special, **more, "messages": conversation(more["messages"])}
            most = _CHARACTERS + 10 * len(json.dumps(variables))
            jobs[index] = {"variables": variables, "most": most}
        except InputError as error:
            results[index] = error
        except (TypeError, ValueError, RecursionError) as error:
            text = f"messages: expected data for JSON, found {one_line(error)}"
            results[index] = InputError(text)
    for index, result in zip(jobs, _run_child(template, list(jobs.values()))):
        results[index] = _checked(result, folder)
    return [results[index] for index in range(len(conversations))]


def _checked(result: dict, folder: pathlib.Path) -> Rendered | InputError:
    """Returns the text in the child's result for a conversation, or the error that it reports."""
    if "text" in result:
        return Rendered(result["text"], tuple(map(tuple, result["answers"])))
    reason = printable(result["error"])[:_MOST_REASON]
    if result.get("refused"):
        expected = f"a conversation for the chat template of {folder}"
        return InputError(f"messages: expected {expected}, found {reason}")
    return InputError(f"{folder}: expected a chat template for the messages, found {reason}")


def _run_child(template: str, jobs: list[dict]) -> list[dict]:
    """Returns the child process's result for each job, or the error that ended the process."""
    if not jobs:
        return []
    # The child imports Jinja from this process's path. -P: it ignores its own folder.
    child = subprocess.run(
        [sys.executable, "-P", str(_CHILD), str(_SECONDS), str(_MEMORY)],
        input=json.dumps({"template": template, "jobs": jobs}),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        return json.loads(child.stdout)
    except ValueError:  # the child failed, or reached a limit
        if len(jobs) > 1:  # the limits are those of one conversation, and so is the fault
            return [result for job in jobs for result in _run_child(template, [job])]
        limits = f"one that needs more than {_SECONDS} s or {_MEMORY >> 20} MiB"
        return [{"error": [limits, *child.stderr.splitlines()][-1]}]


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
