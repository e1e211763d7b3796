"""Which implementation of attention serves, decided by what is known before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfseq.errors import UsageError
from hfseq.nn.random import LazyBits
from hfseq.nn.visible import Visibility

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """All that the choice depends on. Sizes are those of the whole arrays, over all devices.

    ``platform`` is "cpu", "cuda", "rocm" or "tpu"; ``capability`` CUDA's, as (9, 0); ``memory``
    bytes of a device, where they are known. ``mask`` and ``bias`` are the four sizes of what is
    added or hidden densely. ``segments`` says who has them: "" nobody, "keys" (0 is padding),
    "same" queries and keys alike, "both" each their own. ``dropout`` is the rate on the weights.
    ``mesh`` has the axes of more than one device, ``devices`` counts those that are there.
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

    def num_shards(self, *axes: str) -> int:
        """Return over how many devices the mesh lays these axes together."""
        return math.prod(size for name, size in self.mesh if name in axes)

    def __str__(self) -> str:
        parts = [
            f"{self.batch} x {self.heads} heads of {self.head_dim} in {self.dtype}",
            f"{self.queries} queries, {self.keys} keys",
            *(["causal"] if self.causal else []),
            *([f"window {self.window}"] if self.window else []),
            *([f"segments of {self.segments}"] if self.segments else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
        ]
        return ", ".join(parts)


class AttendFunction(Protocol):
    """Attention itself: (batch, queries, heads, head_dim), in the type of ``value``.

    ``drawn`` are the random bits of the weights, which are dropped at ``rate``; ``mesh`` has more
    than one device, or is None.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        visible: Visibility,
        *,
        bias: jax.Array | None,
        scale: float,
        rate: float,
        drawn: LazyBits | None,
        mesh: Mesh | None,
    ) -> jax.Array:
        """Attend."""
        ...


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to attend, and when it serves.

    **Arguments:** ``refuses`` returns why it does not serve, or None; it looks at no device.
    ``blind`` says that a query which sees nothing comes out as zero, without a gradient; of others
    :func:`hfseq.nn.attend` makes it so.
    """

    name: str
    attend: AttendFunction
    unsupported_reason: Callable[[AttentionSpec], str | None] = lambda facts: None
    zeroes_masked_queries: bool = False


@dataclasses.dataclass(frozen=True)
class Selection:
    """The name of what serves, and for each that was asked before it why it does not."""

    name: str
    reasons: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.name, *(f"not {name}: {why}" for name, why in self.reasons)])


def first_supported(
    facts: AttentionSpec, candidates: Sequence[Implementation], wanted: str = "auto"
) -> Selection:
    """Return the first of ``candidates`` that serves; ``wanted`` is what the user called them.

    Raises:
        UsageError: none of them does, which is possible only for those that were named.
    """
    reasons: list[tuple[str, str]] = []
    for candidate in candidates:
        why = candidate.unsupported_reason(facts)
        if why is None:
            return Selection(candidate.name, tuple(reasons))
        reasons.append((candidate.name, why))
    told = "; ".join(f"{name}: {why}" for name, why in reasons)
    raise UsageError(
        f"attn_implementation '{wanted}' cannot serve attention of {facts} on {facts.platform} "
        f"({told}); 'auto' takes what can"
    )


@functools.cache
def log_selection(facts: AttentionSpec, choice: Selection) -> None:
    """Log once for the same facts what was chosen, and why not another."""
    logger.info("attention of %s on %s: %s", facts, facts.platform, choice)
