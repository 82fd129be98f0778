"""Programs compiled ahead for TPUs that are not here: what they hold, move and at best would take.

The programs are those that `generate` compiles, for a mesh over a described topology. Nothing runs:
memory, operations and collectives are the compiler's own count; times are floors, from published
figures of the chips.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from spsjax import decode, generation, hlo, loading, sampling, sharding, theory
from spsjax.drafters import draft_model, none
from spsjax.errors import InputError, brief, one_line
from spsjax.models import transformer
from spsjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip (cloud.google.com/tpu/docs, "system architecture").

    Attributes:
        memory: bytes of high-bandwidth memory.
        bandwidth: of that memory, bytes a second.
        flops: bfloat16 operations a second.
        interconnect: of all links to other chips, both directions together, bytes a second.
    """

    memory: float
    bandwidth: float
    flops: float
    interconnect: float


CHIPS = {
    "v4": Chip(32 * 2**30, 1.2e12, 275e12, 600e9),
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 400e9),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 1200e9),
    "v6e": Chip(32 * 2**30, 1640e9, 918e12, 800e9),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program, as one chip sees it; a loop's body is counted once.

    Attributes:
        temporary: bytes beside arguments and results.
        aliased: bytes of results that take their argument's place.
        flops, bytes_accessed: as the compiler counts them.
        collectives: in the program's text.
    """

    seconds: float
    temporary: int
    aliased: int
    flops: float
    bytes_accessed: float
    collectives: list[hlo.Collective]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass at its floor, on one chip.

    Attributes:
        weights: bytes of weights that it reads.
        cache: bytes of the cache that it reads, were all slots taken.
        flops: of its products with weights.
        collectives: how many.
        memory_seconds, compute_seconds, interconnect_seconds: were each all that counts. The last
            is bytes over bandwidth, and what each collective is assumed to take besides.
    """

    weights: int
    cache: int
    flops: float
    collectives: int
    memory_seconds: float
    compute_seconds: float
    interconnect_seconds: float

    @property
    def seconds(self) -> float:
        """Weights stream while they are multiplied; a collective waits for its layer."""
        return max(self.memory_seconds, self.compute_seconds) + self.interconnect_seconds


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
    passes: dict[str, Pass]
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


def topology(name: str) -> tuple[Chip, list]:
    """Devices that are not here, and the figures of one: "v5p:2x2x4".

    Raises InputError for a name that is none, or without `libtpu`, which describes them.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise InputError(
            f"topology: expected {', '.join(CHIPS)} and a shape, as v5p:2x2x4, found {brief(name)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("topology: expected libtpu to be installed (pip install libtpu)")
    # Asks no cloud what this machine is, and takes no lock on chips that it has not.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # whatever the plugin throws
        raise InputError(
            f"topology: expected one that libtpu knows, found {name}: {one_line(error)}"
        ) from None
    chip, share = CHIPS[kind], math.prod(map(int, shape.split("x"))) / len(devices)
    # Older chips have two cores, each a device of its own.
    return Chip(*(share * figure for figure in dataclasses.astuple(chip))), list(devices)


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
    progress: Callable = lambda names: names,
) -> Report:
    """Compiles prefill, ArS and SpS of a pair for the topology `name`.

    Args:
        target, draft: shapes; both are split over all chips of a row.
        name: as `topology` takes it.
        num_speculative_tokens: K.
        batch: rows; a multiple of `data`.
        prompt_tokens, max_new_tokens: they size the caches, in buckets as `generate` does.
        data: the mesh's data axis; the other chips split the weights.
        dtype: of weights and caches.
        acceptance: of a draft token, independent of its position.
        collective_us: microseconds that every collective is assumed to take beside its bytes over
            the bandwidth. No published figure says; 0 gives a floor.
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
            raise InputError(f"{field}: expected an integer >= 1, found {brief(value)}")
    if not 0 <= acceptance <= 1:
        raise InputError(f"acceptance: expected a number in [0, 1], found {brief(acceptance)}")
    if not 0 <= collective_us < 1e6:
        raise InputError(f"collective_us: expected a number >= 0, found {brief(collective_us)}")
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"draft: expected the target's vocabulary of {target.vocab_size}, "
            f"found {draft.vocab_size}"
        )
    context = min(target.max_positions, draft.max_positions)
    if prompt_tokens + max_new_tokens > context:
        raise InputError(
            f"max_new_tokens: expected prompt and new tokens within the context of {context}, "
            f"found {prompt_tokens} + {max_new_tokens}"
        )
    chip, devices = topology(name)
    if len(devices) % data or batch % data:
        raise InputError(
            f"data: expected a divisor of {len(devices)} devices and of {batch} rows, found {data}"
        )
    mesh = sharding.mesh(data, len(devices) // data, devices)
    for config in (target, draft):
        sharding.check(mesh, config)
    params = {"target": _abstract(target, mesh, dtype), "drafter": _abstract(draft, mesh, dtype)}
    width = generation.bucket(prompt_tokens)
    slots = max(width, generation.bucket(prompt_tokens + max_new_tokens + K + 1))
    caches = sum(_cache_bytes(config, mesh, batch, slots, dtype) for config in (target, draft))
    _check_fits(name, chip.memory, {"weights": _bytes(params), "caches": caches})

    rows = sharding.rows(mesh)
    column = functools.partial(jax.ShapeDtypeStruct, (batch,), sharding=rows)
    inputs = (
        jax.ShapeDtypeStruct((batch, width), jnp.int32, sharding=rows),
        column(jnp.int32),
        column(jnp.int32),
        column(jax.random.key(0, impl=sampling.GENERATOR).dtype),
    )
    sampled = sampling.RowParams(*map(column, (jnp.float32, jnp.int32, jnp.float32, jnp.float32)))
    plain = decode.Program(target, none.Drafter(), (0,))
    fast = decode.Program(target, draft_model.Drafter(draft, K), (0,))
    programs, state = {}, None
    with jax.set_mesh(mesh):
        for program in progress(["prefill", "ArS", "SpS", "draft"]):
            if program == "prefill":
                programs[program], state = _compile(decode.prefill, (fast, slots), params, *inputs)
                continue
            start, which, weights = state, fast, params
            if program != "SpS":
                counts = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=rows)
                start = dataclasses.replace(state, drafter=(), accepted=counts)
                which, weights = plain, params | {"drafter": {}}
            if program == "draft":
                start = dataclasses.replace(start, cache=state.drafter)
                which = decode.Program(draft, none.Drafter(), (0,))
                weights = {"target": params["drafter"], "drafter": {}}
            programs[program], _ = _compile(decode.run, (which,), weights, sampled, start, donate=2)
    passes = {
        label: _floor(chip, mesh, config, kind, tokens, batch, slots, dtype, collective_us)
        for label, config, kind, tokens in (
            ("target", target, programs["ArS"], 1),
            ("scoring", target, programs["ArS"], K + 1),
            ("draft", draft, programs["draft"], 1),
        )
    }
    tokens = theory.block_efficiency(acceptance, K)
    report = Report(
        device=f"{len(devices)} x {devices[0].device_kind} ({name})",
        memory=chip.memory,
        weights=_bytes(params),
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


def _abstract(config: transformer.Config, mesh: Mesh, dtype) -> PyTree:
    """The parameters' shapes, types and places."""

    def place(path, leaf):
        how = sharding.spec(tuple(entry.key for entry in path), mesh, config)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, how))

    return jax.tree_util.tree_map_with_path(place, transformer.param_shapes(config, dtype))


def _bytes(tree: PyTree) -> int:
    """Bytes of the arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _cache_bytes(config: transformer.Config, mesh: Mesh, batch: int, slots: int, dtype) -> int:
    """Bytes of a cache on one device, by the rules of `sharding`."""
    model = mesh.shape["model"]
    heads = config.num_kv_heads // (1 if config.num_kv_heads % model else model)
    per_head = slots * config.head_dim * jnp.dtype(dtype).itemsize * config.num_layers
    total = 2 * (batch // mesh.shape["data"]) * heads * per_head
    if config.positions == "relative":
        total += config.num_heads // model * per_head
    return total


def _check_fits(name: str, memory: float, parts: dict[str, int]) -> None:
    total = sum(parts.values())
    if total > memory:
        shown = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        raise InputError(
            f"{name}: expected at most {memory / 1e9:.2f} GB a chip, "
            f"found {total / 1e9:.2f} ({shown}): {(total - memory) / 1e9:.2f} too much"
        )


def _compile(function, static, *args, donate: int | None = None) -> tuple[Program, PyTree]:
    """The program, and the shapes and places of what it returns."""
    start = time.perf_counter()
    donated = () if donate is None else donate
    lowered = jax.jit(functools.partial(function, *static), donate_argnums=donated).lower(*args)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise InputError(
            f"{function.__name__}: expected a program that fits, found {one_line(error)}"
        ) from None
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    program = Program(
        seconds=time.perf_counter() - start,
        temporary=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=cost["flops"],
        bytes_accessed=cost["bytes accessed"],
        collectives=hlo.collectives(compiled.as_text()),
    )
    results = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        lowered.out_info,
        compiled.output_shardings,
    )
    return program, results


def _floor(
    chip: Chip,
    mesh: Mesh,
    config: transformer.Config,
    program: Program,
    tokens: int,
    batch: int,
    slots: int,
    dtype,
    collective_us: float,
) -> Pass:
    """One pass over `tokens` a row; the collectives are those of the one-token `program`."""
    shapes = _abstract(config, mesh, dtype)
    weights = _bytes(shapes if config.tie_embeddings else shapes | {"embed": {}})
    cache = _cache_bytes(config, mesh, batch, slots, dtype)
    rows = tokens * batch // mesh.shape["data"]
    flops = 2 * rows * weights / jnp.dtype(dtype).itemsize
    moved = rows / (batch // mesh.shape["data"]) * sum(c.num_bytes for c in program.collectives)
    ring = 2 * (1 - 1 / mesh.shape["model"])  # an all-reduce passes every byte twice
    return Pass(
        weights=weights,
        cache=cache,
        flops=flops,
        collectives=len(program.collectives),
        memory_seconds=(weights + cache) / chip.bandwidth,
        compute_seconds=flops / chip.flops,
        interconnect_seconds=ring * moved / (chip.interconnect / 2)
        + len(program.collectives) * collective_us * 1e-6,
    )
