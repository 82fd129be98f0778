"""Tests of the table of accelerators and of measurements of this machine."""

import types

import pytest

from spsjax.performance import hardware


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_peak_of_device_kind_is_published_figure(kind, flops):
    """JAX calls a v5e "TPU v5 lite", which also begins with the name of a v5p."""
    assert hardware.peak(types.SimpleNamespace(device_kind=kind)) == flops


def test_memory_bandwidth_has_one_rate_per_number_of_threads():
    rates = hardware.memory_bandwidth(megabytes=1, times=1)
    cores = hardware.num_cores()
    assert list(rates) == ["1 thread", f"{cores} threads"][: min(cores, 2)]
    assert all(rate > 1e6 for rate in rates.values())
