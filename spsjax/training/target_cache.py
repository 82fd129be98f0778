"""What is kept of a large target, so that it runs once on texts that are seen many times."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spsjax.data import column_store, pipeline
from spsjax.errors import InputError, short_repr
from spsjax.loading import Model
from spsjax.parallel import multihost
from spsjax.training import distillation, losses
from spsjax.training import step as train_step
from spsjax.types import PyTree
from spsjax.utils import hashing


@dataclasses.dataclass(frozen=True)
class Teacher:
    """What is kept of the target on texts that are seen more than once, instead of running it.

    Attributes:
        keep: "nothing"; "states", the final hidden states in half precision, of which the head
            alone gives the logits again, 2 D bytes a token; or "top_k", of the `k` likeliest
            tokens the probabilities at each temperature, 4 bytes an id and 4 a probability. All
            other tokens count as one then, and the acceptance in the log of the training is an
            upper bound.
        k: see there.
        batch: texts in one pass of the target.
    """

    keep: str = "nothing"
    k: int = 64
    batch: int = 4

    def __post_init__(self):
        if self.keep not in ("nothing", "states", "top_k"):
            raise InputError(
                f"keep: expected 'nothing', 'states' or 'top_k', found {short_repr(self.keep)}"
            )
        for field in ("k", "batch"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise InputError(
                    f"{field}: expected an integer >= 1, found {short_repr(getattr(self, field))}"
                )

    def columns(
        self,
        target: Model,
        examples: pipeline.Windows | np.ndarray,
        temperatures: Sequence[float],
        folder: pathlib.Path,
        place: jax.sharding.Sharding,
        dtype,
    ) -> dict[str, np.ndarray]:
        """What is kept, one row an example, read from files as needed.

        Args:
            target: the target.
            examples: [N, T+1] int32; the last token of each is a label only.
            temperatures: of the objective.
            folder: where they are kept, under names made of what they depend on: found there, they
                are not computed again.
            place: of a batch's rows.
            dtype: the compute type.

        Raises:
            InputError: a file is there, and damaged; or states are too large to be kept.
        """
        if self.keep == "nothing":
            return {}
        config, temperatures = target.config, (1.0, *temperatures)
        k = min(self.k, config.vocab_size - 1)

        def run(params, tokens):
            output = train_step.forward(config, params, tokens[:, :-1], dtype)
            if self.keep == "states":
                return {"states": output.hidden.astype(jnp.float16)}
            _, ids = jax.lax.top_k(output.logits, k)
            laws = [losses.coarse(output.logits / each, ids) for each in temperatures]
            return {"ids": ids, "log_probs": jnp.stack(laws, axis=-2)}

        batch = -(-self.batch // _rows(place)) * _rows(place)
        mine, run = pipeline.local_rows(place, batch), jax.jit(run)

        def compute(start):
            rows = np.minimum(np.arange(start, start + batch), len(examples) - 1)
            given = pipeline.put(examples[rows[mine]], batch, place)
            found = multihost.to_host(run(target.params, given))
            if "states" in found and not np.isfinite(found["states"]).all():
                raise InputError(
                    "teacher.keep: expected final states that float16 can hold, found larger "
                    "ones; 'top_k' keeps probabilities instead"
                )
            return found

        shape = len(examples), *examples[0].shape
        laws = (k, temperatures) if self.keep == "top_k" else ()  # states are of no temperature
        depends_on = config, self.keep, laws, str(dtype), shape
        name = f"{self.keep}-{_fingerprint(depends_on, target.params, examples)}"
        with target.in_mesh():
            return column_store.columns(folder / name, len(examples), batch, compute, "target")


def _rows(place: jax.sharding.Sharding) -> int:
    """Into how many parts the rows of a batch are split."""
    return place.mesh.shape["data"] if isinstance(place, NamedSharding) else 1


def _fingerprint(depends_on, params: PyTree, examples) -> str:
    digest = hashlib.sha256(repr((depends_on, hashing.params_fingerprint(params))).encode())
    for start in range(0, len(examples), 1024):
        digest.update(examples[np.arange(start, min(start + 1024, len(examples)))].tobytes())
    return digest.hexdigest()[:16]


def samples(
    target: Model, examples, mixture: distillation.Mixture, folder: pathlib.Path, seed: int
) -> dict[str, np.ndarray]:
    """Texts of the target, each after a prompt of the corpus, as `distill.continued` gives them.

    They are sampled once. See `Teacher.columns` for `folder` and errors.
    """
    length = examples[0].shape[0]
    rows = np.random.default_rng(seed).permutation(len(examples))[: mixture.samples]
    rows = np.resize(rows, mixture.samples)
    depends_on = (target.config, mixture.samples, mixture.prompt_length, mixture.temperature)
    depends_on += (mixture.batch, seed)
    prompts = examples[rows][:, : mixture.prompt_length]
    name = f"samples-{_fingerprint((depends_on, length), target.params, prompts)}"

    def compute(start):
        some = prompts[start : start + mixture.batch]
        return distillation.continued(
            target, some, length, mixture.temperature, (seed + start) % 2**32
        )

    return column_store.columns(folder / name, mixture.samples, mixture.batch, compute, "samples")
