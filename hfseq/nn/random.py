"""Random keys for dropout: one key for the batch, or one for each of its rows.

With a key for each row the masks depend on the row alone, not on how the batch is cut into
micro-batches or laid over devices, so gradient accumulation and topology leave the loss curve as it
is.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Keys:
    """A counter over a key (or over a vector of keys, one a row); each use draws a fresh one.

    It is a pytree, so it crosses ``jax.lax.scan`` and ``jax.checkpoint``. The counter is advanced
    while tracing: derive a child with ``fold_in`` before entering another trace.
    """

    key: jax.Array
    count: int = dataclasses.field(default=0, metadata={"static": True})

    def fold_in(self, data: int | jax.Array) -> Keys:
        """Return independent keys for ``data`` (a layer's number, say)."""
        if self.key.ndim:
            return Keys(jax.vmap(jax.random.fold_in, (0, None))(self.key, data))
        return Keys(jax.random.fold_in(self.key, data))

    def child(self) -> Keys:
        """Return independent keys for a part of the model, and count it as one use."""
        self.count += 1
        return self.fold_in(self.count - 1)

    def bits(self, shape: tuple[int, ...]) -> jax.Array:
        """Draw uint16 random bits; with a key a row, ``shape[0]`` must be a multiple of the rows.

        Element i of a row is a hash of (key, use, i): one fused pass, which the compiler repeats in
        the backward pass rather than keep the bits (docs/benchmarks.md has threefry beside it).
        """
        self.count += 1
        words = jax.random.key_data(self.key)
        rows = words.shape[0] if self.key.ndim else 1
        words = words.reshape(rows, -1, *(1 for _ in shape))
        index = _positions((shape[0] // rows, *shape[1:]))
        bits = _scramble(
            _scramble(index ^ words[:, 0]) + (words[:, -1] ^ _scramble(jnp.uint32(self.count)))
        )
        return (bits >> 16).astype(jnp.uint16).reshape(shape)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Number the elements of ``shape`` in row-major order, with a leading axis of 1."""
    index = jnp.zeros((1, *shape), jnp.uint32)
    for axis, stride in enumerate(math.prod(shape[i + 1 :]) for i in range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, index.shape, axis + 1)
        index = index + along * jnp.uint32(stride)
    return index


def _scramble(x: jax.Array) -> jax.Array:
    """Mix the bits of 32-bit words (lowbias32 of Wellons, 2018): a bijection with little bias."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def make_keys(rng: jax.Array | Keys | None) -> Keys | None:
    """Wrap a typed or a legacy ``uint32`` key (``(2,)``, or ``(rows, 2)``) as :class:`Keys`."""
    if rng is None or isinstance(rng, Keys):
        return rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return Keys(jax.random.wrap_key_data(jnp.asarray(rng, jnp.uint32)))
    return Keys(rng)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Derive one typed key for each row number in ``rows`` (int32, shape ``(n,)``)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
