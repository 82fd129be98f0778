"""Bytes that a compiled TPU program moves to and from the chip's memory, from its text (HLO).

The compiler's own count includes its scratch memory (VMEM), which is faster than the chip's memory.
A layout names it: `bf16[8,128]{1,0:S(1)}`.
"""

import functools
import math
import re
import sys
from collections.abc import Iterator

from spsjax.planning import hlo

_LINE = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r" calls=%?([\w.\-]+)")
# Operations that move nothing, or whose starts and bodies are counted. So are those on "-done" and
# "-update".
_NO_MOVE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "opt-barrier", "partition-id", "replica-id"),
}
# Collectives whose start has its operand among its results.
_WITH_OPERAND = {"all-gather-start", "collective-permute-start"}
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
    if match is None or match["op"] in _NO_MOVE or match["op"].endswith(("-done", "-update")):
        return 0
    operation, result = match["op"], match["type"]
    if operation in ("copy-start", "slice-start"):
        sides = _ARRAY.findall(result)[:2]  # source and destination, in any order
        size = min(_size(*side[:2]) for side in sides)
        return size * sum("S(" not in side[2] for side in sides)
    operands = _operands(match["rest"])
    sizes = [_in_memory(types.get(name, "")) for name in operands]
    if operation == "fusion" and (calls := _CALLS.search(line)):
        fusion = _Fusion(computations[calls[1]])
        read = sum(min(size, fusion.read(index)) for index, size in enumerate(sizes))
        return read + fusion.written(_ARRAY.findall(result))
    written = _in_memory(result)
    if operation in _PARTS:
        sizes[0] = min(sizes[0], _in_any_memory(result))
    elif operation == "dynamic-update-slice":
        sizes[0], written = 0, min(written, _in_any_memory(types[operands[1]]))
    elif operation in _WITH_OPERAND:
        written -= sum(sizes)
    return sum(sizes) + written


def _operands(rest: str) -> list[str]:
    """Returns the names of the operands in the text behind an operation's opening parenthesis."""
    return _NAME.findall(rest.partition(")")[0])


class _Fusion:
    """Instructions of a fusion: what they read of each operand, and write of each result."""

    def __init__(self, instructions: list[re.Match]):
        self.by_name = {match["name"]: match for match in instructions}
        self.root = instructions[-1]

    def read(self, index: int) -> int:
        """Returns the bytes that are read of an operand, or a huge number for all of it."""
        (name,) = (
            match["name"]
            for match in self.by_name.values()
            if match["op"] == "parameter" and int(match["rest"].partition(")")[0]) == index
        )
        total = 0
        for user, is_first in self._users(name):
            if is_first and user["op"] in _PARTS:
                total += _in_any_memory(user["type"])
            elif not (is_first and user["op"] == "dynamic-update-slice"):
                return sys.maxsize
        return total

    def written(self, results: list[tuple[str, str, str]]) -> int:
        """Returns the bytes that are written to results in memory; updates are in place."""
        root = self.root
        names = _operands(root["rest"]) if root["op"] == "tuple" else [root["name"]]
        total = 0
        for name, (bits, sizes, layout) in zip(names, results):
            source = self.by_name[name]
            while source["op"] == "bitcast":
                source = self.by_name[_operands(source["rest"])[0]]
            size = _size(bits, sizes)
            if source["op"] == "dynamic-update-slice":
                update = self.by_name[_operands(source["rest"])[1]]
                size = min(size, _in_any_memory(update["type"]))
            total += size * ("S(" not in layout)
        return total

    def _users(self, name: str) -> Iterator[tuple[re.Match, bool]]:
        """Yields what reads a name, through bitcasts, and whether it is the first operand."""
        for user in self.by_name.values():
            if user["op"] == "parameter" or name not in (operands := _operands(user["rest"])):
                continue
            if user["op"] == "bitcast":
                yield from self._users(user["name"])
            else:
                yield user, operands[0] == name


def _size(bits: str, sizes: str) -> int:
    """Returns the bytes of an array; a pred has no bits in its name."""
    return math.prod(int(size) for size in sizes.split(",") if size) * int(bits or 8) // 8


def _in_memory(text: str) -> int:
    """Returns the bytes of a type's arrays that are in the chip's memory."""
    return sum(_size(*side[:2]) for side in _ARRAY.findall(text) if "S(" not in side[2])


def _in_any_memory(text: str) -> int:
    """Returns the bytes of a type's arrays."""
    return sum(_size(*side[:2]) for side in _ARRAY.findall(text))
