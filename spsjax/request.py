"""A checked call: prompts, budgets, sampling and a drafter become the arrays that the loop takes.

Every mistake of a caller is one line that names the argument.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from spsjax import decode, loading, memory, pacing, sampling, verifiers
from spsjax.drafters import base, none, stopping
from spsjax.errors import InputError, check_flag, short_repr
from spsjax.loading import LoadedDrafter, Model
from spsjax.models import quantization, transformer
from spsjax.parallel import multihost, sharding
from spsjax.sampling import SamplingParams
from spsjax.tokenization.base import difference
from spsjax.verifiers import base as base_verifier

AUTO = "auto"  # for num_speculative_tokens: chosen in every round, as by a `pacing.Pacer`
_NO_DRAFTER = LoadedDrafter("none", none.Drafter(), {})


class Request:
    """A call of `generate` after all checks.

    Attributes:
        model: the target.
        program: static configuration of the loop.
        params: parameters of target and drafter.
        slots: size of token buffers and caches.
        prompts: token ids per prompt.
        context: most tokens of a prompt and its continuation, of target and drafter.
        lengths: [B] lengths of the prompts; rows beyond the prompts fill up the mesh.
        drafter_name: name of the drafter, for messages.
        is_trained: whether the drafter has weights.
    """

    def __init__(
        self,
        caller: str,
        model: Model,
        prompts,
        drafter,
        num_speculative_tokens: int | str | pacing.Pacer | None,
        params: SamplingParams,
        max_new_tokens,
        seed: int,
        verifier,
        stop_at_eos: bool,
        stop_token_ids: Sequence[int] = (),
    ):
        check_model(model)
        check_sampling(params)
        check_seed(seed)
        check_flag("stop_at_eos", stop_at_eos)
        loaded = speculation(model, drafter, num_speculative_tokens)
        if verifier is None:
            verifier = "recursive"  # of chains, modified rejection sampling
        verifier = check_verifier(verifier)
        if not loaded.drafter.num_speculative_tokens:  # there is nothing to verify
            verifier = verifiers.by_name("rejection")
        self.model = model
        name = "prompts[{}]" if caller == "generate" else "prompt"
        self.prompts = token_ids(model, prompts, name)
        new_tokens = budgets(max_new_tokens, len(self.prompts))
        contexts = {model.name: model.config.max_positions}
        if loaded.max_positions:
            contexts[loaded.name] = loaded.max_positions
        self.context = min(contexts.values())
        check_lengths(self.prompts, new_tokens, contexts, name)
        eos_ids = model.eos_ids if stop_at_eos else ()
        eos_ids += check_stop_tokens(stop_token_ids, model.config.vocab_size)
        eos_ids = tuple(dict.fromkeys(eos_ids))
        pacer = pacer_of(num_speculative_tokens) if loaded.drafter.num_speculative_tokens else None
        self.program = decode.Program(model.config, loaded.drafter, verifier, eos_ids, pacer=pacer)
        self.params = loaded.with_target(model.params)  # and costs of a pacer
        self.drafter_name, self.is_trained = loaded.name, bool(loaded.params)
        if caller != "engine":  # which tells the others what process 0 was asked for
            multihost.check_same_everywhere(
                caller, self.program, self.prompts, new_tokens, params, seed, model.mesh
            )
        self._arguments = params, seed
        # Rows come in multiples of the mesh's data axis; the extra ones are done from the start.
        extra = -len(self.prompts) % (1 if model.mesh is None else model.mesh.shape["data"])
        lengths = [len(prompt) for prompt in self.prompts] + [1] * extra
        self.lengths = np.asarray(lengths, np.int32)
        self._limits = self.lengths + np.asarray([*new_tokens, *[0] * extra], np.int32)
        needed = int(self._limits.max()) + self.program.drafter.num_speculative_tokens + 1
        self.slots = max(decode.num_slots(int(self.lengths.max())), decode.num_slots(needed))
        size = len(self.lengths), self.slots
        memory.check("prompts, max_new_tokens", self.program, self.params, *size, model.mesh)

    @functools.cached_property
    def inputs(self) -> tuple:
        """Arrays for `decode.prefill`. With several processes, all must ask for them."""
        (params, seed), count = self._arguments, len(self.prompts)
        width = decode.num_slots(int(self.lengths.max()))
        tokens = np.zeros((len(self.lengths), width), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
            tokens[row, len(prompt) :] = prompt[-1]  # masked; a token that is known to be harmless
        rows = jax.tree.map(
            lambda column: np.pad(column, (0, len(self.lengths) - count)), params.rows(count)
        )
        where = sharding.batch_sharding(self.model.mesh)
        with self.model.in_mesh():
            keys = jax.jit(_keys, static_argnums=1, out_shardings=where)(
                np.uint32(seed), len(self.lengths)
            )
            arrays = rows, tokens, self.lengths, self._limits
            return (*jax.device_put(arrays, where), keys)


def _keys(seed, count: int) -> jax.Array:
    return sampling.row_keys(jax.random.key(seed, impl=sampling.GENERATOR), count)


def check_model(model) -> None:
    """Raises InputError unless `model` is a loaded model."""
    if not isinstance(model, Model):
        raise InputError(f"model: expected a loaded model, found {type(model).__name__}")
    _check_weights(f"model {model.name}", model.params, _shapes(model.config))


def check_sampling(sampling) -> None:
    """Raises InputError unless `sampling` is a SamplingParams."""
    if not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling: expected SamplingParams, found {type(sampling).__name__}")


def check_seed(seed) -> None:
    """Raises InputError unless `seed` is an integer of 32 bits."""
    if not _is_integer(seed) or not 0 <= seed < 2**32:
        raise InputError(f"seed: expected an integer in [0, 2**32), found {short_repr(seed)}")


def check_stop_tokens(stop_token_ids, vocab_size: int) -> tuple[int, ...]:
    """Returns token ids that end a text, each once; raises InputError unless they are that."""
    ids = stop_token_ids
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    known = isinstance(ids, Sequence) and all(
        _is_integer(id) and 0 <= id < vocab_size for id in ids
    )
    if isinstance(ids, str) or not known:
        raise InputError(
            f"stop_token_ids: expected a list of token ids in [0, {vocab_size}), "
            f"found {short_repr(stop_token_ids)}"
        )
    return tuple(sorted({int(id) for id in ids}))


def check_lengths(
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    contexts: Mapping[str, int],
    argument: str,
) -> None:
    """Raises InputError unless every prompt and its new tokens fit into every model's context."""
    for name, context in contexts.items():
        for row, (prompt, budget) in enumerate(zip(prompts, budgets)):
            if len(prompt) + budget > context:
                raise InputError(
                    f"{argument.format(row)}, max_new_tokens: expected both within the context of "
                    f"{context} of {name}, found {len(prompt)} + {budget}"
                )


def pacer_of(count) -> pacing.Pacer | None:
    """Returns the rule that a number of draft tokens stands for; None: it is no rule."""
    if isinstance(count, pacing.Pacer):
        _check_frozen("num_speculative_tokens", count)
        return count
    return pacing.NAMES[count]() if isinstance(count, str) and count in pacing.NAMES else None


def speculation(model: Model, drafter, num_speculative_tokens) -> LoadedDrafter:
    """Returns the drafter as the loop takes it, with K set; raises InputError where it cannot be.

    `drafter` is None, a loaded model or drafter, or a drafter that needs no weights. Without
    drafting, K is ignored, so that one K serves a sweep over drafters.
    """
    count, context = num_speculative_tokens, model.config.max_positions
    automatic = pacer_of(count) is not None
    if count is not None and not automatic and (not _is_integer(count) or count < 0):
        raise InputError(
            f'num_speculative_tokens: expected an integer >= 0 or "auto", found {short_repr(count)}'
        )
    if drafter is None or (isinstance(drafter, LoadedDrafter) and count == 0):
        return _NO_DRAFTER
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
    if not method.num_speculative_tokens:
        return _NO_DRAFTER
    if isinstance(method, base.TrainableDrafter) and not drafter.params:
        raise InputError(
            "drafter: expected the loaded draft model itself, found a drafter without its weights"
        )
    _check_frozen("drafter", method)
    if automatic and method.num_speculative_tokens:
        method = _deepened(method, context)
    elif count is not None and not automatic:
        method = dataclasses.replace(method, num_speculative_tokens=int(count))
    count = method.num_speculative_tokens
    if not _is_integer(count) or not 0 <= count < context:
        raise InputError(
            f"num_speculative_tokens: expected an integer in [0, {context}), the context, "
            f"found {short_repr(count)}"
        )
    if not count:
        return _NO_DRAFTER
    inner, (weights, _) = base.unwrapped(method), stopping.split(drafter.params)
    made_for = getattr(inner, "target", None)
    if isinstance(made_for, transformer.Config) and made_for != model.config:
        raise InputError(
            f"drafter {drafter.name}: expected a drafter of this target's features, found one of "
            "another shape of target. Load it for this target with load_drafter."
        )
    _check_method(f"drafter {drafter.name}", inner, weights)
    if drafter.params and _devices(drafter.params) != _devices(model.params):
        raise InputError(
            f"drafter {drafter.name}: expected weights on the target's devices, found others. "
            "Load it for this target with load_drafter."
        )
    if found := difference(model.tokenizer, drafter.tokenizer):
        raise InputError(
            f"drafter {drafter.name}: expected the target's texts of all ids that both have, "
            f"found {found}"
        )
    return dataclasses.replace(drafter, drafter=method)


def _deepened(drafter: base.Drafter, context: int) -> base.Drafter:
    """Returns a drafter as a loop takes it that chooses the depth of every round.

    Chains are as long as its own K or `PACED_TOKENS`, whichever is greater, but no longer than its
    weights allow and the context has room for. Trees stay as they are.
    """
    longest = max(drafter.num_speculative_tokens, base.PACED_TOKENS)
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
    known = isinstance(sizes, tuple) and all(_is_integer(x) and x >= 0 for x in sizes)
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
    own = _by_name(params)
    for path in sorted(own | shapes) if shapes is not None else ():
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


def token_ids(model: Model, prompts, name: str = "prompts[{}]") -> list[list[int]]:
    """Returns the token ids of each prompt, a text or a list of ids.

    `name` is the name of a prompt in messages, with {} for its row.
    """
    is_array = isinstance(prompts, np.ndarray) and prompts.ndim > 0
    if isinstance(prompts, str) or not (is_array or isinstance(prompts, Sequence)):
        raise InputError(
            f"prompts: expected a list of texts or token-id lists, found {type(prompts).__name__}"
        )
    if not len(prompts):
        raise InputError("prompts: expected at least one, found none")
    return [_encode(model, name.format(row), prompt) for row, prompt in enumerate(prompts)]


def budgets(max_new_tokens, batch: int) -> list[int]:
    """Returns the most new tokens of each row."""
    try:
        counts = np.asarray(max_new_tokens)
    except ValueError:  # lists of several lengths
        counts = np.asarray(None)
    if not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        raise InputError(
            f"max_new_tokens: expected integers >= 0, found {short_repr(max_new_tokens)}"
        )
    if counts.ndim and counts.shape != (batch,):
        found = counts.size if counts.ndim == 1 else f"an array of shape {list(counts.shape)}"
        raise InputError(
            f"max_new_tokens: expected one value or {batch} (one per row), found {found}"
        )
    return np.broadcast_to(counts, (batch,)).tolist()


def _kind(value) -> str:
    """Returns the type of a value, for a message; a class in the place of an instance is named."""
    named = f"the class {getattr(value, '__name__', '')}. Make an instance of it"
    return named if isinstance(value, type) else type(value).__name__


def _is_integer(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _encode(model: Model, name: str, prompt) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError(
                f"{name}: expected token ids ({model.name} has no tokenizer), found text"
            )
        try:
            ids = model.tokenizer.encode(prompt)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if not ids:  # an empty text is what follows the beginning of a sequence
            begin = model.tokenizer.bos_id if model.config.bos_id is None else model.config.bos_id
            ids = [] if prompt or begin is None else [begin]
        if not ids:
            raise InputError(
                f"{name}: expected a text of at least one token, found {short_repr(prompt)}"
            )
        return _checked(model, name, ids)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of several lengths
        ids = np.asarray(None)
    if isinstance(prompt, Sequence) and any(isinstance(id, bool | np.bool) for id in prompt):
        ids = np.asarray(None)  # NumPy would take true for 1
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InputError(
            f"{name}: expected a text or a list of integers, found {type(prompt).__name__}"
        )
    if not ids.size:
        raise InputError(f"{name}: expected at least one token, found none")
    return _checked(model, name, ids.tolist())


def _checked(model: Model, name: str, ids: list[int]) -> list[int]:
    """Returns the ids; raises InputError if the model does not have one of them."""
    for token in ids:
        if not 0 <= token < model.config.vocab_size:
            raise InputError(
                f"{name}: expected token ids in [0, {model.config.vocab_size}), found {token}"
            )
    return ids
