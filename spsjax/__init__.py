"""spsjax: speculative sampling of language models in JAX.

Everything exported here is public; all else is internal and may change.
"""

from spsjax import drafters, verifiers
from spsjax.decode.logprobs import LogProbs
from spsjax.drafters.shapes import DynamicTree, Tree
from spsjax.errors import InputError, NonFiniteError
from spsjax.generation import Generation, Stats, generate, propose, stream
from spsjax.loading import LoadedDrafter, Model, load, load_drafter, save_drafter
from spsjax.parallel import sharding
from spsjax.runtime.engine import Engine
from spsjax.runtime.rollout import Group, rollout
from spsjax.sampling import SamplingParams
from spsjax.types import Proposal, Verdict
from spsjax.utils.version import __version__ as __version__
from spsjax.verifiers.lenience import lenience_bias
from spsjax.verifiers.standalone import block_verify, rejection_sample, tree_verify

__all__ = [
    "DynamicTree",
    "Engine",
    "Generation",
    "Group",
    "InputError",
    "LoadedDrafter",
    "LogProbs",
    "Model",
    "NonFiniteError",
    "Proposal",
    "SamplingParams",
    "Stats",
    "Tree",
    "Verdict",
    "block_verify",
    "drafters",
    "generate",
    "lenience_bias",
    "load",
    "load_drafter",
    "propose",
    "rejection_sample",
    "rollout",
    "save_drafter",
    "sharding",
    "stream",
    "tree_verify",
    "verifiers",
]
