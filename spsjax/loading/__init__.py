"""Loading and saving of models and drafters."""

from spsjax.loading.drafters import (
    LoadedDrafter,
    as_drafter,
    load_drafter,
    of_model,
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
from spsjax.loading.vocabularies import are_foreign

__all__ = [
    "FILES",
    "LoadedDrafter",
    "Model",
    "are_foreign",
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
    "of_model",
    "quantized",
    "random",
    "save",
    "save_drafter",
    "shipped_drafter",
    "with_stop_rule",
]
