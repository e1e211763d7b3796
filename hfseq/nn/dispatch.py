"""Selection of an attention implementation from static properties of the call."""

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
    """Static properties of an attention call, from which the implementation is selected.

    All sizes describe the global arrays, before they are split over devices.

    Attributes:
        platform: "cpu", "cuda", "rocm", "tpu", or the name of a jax plugin.
        batch: Batch size.
        queries: Number of queries per sequence.
        keys: Number of keys per sequence.
        heads: Number of query heads in the model.
        kv_heads: Number of key and value heads.
        head_dim: Features per head.
        dtype: Name of the dtype of the queries.
        causal: Whether attention is causal.
        window: Number of visible keys before a query's own position, and number of visible keys
            after it.
        segments: Whether queries and keys have segment numbers, as in `Visibility.segments`. `""`
            means that neither has them. `"keys"` means that only keys have them, where 0 marks
            padding. `"same"` means that the keys have the same segment numbers as the queries.
            `"both"` means that queries and keys have separate segment numbers.
        lengths: Whether `Visibility.key_lengths` limits the number of keys of each sequence.
        max_runs: `Visibility.max_runs`, the maximum number of runs of positions with the same
            segment number in a sequence, or `None` if it is unknown.
        mask: Shape of the dense mask, with four axes, or `None` without one.
        bias: Shape of the bias, with four axes, or `None` without one.
        dropout: Dropout rate of the attention weights.
        capability: CUDA compute capability, such as (9, 0), or `None` for other devices.
        memory: Memory of a device in bytes, if known.
        mesh: Names and sizes of the mesh axes with more than one device.
        devices: Number of devices.
        deterministic: Whether `XLA_FLAGS` requests deterministic operations.
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
    deterministic: bool = False

    @property
    def half(self) -> bool:
        """Whether the dtype has two bytes per element."""
        return jnp.dtype(self.dtype).itemsize == 2

    def num_shards(self, *axes: str) -> int:
        """Returns the number of shards if a dimension is split over all of these mesh axes."""
        return math.prod(size for name, size in self.mesh if name in axes)

    def __str__(self) -> str:
        parts = [
            f"{self.batch} x {self.heads} heads of {self.head_dim} in {self.dtype}",
            f"{self.queries} queries, {self.keys} keys",
            *(["causal"] if self.causal else []),
            *([f"window {self.window}"] if self.window else []),
            *([f"segments: {self.segments}"] if self.segments else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
        ]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention computation, as the built-in implementations receive them.

    The object only groups the arguments while jax traces the computation. It is not a pytree and
    has no effect on the compiled program.

    Attributes:
        query: `(batch, queries, heads, head_dim)`.
        key: `(batch, keys, kv_heads, head_dim)`, where `heads` is a multiple of `kv_heads`.
        value: Same shape as `key`.
        visible: Which keys each query may attend to.
        scale: The factor by which the scores are multiplied.
        bias: Added to the scaled scores; broadcasts to `(batch, heads, queries, keys)`.
        dropout_rate: Dropout rate of the attention weights.
        dropout_bits: Random bits that decide which weights are dropped,
            `(batch, heads, queries, keys)`, or `None` without dropout.
        mesh: The mesh, if it has more than one device.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    visible: Visibility
    scale: float
    bias: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_bits: LazyBits | None = None
    mesh: Mesh | None = None

    @property
    def queries(self) -> int:
        """Number of queries per sequence."""
        return self.query.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys per sequence."""
        return self.key.shape[1]


class AttendFunction(Protocol):
    """Signature of the `attend` function of an `Implementation` that a plugin registers."""

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
        """Computes attention.

        Args:
            query: `(batch, queries, heads, head_dim)`.
            key: `(batch, keys, kv_heads, head_dim)`.
            value: Same shape as `key`.
            visible: Which keys each query may attend to.
            bias: Added to the scaled scores; broadcasts to `(batch, heads, queries, keys)`.
            scale: The factor by which the scores are multiplied.
            rate: Dropout rate of the attention weights.
            drawn: Random bits that decide which weights are dropped, or `None` without dropout.
            mesh: The mesh, or `None` if it has only one device.

        Returns:
            `(batch, queries, heads, head_dim)` in the dtype of `value`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An attention implementation and the cases that it supports.

    Attributes:
        name: The name in logs and error messages.
        attend: The function that computes attention.
        unsupported_reason: A function that returns why the implementation does not support a call,
            or `None` if it does. It must not access a device.
        zeroes_masked_queries: Whether a fully masked query produces zeros and no gradient. If this
            is False, `hfseq.nn.attend` sets the outputs of these queries to zero.
    """

    name: str
    attend: AttendFunction
    unsupported_reason: Callable[[AttentionSpec], str | None] = lambda spec: None
    zeroes_masked_queries: bool = False

    def run(self, call: AttentionCall) -> jax.Array:
        """Calls `attend` with the arguments of `call`."""
        return self.attend(
            call.query,
            call.key,
            call.value,
            call.visible,
            bias=call.bias,
            scale=call.scale,
            rate=call.dropout_rate,
            drawn=call.dropout_bits,
            mesh=call.mesh,
        )


@dataclasses.dataclass(frozen=True)
class BuiltInImplementation(Implementation):
    """An implementation that is part of hfseq.

    Its function `attend` receives an `AttentionCall`. Plugins use `Implementation` instead, whose
    function receives separate arguments.
    """

    attend: Callable[[AttentionCall], jax.Array]  # type: ignore[assignment]

    def run(self, call: AttentionCall) -> jax.Array:
        """Computes attention."""
        return self.attend(call)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The selected implementation, and why candidates with a higher priority were not selected.

    Attributes:
        name: Name of the selected implementation.
        reasons: Pairs of the name of a rejected candidate and the reason why it does not support
            the call.
    """

    name: str
    reasons: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.name, *(f"not {name}: {reason}" for name, reason in self.reasons)])


def first_supported(
    spec: AttentionSpec, candidates: Sequence[Implementation], requested: str = "auto"
) -> Selection:
    """Selects the first candidate that supports a call.

    Args:
        spec: The properties of the call.
        candidates: Implementations in order of preference.
        requested: The `attn_implementation` that the user set. The error message contains it.

    Raises:
        UsageError: No candidate supports the call. This only happens if the user requested an
            implementation, because the last default candidate supports every call.
    """
    reasons: list[tuple[str, str]] = []
    for candidate in candidates:
        reason = candidate.unsupported_reason(spec)
        if reason is None:
            return Selection(candidate.name, tuple(reasons))
        reasons.append((candidate.name, reason))
    explanation = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    raise UsageError(
        f"attn_implementation '{requested}' does not support attention of {spec} on "
        f"{spec.platform} ({explanation}). Use 'auto' to select an implementation that does"
    )


@functools.cache
def log_selection(spec: AttentionSpec, selection: Selection) -> None:
    """Logs the selected implementation and why others were rejected.

    The cache limits this to one message for each combination of arguments.
    """
    logger.info("attention of %s on %s: %s", spec, spec.platform, selection)
