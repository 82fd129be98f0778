"""Collectives are found in a program's text, whatever the compiler writes around them."""

import pytest

from spsjax import hlo

LINES = {
    "  %a.1 = bf16[5,8192]{1,0:T(8,128)(2,1)} all-reduce(%f), to_apply=%add,"
    ' metadata={op_name="jit(run)/while/body/score/dot_general" stack_frame_id=5}': hlo.Collective(
        "all-reduce", ((5, 8192),), 2 * 5 * 8192, "jit(run)/while/body/score/dot_general"
    ),
    "  %b = (f32[8]{0}, pred[]) all-reduce-start(%x, %y), to_apply=%add": hlo.Collective(
        "all-reduce", ((8,), ()), 33, ""
    ),
    "  %c = (f32[4,2]{1,0}, f32[16,2]{1,0}) all-gather-start(%x), dimensions={0}": hlo.Collective(
        "all-gather", ((16, 2),), 128, ""
    ),
    "  %d = s32[2,3] collective-permute(%x)": hlo.Collective(
        "collective-permute", ((2, 3),), 24, ""
    ),
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_a_collective_is_read_from_its_line(line):
    assert hlo.collectives(f"HloModule m\n{line}\n") == [LINES[line]]


@pytest.mark.parametrize(
    "line",
    [
        "  %e = bf16[8] all-reduce-done(%b)",
        "  %f = bf16[8] fusion(%all-reduce.1), calls=%g",
        "  ROOT %g = f32[8] add(%all-gather, %x)",
    ],
)
def test_what_only_mentions_one_is_none(line):
    assert hlo.collectives(line) == []
