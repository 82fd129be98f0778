"""Bytes that a compiled TPU program moves to and from the chip's memory, from its text (HLO).

The compiler's own count includes its scratch memory (VMEM), which is faster than the chip's memory.
A layout names it: `bf16[8,128]{1,0:S(1)}`.
"""

import functools
import math
import re
from collections.abc import Callable

from spsjax.planning import hlo

_LINE = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r" calls=%?([\w.\-]+)")
# Operations that move nothing, or whose starts and bodies are counted.
_NO_MOVE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "opt-barrier", "copy-done", "slice-done", "async-done", "async-update"),
    *("partition-id", "replica-id"),
}
_PARTS = {"dynamic-slice", "slice", "gather"}  # operations that read a part of their first operand


def accessed(text: str) -> dict[str, int]:
    """Returns the bytes that are read from and written to memory per scope, as `hlo.tally` adds up.

    An operand counts once per instruction that reads it. Of operands that an instruction slices,
    gathers from, or updates in place, the part that it touches counts.
    """
    computations = _computations(text)
    # Names of instructions are unique in a program.
    types = {match["name"]: match["type"] for own in computations.values() for match in own}
    return hlo.tally(text, functools.partial(_moved, types, computations))


def _computations(text: str) -> dict[str, list[re.Match]]:
    """Returns the instructions of each computation by name."""
    instructions: dict[str, list[re.Match]] = {}
    name = ""
    for line in text.splitlines():
        if match := hlo.COMPUTATION.match(line):
            name = match["name"]
            instructions[name] = []
        elif match := _LINE.match(line):
            instructions[name].append(match)
    return instructions


def _moved(types: dict[str, str], computations: dict[str, list[re.Match]], line: str) -> int:
    """Returns the bytes that one instruction moves."""
    match = _LINE.match(line)
    if match is None or match["op"] in _NO_MOVE:
        return 0
    operation, result = match["op"], match["type"]
    if operation in ("copy-start", "slice-start"):
        sides = _ARRAY.findall(result)[:2]  # source and destination, in any order
        size = min(_size(*side[:2]) for side in sides)
        return size * sum("S(" not in side[2] for side in sides)
    operands = _operands(match["rest"])
    reads: list[Callable[[int], int]] = [lambda size: size] * len(operands)
    written = _in_memory(result)
    if operation == "fusion" and (calls := _CALLS.search(line)):
        reads, updated = _parts_of(computations[calls[1]])
        written = written if updated is None else min(written, updated)
    elif operation in _PARTS:
        reads[0] = functools.partial(min, _in_any_memory(result))
    elif operation == "dynamic-update-slice":
        reads[0], written = (lambda _: 0), min(written, _in_any_memory(types[operands[1]]))
    read = [part(_in_memory(types.get(name, ""))) for name, part in zip(operands, reads)]
    return sum(read) + written


def _operands(rest: str) -> list[str]:
    """Returns the names of the operands in the text behind an operation's opening parenthesis."""
    return _NAME.findall(rest.partition(")")[0])


def _parts_of(instructions: list[re.Match]) -> tuple[list[Callable[[int], int]], int | None]:
    """Returns how much of each operand a fusion reads, and how much it updates in place.

    The former are functions of the operand's size. The latter is None if it writes its whole
    result.
    """
    types = {match["name"]: match["type"] for match in instructions}
    readers: dict[str, list[re.Match]] = {match["name"]: [] for match in instructions}
    for match in instructions:
        for name in _operands(match["rest"]):
            readers.setdefault(name, []).append(match)
    updates = [match for match in instructions if match["op"] == "dynamic-update-slice"]
    in_place = {_source(instructions, _operands(match["rest"])[0]) for match in updates}
    reads: dict[int, Callable[[int], int]] = {}
    for match in instructions:
        if match["op"] != "parameter":
            continue
        users = readers[match["name"]]
        if match["name"] in in_place:
            part = 0
        elif users and all(
            user["op"] in _PARTS and _operands(user["rest"])[0] == match["name"] for user in users
        ):
            part = sum(_in_any_memory(user["type"]) for user in users)
        else:
            part = math.inf
        reads[int(match["rest"].partition(")")[0])] = functools.partial(min, part)
    written = sum(_in_any_memory(types[_operands(match["rest"])[1]]) for match in updates)
    return [reads[index] for index in sorted(reads)], written if updates else None


def _source(instructions: list[re.Match], name: str) -> str:
    """Returns the instruction from which a name comes by bitcasts alone."""
    by_name = {match["name"]: match for match in instructions}
    while name in by_name and by_name[name]["op"] == "bitcast":
        name = _operands(by_name[name]["rest"])[0]
    return name


def _size(bits: str, sizes: str) -> int:
    """Returns the bytes of an array; a pred has no bits in its name."""
    return math.prod(int(size) for size in sizes.split(",") if size) * int(bits or 8) // 8


def _in_memory(text: str) -> int:
    """Returns the bytes of a type's arrays that are in the chip's memory."""
    return sum(_size(*side[:2]) for side in _ARRAY.findall(text) if "S(" not in side[2])


def _in_any_memory(text: str) -> int:
    """Returns the bytes of a type's arrays."""
    return sum(_size(*side[:2]) for side in _ARRAY.findall(text))
