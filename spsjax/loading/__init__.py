"""Loading and saving of models and drafters."""

from spsjax.loading.drafters import (
    LoadedDrafter,
    as_drafter,
    load_drafter,
    save_drafter,
    with_stop_rule,
)
from spsjax.loading.models import (
    FILES,
    Model,
    compute_type,
    default_dtype,
    load,
    load_config,
    load_tokenizer,
    quantized,
    random,
    save,
)
from spsjax.loading.names import default_drafter, fetch, is_feature_drafter, shipped_drafter

__all__ = [
    "FILES",
    "LoadedDrafter",
    "Model",
    "as_drafter",
    "compute_type",
    "default_drafter",
    "default_dtype",
    "fetch",
    "is_feature_drafter",
    "load",
    "load_config",
    "load_drafter",
    "load_tokenizer",
    "quantized",
    "random",
    "save",
    "save_drafter",
    "shipped_drafter",
    "with_stop_rule",
]
