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

# What is folded into a key to make one for another purpose; rows and layers have small numbers.
_SHARED, _STEADY = 2**32 - 1, 2**32 - 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Keys:
    """A counter over a key (or over a vector of keys, one a row); each use draws a fresh one.

    Beside its own, a part of the model finds ``keys.shared``, common to all rows of the batch, and
    ``keys.steady``, the same for all windows that a sequence is cut into. Keys are a pytree, so
    they cross ``jax.lax.scan`` and ``jax.checkpoint``. The counter is advanced while tracing:
    derive a child with ``fold_in`` before entering another trace.
    """

    key: jax.Array
    count: int = dataclasses.field(default=0, metadata={"static": True})
    for_batch: Keys | None = None
    for_sequence: Keys | None = None

    @property
    def shared(self) -> Keys:
        """Keys that all rows of the global batch have in common, however it is cut and laid out.

        Where :func:`batch_keys` did not provide them they are those of the first row here.
        """
        if self.for_batch is None:
            first = self.key.reshape(-1)[0]
            self.for_batch = Keys(jax.random.fold_in(first, _SHARED))
        return self.for_batch

    @property
    def steady(self) -> Keys:
        """Keys that stay the same while a sequence is read window by window.

        Draw from them directly; for a part of the model take ``keys.child().steady``.
        """
        if self.for_sequence is None:
            other = None if self.for_batch is None else self.for_batch.fold_in(_STEADY)
            self.for_sequence = Keys(self.fold_in(_STEADY).key, for_batch=other)
        return self.for_sequence

    def fold_in(self, data: int | jax.Array) -> Keys:
        """Return independent keys for ``data`` (a layer's number, say)."""
        fold = jax.random.fold_in
        key = jax.vmap(fold, (0, None))(self.key, data) if self.key.ndim else fold(self.key, data)
        others = (self.for_batch, self.for_sequence)
        return Keys(key, 0, *(None if keys is None else keys.fold_in(data) for keys in others))

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


def batch_keys(key: jax.Array, rows: jax.Array, steady: jax.Array | None = None) -> Keys:
    """Return the keys of a batch whose rows have the numbers ``rows`` (int32, shape ``(n,)``).

    ``key`` is that of the step; ``steady`` that of the step which read the first window of the same
    sequences (default: this one). All are typed keys.
    """
    first = jax.random.fold_in(key if steady is None else steady, _STEADY)
    return dataclasses.replace(_of_batch(key, rows), for_sequence=_of_batch(first, rows))


def _of_batch(key: jax.Array, rows: jax.Array) -> Keys:
    return Keys(row_keys(key, rows), for_batch=Keys(jax.random.fold_in(key, _SHARED)))
