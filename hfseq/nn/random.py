"""PRNG keys for dropout: one key for the whole batch, or one key per row of the batch.

A row is one entry of the batch. With one key per row, the dropout masks of a row do not depend on
how the batch is divided into micro-batches or split over devices. Gradient accumulation and the
mesh then do not change the loss curve.
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

# These constants are folded into a key to derive keys for other purposes. The numbers of rows and
# layers are folded into keys too, but they are smaller.
_SHARED, _SEQUENCE, _ADAPTERS = 2**32 - 1, 2**32 - 2, 2**32 - 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Keys:
    """A PRNG key, or one key per row of the batch, and a counter, so that each use is different.

    Two other keys are available to each part of the model: `keys.shared`, which is the same for all
    rows of the batch, and `keys.per_sequence`, which is the same for all windows of a long
    sequence.

    `Keys` are a pytree, so they can be passed through `jax.lax.scan` and `jax.checkpoint`. The
    counter is increased while a program is traced. Derive a child with `fold_in` before entering
    another trace.

    Attributes:
        key: A typed key, or a vector with one typed key per row.
        count: Number of uses so far.
        for_batch: The value of `shared`, or `None` before it is derived.
        for_sequence: The value of `per_sequence`, or `None` before it is derived.
    """

    key: jax.Array
    count: int = dataclasses.field(default=0, metadata={"static": True})
    for_batch: Keys | None = None
    for_sequence: Keys | None = None

    @property
    def shared(self) -> Keys:
        """Keys that are the same for all rows of the global batch, however the batch is divided.

        If `batch_keys` did not provide them, they are derived from the key of the first row.
        """
        if self.for_batch is None:
            first = self.key.reshape(-1)[0]
            self.for_batch = Keys(jax.random.fold_in(first, _SHARED))
        return self.for_batch

    @property
    def per_sequence(self) -> Keys:
        """Keys that stay the same while a sequence is processed window by window.

        Draw from them directly, or use `keys.child().per_sequence` for independent keys in a part
        of the model.
        """
        if self.for_sequence is None:
            other = None if self.for_batch is None else self.for_batch.fold_in(_SEQUENCE)
            self.for_sequence = Keys(self.fold_in(_SEQUENCE).key, for_batch=other)
        return self.for_sequence

    def fold_in(self, data: int | jax.Array) -> Keys:
        """Returns independent keys for `data`, such as the number of a layer."""
        fold = jax.random.fold_in
        key = jax.vmap(fold, (0, None))(self.key, data) if self.key.ndim else fold(self.key, data)
        derived = (self.for_batch, self.for_sequence)
        return Keys(key, 0, *(None if keys is None else keys.fold_in(data) for keys in derived))

    def child(self) -> Keys:
        """Returns independent keys for a part of the model. This counts as one use."""
        self.count += 1
        return self.fold_in(self.count - 1)

    def bits(self, shape: tuple[int, ...]) -> jax.Array:
        """Draws random uint16 bits.

        Element i of a row is a hash of the key, the counter, and i. The compiler computes
        the hashes in one fused pass. It repeats this pass in the backward pass instead of storing
        the bits. docs/benchmarks.md compares this with threefry.

        Args:
            shape: The shape. With one key per row, `shape[0]` must be a multiple of the number of
                rows.
        """
        return self.draw(shape).all()

    def draw(self, shape: tuple[int, ...]) -> LazyBits:
        """Returns random uint16 bits that are computed later. The call counts as one use."""
        self.count += 1
        words = jax.random.key_data(self.key)
        rows = words.shape[0] if self.key.ndim else 1
        return LazyBits(words.reshape(rows, -1), _scramble(jnp.uint32(self.count)), shape)


class LazyBits(NamedTuple):
    """Random bits of an array that are not computed yet.

    Attributes:
        words: The key data, uint32 `(rows, words per key)`. There is one row if all rows share a
            key.
        use: A hash of the counter of `Keys`, so that each use of a key draws other bits.
        shape: Shape of the array of bits.
    """

    words: jax.Array
    use: jax.Array
    shape: tuple[int, ...]

    def all(self) -> jax.Array:
        """Returns the bits of the whole array, uint16."""
        rows = len(self.words)
        words = self.words.reshape(rows, -1, *(1 for _ in self.shape))
        index = _positions((self.shape[0] // rows, *self.shape[1:]), self.shape[1:])
        bits = element_bits(index[None], words[:, 0], words[:, -1] ^ self.use)
        return bits.reshape(self.shape)

    def part(self, row: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns some of the bits of one row.

        Args:
            row: Number of the row.
            start: Index of the first element within the row.
            shape: Shape of the part. It has the axes of a row, and none is longer than in the row.
        """
        rows_per_key = self.shape[0] // len(self.words)  # rows that share a key
        inside = (row % rows_per_key) * math.prod(self.shape[1:]) + start
        words = self.words[row // rows_per_key]
        index = _positions(shape, self.shape[2:]) + inside.astype(jnp.uint32)
        return element_bits(index, words[0], words[-1] ^ self.use)

    def seeds(self) -> jax.Array:
        """Returns three numbers from which a kernel computes the bits of a row, `(rows, 3)`.

        The first two numbers are the arguments `first` and `second` of `element_bits`. The third is
        the index of the first element of the row. All are uint32, modulo 2**32.
        """
        rows_per_key = self.shape[0] // len(self.words)
        words = jnp.repeat(self.words, rows_per_key, axis=0)
        size = jnp.uint32(math.prod(self.shape[1:]) % 2**32)
        inside = jnp.arange(self.shape[0], dtype=jnp.uint32) % rows_per_key * size
        return jnp.stack([words[:, 0], words[:, -1] ^ self.use, inside], 1)


def element_bits(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the random uint16 bits of single elements.

    Args:
        index: Index of each element among the elements that share a key, uint32.
        first: First word of the key.
        second: Last word of the key, combined with `LazyBits.use` by XOR.
    """
    return (_scramble(_scramble(index ^ first) + second) >> 16).astype(jnp.uint16)


def _positions(shape: tuple[int, ...], inner: tuple[int, ...]) -> jax.Array:
    """Returns the row-major index of each element of a part of a larger array.

    Args:
        shape: Shape of the part.
        inner: All axes of the larger array except the first.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + along * jnp.uint32(math.prod(inner[axis:]))
    return index


def _scramble(x: jax.Array) -> jax.Array:
    """Mixes the bits of 32-bit words (lowbias32; Wellons, 2018): a bijection with little bias."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def make_keys(rng: jax.Array | Keys | None) -> Keys | None:
    """Wraps a typed key or a legacy `uint32` key, `(2,)` or `(rows, 2)`, as `Keys`."""
    if rng is None or isinstance(rng, Keys):
        return rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return Keys(jax.random.wrap_key_data(jnp.asarray(rng, jnp.uint32)))
    return Keys(rng)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Derives one typed key for each row number in `rows`, int32 `(n,)`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def batch_keys(key: jax.Array, rows: jax.Array, sequence_key: jax.Array | None = None) -> Keys:
    """Returns the keys of a batch.

    Args:
        key: The typed key of the step.
        rows: Number of each row in the global batch, int32 `(n,)`.
        sequence_key: The typed key of the step that processed the first window of the same
            sequences, from which `per_sequence` is derived. Default: `key`.
    """

    def keys(key: jax.Array) -> Keys:
        return Keys(row_keys(key, rows), for_batch=Keys(jax.random.fold_in(key, _SHARED)))

    first = jax.random.fold_in(key if sequence_key is None else sequence_key, _SEQUENCE)
    return dataclasses.replace(keys(key), for_sequence=keys(first))


# -- keys of adapters, whose layers do not receive keys
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _AdapterKeys:
    """The PRNG keys of the layer that is being traced, and those of its adapters."""

    layer: Keys | None
    adapters: Keys | None = None


_adapter_keys: contextvars.ContextVar[_AdapterKeys | None] = contextvars.ContextVar(
    "hfseq_adapter_keys", default=None
)


@contextlib.contextmanager
def provide_adapter_keys(keys: Keys | None) -> Iterator[None]:
    """Provides keys for the adapters of a layer within a `with` block.

    Nothing is computed until an adapter draws from them.
    """
    token = _adapter_keys.set(_AdapterKeys(keys))
    try:
        yield
    finally:
        _adapter_keys.reset(token)


def adapter_keys(rows: int) -> Keys | None:
    """Returns keys for the next adapter of the layer that is being traced, or `None`.

    The result is `None` in evaluation. It is also `None` if the first axis of the adapter's input
    does not correspond to the rows of the batch. An example is the head of masked language
    modeling, whose input are the gathered masked tokens. Dropout masks would then depend on the
    division of the batch over devices.

    Args:
        rows: Size of the first axis of the adapter's input.
    """
    source = _adapter_keys.get()
    if source is None or source.layer is None:
        return None
    if source.adapters is None:
        source.adapters = source.layer.fold_in(_ADAPTERS)
    keys = source.adapters
    return None if keys.key.ndim and rows % len(keys.key) else keys
