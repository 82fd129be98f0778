"""Ahead-of-time compilation for TPU slices and GPUs that are not attached.

The programs are those that `generate` compiles, for a mesh over a described topology. Nothing runs.
Memory, operations and collectives are counted by the compiler. `compile_report` adds lower bounds
on times.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from spsjax import decode, loading, sampling
from spsjax.drafters import base, none
from spsjax.errors import InputError, check_flag, check_integer
from spsjax.models import quantization, transformer
from spsjax.parallel import sharding
from spsjax.planning import hardware, roofline
from spsjax.planning.compiled_program import CompiledProgram, compile_program
from spsjax.types import PyTree
from spsjax.verifiers import recursive, rejection

PROGRAMS = "prefill", "ArS", "SpS"


@dataclasses.dataclass(frozen=True, eq=False)
class PairPlan:
    """A target and a drafter on a mesh of described chips, with the sizes of their buffers."""

    name: str  # name of the topology
    target: transformer.Config  # shape of the target
    drafter: base.Planned  # drafting method
    chip: hardware.Chip  # figures of one chip
    mesh: jax.sharding.Mesh  # mesh over the chips
    batch: int  # number of rows
    width: int  # tokens of the prompts
    slots: int  # slots of the caches
    params: PyTree  # shapes and shardings of the parameters of target and drafter
    caches: dict[str, int]  # bytes per chip, of "target" and "draft"

    def check_fits(self, temporaries: Mapping[str, int] = {}) -> None:
        """Raises InputError unless weights, caches and temporaries fit into a chip's memory."""
        sizes = {"weights": roofline.num_bytes(self.params), "caches": sum(self.caches.values())}
        if temporaries:
            largest = max(temporaries, key=temporaries.get)
            sizes[f"temporaries of {largest}"] = temporaries[largest]
        total, memory = sum(sizes.values()), self.chip.memory
        if total > memory:
            shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
            raise InputError(
                f"{self.name}: expected at most {memory / 1e9:.2f} GB a chip, "
                f"found {total / 1e9:.2f} ({shown}): {(total - memory) / 1e9:.2f} too much"
            )

    def compile(
        self,
        names: Sequence[str] = PROGRAMS,
        options: Mapping[str, str | bool | int] | None = None,
        progress: Callable = lambda names: names,
    ) -> dict[str, CompiledProgram]:
        """Compiles programs of PROGRAMS, and prefill, whose result is the state of the others.

        `options` are options of the compiler, as {"xla_tpu_...": False}.
        """
        inputs = self._inputs()  # makes a key, which cannot be done on chips that are not there
        programs, state = {}, None
        with jax.set_mesh(self.mesh):
            for name in progress([name for name in PROGRAMS if name in ("prefill", *names)]):
                function, static, arguments, donate = self._call(name, inputs, state)
                programs[name], result = compile_program(
                    function, static, *arguments, donate=donate, options=options
                )
                state = result if name == "prefill" else state
        return {name: programs[name] for name in names}

    def _inputs(self) -> tuple:
        """Returns shapes and shardings of the arrays that `decode.prompt.prefill` takes."""
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

    def _call(self, name: str, inputs: tuple, state: decode.DecodeState | None) -> tuple:
        """Returns a program's function, its static and its other arguments, and which it consumes.

        `inputs` are those of prefill, and `state` is its result.
        """
        program = decode.Program(self.target, self.drafter, recursive.Verifier(), (0,))
        if name == "prefill":
            return decode.prompt.prefill, (program, self.slots), (self.params, *inputs), None
        if name == "SpS":
            return decode.step.run, (program,), (self.params, state), 1
        column_B1 = jax.ShapeDtypeStruct(
            (self.batch, 1), jnp.int32, sharding=sharding.batch_sharding(self.mesh)
        )
        state = dataclasses.replace(state, drafter=(), accepted=column_B1)
        plain = decode.Program(self.target, none.Drafter(), rejection.Verifier(), (0,))
        return decode.step.run, (plain,), (self.params | {"drafter": {}}, state), 1


def plan_pair(
    target: transformer.Config,
    drafter: base.Planned,
    name: str,
    *,
    batch: int = 1,
    prompt_tokens: int = 1024,
    max_new_tokens: int = 512,
    data: int = 1,
    split_slots: int = 1,
    replicate: bool = False,
    dtype=jnp.bfloat16,
    quantize: str | None = None,
) -> PairPlan:
    """Puts a pair on the chips of a topology, to compile its programs.

    Args:
        target: shape of the target, which is split over all chips of a row.
        drafter: drafting method, with its K. A tree's verifier is `recursive`.
        name: topology, as `hardware.topology` takes it.
        batch: number of rows, a multiple of `data`.
        prompt_tokens, max_new_tokens: lengths that size the caches, in buckets as for `generate`.
        data: size of the mesh's data axis.
        split_slots: size of the axis that splits the slots of caches. The other chips split the
            weights.
        replicate: whether every chip holds all weights of the drafter.
        dtype: type of weights and caches.
        quantize: kind of the target's matrices, as for `load`; None: of the type `dtype`.

    Raises:
        InputError: an argument that cannot be used, or a pair that cannot be split over the chips
            or does not fit into their memory.
    """
    sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
    sizes |= {"data": data, "split_slots": split_slots}
    _check(target, drafter, sizes)
    check_flag("replicate", replicate)
    quantization.check_kind(quantize)
    dtype = loading.compute_type(dtype)
    chip, devices = hardware.topology(name)
    mesh = _mesh(devices, batch, data, split_slots)
    weights = drafter.param_shapes(dtype)
    params = {
        "target": roofline.abstract_params(target, mesh, dtype, quantize),
        "drafter": sharding.shard_shapes(weights, drafter.shardings(mesh, replicate)),
    }
    width = decode.sizes.num_slots(prompt_tokens)
    length = prompt_tokens + max_new_tokens + drafter.num_speculative_tokens + 1
    slots = max(width, decode.sizes.num_slots(length))
    used = mesh, batch, drafter.cache_slots(slots), dtype, replicate
    caches = {
        "target": roofline.cache_bytes(target, mesh, batch, slots, dtype),
        "draft": roofline.cache_bytes(drafter.config, *used),
    }
    plan = PairPlan(name, target, drafter, chip, mesh, batch, width, slots, params, caches)
    plan.check_fits()
    return plan


def _check(target: transformer.Config, drafter: base.Planned, sizes: Mapping[str, int]) -> None:
    """Raises InputError for arguments of `plan_pair` that cannot be used."""
    K, draft = drafter.num_speculative_tokens, drafter.config
    for field, value in {"num_speculative_tokens": K, **sizes}.items():
        check_integer(field, value, 1)
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
    if sizes["prompt_tokens"] + sizes["max_new_tokens"] > context:
        raise InputError(
            f"max_new_tokens: expected prompt and new tokens within the context of {context}, "
            f"found {sizes['prompt_tokens']} + {sizes['max_new_tokens']}"
        )


def _mesh(devices: Sequence, batch: int, data: int, split_slots: int) -> jax.sharding.Mesh:
    """Returns the mesh over described devices; raises InputError if the sizes do not divide."""
    if len(devices) % data or batch % data:
        raise InputError(
            f"data: expected a divisor of {len(devices)} devices and of {batch} rows, found {data}"
        )
    rest = len(devices) // data
    if rest % split_slots:
        raise InputError(f"split_slots: expected a divisor of {rest} devices, found {split_slots}")
    return sharding.mesh(data, rest // split_slots, devices, slots=split_slots)
