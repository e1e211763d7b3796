"""What accelerators can do, by their data sheets: rates, memory, links. Imports no jax.

All figures are of one jax device: that is a core and half of a chip for TPU v3 and v7.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from hfseq.errors import UsageError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device: dense peaks in FLOP/s, bytes, bytes a second.

    ``half`` is the rate of products in bfloat16 or float16, whichever the device has; ``single``
    that of float32 as jax computes it there by default (TF32 on GPUs that have it, one pass of
    bfloat16 on TPUs); ``fp8`` is 0 where there are no such units. ``link`` is what a device sends
    at most to others of its machine (TPU: of its slice), ``network`` its share of the network
    between machines of ``machine`` devices; 0 means that no usual figure exists. jax reserves
    ``share`` of the memory.
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
        """Return the peak of products of a type of ``itemsize`` bytes, FLOP/s."""
        return self.half_flops if itemsize < 4 else self.float32_flops

    @property
    def capability(self) -> str:
        """CUDA's compute capability, as jax writes it; empty for TPUs."""
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


# NVIDIA's data sheets without sparsity, SXM boards where there are several; Google's TPU pages.
# The network is that of NVIDIA's own machines (DGX).
ACCELERATORS: Mapping[str, Accelerator] = {
    one.name: one
    for one in (
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
    """Return the accelerator called ``name``, in either case; an error lists those known.

    TPUs may go without ``tpu-``: "v5e".
    """
    if f"tpu-{name.lower()}" in ACCELERATORS:
        return ACCELERATORS[f"tpu-{name.lower()}"]
    if name.lower() not in ACCELERATORS:
        raise UsageError(
            f"no accelerator '{name}' is known{did_you_mean(name.lower(), ACCELERATORS)} (known: "
            f"{', '.join(ACCELERATORS)}); for another one take the nearest and give --peak_tflops "
            "and --memory_gb"
        )
    return ACCELERATORS[name.lower()]


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Return the accelerator that jax calls ``kind`` (``device_kind``), if it is a known one.

    What it is called stands there as words of its own: an L40 is no L4.
    """
    matches = [
        (len(text), one)
        for one in ACCELERATORS.values()
        for text in one.device_kinds
        if re.search(rf"(?<![^\W_]){text}(?![^\W_])", device_kind.lower())
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None
