"""Child process of `chat_template.render`, which renders one template in a sandbox with limits.

It runs as a script and imports no module of this package, because JAX takes seconds to import. Its
arguments are limits of CPU seconds and bytes of memory. It reads a JSON object with a template, its
variables and the greatest length of the text. It writes a JSON object with the text, or with an
error and whether the template refused the messages. If the memory is too small, it writes nothing.
"""

import contextlib
import datetime
import json
import resource
import sys

import jinja2.ext
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks answers for training. It renders its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(Exception):
    """Call of `raise_exception` by a template."""


def main() -> None:
    """Renders the template from standard input and writes the result to standard output."""
    limits = zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:]))
    for limit, value in (*limits, (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS cannot limit memory
            resource.setrlimit(limit, (value, value))
    request = json.load(sys.stdin)
    try:
        text = _render(request["template"], request["variables"], request["most"])
        result = {"text": text}
    except MemoryError:  # a result would need memory, too
        raise
    except Exception as error:  # a template is a program, which can raise anything
        reason = " ".join(str(error).split())[:1000] or type(error).__name__
        result = {"error": reason, "refused": isinstance(error, _Refusal)}
    json.dump(result, sys.stdout)


def _render(template: str, variables: dict, most: int) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    text = environment.from_string(template).render(variables)
    if len(text) > most:
        raise ValueError(f"a text of more than {most:,} characters")
    return text


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
    raise _Refusal(message)


if __name__ == "__main__":
    with contextlib.suppress(MemoryError):
        main()
