"""Tests of the table of accelerators, of topologies, and of measurements of this machine."""

import importlib.util
import types

import pytest
from helpers.bad_input import one_line

from spsjax.planning import hardware

PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "NVIDIA H100 80GB HBM3": 989e12, "cpu": None,
}  # fmt: skip
TPUS = "v4, v5e, v5p, v6e, tpu7x"


def test_peak_of_device_kind_is_published_figure():
    """JAX calls a v5e "TPU v5 lite", which also begins with the name of a v5p."""
    for kind, flops in PEAKS.items():
        assert hardware.peak(types.SimpleNamespace(device_kind=kind)) == flops, kind


def test_memory_bandwidth_has_one_rate_per_number_of_threads():
    rates = hardware.memory_bandwidth(megabytes=1, times=1)
    cores = hardware.num_cores()
    assert list(rates) == ["1 thread", f"{cores} threads"][: min(cores, 2)]
    assert all(rate > 1e6 for rate in rates.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (name, "v4, v5e, v5p, v6e, tpu7x and a shape, as v5p:2x2x4, or H100, H200")
            for name in ("", "v5e:0x0", "v9x:2x2", "v5p:2x", "A100", "H100:2")
        ),
        ("v5p:2x2", "3 sizes for v5p"),
        ("v5e:2x2x2", "2 sizes for v5e"),
    ],
)
def test_topology_of_another_form_is_refused(name, expected):
    with one_line("topology", f"expected {expected}"):
        hardware.topology(name)


@pytest.mark.aot
def test_topology_has_the_devices_that_jax_sees():
    pytest.importorskip("libtpu")
    counts = {"v4:2x2x4": 16, "v5p:2x2x1": 4, "v5e:2x4": 8, "v6e:2x2": 4, "tpu7x:2x2x1": 8}
    for name, count in counts.items():
        chip, devices = hardware.topology(name)
        assert len(devices) == count
        assert chip == hardware.CHIPS[name.partition(":")[0]]
    with one_line("topology", "one that libtpu knows, found v5e:7x9"):
        hardware.topology("v5e:7x9")


def test_topology_without_its_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with one_line("jax_cuda13_plugin: expected an installed", "spsjax[gpu-compiler]"):
        hardware.topology("H100")
    with one_line("libtpu: expected an installed package", "spsjax[tpu-compiler]"):
        hardware.topology("v5p:2x2x4")
