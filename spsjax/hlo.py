"""What a compiled program says of itself: the collectives in its text."""

import collections
import dataclasses
import math
import re

_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # bf16[1,5,512]
_SCOPE = re.compile(r'op_name="([^"]*)"')


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
            results = results[len(results) // 2 :]  # an asynchronous one names its operands first
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
