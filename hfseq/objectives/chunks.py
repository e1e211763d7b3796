"""Computations over chunks of the rows of a batch, to bound the memory of large batches.

`map_chunks` applies a function to chunks of rows one after the other and computes each chunk again
in the backward pass. Together with automatic differentiation, this is GradCache (Gao et al., 2021):
the gradient of a loss that depends on the vectors of all rows is exact, but only the intermediate
values of a single chunk are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq.nn import sharding
from hfseq.nn.random import Keys


class Sharded(NamedTuple):
    """Describes how the rows of a batch are split over devices.

    Attributes:
        mesh: The mesh. The axes ``data`` and ``fsdp`` split the rows into equal, contiguous parts.
    """

    mesh: Mesh

    @property
    def parts(self) -> int:
        """The number of parts into which the mesh splits the rows."""
        return sharding.data_shards(self.mesh)

    def constrain(self, x: jax.Array, axis: int) -> jax.Array:
        """Splits an axis of an array over the devices."""
        spec = PartitionSpec(*(None,) * axis, sharding.batch_axes(self.mesh))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def map_chunks(
    function: Callable[[Any], Any],
    rows: Any,
    chunk_rows: int | None,
    sharded: Sharded | None = None,
    sums: bool = False,
) -> Any:
    """Applies a function to chunks of rows, and computes each chunk again in the backward pass.

    Every device processes ``chunk_rows`` of its rows at a time. If the number of rows is not a
    multiple of the chunk size, the chunks are made as equal as possible, and some rows are computed
    twice. Their second result is dropped.

    Args:
        function: Maps arrays to arrays. The first axis of each array has one entry per row. The
            result for a row must not depend on the other rows.
        rows: A tree of arrays with one entry per row. :class:`~hfseq.nn.random.Keys` with one key
            per row are allowed.
        chunk_rows: Number of rows per device and chunk, or ``None`` for a single call with all
            rows.
        sharded: How the rows are split over devices.
        sums: Whether the result for a chunk is a sum over its rows, with one entry. In this case,
            ``function`` must ignore the repeated rows of the last chunk: the last array of ``rows``
            must be a boolean array, which is false for these rows.

    Returns:
        The results, with one entry per row, or per chunk if ``sums`` is true.
    """
    leaves, structure = jax.tree.flatten(rows)
    count = _num_rows(rows)
    parts = sharded.parts if sharded is not None and not count % sharded.parts else 1
    size = count // parts
    if chunk_rows is None or chunk_rows >= size:
        return function(rows)
    num_chunks = -(-size // chunk_rows)
    chunk = -(-size // num_chunks)
    padding = num_chunks * chunk - size

    def constrain(x: jax.Array, axis: int) -> jax.Array:
        return x if sharded is None or parts == 1 else sharded.constrain(x, axis)

    def split(leaf: jax.Array) -> jax.Array:
        """Returns the chunks, `(num_chunks, parts * chunk, ...)`."""
        leaf = leaf.reshape(parts, size, *leaf.shape[1:])
        leaf = jnp.concatenate([leaf, leaf[:, :padding]], axis=1) if padding else leaf
        leaf = leaf.reshape(parts, num_chunks, chunk, *leaf.shape[2:]).swapaxes(0, 1)
        leaf = leaf.reshape(num_chunks, parts * chunk, *leaf.shape[3:])
        return constrain(leaf, 1)

    def join(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(num_chunks, parts, chunk, *leaf.shape[2:]).swapaxes(0, 1)
        leaf = leaf.reshape(parts, num_chunks * chunk, *leaf.shape[3:])[:, :size]
        return constrain(leaf.reshape(count, *leaf.shape[2:]), 0)

    is_row = [_has_rows(leaf, count) for leaf in leaves]
    chunks = [split(leaf) for leaf, per_row in zip(leaves, is_row, strict=True) if per_row]
    if sums and padding:
        real = jnp.arange(num_chunks * chunk).reshape(num_chunks, 1, chunk) < size
        real = jnp.broadcast_to(real, (num_chunks, parts, chunk)).reshape(num_chunks, -1)
        chunks[-1] &= real

    @jax.checkpoint
    def one(chunk_leaves: list[jax.Array]) -> Any:
        remaining = iter(chunk_leaves)
        merged = [
            next(remaining) if per_row else leaf
            for leaf, per_row in zip(leaves, is_row, strict=True)
        ]
        return function(jax.tree.unflatten(structure, merged))

    results = jax.lax.map(one, chunks)
    if sums:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
    return jax.tree.map(join, results)


def _num_rows(rows: Any) -> int:
    arrays = jax.tree.leaves(rows, is_leaf=lambda x: isinstance(x, Keys))
    return next(len(leaf) for leaf in arrays if not isinstance(leaf, Keys))


def _has_rows(leaf: jax.Array, count: int) -> bool:
    """Returns whether an array has one entry per row, unlike keys that all rows share."""
    return leaf.ndim > 0 and len(leaf) == count
