"""Other libraries that a benchmark measures in the same run, by the names of `--peer`."""

from collections.abc import Sequence

from spsjax.evaluation import hf_baseline, openvino_baseline
from spsjax.evaluation.samplers import System
from spsjax.loading import Model

_PEERS = {"hf": hf_baseline, "openvino": openvino_baseline}
NAMES = tuple(_PEERS)
HELP = "Measure Hugging Face generate or OpenVINO GenAI, too."


def modules(name: str) -> tuple[str, ...]:
    """Returns the modules that a peer needs."""
    return _PEERS[name].MODULES


def systems(names: Sequence[str], options, target: Model, draft: Model | None) -> list[System]:
    """Returns the systems of these peers.

    Args:
        names: names of peers.
        options: section `peer` of a config.
        target, draft: models whose weights are copied.
    """
    return [system for name in names for system in _PEERS[name].systems(options, target, draft)]
