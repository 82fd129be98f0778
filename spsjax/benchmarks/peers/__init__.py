"""Other libraries that a benchmark measures in the same run, by the names of `--peer`."""

from collections.abc import Sequence

from spsjax.benchmarks.peers import hf, openvino
from spsjax.benchmarks.systems import System
from spsjax.loading import Model
from spsjax.utils import extras

_PEERS = {"hf": hf, "openvino": openvino}
NAMES = tuple(_PEERS)
HELP = "Measure Hugging Face generate or OpenVINO GenAI, too."


def require(name: str) -> None:
    """Raises MissingPackage unless the packages that a peer needs are installed."""
    extras.require(_PEERS[name].EXTRA, *_PEERS[name].MODULES)


def systems(names: Sequence[str], options, target: Model, draft: Model | None) -> list[System]:
    """Returns plain and, with a draft, speculative generation per K, of peers with these weights.

    `options` is the section `peer` of a config.
    """
    counts = (0, *(options.num_speculative_tokens if draft else ()))
    pairs = [pair for name in names for pair in _PEERS[name].pairs(options, target, draft)]
    return [pair.system(count) for pair in pairs for count in counts]
