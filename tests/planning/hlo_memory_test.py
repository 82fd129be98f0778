"""Tests of the bytes that a compiled program moves to and from memory."""

import pytest

from spsjax.planning import hlo_memory

# A loop of three rounds. `S(1)` is the scratch memory. Layouts have tiles, as in TPU programs.
PROGRAM = """HloModule m

%sliced (p.0: f32[100,8], p.1: s32[]) -> f32[1,8] {
  %p.0 = f32[100,8]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  ROOT %a = f32[1,8]{1,0:T(1,128)} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,8}
}

%updated (p.2: f32[64,8], p.3: f32[2,8], p.4: s32[]) -> f32[64,8] {
  %p.2 = f32[64,8]{1,0:T(8,128)} parameter(0)
  %p.3 = f32[2,8]{1,0:T(2,128)} parameter(1)
  %p.4 = s32[]{:T(128)} parameter(2)
  %b = f32[64,8]{1,0:T(8,128)} bitcast(%p.2)
  ROOT %c = f32[64,8]{1,0:T(8,128)} dynamic-update-slice(%b, %p.3, %p.4)
}

%multiplied (p.5: bf16[8,32], p.6: bf16[2,8]) -> bf16[2,32] {
  %p.5 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p.6 = bf16[2,8]{1,0:T(2,128)(2,1)} parameter(1)
  ROOT %d = bf16[2,32]{1,0:T(2,128)(2,1)} convolution(%p.6, %p.5), dim_labels=bf_io->bf
}

%body (t.1: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %t.1 = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %cache = f32[64,8]{1,0:T(8,128)} get-tuple-element(%t.1), index=1
  %table = f32[100,8]{1,0:T(8,128)} get-tuple-element(%t.1), index=2
  %weights = bf16[8,32]{1,0:T(8,128)(2,1)} get-tuple-element(%t.1), index=3
  %row = f32[1,8]{1,0:T(1,128)S(1)} fusion(%table, %i), kind=kLoop, calls=%sliced, metadata={op_name="f/while/body/embed/slice"}
  %copy-start.1 = (bf16[8,32]{1,0:T(8,128)(2,1)S(1)}, bf16[8,32]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weights), metadata={op_name="f/while/body/up/copy"}
  %copy-done.1 = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %x = bf16[2,8]{1,0:T(2,128)(2,1)S(1)} convert(%row), metadata={op_name="f/while/body/embed/convert"}
  %y = bf16[2,32]{1,0:T(2,128)(2,1)} fusion(%copy-done.1, %x), kind=kOutput, calls=%multiplied, metadata={op_name="f/while/body/up/dot"}
  %z = bf16[2,32]{1,0:T(2,128)(2,1)S(1)} fusion(%weights, %x), kind=kOutput, calls=%multiplied, metadata={op_name="f/while/body/gate/dot"}
  %n = f32[2,8]{1,0:T(2,128)S(1)} slice(%table), slice={[0:2], [0:8]}, metadata={op_name="f/while/body/part/slice"}
  %u = f32[64,8]{1,0:T(8,128)} fusion(%cache, %n, %i), kind=kLoop, calls=%updated, metadata={op_name="f/while/body/write/update"}
  ROOT %t.2 = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) tuple(%i, %u)
}

%condition (t.3: (s32[], f32[64,8])) -> pred[] {
  %t.3 = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t.3), index=0
  %most = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%j, %most), direction=LT
}

ENTRY %main (t.4: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %t.4 = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) parameter(0)
  ROOT %w = (s32[]{:T(128)}, f32[64,8]{1,0:T(8,128)}) while(%t.4), condition=%condition, body=%body, metadata={op_name="f/while"}
}
"""  # noqa: E501


def test_accessed_counts_what_instructions_touch_outside_of_scratch():
    """Indices of four bytes are read where a slice begins."""
    per_round = {
        "embed/slice": 32 + 4,  # a row of the table, into scratch memory
        "up/copy": 512,  # the weights, into scratch memory
        "up/dot": 128,  # a result in memory; both operands are in scratch memory
        "gate/dot": 512,  # the weights, in memory
        "part/slice": 64,
        "write/update": 64 + 4,  # the new rows of a cache that is updated in place
    }
    expected = {f"f/while/body/{name}": 3 * count for name, count in per_round.items()}
    expected["f/while"] = 3 * (4 + 4 + 1)  # the condition
    assert hlo_memory.accessed(PROGRAM) == expected


def test_accessed_counts_whole_operands_that_others_read_too():
    program = PROGRAM.replace(
        "ROOT %a = f32[1,8]", "%whole = f32[100,8] negate(%p.0)\n  ROOT %a = f32[1,8]"
    )
    counts = hlo_memory.accessed(program)
    assert counts["f/while/body/embed/slice"] == 3 * (3200 + 4)


def test_accessed_slices_and_updates_through_bitcasts_and_in_tuples():
    """One result of the fusion is the updated cache, the other is read from all of the cache."""
    root = "ROOT %c = f32[64,8]{1,0:T(8,128)} dynamic-update-slice(%b, %p.3, %p.4)"
    update = root.replace("ROOT ", "")
    negated = "%d.1 = f32[64,8]{1,0:T(8,128)} negate(%p.2)"
    both = f"{update}\n  {negated}\n  ROOT %e = (f32[64,8], f32[64,8]) tuple(%c, %d.1)"
    result = "%u = f32[64,8]{1,0:T(8,128)} fusion("
    pair = "%u = (f32[64,8]{1,0:T(8,128)}, f32[64,8]{1,0:T(8,128)}) fusion("
    counts = hlo_memory.accessed(PROGRAM.replace(root, both).replace(result, pair))
    assert counts["f/while/body/write/update"] == 3 * (2048 + 64 + 4 + 2048)
    cut, view = "ROOT %a = f32[1,8]{1,0:T(1,128)} dynamic-slice(", "%v = f32[100,8] bitcast(%p.0)"
    program = PROGRAM.replace(f"{cut}%p.0", f"{view}\n  {cut}%v")
    assert hlo_memory.accessed(program)["f/while/body/embed/slice"] == 3 * (32 + 4)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "collective-permute"])
def test_accessed_asynchronous_collective_counts_as_the_plain_one(kind):
    array = "f32[100,8]{1,0:T(8,128)}"
    result = array if kind == "all-reduce" else f"({array}, {array}, u32[]{{:S(2)}})"
    plain = f"  %o = {array} {kind}(%table)\n"
    parts = f"  %s = {result} {kind}-start(%table)\n  %o = {array} {kind}-done(%s)\n"
    first = "  %row ="
    counts = [
        sum(hlo_memory.accessed(PROGRAM.replace(first, lines + first)).values())
        for lines in (plain, parts)
    ]
    assert counts[0] == counts[1]
