"""spsjax: speculative sampling of language models in JAX. Everything public is here."""

from spsjax import drafters
from spsjax.errors import InputError, NonFiniteError
from spsjax.generation import Generation, Stats, generate, stream
from spsjax.loading import Model, load
from spsjax.parallel import sharding
from spsjax.sampling import SamplingParams
from spsjax.verifiers.rejection import lenience_bias, rejection_sample

__version__ = "0.1.0"

__all__ = [
    "Generation",
    "InputError",
    "Model",
    "NonFiniteError",
    "SamplingParams",
    "Stats",
    "drafters",
    "generate",
    "lenience_bias",
    "load",
    "rejection_sample",
    "sharding",
    "stream",
]
