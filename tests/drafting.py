"""Every drafter that spsjax has, found by looking into its package: a new one is tested unasked."""

import dataclasses
import pkgutil

from spsjax import drafters, loading

NAMES = sorted(
    module.name for module in pkgutil.iter_modules(drafters.__path__) if module.name != "base"
)


def build(name: str, draft: loading.Model, K: int):
    """The drafter `name` proposing K tokens, and its parameters.

    One with a field `config` is given the draft's shape and weights; the others need nothing. Of
    what a drafter of another kind needs, this is the place.
    """
    drafter = getattr(drafters, name).Drafter
    fields = {field.name for field in dataclasses.fields(drafter)}
    options = {} if name == "none" else {"num_speculative_tokens": K}
    if "config" in fields:
        return drafter(config=draft.config, **options), draft.params
    return drafter(**options), {}


def argument(name: str, draft: loading.Model, K: int):
    """The same as `generate` takes it."""
    drafter, params = build(name, draft, K)
    return draft if params else drafter
