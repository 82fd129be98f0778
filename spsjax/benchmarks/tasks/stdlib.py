"""Completion of functions of the standard library that no shipped model was trained on."""

import ast
import dataclasses
import difflib
import hashlib
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar

from spsjax.benchmarks.tasks import base
from spsjax.data import documents
from spsjax.errors import InputError, check_integer
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Held-out files up to a function's docstring, to be continued with the function's body."""

    # Sources of documents, of which the held-out ones are used (`documents.held_out`).
    sources: documents.Sources = documents.Sources(("stdlib",))
    lines: int = 20  # number of lines before the body that form the prompt
    count: int = 100  # number of examples, chosen by the hash of their names; 0 for all
    least: int = 3  # least number of lines of a body
    max_new_tokens: int = 128  # token budget per answer

    settings: ClassVar = {
        "nucleus": SamplingParams(temperature=0.8, top_p=0.95),
        "greedy": SamplingParams(temperature=0.0),
    }
    code: ClassVar = True

    def __post_init__(self):
        for field, least in (("lines", 1), ("count", 0), ("least", 1)):
            check_integer(field, getattr(self, field), least)

    def examples(self):
        examples = [
            example
            for document in documents.held_out(self.sources)
            for example in self._functions(document)
        ]
        if not examples:
            raise InputError("sources: expected held-out files with functions, found none")
        examples.sort(key=lambda example: hashlib.sha256(example.name.encode()).hexdigest())
        yield from examples[: self.count or None]

    def _functions(self, document: documents.Document) -> Iterator[base.Example]:
        """Yields an example per function of a document."""
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):  # not Python, or a newer version of it
            return
        rows = document.text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            body = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            before = node.body[0].end_lineno if len(body) < len(node.body) else _head(node)
            if not body or body[0].lineno <= before:  # the body shares a line with the head
                continue
            if node.end_lineno - before < self.least:
                continue
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            first = max(before - self.lines, 0)
            reference = {
                "head": "".join(rows[start:before]),
                "body": "".join(rows[before : node.end_lineno]),
                "indent": body[0].col_offset,
            }
            name = f"{document.name}:{node.lineno} {node.name}"
            yield base.Example(name, ("".join(rows[first:before]),), reference)

    def answer(self, example, text):
        """Returns the text up to the first line that is indented less than the body."""
        lines = []
        for line in text.splitlines(keepends=True):
            stripped = line.strip()
            if stripped and len(line) - len(line.lstrip()) < example.reference["indent"]:
                break
            lines.append(line)
        return "".join(lines).rstrip() + "\n"

    def scores(self, example, answers):
        """Returns the mean scores over the answers."""
        scored = [answer_scores(example, answer) for answer in answers]
        return {name: sum(scores[name] for scores in scored) / len(scored) for name in scored[0]}


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the last line of the head of a function without a docstring."""
    trees = [node.args, node.returns, *node.decorator_list]
    ends = [
        getattr(child, "end_lineno", 0) or 0 for tree in trees if tree for child in ast.walk(tree)
    ]
    return max([node.lineno, *ends])


def answer_scores(example: base.Example, answer: str) -> dict[str, float]:
    """Returns whether an answer parses, whether its first line is right, and its similarity."""
    head, body = example.reference["head"], example.reference["body"]
    lines, answered = (
        [line.strip() for line in text.splitlines() if line.strip()] for text in (body, answer)
    )
    return {
        "parses": float(_is_function(head + answer)),
        "next line": float(bool(answered) and answered[0] == lines[0]),
        "similarity": difflib.SequenceMatcher(None, body, answer, autojunk=False).ratio(),
    }


def _is_function(text: str) -> bool:
    """Returns whether a text is one function with a body after its docstring."""
    try:
        node: Any
        (node,) = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return len(node.body) > (ast.get_docstring(node, clean=False) is not None)
