"""What a compiled program says of itself: the collectives in its text, and a TPU's cycles."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # bf16[1,5,512]
_SCOPE = re.compile(r'op_name="([^"]*)"')
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CONDITIONAL = re.compile(r" conditional\(.*branch_computations=\{([^}]*)\}")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program, as one device sees it.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
        shapes: of what it produces.
        num_bytes: of what it produces.
        scope: the names of the scopes that it was traced in, joined by slashes.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    scope: str


def collectives(text: str) -> list[Collective]:
    """The collectives in a program's text (`compiled.as_text()`), each once, in loops too."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if not match:
            continue
        results = _SHAPE.findall(match[1])
        if match[3] and match[2] in ("all-gather", "collective-permute"):
            # An asynchronous one names its operands first, and flags of its own last.
            results = results[1:2] if match[2][0] == "c" else results[len(results) // 2 :]
        shapes, num_bytes = [], 0
        for bits, sizes in results:
            shape = tuple(int(size) for size in sizes.split(",") if size)
            shapes.append(shape)
            num_bytes += math.prod(shape) * int(bits or 8) // 8
        scope = _SCOPE.search(line)
        found.append(Collective(match[2], tuple(shapes), num_bytes, scope[1] if scope else ""))
    return found


def shapes(found: list[Collective]) -> dict[str, list[tuple[int, ...]]]:
    """Kind -> the shapes that its instructions produce."""
    kinds = collections.defaultdict(list)
    for each in found:
        kinds[each.kind] += each.shapes
    return kinds


def cycles(text: str) -> dict[str, int]:
    """Scope -> cycles, as the TPU's compiler estimates them in a program's text, by `tally`.

    Missing is what it does not estimate: collectives, sorts, custom calls.
    """
    return tally(text, lambda line: int(match[1]) if (match := _CYCLES.search(line)) else 0)


def executed(text: str) -> dict[str, int]:
    """Scope -> how many collectives are run, by `tally`."""
    return tally(text, lambda line: 1 if _COLLECTIVE.search(line) else 0)


def tally(text: str, measure: Callable[[str], int]) -> dict[str, int]:
    """Scope -> the sum of `measure(line)` over the instructions that run.

    A loop counts as often as it runs, where it counts up from 0 to a constant, and once
    otherwise; a conditional counts as its largest branch. An instruction without a scope belongs to
    that of the loop or conditional around it.
    """
    lines, entry, name = collections.defaultdict(list), None, None
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            name = match["name"]
            entry = name if match["entry"] else entry
        elif name:
            lines[name].append(line)

    def trips(condition: str) -> int:
        bounds = [int(bound) for line in lines[condition] for bound in _BOUND.findall(line)]
        counts_up = any("direction=LT" in line for line in lines[condition])
        return bounds[0] if len(bounds) == 1 and counts_up else 1

    def total(computation: str, outer: str) -> collections.Counter:
        found = collections.Counter()
        for line in lines[computation]:
            scope = _SCOPE.search(line)
            scope = scope[1] if scope and "/" in scope[1] else outer
            found[scope] += measure(line)
            if match := _WHILE.search(line):
                times = trips(match[1])
                for inner, value in total(match[2], scope).items():
                    found[inner] += times * value
            elif match := _CONDITIONAL.search(line):
                branches = [total(each.strip(" %"), scope) for each in match[1].split(",")]
                found += max(branches, key=lambda branch: branch.total())
        return +found

    return dict(total(entry, ""))
