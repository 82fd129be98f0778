"""Cached outputs of a large target, so that it runs once on texts that training sees many times."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax.data import column_store, pipeline
from spsjax.errors import InputError, short_repr
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import multihost
from spsjax.training import distillation, losses
from spsjax.types import PyTree
from spsjax.utils import hashing
from spsjax.utils.fields import Checked, integer


@dataclasses.dataclass(frozen=True)
class TargetCache(Checked):
    """Options of the cache of the target's outputs, which replaces its passes in every step."""

    # What the cache holds per token. "nothing" disables the cache. "states" stores the final hidden
    # states in half precision (2 D bytes), from which the head alone recomputes the logits, and as
    # many bytes per tapped layer. "top_k" stores the ids of the `k` most likely tokens (4 bytes
    # each) and their probabilities at each temperature (4 bytes each). All other tokens then count
    # as one, and the acceptance rate that training logs is an upper bound.
    store: str = "states"
    k: int = integer(64, 1)  # number of tokens that "top_k" stores
    batch: int = integer(2, 1)  # number of texts in one forward pass of the target

    def __post_init__(self):
        super().__post_init__()
        if self.store not in ("nothing", "states", "top_k"):
            raise InputError(
                f"store: expected 'nothing', 'states' or 'top_k', found {short_repr(self.store)}"
            )

    def columns(
        self,
        target: Model,
        examples: pipeline.TokenWindows | np.ndarray,
        temperatures: Sequence[float],
        folder: pathlib.Path,
        batch_sharding: jax.sharding.Sharding,
        dtype,
        tap_layers: tuple[int, ...] = (),
    ) -> dict[str, np.ndarray]:
        """Returns the cached columns, one row per example, computing them if they are missing.

        Args:
            target: target model.
            examples: [N, T+1] int32; the last token of each row is a label only.
            temperatures: temperatures of the objective.
            folder: folder of all caches. A cache's name is a fingerprint of everything that its
                content depends on.
            batch_sharding: sharding of the rows of a batch.
            dtype: compute type.
            tap_layers: layers whose input "states" stores, too, as `taps`.

        Raises:
            InputError: a cached file is damaged, or states exceed the range of float16.
        """
        if self.store == "nothing":
            return {}
        temperatures = (1.0, *temperatures)
        # All other tokens count as one, so that at least one must be left.
        k = min(self.k, target.config.vocab_size - 1)
        shards = 1 if target.mesh is None else target.mesh.shape["data"]
        batch = -(-self.batch // shards) * shards
        local = pipeline.local_rows(batch_sharding, batch)
        run = jax.jit(self._target_pass(target.config, temperatures, k, dtype, tap_layers))

        def compute(start):
            # The last batch is filled up with its last row.
            rows = np.minimum(np.arange(start, start + batch), len(examples) - 1)
            tokens = pipeline.global_batch(examples[rows[local]], batch, batch_sharding)
            columns = multihost.to_host(run(target.params, tokens))
            kept = [columns[name] for name in ("states", "taps") if name in columns]
            if not all(np.isfinite(column).all() for column in kept):
                advice = "'nothing'" if tap_layers else "'top_k', which stores probabilities"
                raise InputError(
                    "target_cache.store: expected states in the range of float16, found larger "
                    f"ones. Use {advice}"
                )
            return columns

        shape = len(examples), *examples[0].shape
        # Hidden states do not depend on a temperature.
        options = (k, temperatures) if self.store == "top_k" else tap_layers
        depends_on = target.config, self.store, options, str(dtype), shape
        name = f"{self.store}-{_fingerprint(depends_on, target.params, examples)}"
        with target.in_mesh():
            return column_store.cached_columns(
                folder / name, len(examples), batch, compute, "target"
            )

    def _target_pass(self, config, temperatures: Sequence[float], k: int, dtype, tap_layers):
        """Returns `(params, tokens [B, T+1]) -> columns` of one batch."""

        def run(params, tokens):
            output = transformer.apply(
                config, params, tokens[:, :-1], tap_layers=tap_layers, dtype=dtype
            )
            if self.store == "states":
                states = {"states": output.hidden.astype(jnp.float16)}
                if tap_layers:
                    states["taps"] = jnp.concatenate(output.taps, axis=-1).astype(jnp.float16)
                return states
            _, ids = jax.lax.top_k(output.logits, k)
            log_probs = [losses.top_k_with_rest(output.logits / t, ids) for t in temperatures]
            return {"ids": ids, "log_probs": jnp.stack(log_probs, axis=-2)}

        return run


def target_samples(
    target: Model, examples, mixture: distillation.Mixture, folder: pathlib.Path, seed: int
) -> dict[str, np.ndarray]:
    """Returns continuations that the target generated after prompts of the corpus; samples once.

    Prompts are the first tokens of examples [N, T+1]. The columns are those of
    `distillation.sample_continuations`, cached below `folder`. Raises InputError if a cached file
    is damaged.
    """
    length = examples[0].shape[0]
    rows = np.random.default_rng(seed).permutation(len(examples))[: mixture.samples]
    rows = np.resize(rows, mixture.samples)  # a small corpus gives a prompt more than once
    prompts = examples[rows][:, : mixture.prompt_length]
    options = mixture.samples, mixture.prompt_length, mixture.temperature, mixture.batch
    depends_on = target.config, *options, seed, length
    name = f"samples-{_fingerprint(depends_on, target.params, prompts)}"

    def compute(start):
        return distillation.sample_continuations(
            target,
            prompts[start : start + mixture.batch],
            length,
            mixture.temperature,
            (seed + start) % 2**32,
        )

    return column_store.cached_columns(
        folder / name, mixture.samples, mixture.batch, compute, "samples"
    )


def _fingerprint(depends_on, params: PyTree, examples) -> str:
    """Returns 16 hexadecimal digits that identify options, weights and texts."""
    digest = hashlib.sha256(repr((depends_on, hashing.params_fingerprint(params))).encode())
    for start in range(0, len(examples), 1024):
        digest.update(examples[np.arange(start, min(start + 1024, len(examples)))].tobytes())
    return digest.hexdigest()[:16]
