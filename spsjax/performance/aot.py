"""Ahead-of-time compilation for TPU slices that are not attached.

The programs are those that `generate` compiles, for a mesh over a described topology. Nothing runs.
Memory, operations and collectives are counted by the compiler. Times are lower bounds from the
published figures of the chips.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from spsjax import decode, loading, sampling
from spsjax.drafters import draft_model, none
from spsjax.errors import InputError, check_integer, short_repr
from spsjax.growth import Tree
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.performance import hardware, roofline, theory
from spsjax.performance.compiled_program import CompiledProgram, compile_program
from spsjax.types import PyTree
from spsjax.verifiers import recursive, rejection

PROGRAMS = "prefill", "ArS", "SpS", "draft"  # the last: ArS of the draft alone


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Results of `compile_pair`.

    Attributes:
        device: kind and number of the chips.
        memory: bytes of memory per chip.
        weights, caches: bytes per chip, of target and draft together.
        programs: compiled programs by name, of PROGRAMS.
        passes: costs by name: target (one token), scoring (K+1 tokens), draft (one token).
        acceptance: assumed acceptance rate of a draft token.
        block_efficiency: tokens per target call that follow from it.
        ars_ms, sps_ms: lower bounds of the time per token.
    """

    device: str
    memory: float
    weights: int
    caches: int
    programs: dict[str, CompiledProgram]
    passes: dict[str, roofline.PassCost]
    acceptance: float
    block_efficiency: float
    ars_ms: float
    sps_ms: float

    @property
    def needed(self) -> int:
        """Bytes per chip: weights, caches, and the most temporaries of any program."""
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
    tree: Tree | None = None,
    compiler_options: Mapping[str, str | bool | int] | None = None,
    progress: Callable = lambda names: names,
) -> CompileReport:
    """Compiles prefill, ArS and SpS of a pair for the topology `name`.

    Args:
        target, draft: shapes of the models; both are split over all chips of a row.
        name: topology, as `hardware.topology` takes it.
        num_speculative_tokens: K; with a tree its depth.
        batch: number of rows, a multiple of `data`.
        prompt_tokens, max_new_tokens: lengths that size the caches, in buckets as for `generate`.
        data: size of the mesh's data axis; the other chips split the weights.
        dtype: type of weights and caches.
        acceptance: assumed acceptance rate of a draft token, the same at every position; in a tree
            that of first children, beside which the others are left out of the prediction.
        collective_us: microseconds per collective, assumed, beside its bytes over the bandwidth. No
            published figure states it; 0 gives a lower bound.
        tree: shape of trees that SpS drafts, and verifies recursively; None: chains.
        compiler_options: options of the TPU compiler, as {"xla_tpu_...": False}.
        progress: wrapper of the list of programs, for a progress bar.

    Raises:
        InputError: an argument that cannot be used, or a pair that cannot be split over the chips
            or does not fit into their memory.
    """
    if not 0 <= acceptance <= 1:
        raise InputError(f"acceptance: expected a number in [0, 1], found {short_repr(acceptance)}")
    if not 0 <= collective_us < 1e6:
        raise InputError(
            f"collective_us: expected a number >= 0, found {short_repr(collective_us)}"
        )
    plan = plan_pair(
        target,
        draft,
        name,
        num_speculative_tokens=num_speculative_tokens,
        batch=batch,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        data=data,
        dtype=dtype,
        tree=tree,
    )
    programs = plan.compile(options=compiler_options, progress=progress)
    return plan.report(programs, acceptance, collective_us)


def plan_pair(
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
    tree: Tree | None = None,
) -> "Plan":
    """Puts a pair on the chips of a topology, to compile some of its programs only.

    Takes what `compile_pair` takes, and raises what it raises.
    """
    sizes = {
        "num_speculative_tokens": num_speculative_tokens,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "data": data,
    }
    _validate(target, draft, sizes)
    return _plan(target, draft, name, sizes, loading.compute_type(dtype), tree)


def _validate(target, draft, sizes: Mapping[str, int]) -> None:
    """Raises InputError for arguments of `plan_pair` that cannot be used."""
    for field, value in sizes.items():
        check_integer(field, value, 1)
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"draft: expected the target's vocabulary of {target.vocab_size}, "
            f"found {draft.vocab_size}"
        )
    K, context = sizes["num_speculative_tokens"], min(target.max_positions, draft.max_positions)
    if context <= K:
        raise InputError(
            f"num_speculative_tokens: expected an integer in [1, {context}), the context, found {K}"
        )
    if sizes["prompt_tokens"] + sizes["max_new_tokens"] > context:
        raise InputError(
            f"max_new_tokens: expected prompt and new tokens within the context of {context}, "
            f"found {sizes['prompt_tokens']} + {sizes['max_new_tokens']}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pair on a mesh of described chips, with the sizes of its buffers."""

    name: str
    target: transformer.Config
    draft: transformer.Config
    chip: hardware.Chip
    mesh: jax.sharding.Mesh
    dtype: jnp.dtype
    K: int
    tree: Tree | None
    batch: int
    width: int  # tokens of the prompts
    slots: int  # slots of the caches
    params: PyTree
    caches: int  # bytes per chip

    def inputs(self) -> tuple:
        """Returns shapes and shardings of what `decode.prefill` takes after the parameters."""
        rows = sharding.batch_sharding(self.mesh)
        column = functools.partial(jax.ShapeDtypeStruct, (self.batch,), sharding=rows)
        types = jnp.float32, jnp.int32, jnp.float32, jnp.float32
        return (
            sampling.RowParams(*map(column, types)),
            jax.ShapeDtypeStruct((self.batch, self.width), jnp.int32, sharding=rows),
            column(jnp.int32),
            column(jnp.int32),
            column(jax.random.key(0, impl=sampling.GENERATOR).dtype),
        )

    def compile(
        self,
        names: Sequence[str] = PROGRAMS,
        options: Mapping[str, str | bool | int] | None = None,
        progress: Callable = lambda names: names,
    ) -> dict[str, CompiledProgram]:
        """Compiles some of PROGRAMS, and prefill, from whose result the others start."""
        verifier = rejection.Verifier()
        plain = decode.Program(self.target, none.Drafter(), verifier, (0,))
        drafter = draft_model.Drafter(self.draft, self.K, tree=self.tree)
        rule = recursive.Verifier() if self.tree else verifier
        fast = decode.Program(self.target, drafter, rule, (0,))
        alone = decode.Program(self.draft, none.Drafter(), verifier, (0,))
        no_draft = self.params | {"drafter": {}}
        counts = jax.ShapeDtypeStruct(
            (self.batch, 1), jnp.int32, sharding=sharding.batch_sharding(self.mesh)
        )
        inputs = self.inputs()  # makes a key, which cannot be done on chips that are not there
        programs, state = {}, None
        with jax.set_mesh(self.mesh):
            for name in progress([name for name in PROGRAMS if name in ("prefill", *names)]):
                if name == "prefill":
                    static = fast, self.slots
                    arguments = self.params, *inputs
                    programs[name], state = compile_program(
                        decode.prefill, static, *arguments, options=options
                    )
                    without = dataclasses.replace(state, drafter=(), accepted=counts)
                    continue
                static, weights, start = {
                    "ArS": (plain, no_draft, without),
                    "SpS": (fast, self.params, state),
                    "draft": (
                        alone,
                        {"target": self.params["drafter"], "drafter": {}},
                        dataclasses.replace(without, cache=state.drafter),
                    ),
                }[name]
                programs[name], _ = compile_program(
                    decode.run, (static,), weights, start, donate=1, options=options
                )
        return {name: programs[name] for name in names}

    def report(
        self, programs: dict[str, CompiledProgram], acceptance: float, collective_us: float
    ) -> CompileReport:
        """Returns what was compiled, with lower bounds; raises InputError if it does not fit."""
        passes = {
            label: roofline.lower_bound(
                self.chip,
                self.mesh,
                config,
                programs[program].collectives,
                tokens,
                self.batch,
                self.slots,
                self.dtype,
                collective_us,
            )
            for label, config, program, tokens in (
                ("target", self.target, "ArS", 1),
                ("scoring", self.target, "ArS", 1 + (self.tree.num_nodes if self.tree else self.K)),
                ("draft", self.draft, "draft", 1),
            )
        }
        weights = roofline.num_bytes(self.params)
        tokens = theory.block_efficiency(acceptance, self.K)  # along first children, in a tree
        temporary = {name: program.temporary for name, program in programs.items()}
        largest = max(temporary, key=temporary.get)
        _check_fits(
            self.name,
            self.chip.memory,
            {
                "weights": weights,
                "caches": self.caches,
                f"temporaries of {largest}": temporary[largest],
            },
        )
        devices = self.mesh.devices
        round_seconds = self.K * passes["draft"].seconds + passes["scoring"].seconds
        return CompileReport(
            device=f"{devices.size} x {devices.flat[0].device_kind} ({self.name})",
            memory=self.chip.memory,
            weights=weights,
            caches=self.caches,
            programs=programs,
            passes=passes,
            acceptance=acceptance,
            block_efficiency=tokens,
            ars_ms=1e3 * passes["target"].seconds,
            sps_ms=1e3 * round_seconds / tokens,
        )


def _plan(target, draft, name: str, sizes: Mapping[str, int], dtype, tree: Tree | None) -> Plan:
    """Puts a pair on the chips of a topology; raises InputError if they cannot hold it."""
    chip, devices = hardware.topology(name)
    data, batch, K = (sizes[field] for field in ("data", "batch", "num_speculative_tokens"))
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
    width = decode.num_slots(sizes["prompt_tokens"])
    length = sizes["prompt_tokens"] + sizes["max_new_tokens"]
    slots = max(width, decode.num_slots(length + K + 1))
    caches = sum(
        roofline.cache_bytes(config, mesh, batch, slots, dtype) for config in (target, draft)
    )
    _check_fits(name, chip.memory, {"weights": roofline.num_bytes(params), "caches": caches})
    return Plan(
        name, target, draft, chip, mesh, dtype, K, tree, batch, width, slots, params, caches
    )


def _check_fits(name: str, memory: float, parts: dict[str, int]) -> None:
    total = sum(parts.values())
    if total > memory:
        shown = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        raise InputError(
            f"{name}: expected at most {memory / 1e9:.2f} GB a chip, "
            f"found {total / 1e9:.2f} ({shown}): {(total - memory) / 1e9:.2f} too much"
        )
