"""Which implementation of attention serves: a pure function of what is known before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that the choice depends on. Sizes are those of the whole arrays, over all devices.

    ``platform`` is "cpu", "cuda", "rocm" or "tpu"; ``capability`` CUDA's, as (9, 0); ``memory``
    bytes of a device, where they are known. ``mask`` and ``bias`` are the four sizes of what is
    added or hidden densely. ``segments`` says who has them: "" nobody, "keys" (0 is padding),
    "same" queries and keys alike, "both" each their own. ``dropout`` is the rate on the weights.
    ``mesh`` has the axes of more than one device.
    """

    platform: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = False
    window: tuple[int, int] | None = None
    segments: str = ""
    lengths: bool = False
    max_runs: int | None = None
    mask: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    dropout: float = 0.0
    capability: tuple[int, int] | None = None
    memory: float | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    devices: int = 1

    @property
    def half(self) -> bool:
        """Whether it is computed in a type of two bytes."""
        return jnp.dtype(self.dtype).itemsize == 2

    def ways(self, *axes: str) -> int:
        """Return over how many devices the mesh lays these axes together."""
        sizes: Mapping[str, int] = dict(self.mesh)
        ways = 1
        for axis in axes:
            ways *= sizes.get(axis, 1)
        return ways
