"""TPU chips: published figures, and descriptions of slices that are not here."""

import dataclasses
import importlib.util
import math
import os
import re

from jax.experimental import topologies

from spsjax.errors import InputError, one_line, short_repr


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip (cloud.google.com/tpu/docs, "system architecture").

    Attributes:
        memory: bytes of high-bandwidth memory.
        bandwidth: of that memory, bytes a second.
        flops: bfloat16 operations a second.
        interconnect: of all links to other chips, both directions together, bytes a second.
    """

    memory: float
    bandwidth: float
    flops: float
    interconnect: float


CHIPS = {
    "v4": Chip(32 * 2**30, 1.2e12, 275e12, 600e9),
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 400e9),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 1200e9),
    "v6e": Chip(32 * 2**30, 1640e9, 918e12, 800e9),
}

# Dense bfloat16 operations a second, by how JAX names the device.
_PEAKS = {
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}

_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}

# A v4 has two cores, which JAX sees as one device; its description has to be asked to.
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}


def peak(device) -> float | None:
    """Dense bfloat16 operations a second of a JAX device, by its maker; None where unknown."""
    names = [name for name in _PEAKS if device.device_kind.startswith(name)]
    return _PEAKS[max(names, key=len)] if names else None


def topology(name: str) -> tuple[Chip, list]:
    """Chips that are not here, a device each, and the figures of one: "v5p:2x2x4".

    Raises InputError for a name that is none, or without `libtpu`, which describes them.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise InputError(
            f"topology: expected {', '.join(CHIPS)} and a shape, as v5p:2x2x4, "
            f"found {short_repr(name)}"
        )
    if shape.count("x") + 1 != _DIMENSIONS[kind]:
        raise InputError(f"topology: expected {_DIMENSIONS[kind]} sizes for {kind}, found {name}")
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("topology: expected libtpu to be installed (pip install libtpu)")
    # Ask no cloud what this machine is, and take no lock on chips that it has not.
    alone = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-32",  # any: without one the plugin complains of it
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    added = {key: value for key, value in alone.items() if key not in os.environ}
    os.environ.update(added)
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **_OPTIONS.get(kind, {})
        ).devices
    except Exception as error:  # whatever the plugin throws
        raise InputError(
            f"topology: expected one that libtpu knows, found {name}: {one_line(error)}"
        ) from None
    finally:
        for key in added:
            del os.environ[key]
    if len(devices) != math.prod(map(int, shape.split("x"))):
        raise InputError(
            f"topology: expected a device a chip, found {len(devices)} devices in {name}"
        )
    return CHIPS[kind], list(devices)
