"""Faults in spsjax, written as a text with four lines per fault."""

import ast
import typing


class Mutant(typing.NamedTuple):
    """A fault, made by changing one text of one file; each of `tests` must show it."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(text: str) -> list[Mutant]:
    """Returns the mutants of a text: files below `spsjax/`, and below each file its faults.

    Each fault begins with a dash. Below it are the old text, which occurs once in the file, the
    new text, and the tests that must fail. Texts with line breaks or outer spaces are quoted.
    """
    mutants, file = [], ""
    for line in text.strip().split("\n"):
        if line.startswith("- "):
            mutants.append([line[2:], f"spsjax/{file}"])
        elif line.startswith("    "):
            value = line.strip()
            mutants[-1].append(ast.literal_eval(value) if value[0] in "\"'" else value)
        else:
            file = line
    return [Mutant(*fields[:4], tuple(fields[4:])) for fields in mutants]
