"""Drafters under test: those of the package `drafters`, and those of `toy_drafters`."""

import pkgutil

import jax
import toy_drafters
from jax.sharding import NamedSharding, PartitionSpec

from spsjax import drafters, loading
from spsjax.drafters import draft_model
from spsjax.loading import LoadedDrafter
from spsjax.verifiers import match, rejection

PACKAGE = sorted(
    module.name for module in pkgutil.iter_modules(drafters.__path__) if module.name != "base"
)
NAMES = [*PACKAGE, "random_tree", "tapped"]


def build(name: str, draft: loading.Model, K: int) -> LoadedDrafter:
    """Returns the drafter `name` proposing K tokens, with its parameters.

    A drafter that needs parameters or a config gets them here. A new kind of drafter adds a branch.

    Args:
      name: name of a drafter in NAMES.
      draft: model of the target's shape.
      K: number of draft tokens per round.
    """
    if name == "none":
        return LoadedDrafter(name, drafters.none.Drafter(), {})
    if name == "draft_model":
        return LoadedDrafter(name, draft_model.Drafter(draft.config, K), draft.params)
    if name == "random_tree":
        drafter = toy_drafters.RandomTree(draft.config, K)
        return LoadedDrafter(name, drafter, draft.params)
    if name == "tapped":
        drafter = toy_drafters.Tapped(draft.config.d_model, draft.config.vocab_size, K)
        params = drafter.init_params(jax.random.key(3), draft.params)
        if draft.mesh is not None:
            params = jax.device_put(params, NamedSharding(draft.mesh, PartitionSpec()))
        return LoadedDrafter(name, drafter, params)
    return LoadedDrafter(name, getattr(drafters, name).Drafter(num_speculative_tokens=K), {})


def verifier(name: str):
    """Returns the verifier that fits the drafter's proposals."""
    return match.Verifier() if name == "random_tree" else rejection.Verifier()
