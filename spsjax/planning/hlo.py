"""Collectives, kernels and estimated cycles in the text of compiled programs (HLO)."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # bf16[1,5,512]
_SCOPE = re.compile(r'op_name="([^"]*)"')
COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLS = re.compile(r" fusion\(.*? calls=%?([\w.\-]+)")
_STARTS = re.compile(r"\s*%?async-collective-start")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)")
_CONDITIONAL = re.compile(
    r" conditional\(.*(?:branch_computations=\{([^}]*)\}|"
    r"true_computation=(%?[\w.\-]+), false_computation=(%?[\w.\-]+))"
)
_OPERATION = re.compile(r"= (?:\(.*?\)|\S+) ([\w\-]+)\(")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")

# Operations for which a GPU starts no kernel of their own.
_WITHOUT_KERNEL = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("while", "conditional", "call", "after-all", "opt-barrier"),
    *("fusion-done", "copy-done", "async-done", "async-update"),
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction of a program, as one device sees it."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute
    shapes: tuple[tuple[int, ...], ...]  # shapes of its results
    num_bytes: int  # bytes of its results
    scope: str  # names of the scopes in which it was traced, joined by slashes


def collectives(text: str) -> list[Collective]:
    """Returns the collectives in a program's text (`compiled.as_text()`).

    A collective in a loop is returned once.
    """
    lines = itertools.chain.from_iterable(_computations(text)[0].values())
    return [collective for line in lines if (collective := _parsed(line))]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of computations by name without those of fusions, and the entry's name.

    A collective that runs beside other work is in several fusions: the first starts it, and the
    others, which have a copy of it, continue it. It is returned behind the line of the first.
    """
    lines, entry, name = collections.defaultdict(list), "", ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match["name"]
            entry = name if match["entry"] else entry
        else:
            lines[name].append(line)
    fused = set(_CALLS.findall(text))
    started = {
        name: [line for line in lines.pop(name, ()) if _COLLECTIVE.search(line)] for name in fused
    }
    whole = {}
    for name, own in lines.items():
        whole[name] = []
        for line in own:
            calls = _CALLS.search(line) if _STARTS.match(line) else None
            whole[name] += [line, *(started[calls[1]] if calls else ())]
    return whole, entry


def _parsed(line: str) -> Collective | None:
    """Returns the collective in a line of a program's text, if it has one."""
    match = _COLLECTIVE.search(line)
    if not match:
        return None
    results = _SHAPE.findall(match[1])
    if match[3] and match[2] in ("all-gather", "collective-permute"):
        # The result of an asynchronous start lists operands, then results. A collective-permute
        # has two flags after them.
        results = results[1:2] if match[2][0] == "c" else results[len(results) // 2 :]
    shapes, num_bytes = [], 0
    for bits, sizes in results:
        shape = tuple(int(size) for size in sizes.split(",") if size)
        shapes.append(shape)
        num_bytes += math.prod(shape) * int(bits or 8) // 8  # a pred has no bits in its name
    scope = _SCOPE.search(line)
    return Collective(match[2], tuple(shapes), num_bytes, scope[1] if scope else "")


def estimated_cycles(text: str) -> dict[str, int]:
    """Returns the cycles per scope that the TPU compiler estimates, added up by `tally`.

    The compiler gives no estimate for collectives, sorts and custom calls.
    """
    return tally(text, lambda line: int(match[1]) if (match := _CYCLES.search(line)) else 0)


def collective_counts(text: str) -> dict[str, int]:
    """Returns the number of executed collectives per scope, added up by `tally`."""
    return tally(text, lambda line: 1 if _COLLECTIVE.search(line) else 0)


def collective_bytes(text: str) -> dict[str, int]:
    """Returns the bytes of the results of executed collectives per scope, added up by `tally`."""
    return tally(text, lambda line: moved.num_bytes if (moved := _parsed(line)) else 0)


def kernel_counts(text: str) -> dict[str, int]:
    """Returns the number of kernels per scope that a GPU starts, added up by `tally`."""
    return tally(text, _starts_kernel)


def _starts_kernel(line: str) -> bool:
    match = _OPERATION.search(line)
    return match is not None and match[1] not in _WITHOUT_KERNEL


def tally(text: str, measure: Callable[[str], int]) -> dict[str, int]:
    """Returns the sum of `measure(line)` over the executed instructions, per scope.

    A loop is multiplied by its number of iterations, if the compiler knows it or if it counts from
    0 up to a constant. Other loops count once. A conditional counts as its most expensive branch.
    An instruction without a scope gets the scope of the loop or conditional around it.
    """
    lines, entry = _computations(text)

    def num_iterations(line: str, condition: str) -> int:
        if known := _TRIPS.search(line):
            return int(known[1])
        bounds = [int(bound) for line in lines[condition] for bound in _BOUND.findall(line)]
        counts_up = any("direction=LT" in line for line in lines[condition])
        return bounds[0] if len(bounds) == 1 and counts_up else 1

    def total(computation: str, outer: str) -> collections.Counter:
        counts: collections.Counter = collections.Counter()
        for line in lines[computation]:
            scope = _SCOPE.search(line)
            scope = scope[1] if scope and "/" in scope[1] else outer
            counts[scope] += measure(line)
            if match := _WHILE.search(line):
                times = num_iterations(line, match[1])
                for inside in match.groups():
                    for inner, value in total(inside, scope).items():
                        counts[inner] += times * value
            elif match := _CALL.search(line):
                counts += total(match[1], scope)
            elif match := _CONDITIONAL.search(line):
                names = match[1].split(",") if match[1] else match.groups()[1:]
                branches = [total(name.strip(" %"), scope) for name in names]
                longest = max(branches, key=lambda branch: branch.total())
                counts += longest
        return +counts  # unary plus drops scopes whose count is 0

    return dict(total(entry, ""))
