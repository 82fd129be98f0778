"""Chat templates, which turn a conversation into the text format of a model."""

import datetime
import json
from collections.abc import Sequence

import jinja2.ext
import jinja2.sandbox

from spsjax.errors import InputError, one_line, short_repr


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks answers for training. It renders its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str | None]) -> str:
    """Returns the text of a conversation, up to the beginning of the answer.

    Templates come with downloaded checkpoints, so they run in a sandbox. They have the functions
    that `transformers` offers: `raise_exception`, `strftime_now` and the filter `tojson`.

    Args:
        template: source of the Jinja template.
        messages: conversation, as `[{"role": "user", "content": "Hello"}]`.
        tokens: text of the special tokens by name, as `bos_token`.

    Raises:
        InputError: the template is invalid, or it refuses the messages.
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
    special = {name: text for name, text in tokens.items() if text is not None}
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render(messages=messages, **options, **special)
    except Exception as error:  # a template is a program, which can raise anything
        raise InputError(
            f"messages: expected a conversation for the chat template, found {one_line(error)}"
        ) from None


def _tojson(value, indent=None, ensure_ascii=False, separators=None, sort_keys=False) -> str:
    """Returns JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str):
    raise jinja2.exceptions.TemplateError(message)
