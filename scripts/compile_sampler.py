"""Compares ways to sample from logits that are sharded by vocabulary, by the TPU compiler's counts.

python scripts/compile_sampler.py --topology=v5p:2x2x4

Compiles the speculative loop of Chinchilla and its draft, one layer each, once per way. Counts the
cycles of the draft's K samples and of the verifier, and the collectives. docs/sampler.md has the
table. Needs `pip install libtpu`.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from unittest import mock

import _environment  # noqa: F401 (must be first: names a package that is missing)
import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from spsjax import sampling
from spsjax.cli import configs, main, terminal
from spsjax.parallel import sharding
from spsjax.performance import aot

_MODELS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "models"
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x4", "Kind and shape of the slice.")
_BATCH = flags.DEFINE_integer("batch", 1, "Number of rows.", lower_bound=1)
_K = flags.DEFINE_integer("num_speculative_tokens", 4, "K.", lower_bound=1)


def run():
    ways = [
        (layout, name, gathering, change)
        for layout, gathering in (
            ("gathered", sharding.gather_vocab),
            ("sharded", lambda logits: logits),
        )
        for name, change in (
            ("search, 1 bit per round", {"_BITS": 1}),
            ("search, 2 bits", {"_BITS": 2}),
            ("search, 4 bits", {"_BITS": 4}),
            ("sort", {"_keep_top_mass": by_sorting}),
        )
    ]
    rows = [
        (layout, name, *_compile(gathering, change))
        for layout, name, gathering, change in terminal.progress("compiling")(ways)
    ]
    header = ("logits", "threshold by", "draft's cycles", "verifier's", "collectives", "temp. MB")
    terminal.print_table(header, rows, left=(0, 1))
    print("one round with top-k and top-p; the compiler does not count the cycles of a sort")


def _compile(gathering: Callable, change: dict) -> tuple[str, ...]:
    """Returns the counts of the loop with another `gather_vocab`, and changes to `sampling`."""
    jax.clear_caches()
    target, draft = (
        dataclasses.replace(configs.model_config(name, _MODELS), num_layers=1)
        for name in ("chinchilla_70b", "chinchilla_draft_4b")
    )
    with (
        mock.patch.object(sharding, "gather_vocab", gathering),
        mock.patch.multiple(sampling, **change),
    ):
        plan = aot.plan_pair(
            target,
            draft,
            _TOPOLOGY.value,
            num_speculative_tokens=_K.value,
            batch=_BATCH.value,
            prompt_tokens=32,
            max_new_tokens=32,
        )
        loop = plan.compile(["SpS"])["SpS"]
    return (
        f"{loop.cycles['propose, sampling']:,}",
        f"{loop.cycles['verify']:,}",
        f"{sum(loop.executed.values())}",
        f"{loop.temporary / 1e6:.1f}",
    )


def by_sorting(logits, weights, needed):
    """Returns what `sampling._keep_top_mass` returns, by a stable sort and a cumulative sum."""
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
    _, weights, ids = lax.sort((-logits, weights, ids), num_keys=1, is_stable=True)
    keep = jnp.cumsum(weights, axis=-1) - weights < needed
    _, keep = lax.sort((ids, keep.astype(jnp.int32)), num_keys=1)
    return keep > 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # only the TPU's compiler is needed, not a TPU
    main.run(run)
