"""Ways to sample from logits that are split by vocabulary, by the TPU compiler's own count.

python scripts/compile_sampler.py --topology=v5p:2x2x4

Compiles the speculative loop of Chinchilla and its draft, one layer each, once for every way, and
counts what sampling takes: cycles of the draft's K samples and of the verifier, and collectives.
docs/sampler.md has the table and what was made of it. Needs `pip install libtpu`.
"""

import dataclasses
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from spsjax import sampling
from spsjax.cli import main as cli
from spsjax.cli import terminal
from spsjax.parallel import sharding
from spsjax.performance import aot

_MODELS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "models"
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "Kind and shape of the slice.")
_BATCH = flags.DEFINE_integer("batch", 1, "Rows.", lower_bound=1)
_K = flags.DEFINE_integer("num_speculative_tokens", 4, "K.", lower_bound=1)


def main():
    jax.config.update("jax_platforms", "cpu")  # the TPU's compiler is asked for, not a TPU
    ways = [
        (place, name, gathering, change)
        for place, gathering in (
            ("gathered", {"gathered": sharding.gather_vocab}),
            (
                "where they are",
                {"gathered": lambda logits: logits, "by_rows": lambda logits: logits},
            ),
        )
        for name, change in (
            ("search, 1 bit a round", {"_BITS": 1}),
            ("search, 2 bits", {"_BITS": 2}),
            ("search, 4 bits", {"_BITS": 4}),
            ("sort", {"_heaviest": by_sorting}),
        )
    ]
    rows = [
        (place, name, *_compiled(gathering, change))
        for place, name, gathering, change in terminal.progress("compiling")(ways)
    ]
    header = ("logits", "threshold by", "draft's cycles", "verifier's", "collectives", "temp. MB")
    terminal.columns(header, rows, left=(0, 1))
    print("a round with top-k and top-p; sorts themselves are not in the compiler's count")


def _compiled(gathering: dict, change: dict) -> tuple[str, ...]:
    """What the loop takes with these functions of `sharding`, and these parts of `sampling`."""
    jax.clear_caches()
    target, draft = (
        dataclasses.replace(cli.model_config(name, _MODELS), num_layers=1)
        for name in ("chinchilla_70b", "chinchilla_draft_4b")
    )
    with (
        mock.patch.multiple(sharding, **gathering),
        mock.patch.multiple(sampling, **change),
    ):
        report = aot.compile_pair(
            target,
            draft,
            _TOPOLOGY.value,
            num_speculative_tokens=_K.value,
            batch=_BATCH.value,
            prompt_tokens=32,
            max_new_tokens=32,
        )
    loop = report.programs["SpS"]
    return (
        f"{loop.cycles['propose, sampling']:,}",
        f"{loop.cycles['verify']:,}",
        f"{sum(loop.executed.values())}",
        f"{loop.temporary / 1e6:.1f}",
    )


def by_sorting(logits, weights, needed):
    """`sampling._keep_top_mass` by a stable sort and a cumulative sum."""
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
    _, weights, ids = lax.sort((-logits, weights, ids), num_keys=1, is_stable=True)
    keep = jnp.cumsum(weights, axis=-1) - weights < needed
    _, keep = lax.sort((ids, keep.astype(jnp.int32)), num_keys=1)
    return keep > 0


if __name__ == "__main__":
    cli.run(main)
