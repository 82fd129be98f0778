"""Tests of the parser of compiled programs: collectives and estimated cycles."""

import pytest

from spsjax.planning import hlo

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
    "  %p = (f32[64]{0:T(128)}, f32[32]{0:T(128)}, u32[]{:S(2)}, u32[]{:S(2)}) "
    "collective-permute-start(%x)": hlo.Collective("collective-permute", ((32,),), 128, ""),
    "  %d = s32[2] collective-permute(%x)": hlo.Collective("collective-permute", ((2,),), 8, ""),
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_collectives_line_with_one_returns_it(line):
    assert hlo.collectives(f"HloModule m\n{line}\n") == [LINES[line]]


def test_collectives_line_that_mentions_one_returns_none():
    for line in (
        "  %e = bf16[8] all-reduce-done(%b)",
        "  %f = bf16[8] fusion(%all-reduce.1), calls=%g",
        "  ROOT %g = f32[8] add(%all-gather, %x)",
    ):
        assert hlo.collectives(line) == [], line


PROGRAM = """HloModule m

%fused (x: f32[8]) -> f32[8] {
  ROOT %y = f32[8] add(%x, %x), backend_config={"estimated_cycles":"999"}
}

%small.1 (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8] copy(%x), backend_config={"window_config":{"estimated_cycles":"1"}}
}

%large.1 (x: f32[8]) -> f32[8] {
  %b = f32[8] all-reduce(%x), to_apply=%add, metadata={op_name="jit(f)/while/body/in/add"}
  ROOT %c = f32[8] fusion(%b), calls=%fused, backend_config={"estimated_cycles":"10"}
}

%body (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = f32[8] fusion(%x), calls=%fused, metadata={op_name="jit(f)/while/body/on/mul"}, backend_config={"estimated_cycles":"100"}
  %e = f32[8] conditional(%p, %d, %d), branch_computations={%small.1, %large.1}, metadata={op_name="jit(f)/while/body/if/cond"}
}

%condition (x: (s32[], f32[8])) -> pred[] {
  %f = s32[]{:T(128)} constant(7)
  ROOT %g = pred[] compare(%i, %f), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %h = f32[8] copy(%x), metadata={op_name="copy.3"}, backend_config={"estimated_cycles":"1000"}
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
}
"""  # noqa: E501


ASYNC = """
%fused.1 (x: f32[8]) -> (f32[8], f32[32], u32[]) {
  %a.1 = f32[32] all-gather(%x), metadata={op_name="jit(f)/propose/slice"}
}

%fused.2 (x: f32[8]) -> f32[32] {
  %a.2 = f32[32] all-gather(%x), metadata={op_name="jit(f)/propose/slice"}
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %async-collective-start.1 = (f32[8], f32[32], u32[]) fusion(%x), kind=kCustom, calls=%fused.1
  ROOT %async-collective-done = f32[32] fusion(%y), kind=kCustom, calls=%fused.2
}
"""


def test_collective_in_fusions_that_start_and_end_it_counts_once():
    scope = "jit(f)/propose/slice"
    assert hlo.collectives(ASYNC) == [hlo.Collective("all-gather", ((32,),), 128, scope)]
    assert hlo.collective_counts(ASYNC) == {scope: 1}
    assert hlo.collective_bytes(ASYNC) == {scope: 128}


def test_tally_counts_iterations_and_most_expensive_branch():
    """The loop runs seven times, and its conditional has branches of 1 and of 10 cycles."""
    scope = "jit(f)/while/body/"
    expected = {"": 1000, scope + "on/mul": 7 * 100, scope + "if/cond": 7 * 10}
    assert hlo.estimated_cycles(PROGRAM) == expected
    assert hlo.collective_counts(PROGRAM) == {scope + "in/add": 7}
    assert hlo.collective_bytes(PROGRAM) == {scope + "in/add": 7 * 32}
    kernels = {"": 1, scope + "on/mul": 7, scope + "in/add": 7, scope + "if/cond": 7}
    kernels["jit(f)/while"] = 7  # of the condition
    assert hlo.kernel_counts(PROGRAM) == kernels


def test_tally_takes_the_trip_count_that_the_compiler_knows():
    """The condition is a fusion then, in which nothing is looked for."""
    known = PROGRAM.replace("compare(%i, %f), direction=LT", "fusion(%i), calls=%fused")
    known = known.replace(
        "body=%body,", 'body=%body, backend_config={"known_trip_count":{"n":"5"}},'
    )
    assert hlo.collective_counts(known) == {"jit(f)/while/body/in/add": 5}


def test_tally_follows_calls_and_branches_of_either_form():
    called = PROGRAM.replace(
        "f32[8] copy(%x), metadata", "f32[8] call(%x), to_apply=%large.1, metadata"
    )
    assert sum(hlo.collective_counts(called).values()) == 8
    forms = (
        "branch_computations={%small.1, %large.1}",
        "true_computation=%small.1, false_computation=%large.1",
    )
    assert hlo.kernel_counts(PROGRAM) == hlo.kernel_counts(PROGRAM.replace(*forms))


@pytest.mark.parametrize(
    ("known", "unknown"), [("constant(7)", "parameter(1)"), ("direction=LT", "direction=GT")]
)
def test_tally_loop_of_unknown_length_counts_once(known, unknown):
    program = PROGRAM.replace(known, unknown)
    assert sum(hlo.estimated_cycles(program).values()) == 1110
    assert sum(hlo.collective_counts(program).values()) == 1
