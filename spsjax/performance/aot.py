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
from spsjax.drafters import base, draft_model, none, sparse_self
from spsjax.drafters.pairs import PairDrafter
from spsjax.drafters.shapes import Tree
from spsjax.errors import InputError, check_flag, check_integer, short_repr
from spsjax.models import quantization, transformer
from spsjax.parallel import sharding
from spsjax.performance import hardware, roofline, theory
from spsjax.performance.compiled_program import CompiledProgram, compile_program
from spsjax.types import PyTree
from spsjax.verifiers import recursive, rejection

# The last: ArS of a draft model alone, or one step of another drafter.
PROGRAMS = "prefill", "ArS", "SpS", "draft"
Draft = transformer.Config | PairDrafter | sparse_self.Drafter


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Results of `compile_pair`.

    Attributes:
        device: kind and number of the chips.
        memory: bytes of memory per chip.
        weights, caches: bytes per chip, of target and drafter together.
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
    draft: Draft,
    name: str,
    *,
    num_speculative_tokens: int,
    batch: int = 1,
    prompt_tokens: int = 1024,
    max_new_tokens: int = 512,
    data: int = 1,
    split_slots: int = 1,
    replicate: bool = False,
    dtype=jnp.bfloat16,
    quantize: str | None = None,
    acceptance: float = 0.8,
    collective_us: float = 0.0,
    tree: Tree | None = None,
    compiler_options: Mapping[str, str | bool | int] | None = None,
    progress: Callable = lambda names: names,
) -> CompileReport:
    """Compiles prefill, ArS and SpS of a pair for the topology `name`.

    Args:
        target: shape of the target, which is split over all chips of a row.
        draft: shape of a draft model; or a drafter of the target's features, or the target with a
            small cache, whose K and tree are not used.
        name: topology, as `hardware.topology` takes it.
        num_speculative_tokens: K; with a tree its depth.
        batch: number of rows, a multiple of `data`.
        prompt_tokens, max_new_tokens: lengths that size the caches, in buckets as for `generate`.
        data: size of the mesh's data axis.
        split_slots: size of the axis that splits the slots of caches. The other chips split the
            weights.
        replicate: whether every chip holds all weights of the draft.
        dtype: type of weights and caches.
        quantize: kind of the target's matrices, as for `load`; None: of the type `dtype`.
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
        split_slots=split_slots,
        replicate=replicate,
        dtype=dtype,
        quantize=quantize,
        tree=tree,
    )
    programs = plan.compile(options=compiler_options, progress=progress)
    return plan.report(programs, acceptance, collective_us)


def plan_pair(
    target: transformer.Config,
    draft: Draft,
    name: str,
    *,
    num_speculative_tokens: int,
    batch: int = 1,
    prompt_tokens: int = 1024,
    max_new_tokens: int = 512,
    data: int = 1,
    split_slots: int = 1,
    replicate: bool = False,
    dtype=jnp.bfloat16,
    quantize: str | None = None,
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
        "split_slots": split_slots,
    }
    check_flag("replicate", replicate)
    quantization.check_kind(quantize)
    shape = draft if isinstance(draft, transformer.Config) else draft.config
    _validate(target, shape, sizes)
    K = num_speculative_tokens
    if isinstance(draft, transformer.Config):
        drafter = draft_model.Drafter(draft, K, tree=tree)
    else:
        drafter = dataclasses.replace(draft, num_speculative_tokens=K, tree=tree)
    types = loading.compute_type(dtype), quantize
    return _plan(target, drafter, name, sizes, types, replicate)


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
    """A target and a drafter on a mesh of described chips, with the sizes of their buffers."""

    name: str
    target: transformer.Config
    drafter: draft_model.Drafter | PairDrafter | sparse_self.Drafter
    chip: hardware.Chip
    mesh: jax.sharding.Mesh
    batch: int
    width: int  # tokens of the prompts
    slots: int  # slots of the caches
    params: PyTree
    caches: dict[str, int]  # bytes per chip: target, draft

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a draft model."""
        return isinstance(self.drafter, draft_model.Drafter)

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
        inputs = self.inputs()  # makes a key, which cannot be done on chips that are not there
        programs, state = {}, None
        with jax.set_mesh(self.mesh):
            for name in progress([name for name in PROGRAMS if name in ("prefill", *names)]):
                function, static, arguments, donate = self._call(name, inputs, state)
                programs[name], result = compile_program(
                    function, static, *arguments, donate=donate, options=options
                )
                state = result if name == "prefill" else state
        return {name: programs[name] for name in names}

    def _call(self, name: str, inputs: tuple, state: decode.DecodeState | None) -> tuple:
        """Returns a program's function, its static and its other arguments, and which it consumes.

        `inputs` are those of prefill, and `state` is its result.
        """
        rejects = rejection.Verifier()
        rule = recursive.Verifier()
        fast = decode.Program(self.target, self.drafter, rule, (0,))
        if name == "prefill":
            return decode.prefill, (fast, self.slots), (self.params, *inputs), None
        if name == "SpS":
            return decode.run, (fast,), (self.params, state), 1
        counts = jax.ShapeDtypeStruct(
            (self.batch, 1), jnp.int32, sharding=sharding.batch_sharding(self.mesh)
        )
        if name == "draft" and not self.has_model:
            own = isinstance(self.drafter, sparse_self.Drafter)
            step = _self_step if own else _draft_step
            return step, (self.drafter,), (self.params, counts, state.drafter), None
        weights, config = self.params["target"], self.target
        cache = state.cache if name == "ArS" else state.drafter
        state = dataclasses.replace(state, cache=cache, drafter=(), accepted=counts)
        if name == "draft":
            weights, config = self.params["drafter"], self.drafter.config
        plain = decode.Program(config, none.Drafter(), rejects, (0,))
        return decode.run, (plain,), ({"target": weights, "drafter": {}}, state), 1

    def report(
        self, programs: dict[str, CompiledProgram], acceptance: float, collective_us: float
    ) -> CompileReport:
        """Returns what was compiled, with lower bounds; raises InputError if it does not fit."""
        read = roofline.multiplied(self.target, self.params["target"])
        # Of a drafter's weights, some are read in every step, and the others once per round.
        if self.has_model:
            drafting, once = roofline.multiplied(self.drafter.config, self.params["drafter"]), ()
        elif isinstance(self.drafter, sparse_self.Drafter):
            drafting, once = read, ()
        else:
            drafting = self.drafter.step_weights(self.params)
            steps = {id(leaf) for leaf in jax.tree.leaves(drafting)}
            trained = jax.tree.leaves(self.params["drafter"])
            once = [leaf for leaf in trained if id(leaf) not in steps]
        K = self.drafter.num_speculative_tokens
        passes = {
            label: roofline.lower_bound(
                self.chip,
                self.mesh,
                weights,
                self.caches["draft" if label == "draft" else "target"],
                programs[program].collectives,
                tokens,
                self.batch,
                collective_us,
                shape.experts_per_token,
            )
            for label, weights, program, tokens, shape in (
                ("target", read, "ArS", 1, self.target),
                ("scoring", (read, once), "ArS", 1 + base.num_nodes(self.drafter), self.target),
                ("draft", drafting, "draft", 1, self.drafter.config),
            )
        }
        weights, caches = roofline.num_bytes(self.params), sum(self.caches.values())
        tokens = theory.block_efficiency(acceptance, K)  # along first children, in a tree
        temporary = {name: program.temporary for name, program in programs.items()}
        largest = max(temporary, key=temporary.get)
        _check_fits(
            self.name,
            self.chip.memory,
            {
                "weights": weights,
                "caches": caches,
                f"temporaries of {largest}": temporary[largest],
            },
        )
        devices = self.mesh.devices
        round_seconds = K * passes["draft"].seconds + passes["scoring"].seconds
        return CompileReport(
            device=f"{devices.size} x {devices.flat[0].device_kind} ({self.name})",
            memory=self.chip.memory,
            weights=weights,
            caches=caches,
            programs=programs,
            passes=passes,
            acceptance=acceptance,
            block_efficiency=tokens,
            ars_ms=1e3 * passes["target"].seconds,
            sps_ms=1e3 * round_seconds / tokens,
        )


def _draft_step(drafter: PairDrafter, params: PyTree, token_BT, state):
    """Returns what follows a token by a drafter of features, and the block."""
    outputs, block = drafter.run(params, token_BT, state.last[:, None], state.cache)
    return drafter.logits(params, outputs), block


def _self_step(drafter: sparse_self.Drafter, params: PyTree, token_BT, state):
    """Returns what follows a token by the target with its small cache, and the block."""
    output = transformer.apply(drafter.config, params["target"], token_BT, state)
    return sharding.gather_vocab(output.logits), output.block


def _plan(target, drafter, name: str, sizes: Mapping[str, int], types, replicate: bool) -> Plan:
    """Puts a pair on the chips of a topology; raises InputError if they cannot hold it."""
    dtype, quantize = types
    chip, devices = hardware.topology(name)
    data, batch, parts = sizes["data"], sizes["batch"], sizes["split_slots"]
    if len(devices) % data or batch % data:
        raise InputError(
            f"data: expected a divisor of {len(devices)} devices and of {batch} rows, found {data}"
        )
    if len(devices) // data % parts:
        raise InputError(
            f"split_slots: expected a divisor of {len(devices) // data} devices, found {parts}"
        )
    mesh = sharding.mesh(data, len(devices) // (data * parts), devices, slots=parts)
    if isinstance(drafter, PairDrafter):
        shapes = drafter.param_shapes(dtype)
        weights = sharding.place_shapes(shapes, drafter.shardings(mesh, replicate))
    elif isinstance(drafter, sparse_self.Drafter):
        weights = {}
    else:
        weights = roofline.abstract_params(drafter.config, mesh, dtype, replicate)
    params = {
        "target": roofline.abstract_params(target, mesh, dtype, quantize=quantize),
        "drafter": weights,
    }
    width = decode.num_slots(sizes["prompt_tokens"])
    length = sizes["prompt_tokens"] + sizes["max_new_tokens"]
    slots = max(width, decode.num_slots(length + drafter.num_speculative_tokens + 1))
    held = transformer.num_slots(drafter.config, slots) + getattr(drafter, "chosen", 0)
    caches = {
        "target": roofline.cache_bytes(target, mesh, batch, slots, dtype),
        "draft": roofline.cache_bytes(drafter.config, mesh, batch, held, dtype, replicate),
    }
    needed = {"weights": roofline.num_bytes(params), "caches": sum(caches.values())}
    _check_fits(name, chip.memory, needed)
    return Plan(name, target, drafter, chip, mesh, batch, width, slots, params, caches)


def _check_fits(name: str, memory: float, parts: dict[str, int]) -> None:
    total = sum(parts.values())
    if total > memory:
        shown = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        raise InputError(
            f"{name}: expected at most {memory / 1e9:.2f} GB a chip, "
            f"found {total / 1e9:.2f} ({shown}): {(total - memory) / 1e9:.2f} too much"
        )
