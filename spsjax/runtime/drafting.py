"""Checks of a drafter and of a rule of acceptance, before anything is compiled.

Every mistake of a caller is one line that names the argument.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import loading, verifiers
from spsjax.decode import Program, confidence, prompt, schedule, sizes, step
from spsjax.drafters import base, none, stopping
from spsjax.errors import InputError, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import quantization, transformer
from spsjax.runtime import batch
from spsjax.runtime.batch import is_integer
from spsjax.tokenization.base import difference
from spsjax.types import PyTree
from spsjax.verifiers import base as base_verifier

AUTO = "auto"  # for num_speculative_tokens: chosen in every round, by `schedule.Fastest`
# Schedules by the names that stand for a number of draft tokens.
SCHEDULES = {AUTO: schedule.Fastest, "confidence": confidence.Confident}
_NO_DRAFTER = LoadedDrafter("none", none.Drafter(), {})


def check_model(model) -> None:
    """Raises InputError unless `model` is a loaded model."""
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")
    _check_weights(f"model {model.name}", model.params, _shapes(model.config))


def schedule_of(count) -> schedule.Schedule | None:
    """Returns the schedule that a number of draft tokens stands for; None: it is no schedule."""
    if isinstance(count, schedule.Schedule):
        _check_frozen("num_speculative_tokens", count)
        return count
    named = isinstance(count, str) and count in SCHEDULES
    return SCHEDULES[count]() if named else None


def check_estimates(program: Program, params: PyTree) -> None:
    """Raises InputError if a program's schedule reads estimates that its drafter does not make.

    The first round is traced for one row, which takes about a second for a large model.
    """
    if program.schedule is None or not program.schedule.reads_confidence:
        return
    K = program.drafter.num_speculative_tokens
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def first_round(params, *inputs):
        state = prompt.empty(program, sizes.num_slots(K + 2), params, *inputs)
        state, now = step.next_round(program, params, state, jnp.full(1, K))
        proposal = step.propose(program, params, state, now)
        sizes.check_estimates(program, proposal)
        return proposal.tokens

    jax.eval_shape(first_round, shapes, *batch.blank(1, None).inputs(1))


def drafter_for(model: Model, drafter, num_speculative_tokens) -> LoadedDrafter:
    """Returns the drafter as the loop takes it, with K set.

    Args:
        model: the target.
        drafter: None, a loaded model or drafter, or a drafter that needs no weights.
        num_speculative_tokens: K, None for the drafter's own, or a schedule or its name. Without
            a drafter it is ignored, so that one K serves a sweep over drafters.

    Raises:
        InputError: an argument that cannot be used.
    """
    count = num_speculative_tokens
    rule = schedule_of(count)
    if count is not None and rule is None and (not is_integer(count) or count < 0):
        names = " or ".join(map(repr, SCHEDULES))
        raise InputError(
            f"num_speculative_tokens: expected an integer >= 0, {names}, found {short_repr(count)}"
        )
    if drafter is None or (isinstance(drafter, LoadedDrafter) and count == 0):
        return _NO_DRAFTER
    loaded = _as_loaded(drafter, model)
    method = loaded.drafter
    if not method.num_speculative_tokens:
        return _NO_DRAFTER
    if isinstance(method, base.TrainableDrafter) and not loaded.params:
        raise InputError(
            "drafter: expected the loaded draft model itself, found a drafter without its weights"
        )
    _check_frozen("drafter", method)
    context = model.config.max_positions
    if rule is not None:
        method = _deepened(method, rule, context)
        rule.check(method.num_speculative_tokens)
    elif count is not None:
        method = dataclasses.replace(method, num_speculative_tokens=int(count))
    count = method.num_speculative_tokens
    if not is_integer(count) or not 0 <= count < context:
        raise InputError(
            f"num_speculative_tokens: expected an integer in [0, {context}), the context, "
            f"found {short_repr(count)}"
        )
    if not count:
        return _NO_DRAFTER
    loaded = dataclasses.replace(loaded, drafter=method)
    _check_fits(loaded, model)
    return loaded


def _as_loaded(drafter, model: Model) -> LoadedDrafter:
    """Returns what a caller gives as a drafter with its weights and its name."""
    if isinstance(drafter, Model):
        drafter = loading.as_drafter(drafter, model)
    elif isinstance(drafter, base.Drafter):
        drafter = LoadedDrafter(type(drafter).__module__.rpartition(".")[2], drafter, {})
    if not isinstance(drafter, LoadedDrafter):
        raise InputError(
            f"drafter: expected None, a loaded model or a drafter, found {_kind(drafter)}"
        )
    method = drafter.drafter
    if not isinstance(method, base.Drafter):
        raise InputError(f"drafter {drafter.name}: expected a drafter in it, found {_kind(method)}")
    return drafter


def _check_fits(drafter: LoadedDrafter, model: Model) -> None:
    """Raises InputError unless a drafter is made for a target: its shape, devices and texts."""
    name = f"drafter {drafter.name}"
    inner, (weights, _) = base.unwrapped(drafter.drafter), stopping.split(drafter.params)
    made_for = getattr(inner, "target", None)
    if isinstance(made_for, transformer.Config) and made_for != model.config:
        raise InputError(
            f"{name}: expected a drafter of this target's features, found one of "
            "another shape of target. Load it for this target with load_drafter."
        )
    _check_method(name, inner, weights)
    if drafter.params and _devices(drafter.params) != _devices(model.params):
        raise InputError(
            f"{name}: expected weights on the target's devices, found others. "
            "Load it for this target with load_drafter."
        )
    if differs := difference(model.tokenizer, drafter.tokenizer):
        raise InputError(
            f"{name}: expected the target's texts of all ids that both have, found {differs}"
        )


def _deepened(drafter: base.Drafter, rule: schedule.Schedule, context: int) -> base.Drafter:
    """Returns a drafter for a loop in which a rule decides the depth of every round.

    Chains are as long as its own K or the rule's longest, whichever is greater, but no longer than
    its weights allow and the context has room for. Trees stay as they are.
    """
    longest = max(drafter.num_speculative_tokens, rule.longest)
    longest = min(base.max_steps(drafter) or longest, longest, max(context - 1, 1))
    if base.num_nodes(drafter) != drafter.num_speculative_tokens:
        return drafter
    try:
        return dataclasses.replace(drafter, num_speculative_tokens=longest)
    except InputError:  # a tree with one node per depth
        return drafter


def _check_method(name: str, method: base.Drafter, params) -> None:
    """Raises InputError unless a drafter's sizes of scoring passes and its weights are valid."""
    sizes = method.score_sizes
    known = isinstance(sizes, tuple) and all(is_integer(x) and x >= 0 for x in sizes)
    if not known or not sizes or max(sizes) != sizes[-1]:
        raise InputError(
            f"{name}: expected score_sizes, integers >= 0 of which the last is the greatest, "
            f"found {short_repr(sizes)}"
        )
    has_weights = isinstance(method, base.TrainableDrafter)
    _check_weights(name, params, _shapes_of_drafter(method) if has_weights else None)


def _check_weights(name: str, params, shapes: dict[str, list] | None) -> None:
    """Raises InputError unless the weights are JAX arrays of these shapes by name; None: any."""
    for leaf in jax.tree.leaves(params):
        if not isinstance(leaf, jax.Array):
            raise InputError(
                f"{name}: expected weights as JAX arrays, found {type(leaf).__name__}. "
                "Place them on their devices with jax.device_put."
            )
    if shapes is None:
        return
    own = _by_name(params)
    for path in sorted(own | shapes):
        if own.get(path) != shapes.get(path):
            raise InputError(
                f"{name}: expected weights of its config, with {path}: "
                f"{shapes.get(path, 'none')}, found {own.get(path, 'none')}"
            )


def _by_name(tree) -> dict[str, list[int]]:
    """Returns the shapes of arrays by their paths in a tree; a matrix in int8 is one of them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=quantization.is_matrix)
    return {jax.tree_util.keystr(path): [*leaf.shape] for path, leaf in leaves}


@functools.lru_cache
def _shapes_of_drafter(drafter: base.TrainableDrafter) -> dict[str, list[int]]:
    return _by_name(drafter.param_shapes(np.float32))


@functools.lru_cache
def _shapes(config: transformer.Config) -> dict[str, list[int]]:
    return _by_name(transformer.param_shapes(config))


def _devices(params) -> set:
    """Returns the meshes of the weights, or the devices of those on no mesh."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
    return {getattr(where, "mesh", None) or frozenset(where.device_set) for where in shardings}


def check_verifier(verifier) -> base_verifier.Verifier:
    """Returns a verifier, or that of a name; raises InputError for others."""
    if isinstance(verifier, str):
        return verifiers.by_name(verifier)
    if not isinstance(verifier, base_verifier.Verifier):
        names = ", ".join(verifiers.NAMES)
        raise InputError(f"verifier: expected {names} or a Verifier, found {_kind(verifier)}")
    _check_frozen("verifier", verifier)
    return verifier


def _check_frozen(name: str, method) -> None:
    """Raises InputError unless it can be compiled in."""
    try:
        hash(method)
    except TypeError as error:
        raise InputError(
            f"{name}: expected a frozen dataclass that can be hashed, as every {name} is, "
            f"found {type(method).__name__}: {error}"
        ) from None
    if not dataclasses.is_dataclass(method):
        raise InputError(
            f"{name}: expected a frozen dataclass, as every {name} is, "
            f"found {type(method).__name__}"
        )


def _kind(value) -> str:
    """Returns the type of a value, for a message; a class in the place of an instance is named."""
    named = f"the class {getattr(value, '__name__', '')}. Make an instance of it"
    return named if isinstance(value, type) else type(value).__name__
