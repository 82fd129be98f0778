"""Published figures of accelerators, TPU topologies, and measurements of this machine."""

import concurrent.futures
import dataclasses
import math
import os
import platform
import re
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from spsjax.errors import InputError, one_line, short_repr
from spsjax.loading import Model
from spsjax.models import quantization
from spsjax.utils import bfloat16, extras


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one accelerator, and how JAX and `libtpu` name it.

    Attributes:
        device_kind: start of the name that JAX gives the device.
        flops: dense bfloat16 operations per second.
        memory: bytes of high-bandwidth memory.
        bandwidth: bytes per second that the memory delivers.
        interconnect: bytes per second over all links to other chips, both directions together;
            None: unknown.
        dimensions: number of axes of a slice's shape; None: slices of this kind are not described.
        chip_config: name of the chip configuration that describes one device per chip.
        devices: number of devices that JAX sees per chip. The figures are those of one.
    """

    device_kind: str
    flops: float
    memory: float
    bandwidth: float
    interconnect: float | None = None
    dimensions: int | None = None
    chip_config: str | None = None
    devices: int = 1


# TPUs: cloud.google.com/tpu/docs, "system architecture". A v4 has two cores, which JAX sees as one
# device; `libtpu` describes them as one only in the configuration "megacore".
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 32 * 2**30, 1.2e12, 600e9, 3, "megacore"),
    "v5e": Chip("TPU v5 lite", 197e12, 16 * 2**30, 819e9, 400e9, 2),
    "v5p": Chip("TPU v5", 459e12, 95 * 2**30, 2765e9, 1200e9, 3),
    "v6e": Chip("TPU v6 lite", 918e12, 32 * 2**30, 1640e9, 800e9, 2),
    # A chip of this kind is two devices, with half of the published figures each.
    "tpu7x": Chip("TPU7x", 1153.5e12, 96 * 2**30, 3690e9, 600e9, 3, devices=2),
    # GPUs: the vendor's data sheets of the boards with NVLink (SXM), A100 with 80 GB.
    "A100": Chip("NVIDIA A100", 312e12, 80 * 2**30, 2039e9, 600e9),
    "H100": Chip("NVIDIA H100", 989e12, 80 * 2**30, 3350e9, 900e9),
    "H200": Chip("NVIDIA H200", 989e12, 141e9, 4800e9, 900e9),
}

# GPUs of one generation, for which programs can be compiled without one, and their
# multiprocessors. The vendor's "Hopper tuning guide" and data sheets have the other figures.
_MULTIPROCESSORS = {"H100": 132, "H200": 132}
_GPU_TARGET = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {count}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""


def peak(device) -> float | None:
    """Returns the published dense bfloat16 operations per second of a JAX device, if known."""
    chips = [chip for chip in CHIPS.values() if device.device_kind.startswith(chip.device_kind)]
    # "TPU v5 lite" starts with the names of two chips. The longer one is right.
    return max(chips, key=lambda chip: len(chip.device_kind)).flops if chips else None


# JAX's names of GPUs with the memory of `CHIPS`; other boards have slower memory.
_BOARDS = {"NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}


def bandwidth(device) -> float:
    """Returns the bytes per second of a device's memory: published ones, or else measured ones."""
    if device.device_kind in _BOARDS:
        return CHIPS[_BOARDS[device.device_kind]].bandwidth
    return max(memory_bandwidth().values())


def topology(name: str) -> tuple[Chip, list]:
    """Returns the figures of one device, and the devices of chips that are not attached.

    `name` is kind and shape of a TPU slice, as "v5p:2x2x4", or one GPU, "H100" or "H200". Raises
    InputError if it is something else, or if the package is missing that compiles for it.
    """
    if name in _MULTIPROCESSORS:
        return CHIPS[name], _gpu(name)
    kind, _, shape = name.partition(":")
    tpus = {kind: chip for kind, chip in CHIPS.items() if chip.dimensions}
    if kind not in tpus or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise InputError(
            f"topology: expected {', '.join(tpus)} and a shape, as v5p:2x2x4, or "
            f"{', '.join(_MULTIPROCESSORS)}, found {short_repr(name)}"
        )
    chip = tpus[kind]
    if shape.count("x") + 1 != chip.dimensions:
        raise InputError(f"topology: expected {chip.dimensions} sizes for {kind}, found {name}")
    extras.require("tpu-compiler", "libtpu")
    options = {"chip_config_name": chip.chip_config} if chip.chip_config else {}
    devices = _describe(name, options)
    expected = chip.devices * math.prod(map(int, shape.split("x")))
    if len(devices) != expected:
        raise InputError(f"topology: expected {expected} devices in {name}, found {len(devices)}")
    return chip, devices


def _describe(name: str, options: dict[str, str]) -> list:
    """Returns the devices of a slice as `libtpu` describes them."""
    # Without these variables libtpu asks the cloud's metadata server about this machine, locks the
    # TPU that it expects here, and warns of a missing accelerator type (any type will do).
    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-32",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        return list(description.devices)
    except Exception as error:  # the plugin raises errors of many types
        raise InputError(
            f"topology: expected one that libtpu knows, found {name}: {one_line(error)}"
        ) from None
    finally:
        for key in added:
            del os.environ[key]


def _gpu(name: str) -> list:
    """Returns one GPU as XLA's compiler sees it, without any GPU here."""
    extras.require("gpu-compiler", "jax_cuda13_plugin")
    chip = CHIPS[name]
    target = _GPU_TARGET.format(
        count=_MULTIPROCESSORS[name],
        memory=int(chip.memory),
        bandwidth=int(chip.bandwidth),
        kind=chip.device_kind,
    )
    try:
        description = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology="1x1x1"
        )
        return list(description.devices)
    except Exception as error:  # the plugin raises errors of many types
        raise InputError(
            f"topology: expected one that the CUDA compiler knows, found {name}: {one_line(error)}"
        ) from None


def machine(model: Model) -> dict[str, object]:
    """Returns what measured times depend on: device, cores, versions and compute types."""
    kind = jax.devices()[0].device_kind
    direct = bfloat16.is_multiplied_directly()
    return {
        "device": _processor() if kind == "cpu" else kind,
        "cores": num_cores(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dtype": str(model.params["norm"]["scale"].dtype),
        "weights": quantization.kind_of(model.params) or "as dtype",
        "bfloat16": "multiplied directly" if direct else "converted to float32",
    }


def _processor() -> str:
    """Returns the name of the processor's model, or "cpu" if it is unknown."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return (names or [platform.processor()])[0] or "cpu"


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory_bandwidth(megabytes: int = 512, times: int = 5) -> dict[str, float]:
    """Measures the bytes per second that a sum over a large array reads, by label.

    On a CPU, the labels are one thread and one thread per core. `megabytes` is the size of the
    array on a CPU, and a quarter of it elsewhere; it should be much larger than any cache. Of the
    repetitions, the fastest counts.

    Returns:
        Bytes per second by label. On a CPU there is one value for one thread and one for a thread
        per core.
    """
    count = megabytes * 2**20 // 4
    if jax.default_backend() != "cpu":
        array = jax.block_until_ready(jnp.ones(4 * count, jnp.float32))
        total = jax.jit(jnp.sum).lower(array).compile()
        return {"device": _best_rate(lambda: total(array).block_until_ready(), array.nbytes, times)}
    array = np.ones(count, np.float32)
    rates = {"1 thread": _best_rate(array.sum, array.nbytes, times)}
    if (threads := num_cores()) > 1:
        slices = np.array_split(array, threads)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            rate = _best_rate(lambda: list(pool.map(np.sum, slices)), array.nbytes, times)
        rates[f"{threads} threads"] = rate
    return rates


def _best_rate(call: Callable, size: int, times: int) -> float:
    best = float("inf")
    for _ in range(times + 1):  # the first call warms up
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return size / best
