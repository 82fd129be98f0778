"""Other libraries that a benchmark measures in the same run, by the names of `--peer`."""

from collections.abc import Sequence

from spsjax.benchmarks.peers import hf, openvino
from spsjax.benchmarks.systems import System
from spsjax.loading import Model

_PEERS = {"hf": hf, "openvino": openvino}
NAMES = tuple(_PEERS)
HELP = "Measure Hugging Face generate or OpenVINO GenAI, too."


def modules(name: str) -> tuple[str, ...]:
    """Returns the modules that a peer needs."""
    return _PEERS[name].MODULES


def systems(names: Sequence[str], options, target: Model, draft: Model | None) -> list[System]:
    """Returns the systems of peers, with the weights of a pair; `options` is the section `peer`."""
    return [system for name in names for system in _PEERS[name].systems(options, target, draft)]
