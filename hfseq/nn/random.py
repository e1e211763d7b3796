"""Random keys for dropout: one key for the batch, or one for each of its rows.

With a key for each row the masks depend on the row alone, not on how the batch is cut into
micro-batches or laid over devices, so gradient accumulation and topology leave the loss curve as it
is.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What is folded into a key to make one for another purpose; rows and layers have small numbers.
_SHARED, _SEQUENCE, _ADAPTERS = 2**32 - 1, 2**32 - 2, 2**32 - 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Keys:
    """A counter over a key (or over a vector of keys, one a row); each use draws a fresh one.

    Beside its own, a part of the model finds ``keys.shared``, common to all rows of the batch, and
    ``keys.per_sequence``, the same for all windows that a sequence is cut into. Keys are a pytree,
    so they cross ``jax.lax.scan`` and ``jax.checkpoint``. The counter is advanced while tracing:
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
    def per_sequence(self) -> Keys:
        """Keys that stay the same while a sequence is read window by window.

        Draw from them directly; for a part of the model take ``keys.child().per_sequence``.
        """
        if self.for_sequence is None:
            other = None if self.for_batch is None else self.for_batch.fold_in(_SEQUENCE)
            self.for_sequence = Keys(self.fold_in(_SEQUENCE).key, for_batch=other)
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
        return self.draw(shape).all()

    def draw(self, shape: tuple[int, ...]) -> LazyBits:
        """Count a use for ``shape``, whose bits are then had in parts (:meth:`Drawn.part`)."""
        self.count += 1
        words = jax.random.key_data(self.key)
        rows = words.shape[0] if self.key.ndim else 1
        return LazyBits(words.reshape(rows, -1), _scramble(jnp.uint32(self.count)), shape)


class LazyBits(NamedTuple):
    """Random bits of an array of ``shape`` that are not computed yet.

    ``words`` (rows, n) are the keys; ``use`` says which of their uses this is.
    """

    words: jax.Array
    use: jax.Array
    shape: tuple[int, ...]

    def all(self) -> jax.Array:
        """Return the bits, uint16."""
        rows = len(self.words)
        words = self.words.reshape(rows, -1, *(1 for _ in self.shape))
        index = _positions((self.shape[0] // rows, *self.shape[1:]), self.shape[1:])
        bits = element_bits(index[None], words[:, 0], words[:, -1] ^ self.use)
        return bits.reshape(self.shape)

    def part(self, row: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the bits of ``row``, an array of ``shape`` that begins ``start`` elements into it.

        ``shape`` has an axis for each of a row's, with as many elements or fewer.
        """
        many = self.shape[0] // len(self.words)  # rows that share a key
        inside = (row % many) * math.prod(self.shape[1:]) + start
        words = self.words[row // many]
        index = _positions(shape, self.shape[2:]) + inside.astype(jnp.uint32)
        return element_bits(index, words[0], words[-1] ^ self.use)

    def seeds(self) -> jax.Array:
        """Return what a kernel needs to make the bits of a row itself, uint32 (rows of it, 3).

        The first two are arguments of :func:`element_bits`, the third is the number of the row's
        first element; numbers are modulo 2**32.
        """
        many = self.shape[0] // len(self.words)
        words = jnp.repeat(self.words, many, axis=0)
        size = jnp.uint32(math.prod(self.shape[1:]) % 2**32)
        inside = jnp.arange(self.shape[0], dtype=jnp.uint32) % many * size
        return jnp.stack([words[:, 0], words[:, -1] ^ self.use, inside], 1)


def element_bits(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Return the bits, uint16, of the elements of number ``index``, uint32, of a row.

    ``first`` and ``second`` are made of its key and of what it is used for.
    """
    return (_scramble(_scramble(index ^ first) + second) >> 16).astype(jnp.uint16)


def _positions(shape: tuple[int, ...], inner: tuple[int, ...]) -> jax.Array:
    """Number the elements of ``shape``, cut from an array whose axes but the first are ``inner``.

    Numbers are those of the whole array in row-major order, from 0.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + along * jnp.uint32(math.prod(inner[axis:]))
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


def batch_keys(key: jax.Array, rows: jax.Array, sequence_key: jax.Array | None = None) -> Keys:
    """Return the keys of a batch whose rows have the numbers ``rows`` (int32, shape ``(n,)``).

    ``key`` is that of the step; ``sequence_key`` that of the step which read the first window of
    the same sequences (default: this one). All are typed keys.
    """

    def keys(key: jax.Array) -> Keys:
        return Keys(row_keys(key, rows), for_batch=Keys(jax.random.fold_in(key, _SHARED)))

    first = jax.random.fold_in(key if sequence_key is None else sequence_key, _SEQUENCE)
    return dataclasses.replace(keys(key), for_sequence=keys(first))


# -- keys of adapters, which stand in layers that are given none
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Offered:
    """The keys of the layer that is traced, and those that its adapters draw from."""

    layer: Keys | None
    drawn: Keys | None = None


_offered: contextvars.ContextVar[_Offered | None] = contextvars.ContextVar(
    "hfseq_adapter_keys", default=None
)


@contextlib.contextmanager
def provide_adapter_keys(keys: Keys | None) -> Iterator[None]:
    """Trace what is inside with ``keys`` for its adapters; nothing is computed until one draws."""
    token = _offered.set(_Offered(keys))
    try:
        yield
    finally:
        _offered.reset(token)


def adapter_keys(rows: int) -> Keys | None:
    """Return keys for the next adapter of the layer that is traced; None in evaluation.

    None too where the ``rows`` of its input are no longer those of the batch, as in a masked
    language model's head, whose tokens are put together: masks would depend on how it is cut.
    """
    offered = _offered.get()
    if offered is None or offered.layer is None:
        return None
    if offered.drawn is None:
        offered.drawn = offered.layer.fold_in(_ADAPTERS)
    drawn = offered.drawn
    return None if drawn.key.ndim and rows % len(drawn.key) else drawn
