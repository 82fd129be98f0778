"""Child process of `chat_template`, which renders one template in a sandbox with limits.

It runs as a script and imports no module of this package, because JAX takes seconds to import. Its
arguments are limits of CPU seconds and bytes of memory. It reads a JSON object with a template and
jobs: variables, and the greatest length of the text. Per job it writes the text and where the
template marks answers, or an error and whether the template refused the messages. If the memory is
too small, it writes nothing.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
import resource
import secrets
import sys

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Random marks of the beginning and the end of an answer, which no conversation can contain.
_MARKS = [f"\2{secrets.token_hex(8)}{kind}\3" for kind in "[]"]


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks answers for training. It renders its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in _MARKS)
        return [begin, *content, end]


class _Refusal(Exception):
    """Call of `raise_exception` by a template."""


def main() -> None:
    """Renders the template from standard input and writes the result to standard output."""
    limits = zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:]))
    for limit, value in (*limits, (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS cannot limit memory
            resource.setrlimit(limit, (value, value))
    request = json.load(sys.stdin)
    json.dump([_result(request["template"], **job) for job in request["jobs"]], sys.stdout)


def _result(template: str, variables: dict, most: int) -> dict:
    """Returns the text of a conversation and its answers, or an error."""
    try:
        text = _compiled(template).render(variables)
        pieces = re.split(f"({'|'.join(map(re.escape, _MARKS))})", text)
        pieces, marks = pieces[::2], pieces[1::2]
        if marks != _MARKS * (len(marks) // 2):
            raise ValueError("a {% generation %} inside another, or one that is not closed")
        text, ends = "".join(pieces), list(itertools.accumulate(map(len, pieces)))
        if len(text) > most:
            raise ValueError(f"a text of more than {most:,} characters")
        return {"text": text, "answers": list(zip(ends[:-1:2], ends[1::2]))}
    except MemoryError:  # a result would need memory, too
        raise
    except Exception as error:  # a template is a program, which can raise anything
        reason = " ".join(str(error).split())[:1000] or type(error).__name__
        return {"error": reason, "refused": isinstance(error, _Refusal)}


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(template)


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
