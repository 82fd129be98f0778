"""Checked prompts, budgets and sampling parameters, as the arrays that the loop takes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from spsjax import sampling
from spsjax.decode import sizes
from spsjax.errors import InputError, short_repr
from spsjax.loading import Model
from spsjax.parallel import sharding
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Prompts with their limits, sampling parameters and keys.

    Attributes:
        prompts: token ids per prompt.
        params: sampling parameters.
        seed: random seed.
        lengths: [B] lengths of the prompts; rows beyond the prompts fill up the mesh.
        limits: [B] lengths at which rows are done; extra rows are done from the start.
        mesh: mesh of the arrays; None: one device.
    """

    prompts: list[list[int]]
    params: SamplingParams
    seed: int
    lengths: np.ndarray
    limits: np.ndarray
    mesh: jax.sharding.Mesh | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The most new tokens per prompt."""
        return (self.limits - self.lengths)[: len(self.prompts)].tolist()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.lengths.max())

    def slots(self, num_speculative_tokens: int) -> int:
        """Returns the size of buffers that have room for all texts, and for K + 1 more tokens."""
        return sizes.num_slots(int(self.limits.max()) + num_speculative_tokens + 1)

    @functools.cached_property
    def arrays(self) -> tuple:
        """Sampling parameters, lengths, limits and keys of the rows, on their devices.

        With several processes, all must ask for them.
        """
        count, B = len(self.prompts), len(self.lengths)
        rows = jax.tree.map(lambda column: np.pad(column, (0, B - count)), self.params.rows(count))
        where = sharding.batch_sharding(self.mesh)
        with sharding.use_mesh(self.mesh):
            keys = jax.jit(_keys, static_argnums=1, out_shardings=where)(np.uint32(self.seed), B)
            return (*jax.device_put((rows, self.lengths, self.limits), where), keys)

    def inputs(self, width: int) -> tuple:
        """Returns arrays for `decode.prompt.prefill`, with prompts padded to `width` tokens."""
        tokens = np.zeros((len(self.lengths), width), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
            tokens[row, len(prompt) :] = prompt[-1]  # masked; known to be a token of the model
        rows, *others = self.arrays
        return rows, jax.device_put(tokens, sharding.batch_sharding(self.mesh)), *others


def batch_of(
    model: Model,
    prompts,
    params: SamplingParams,
    max_new_tokens,
    seed: int,
    contexts: Mapping[str, int],
    name: str = "prompts[{}]",
) -> Batch:
    """Returns a checked batch.

    Args:
        model: the target.
        prompts: texts, or lists of token ids.
        params: sampling parameters.
        max_new_tokens: one budget, or one per prompt.
        seed: random seed.
        contexts: the most tokens of a text, by the name of the model that cannot read more.
        name: name of a prompt in messages, with {} for its row.

    Raises:
        InputError: an argument that cannot be used.
    """
    check_sampling(params)
    check_seed(seed)
    prompts = token_ids(model, prompts, name)
    new_tokens = budgets(max_new_tokens, len(prompts))
    check_lengths(prompts, new_tokens, contexts, name)
    # Rows come in multiples of the mesh's data axis; the extra ones are done from the start.
    extra = -len(prompts) % (1 if model.mesh is None else model.mesh.shape["data"])
    lengths = np.asarray([*map(len, prompts), *[1] * extra], np.int32)
    limits = lengths + np.asarray([*new_tokens, *[0] * extra], np.int32)
    return Batch(prompts, params, int(seed), lengths, limits, model.mesh)


def blank(rows: int, mesh: jax.sharding.Mesh | None) -> Batch:
    """Returns a batch of so many rows that are done from the start."""
    ones = np.ones(rows, np.int32)
    return Batch([[0]] * rows, SamplingParams(), 0, ones, ones, mesh)


def _keys(seed, count: int) -> jax.Array:
    return sampling.row_keys(jax.random.key(seed, impl=sampling.GENERATOR), count)


def check_sampling(sampling) -> None:
    """Raises InputError unless `sampling` is a SamplingParams."""
    if not isinstance(sampling, SamplingParams):
        raise InputError(f"sampling: expected SamplingParams, found {type(sampling).__name__}")


def check_seed(seed) -> None:
    """Raises InputError unless `seed` is an integer of 32 bits."""
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise InputError(f"seed: expected an integer in [0, 2**32), found {short_repr(seed)}")


def check_stop_tokens(stop_token_ids, vocab_size: int) -> tuple[int, ...]:
    """Returns token ids that end a text, each once; raises InputError unless they are that."""
    ids = stop_token_ids
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    known = isinstance(ids, Sequence) and all(is_integer(id) and 0 <= id < vocab_size for id in ids)
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


def is_integer(value) -> bool:
    """Returns whether a value is an integer of Python or NumPy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
