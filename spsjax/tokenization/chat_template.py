"""Chat templates: a conversation as the text that a model was trained on."""

import datetime
import json
from collections.abc import Sequence

import jinja2.ext
import jinja2.sandbox

from spsjax.errors import InputError, one_line, short_repr


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; here it is what is within."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str | None]) -> str:
    """The conversation, and what begins the answer.

    Templates come with a checkpoint, from anywhere: they run in a sandbox. They may use what
    `transformers` gives them: the special `tokens`, `raise_exception`, `strftime_now`, `tojson`.

    Raises InputError where the template is none, or refuses the messages.
    """
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
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    known = {name: text for name, text in tokens.items() if text is not None}
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(messages=messages, **options, **known)
    except Exception as error:  # a template is a program: it may fail in any way
        raise InputError(
            f"messages: expected what the chat template takes, found {one_line(error)}"
        ) from None


def _tojson(value, indent=None, ensure_ascii=False, separators=None, sort_keys=False) -> str:
    """JSON without the escapes of HTML that Jinja's own filter makes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str):
    raise jinja2.exceptions.TemplateError(message)
