"""Probes of the hardware: the parts of one round, each alone, and the memory's bandwidth."""

import concurrent.futures
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spsjax import decode, sampling
from spsjax.drafters import draft_model, none
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import sharding
from spsjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Parts:
    """What one round is made of, each timed on its own, in seconds.

    Attributes:
        draft_step: a token of the draft: all that a round drafts, over K.
        scoring: the pass over K + 1 tokens.
    """

    draft_step: float
    scoring: float

    def together(self, num_speculative_tokens: int) -> float:
        """Seconds of a round that is nothing but these."""
        return num_speculative_tokens * self.draft_step + self.scoring


def median(parts: Sequence[Parts]) -> Parts:
    """Of each part."""
    return Parts(*(float(np.median(times)) for times in zip(*map(dataclasses.astuple, parts))))


def probe(
    target: Model,
    draft: Model | None,
    num_speculative_tokens: int,
    params: SamplingParams,
    length: int,
    repeats: int = 8,
) -> Callable[[], Parts]:
    """Times the parts of a round alone, in caches such as `generate` has for `length` tokens.

    What it returns is to be called again and again, in turn with what is compared: machines drift.
    """
    K = num_speculative_tokens
    drafter = draft_model.Drafter(draft.config, K) if draft and K else none.Drafter()
    program = decode.Program(target.config, drafter)
    weights = {"target": target.params, "drafter": draft.params if draft and K else {}}
    slots = decode.num_slots(length + K + 1)
    place = sharding.batch_sharding(target.mesh)
    B = 1 if target.mesh is None else target.mesh.shape["data"]
    with target.in_mesh():
        keys = jax.jit(lambda: sampling.row_keys(jax.random.key(0), B), out_shardings=place)()
    rows = jax.device_put(params.rows(B), place)
    middle = jax.device_put(np.full(B, slots // 2, np.int32), place)
    block = jax.device_put(np.zeros((B, K + 1), np.int32), place)
    tokens = jax.device_put(np.zeros((B, slots), np.int32), place)

    def measure() -> Parts:
        with target.in_mesh():
            return parts()

    def parts() -> Parts:
        cache = transformer.empty_cache(target.config, weights["target"], B, slots).at(middle)
        many = decode.compiled(_score_often, program, repeats)
        scoring = _seconds(many, weights, rows, cache, block) / repeats
        step = 0.0
        if K and draft:
            cache = transformer.empty_cache(draft.config, weights["drafter"], B, slots)
            often = decode.compiled(_draft_often, drafter, repeats)
            step = _seconds(often, weights, rows, cache.at(middle - 1), tokens, keys)
            step /= repeats * K
        return Parts(step, scoring)

    return measure


def _seconds(call: Callable, *args) -> float:
    """Of a second run: the first finds weights and fresh memory where a loop would not."""
    jax.block_until_ready(args)
    jax.block_until_ready(call(*args)[0])
    start = time.perf_counter()
    result, compiling = call(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start - compiling


def _score_often(program, repeats, params, rows, cache, block):
    """Scoring passes one after another, each waiting for all of the one before."""

    def once(_, carry):
        block, cache, _ = carry
        output = decode.score(program, params, block, cache)
        probs = sampling.to_probs(sharding.gather_vocab(output.logits), rows)
        return block + (probs[..., 0] > 2), output.cache.at(cache.lengths), probs

    probs = jnp.zeros((*block.shape, program.target.vocab_size), jnp.float32)
    return lax.fori_loop(0, repeats, once, (block, cache, probs))


def _draft_often(drafter, repeats, params, rows, state, tokens, keys):
    """Drafts of K tokens one after another, with their distributions and draws."""
    lengths = state.lengths + 1

    def once(index, carry):
        state, _ = carry
        fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        proposal, state = drafter.propose(params, state, tokens, lengths, rows, fresh)
        return drafter.commit(params, state, lengths), proposal

    shapes = jax.eval_shape(drafter.propose, params, state, tokens, lengths, rows, keys)[0]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.fori_loop(0, repeats, once, (state, nothing))


def memory_bandwidth(megabytes: int = 512, times: int = 5) -> dict[str, float]:
    """Bytes a second that a sum over an array much larger than any cache reads; best of `times`.

    On a CPU, of one thread and of one a core.
    """
    count = megabytes * 2**20 // 4
    if jax.default_backend() != "cpu":
        array = jax.block_until_ready(jnp.ones(4 * count, jnp.float32))
        total = jax.jit(jnp.sum).lower(array).compile()
        return {"device": _best_rate(lambda: total(array).block_until_ready(), array.nbytes, times)}
    array = np.ones(count, np.float32)
    rates = {"1 thread": _best_rate(array.sum, array.nbytes, times)}
    if (threads := num_cores()) > 1:
        parts = np.array_split(array, threads)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            rate = _best_rate(lambda: list(pool.map(np.sum, parts)), array.nbytes, times)
        rates[f"{threads} threads"] = rate
    return rates


def _best_rate(call: Callable, size: int, times: int) -> float:
    best = float("inf")
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return size / best


def machine(model: Model) -> dict[str, object]:
    """What times depend on: device, cores, versions and the model's compute type."""
    kind = jax.devices()[0].device_kind
    return {
        "device": _processor() if kind == "cpu" else kind,
        "cores": num_cores(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dtype": str(model.params["norm"]["scale"].dtype),
    }


def _processor() -> str:
    """The model's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        found = []
    return (found or [platform.processor()])[0] or "cpu"


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
