"""Memory and lower bounds on times of a pair that was compiled ahead of time."""

import dataclasses
from collections.abc import Callable, Mapping

from spsjax.drafters import base
from spsjax.errors import InputError, short_repr
from spsjax.planning import aot, roofline, theory
from spsjax.planning.compiled_program import CompiledProgram

PROPOSING = "propose", "propose, sampling"  # of `compiled_program.PHASES`


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Results of `report`."""

    device: str  # kind and number of the chips
    memory: float  # bytes of memory per chip
    # Bytes per chip, of target and drafter together.
    weights: int
    caches: int
    programs: dict[str, CompiledProgram]  # compiled programs by name, of `aot.PROGRAMS`
    # Costs by name: target (one token), scoring (K+1 tokens), and the drafter's (`base.Pass`).
    passes: dict[str, roofline.PassCost]
    acceptance: float  # assumed acceptance rate of a draft token
    block_efficiency: float  # tokens per target call that follow from it
    # Lower bounds of the time: per token of plain decoding, per round, and per token of a round.
    ars_ms: float
    round_ms: float
    sps_ms: float

    @property
    def needed(self) -> int:
        """Bytes per chip: weights, caches, and the most temporaries of any program."""
        most = max(program.temporary for program in self.programs.values())
        return self.weights + self.caches + most


def report(
    plan: aot.PairPlan,
    acceptance: float = 0.8,
    collective_us: float = 0.0,
    compiler_options: Mapping[str, str | bool | int] | None = None,
    progress: Callable = lambda names: names,
) -> CompileReport:
    """Compiles all programs of a plan; returns their figures, with lower bounds on times.

    `acceptance` is the assumed acceptance rate of a draft token, in a tree that of first children;
    other children are left out of the prediction. `collective_us` are assumed microseconds per
    collective, in addition to its bytes over the bandwidth. No published figure states it; 0 gives
    a lower bound. Raises InputError for an argument that cannot be used, or for programs that do
    not fit into the memory.
    """
    if not 0 <= acceptance <= 1:
        raise InputError(f"acceptance: expected a number in [0, 1], found {short_repr(acceptance)}")
    if not 0 <= collective_us < 1e6:
        raise InputError(
            f"collective_us: expected a number >= 0, found {short_repr(collective_us)}"
        )
    programs = plan.compile(options=compiler_options, progress=progress)
    plan.check_fits({name: program.temporary for name, program in programs.items()})
    passes = _passes(plan, programs, collective_us)
    K, devices = plan.drafter.num_speculative_tokens, plan.mesh.devices
    tokens = theory.block_efficiency(acceptance, K)  # along first children, in a tree
    round_seconds = sum(
        cost.times * cost.seconds for name, cost in passes.items() if name != "target"
    )
    return CompileReport(
        device=f"{devices.size} x {devices.flat[0].device_kind} ({plan.name})",
        memory=plan.chip.memory,
        weights=roofline.num_bytes(plan.params),
        caches=sum(plan.caches.values()),
        programs=programs,
        passes=passes,
        acceptance=acceptance,
        block_efficiency=tokens,
        ars_ms=1e3 * passes["target"].seconds,
        round_ms=1e3 * round_seconds,
        sps_ms=1e3 * round_seconds / tokens,
    )


def _passes(
    plan: aot.PairPlan, programs: Mapping[str, CompiledProgram], collective_us: float
) -> dict[str, roofline.PassCost]:
    """Returns lower bounds on the passes of a round, and on that of plain decoding."""
    drafter, ars, sps = plan.drafter, programs["ArS"], programs["SpS"]
    drafting = {"propose": PROPOSING, "sync": ("sync",)}
    others = set(sps.executed) - {*PROPOSING, "sync"}

    def bound(weights, cache, tokens, program, phases, experts, times=1) -> roofline.PassCost:
        collectives, moved = (
            sum(counts.get(phase, 0) for phase in phases) / times
            for counts in (program.executed, program.moved)
        )
        return roofline.lower_bound(
            plan.chip,
            plan.mesh,
            weights,
            cache,
            tokens,
            plan.batch,
            collectives=collectives,
            moved=moved,
            collective_us=collective_us,
            per_token=experts,
            times=times,
        )

    target, cache = roofline.multiplied(plan.target, plan.params["target"]), plan.caches["target"]
    experts, scored = plan.target.experts_per_token, 1 + base.num_nodes(drafter)
    costs = {
        "target": bound(target, cache, 1, ars, set(ars.executed), experts),
        "scoring": bound(target, cache, scored, sps, others, experts),
    }
    for name, made in drafter.passes(plan.params).items():
        costs[name] = bound(
            roofline.multiplied(drafter.config, made.weights),
            plan.caches["draft"] if made.reads_cache else 0,
            made.tokens,
            sps,
            # All collectives of a phase count as those of its first pass.
            drafting.pop(made.phase, ()),
            drafter.config.experts_per_token,
            made.times,
        )
    return costs
