"""Programs compiled ahead for TPUs that are not here: what they hold, move and at best would take.

The programs are those that `generate` compiles, for a mesh over a described topology. Nothing runs:
memory, operations and collectives are the compiler's own count; times are floors, from published
figures of the chips.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from spsjax import decode, loading, sampling
from spsjax.drafters import draft_model, none
from spsjax.errors import InputError, one_line, short_repr
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.performance import hardware, hlo, roofline, theory
from spsjax.types import PyTree
from spsjax.verifiers import rejection

# Of a round; what the draft's steps take to sample is apart from its forward passes.
PARTS = ("propose", "propose, sampling", "score", "verify", "commit", "other")


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program, as one chip sees it; `flops` and the like count a loop's body once.

    Attributes:
        temporary: bytes beside arguments and results.
        aliased: bytes of results that take their argument's place.
        flops, bytes_accessed: as the compiler counts them.
        collectives: in the program's text.
        cycles: of one round, by the part of it (`part`); `hlo.estimated_cycles` says what is
            missing.
        executed: collectives of one round, by the part of it.
    """

    seconds: float
    temporary: int
    aliased: int
    flops: float
    bytes_accessed: float
    collectives: list[hlo.Collective]
    cycles: dict[str, int]
    executed: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `compile_pair` found.

    Attributes:
        device: kind and number of the chips.
        memory: bytes of a chip.
        weights, caches: bytes on each chip, of target and draft together.
        programs: by name: prefill, ArS, SpS, and draft (ArS of the draft alone).
        passes: by name: target (one token), scoring (K+1 tokens), draft (one token).
        acceptance: of a draft token; assumed.
        block_efficiency: tokens a round that follow from it.
        ars_ms, sps_ms: a token, at the floor.
    """

    device: str
    memory: float
    weights: int
    caches: int
    programs: dict[str, Program]
    passes: dict[str, roofline.PassCost]
    acceptance: float
    block_efficiency: float
    ars_ms: float
    sps_ms: float

    @property
    def needed(self) -> int:
        """Bytes on each chip: weights, caches, and the most that any program needs beside."""
        return (
            self.weights
            + self.caches
            + max(program.temporary for program in self.programs.values())
        )


def compile_pair(
    target: transformer.Config,
    draft: transformer.Config,
    name: str,
    *,
    num_speculative_tokens: int,
    batch: int = 1,
    prompt_tokens: int = 1024,
    max_new_tokens: int = 512,
    data: int = 1,
    dtype=jnp.bfloat16,
    acceptance: float = 0.8,
    collective_us: float = 0.0,
    compiler_options: Mapping[str, str | bool | int] | None = None,
    progress: Callable = lambda names: names,
) -> Report:
    """Compiles prefill, ArS and SpS of a pair for the topology `name`.

    Args:
        target, draft: shapes; both are split over all chips of a row.
        name: as `chips.topology` takes it.
        num_speculative_tokens: K.
        batch: rows; a multiple of `data`.
        prompt_tokens, max_new_tokens: they size the caches, in buckets as `generate` does.
        data: the mesh's data axis; the other chips split the weights.
        dtype: of weights and caches.
        acceptance: of a draft token, independent of its position.
        collective_us: microseconds that every collective is assumed to take beside its bytes over
            the bandwidth. No published figure says; 0 gives a floor.
        compiler_options: of the TPU's compiler, as {"xla_tpu_...": False}.
        progress: wraps the list of programs while it is gone through.

    Raises:
        InputError: what cannot be split over the chips, or does not fit into their memory.
    """
    K, dtype = num_speculative_tokens, loading.compute_type(dtype)
    numbers = {
        "num_speculative_tokens": K,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "data": data,
    }
    for field, value in numbers.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{field}: expected an integer >= 1, found {short_repr(value)}")
    if not 0 <= acceptance <= 1:
        raise InputError(f"acceptance: expected a number in [0, 1], found {short_repr(acceptance)}")
    if not 0 <= collective_us < 1e6:
        raise InputError(
            f"collective_us: expected a number >= 0, found {short_repr(collective_us)}"
        )
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"draft: expected the target's vocabulary of {target.vocab_size}, "
            f"found {draft.vocab_size}"
        )
    context = min(target.max_positions, draft.max_positions)
    if context <= K:
        raise InputError(
            f"num_speculative_tokens: expected an integer in [1, {context}), the context, found {K}"
        )
    if prompt_tokens + max_new_tokens > context:
        raise InputError(
            f"max_new_tokens: expected prompt and new tokens within the context of {context}, "
            f"found {prompt_tokens} + {max_new_tokens}"
        )
    chip, devices = hardware.topology(name)
    if len(devices) % data or batch % data:
        raise InputError(
            f"data: expected a divisor of {len(devices)} devices and of {batch} rows, found {data}"
        )
    mesh = sharding.mesh(data, len(devices) // data, devices)
    for config in (target, draft):
        sharding.check_divides(mesh, config)
    params = {
        "target": roofline.abstract_params(target, mesh, dtype),
        "drafter": roofline.abstract_params(draft, mesh, dtype),
    }
    width = decode.num_slots(prompt_tokens)
    slots = max(width, decode.num_slots(prompt_tokens + max_new_tokens + K + 1))
    caches = sum(
        roofline.cache_bytes(config, mesh, batch, slots, dtype) for config in (target, draft)
    )
    _check_fits(name, chip.memory, {"weights": roofline.num_bytes(params), "caches": caches})

    rows = sharding.batch_sharding(mesh)
    column = functools.partial(jax.ShapeDtypeStruct, (batch,), sharding=rows)
    inputs = (
        sampling.RowParams(*map(column, (jnp.float32, jnp.int32, jnp.float32, jnp.float32))),
        jax.ShapeDtypeStruct((batch, width), jnp.int32, sharding=rows),
        column(jnp.int32),
        column(jnp.int32),
        column(jax.random.key(0, impl=sampling.GENERATOR).dtype),
    )
    verifier = rejection.Verifier()
    plain = decode.Program(target, none.Drafter(), verifier, (0,))
    fast = decode.Program(target, draft_model.Drafter(draft, K), verifier, (0,))
    programs, state = {}, None
    with jax.set_mesh(mesh):
        for program in progress(["prefill", "ArS", "SpS", "draft"]):
            if program == "prefill":
                programs[program], state = _compile(
                    decode.prefill, (fast, slots), params, *inputs, options=compiler_options
                )
                continue
            start, which, weights = state, fast, params
            if program != "SpS":
                counts = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=rows)
                start = dataclasses.replace(state, drafter=(), accepted=counts)
                which, weights = plain, params | {"drafter": {}}
            if program == "draft":
                start = dataclasses.replace(start, cache=state.drafter)
                which = decode.Program(draft, none.Drafter(), verifier, (0,))
                weights = {"target": params["drafter"], "drafter": {}}
            programs[program], _ = _compile(
                decode.run, (which,), weights, start, donate=1, options=compiler_options
            )
    passes = {
        label: roofline.lower_bound(
            chip, mesh, config, moved, tokens, batch, slots, dtype, collective_us
        )
        for label, config, moved, tokens in (
            ("target", target, programs["ArS"].collectives, 1),
            ("scoring", target, programs["ArS"].collectives, K + 1),
            ("draft", draft, programs["draft"].collectives, 1),
        )
    }
    tokens = theory.block_efficiency(acceptance, K)
    report = Report(
        device=f"{len(devices)} x {devices[0].device_kind} ({name})",
        memory=chip.memory,
        weights=roofline.num_bytes(params),
        caches=caches,
        programs=programs,
        passes=passes,
        acceptance=acceptance,
        block_efficiency=tokens,
        ars_ms=1e3 * passes["target"].seconds,
        sps_ms=1e3 * (K * passes["draft"].seconds + passes["scoring"].seconds) / tokens,
    )
    beside = {name: program.temporary for name, program in programs.items()}
    largest = max(beside, key=beside.get)
    _check_fits(
        name,
        chip.memory,
        {"weights": report.weights, "caches": caches, f"temporaries of {largest}": beside[largest]},
    )
    return report


def part(scope: str) -> str:
    """Which of PARTS a scope belongs to."""
    for verb in ("propose", "score", "verify", "commit"):
        if f"/{verb}/" in scope:
            samples = verb == "propose" and ("/to_probs/" in scope or "/draw/" in scope)
            return "propose, sampling" if samples else verb
    return "other"


def _by_part(counts: dict[str, int]) -> dict[str, int]:
    total = collections.Counter()
    for scope, count in counts.items():
        total[part(scope)] += count
    return dict(total)


def _check_fits(name: str, memory: float, parts: dict[str, int]) -> None:
    total = sum(parts.values())
    if total > memory:
        shown = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        raise InputError(
            f"{name}: expected at most {memory / 1e9:.2f} GB a chip, "
            f"found {total / 1e9:.2f} ({shown}): {(total - memory) / 1e9:.2f} too much"
        )


def _compile(
    function, static, *args, donate: int | None = None, options=None
) -> tuple[Program, PyTree]:
    """The program, and the shapes and places of what it returns."""
    start = time.perf_counter()
    donated = () if donate is None else donate
    lowered = jax.jit(functools.partial(function, *static), donate_argnums=donated).lower(*args)
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
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    program = Program(
        seconds=time.perf_counter() - start,
        temporary=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=cost["flops"],
        bytes_accessed=cost["bytes accessed"],
        collectives=hlo.collectives(text),
        cycles=_by_part(hlo.estimated_cycles(text)),
        executed=_by_part(hlo.collective_counts(text)),
    )
    results = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        lowered.out_info,
        compiled.output_shardings,
    )
    return program, results


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Keeps programs out of the persistent cache: only a TPU could read them back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, least)
