"""Data sheets of accelerators: their compute rates, memory and bandwidths.

All numbers are per jax device. For TPU v3 and v7, a jax device is one of the two cores of a chip.
This module does not import jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from hfseq.errors import UsageError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The data sheet of a device, with rates in FLOP/s, sizes in bytes and bandwidths in bytes/s.

    Attributes:
        name: The name, e.g. "h100" or "tpu-v5e".
        half_flops: Dense peak rate in bfloat16 or float16, whichever the device supports.
        float32_flops: Dense peak rate in float32 with jax's default precision: TF32 on GPUs that
            have it, one bfloat16 pass on TPUs.
        fp8_flops: Dense peak rate in FP8. 0 if the device has no FP8 units.
        memory_bytes: Memory size.
        memory_bandwidth: Memory bandwidth.
        link_bandwidth: Maximum rate at which a device sends data to other devices of its machine,
            or of its slice for TPUs. 0 if it differs between machines or is unknown.
        devices_per_machine: Number of devices in a machine. 0 for TPUs.
        network_bandwidth: Bandwidth of the network between machines, divided by the number of
            devices in a machine. 0 if it differs between machines or is unknown.
        device_kinds: Names of the device in `jax.Device.device_kind`, in lower case.
        memory_fraction: Fraction of the memory that jax allocates.
    """

    name: str
    half_flops: float
    float32_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    devices_per_machine: int = 8
    network_bandwidth: float = 0.0
    device_kinds: tuple[str, ...] = ()
    memory_fraction: float = 0.75

    def peak_flops(self, itemsize: float) -> float:
        """Returns the peak rate of matrix multiplications in a dtype of `itemsize` bytes."""
        return self.half_flops if itemsize < 4 else self.float32_flops

    @property
    def capability(self) -> str:
        """The CUDA compute capability, e.g. "9.0". Empty for TPUs."""
        return _CAPABILITIES.get(self.name.partition("-")[0], "")


_CAPABILITIES = {
    "b200": "10.0",
    "h200": "9.0",
    "h100": "9.0",
    "a100": "8.0",
    "l4": "8.9",
    "t4": "7.5",
    "v100": "7.0",
}


def _tpu(
    name: str, half: float, fp8: float, memory: float, bandwidth: float, link: float, *kinds: str
) -> Accelerator:
    return Accelerator(
        name,
        half,
        half,
        fp8,
        memory * 2**30,
        bandwidth,
        link,
        devices_per_machine=0,
        device_kinds=kinds,
        memory_fraction=0.95,
    )


# Sources: NVIDIA's data sheets and Google's TPU pages. GPU rates are those without sparsity. Names
# without a suffix are the SXM boards of GPUs with several variants. Network bandwidths are those of
# NVIDIA's own machines (DGX).
ACCELERATORS: Mapping[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("b200", 2250e12, 1125e12, 4500e12, 180e9, 7.7e12, 900e9, 8, 50e9, ("b200",)),
        Accelerator("h200", 989e12, 494e12, 1979e12, 141e9, 4.8e12, 450e9, 8, 50e9, ("h200",)),
        Accelerator("h100", 989e12, 494e12, 1979e12, 80e9, 3.35e12, 450e9, 8, 50e9, ("h100",)),
        Accelerator(
            "h100-pcie", 756e12, 378e12, 1513e12, 80e9, 2.0e12, 64e9, 8, 50e9, ("h100 pcie",)
        ),
        Accelerator(
            "h100-nvl", 835e12, 417e12, 1670e12, 94e9, 3.9e12, 300e9, 8, 50e9, ("h100 nvl",)
        ),
        Accelerator("a100", 312e12, 156e12, 0, 80e9, 2.04e12, 300e9, 8, 25e9, ("a100",)),
        Accelerator(
            "a100-40gb", 312e12, 156e12, 0, 40e9, 1.555e12, 300e9, 8, 25e9,
            ("a100-sxm4-40gb", "a100-pcie-40gb"),
        ),
        Accelerator("l4", 121e12, 60e12, 242e12, 24e9, 300e9, 32e9, device_kinds=("l4",)),
        Accelerator("t4", 65e12, 8.1e12, 0, 16e9, 320e9, 16e9, device_kinds=("t4",)),
        Accelerator("v100", 125e12, 15.7e12, 0, 32e9, 900e9, 150e9, 8, 6.25e9, ("v100",)),
        Accelerator(
            "v100-16gb", 125e12, 15.7e12, 0, 16e9, 900e9, 150e9, 8, 6.25e9,
            ("v100-sxm2-16gb", "v100-pcie-16gb"),
        ),
        _tpu("tpu-v3", 61.5e12, 0, 16, 450e9, 0, "tpu v3"),
        _tpu("tpu-v4", 275e12, 0, 32, 1228e9, 300e9, "tpu v4"),
        _tpu("tpu-v5e", 197e12, 0, 16, 819e9, 200e9, "tpu v5 lite", "tpu v5e"),
        _tpu("tpu-v5p", 459e12, 0, 95, 2765e9, 600e9, "tpu v5p", "tpu v5"),
        _tpu("tpu-v6e", 918e12, 0, 32, 1638e9, 400e9, "tpu v6 lite", "tpu v6e", "tpu v6"),
        _tpu("tpu-v7", 1153e12, 2307e12, 96, 3690e9, 300e9, "tpu7x", "tpu v7"),
    )
}  # fmt: skip


def get_accelerator(name: str) -> Accelerator:
    """Returns the accelerator with this name. The case of letters does not matter.

    The prefix `tpu-` can be omitted, e.g. "v5e" for "tpu-v5e".

    Raises:
        UsageError: The accelerator is unknown. The message lists the known accelerators.
    """
    if f"tpu-{name.lower()}" in ACCELERATORS:
        return ACCELERATORS[f"tpu-{name.lower()}"]
    if name.lower() not in ACCELERATORS:
        raise UsageError(
            f"unknown accelerator '{name}'{did_you_mean(name.lower(), ACCELERATORS)} (known: "
            f"{', '.join(ACCELERATORS)}). For any other accelerator, use the most similar one and "
            "set --peak_tflops and --memory_gb"
        )
    return ACCELERATORS[name.lower()]


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with a jax `device_kind`, or `None` if it is unknown.

    Names only match whole words, so that "NVIDIA L40" does not match "l4".
    """
    matches = [
        (len(text), accelerator)
        for accelerator in ACCELERATORS.values()
        for text in accelerator.device_kinds
        if re.search(rf"(?<![^\W_]){text}(?![^\W_])", device_kind.lower())
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
