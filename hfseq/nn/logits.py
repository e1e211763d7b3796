"""Logits whose output head is computed later, for a part of the positions at a time.

With a large vocabulary, the logits are by far the largest array of a training step. Losses that
only need a few numbers per position do not have to store all logits: inside :func:`defer_logits`, a
model returns :class:`DeferredLogits`, and :func:`map_logits` computes the head for one chunk of
positions after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.nn import context
from hfseq.nn.heads import reduced_logits
from hfseq.nn.sharding import data_shards

#: Maximum number of logits of a chunk per shard of the batch: 64 MiB in float32.
CHUNK_LOGITS = 2**24


@dataclasses.dataclass(frozen=True)
class DeferredLogits:
    """The input of an output head, and the head.

    Attributes:
        head: Computes logits `(..., vocab_size)` from hidden states `(..., hidden)`.
        hidden_states: The input of the head, `(batch, length, hidden)`.
        options: The options of the forward pass that returned the logits.
    """

    head: Callable[[jax.Array], jax.Array]
    hidden_states: jax.Array
    options: context.Options = context.Options()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits, `(batch, length, vocab_size)`."""
        first = jax.eval_shape(self._apply, self.hidden_states[:, :1])
        return (*self.hidden_states.shape[:-1], first.shape[-1])

    def compute(self) -> jax.Array:
        """Computes all logits, `(batch, length, vocab_size)`."""
        return self._apply(self.hidden_states)

    def _apply(self, hidden_states: jax.Array) -> jax.Array:
        # A copy of the options, because the options collect arrays of the trace that uses them.
        with context.options(dataclasses.replace(self.options)):
            return self.head(hidden_states)


def defer_logits() -> contextlib.AbstractContextManager[None]:
    """Makes models return :class:`DeferredLogits` within a `with` block, if they support it."""
    return reduced_logits(
        lambda head, hidden_states: DeferredLogits(head, hidden_states, context.current_options())
    )


def map_logits(
    function: Callable[..., Any],
    logits: Sequence[jax.Array | DeferredLogits],
    *arrays: jax.Array,
) -> Any:
    """Applies a function to the logits of all positions, chunk by chunk.

    The backward pass computes the logits of a chunk again, so neither pass stores the logits of the
    whole batch. A chunk contains evenly spaced positions of every row, so chunking does not change
    how the rows and the positions are split over devices.

    Args:
        function: Accepts the logits of each model, `(batch, chunk, vocab_size)`, and the chunk of
            each array. Returns a tree of arrays `(batch, chunk, ...)`.
        logits: The logits of one or more models for the same positions.
        *arrays: Further inputs, `(batch, length, ...)`.

    Returns:
        A tree of arrays `(batch, length, ...)`.
    """
    deferred = [
        part if isinstance(part, DeferredLogits) else DeferredLogits(_identity, part)
        for part in logits
    ]
    hidden = [part.hidden_states for part in deferred]
    batch, length = hidden[0].shape[:2]
    count = _chunk_count(deferred)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(hidden_chunks: list[jax.Array], chunks: tuple[jax.Array, ...]) -> Any:
        computed = [part._apply(x) for part, x in zip(deferred, hidden_chunks, strict=True)]
        return function(*computed, *chunks)

    if count == 1:
        return run(hidden, arrays)
    size = -(-length // count)

    def split(x: jax.Array) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, size * count - length)
        padded = jnp.pad(x, padding) if size * count > length else x
        return jnp.moveaxis(padded.reshape(batch, size, count, *x.shape[2:]), 2, 0)

    def join(x: jax.Array) -> jax.Array:
        stacked = jnp.moveaxis(x, 0, 2).reshape(batch, size * count, *x.shape[3:])
        return stacked[:, :length]

    parts = jax.tree.map(split, (hidden, arrays))
    return jax.tree.map(join, jax.lax.map(lambda part: run(*part), parts))


def _identity(x: jax.Array) -> jax.Array:
    return x


def _chunk_count(logits: Sequence[DeferredLogits]) -> int:
    """Returns the number of chunks of a batch."""
    batch, length, _ = logits[0].shape
    width = max(part.shape[-1] for part in logits)
    mesh = logits[0].options.mesh
    shards = 1 if mesh is None else data_shards(mesh)
    rows = -(-batch // shards)
    positions = max(1, CHUNK_LOGITS // (rows * width))
    return -(-length // min(positions, length))
