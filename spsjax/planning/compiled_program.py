"""Programs compiled for chips that are not attached: memory, collectives, cycles and kernels."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax

from spsjax.errors import InputError, one_line
from spsjax.planning import hlo, hlo_memory
from spsjax.types import PyTree
from spsjax.utils import compilation

# Phases of a round. Sampling in the draft's steps is counted apart from the forward passes.
PHASES = ("sync", "propose", "propose, sampling", "score", "verify", "commit", "other")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Figures of a compiled program, for one chip."""

    seconds: float  # time to compile
    temporary: int  # bytes of temporaries
    aliased: int  # bytes of results that take over an argument's buffer
    # The compiler's count, with the body of a loop counted once; None: it has none (GPUs).
    flops: float | None
    collectives: list[hlo.Collective]  # collectives in the program's text
    # Cycles per phase of one round (`phase`); `hlo.estimated_cycles` says what is missing.
    cycles: dict[str, int]
    accessed: dict[str, int]  # on TPUs: bytes of memory per phase of one round; empty on a GPU
    kernels: dict[str, int]  # on a GPU: kernels per phase of one round; empty on TPUs
    executed: dict[str, int]  # number of collectives per phase of one round
    moved: dict[str, int]  # bytes of their results


def phase(scope: str) -> str:
    """Returns the phase, one of PHASES, of a scope."""
    for verb in ("sync", "propose", "score", "verify", "commit"):
        if f"/{verb}/" in scope:
            samples = verb == "propose" and ("/to_probs/" in scope or "/draw/" in scope)
            return "propose, sampling" if samples else verb
    return "other"


def _by_phase(counts: dict[str, int]) -> dict[str, int]:
    total = collections.Counter()
    for scope, count in counts.items():
        total[phase(scope)] += count
    return dict(total)


def compile_program(
    function, static, *args, donate: int | None = None, options=None
) -> tuple[CompiledProgram, PyTree]:
    """Returns the program, and the shapes and shardings of its results."""
    start = time.perf_counter()
    jitted, numbers = compilation.jitted(function, *static, donate=donate)
    lowered = jitted.lower(numbers, *args)
    try:
        with uncached():
            compiled = lowered.compile(compiler_options=dict(options or {}))
    except jax.errors.JaxRuntimeError as error:
        if options and "INVALID_ARGUMENT" in str(error):
            raise InputError(f"compiler_options: {one_line(error)}") from None
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"{function.__name__}: expected a program that fits, found {one_line(error)}"
        ) from None
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # seen with JAX 0.10 and libtpu 0.0.52
        raise InputError(
            f"{function.__name__}: expected a program whose text JAX can read, found "
            f"{one_line(error)}. Other sizes, or another version of libtpu, may do"
        ) from None
    is_gpu = jax.sharding.get_abstract_mesh().abstract_device.platform == "gpu"
    program = CompiledProgram(
        seconds=time.perf_counter() - start,
        temporary=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=cost.get("flops"),
        collectives=hlo.collectives(text),
        cycles=_by_phase(hlo.estimated_cycles(text)),
        accessed={} if is_gpu else _by_phase(hlo_memory.accessed(text)),
        kernels=_by_phase(hlo.kernel_counts(text)) if is_gpu else {},
        executed=_by_phase(hlo.collective_counts(text)),
        moved=_by_phase(hlo.collective_bytes(text)),
    )
    results = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        lowered.out_info,
        compiled.output_shardings,
    )
    return program, results


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Keeps programs out of the persistent cache, because only their chips could read them back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, least)
