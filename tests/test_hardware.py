"""Data sheets by the device names of jax and of hfseq."""

from __future__ import annotations

import pytest

from hfseq.errors import UsageError
from hfseq.training.hardware import ACCELERATORS, find_accelerator, get_accelerator


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-v7"),
    ],
)
def test_accelerator_is_found_by_its_jax_name(device_kind, name):
    assert find_accelerator(device_kind) is ACCELERATORS[name]


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA L40S", "NVIDIA T400", "NVIDIA GH200 480GB"])
def test_a_device_with_a_similar_name_is_not_taken_for_a_known_one(device_kind):
    assert find_accelerator(device_kind) is None


def test_figures_are_plausible():
    for accelerator in ACCELERATORS.values():
        assert (
            accelerator.float32_flops
            <= accelerator.half_flops
            <= (accelerator.fp8_flops or accelerator.half_flops)
        )
        assert 8e9 < accelerator.memory_bytes < 1e12 and 1e11 < accelerator.memory_bandwidth < 1e13
        assert (
            accelerator.link_bandwidth < accelerator.memory_bandwidth
            and accelerator.network_bandwidth <= accelerator.link_bandwidth
            or not accelerator.link_bandwidth
        )
        assert (
            accelerator.peak_flops(2) == accelerator.half_flops
            and accelerator.peak_flops(4) == accelerator.float32_flops
        )


def test_an_unknown_accelerator_is_an_error_that_lists_those_known():
    assert get_accelerator("H200") is ACCELERATORS["h200"]
    with pytest.raises(UsageError, match="did you mean 'h200'.*known: b200, h200.*--peak_tflops"):
        get_accelerator("h20")
