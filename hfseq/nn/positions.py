"""Positions: where tokens stand, and which of them a head looks at."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


def positions_after_padding(input_ids: jax.Array, pad_token_id: int) -> jax.Array:
    """Number the tokens that are not padding from ``pad_token_id + 1`` (RoBERTa's rule)."""
    real = (input_ids != pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=-1) * real + pad_token_id


def positions_from_mask(attention_mask: jax.Array) -> jax.Array:
    """Number the tokens of each row that may be seen from 0, padding on either side being 0.

    ``attention_mask`` is (batch, length), non-zero where a token stands. Families whose tables
    begin with rows for other purposes add their number (OPT: 2).
    """
    real = (attention_mask != 0).astype(jnp.int32)
    return (jnp.cumsum(real, axis=-1) - 1) * real


def gather_positions(hidden_states: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Pick the hidden states that a head needs; ``None`` keeps all.

    ``hidden_states`` is (batch, length, features), ``positions`` (groups, k) indices into the
    flattened rows of each of ``groups`` equal parts of the batch; the result is (groups, k,
    features). One group a data shard keeps the gather on its own device.
    """
    if positions is None:
        return hidden_states
    grouped = hidden_states.reshape(positions.shape[0], -1, hidden_states.shape[-1])
    return jnp.take_along_axis(grouped, positions[..., None], axis=1)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """Number the tokens of every document from 0; ``segment_ids`` is (batch, length)."""
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return columns - jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)


def alibi_slopes(heads: int) -> np.ndarray:
    """Return how much each head's scores fall with distance, (heads,) (Press et al., 2021).

    Powers of one number for the largest power of two of heads, every other power of its root for
    the rest. The bias of a key is its position times the slope.
    """
    even = 2 ** math.floor(math.log2(heads))
    base, finer = 2.0 ** -(8 / even), 2.0 ** -(4 / even)
    slopes = [base**k for k in range(1, even + 1)]
    slopes += [finer ** (2 * k + 1) for k in range(heads - even)]
    return np.asarray(slopes, np.float32)


def relative_position_bias(
    table: jax.Array,
    queries: int,
    keys: int,
    start: int | jax.Array = 0,
    *,
    bidirectional: bool,
    max_distance: int,
) -> jax.Array:
    """Return T5's bias (1, heads, queries, keys) on attention scores, by distance alone.

    ``table`` is (buckets, heads); the queries stand at ``start``, ``start + 1`` …, the keys at 0, 1
    …. Near distances have a bucket each, far ones share them logarithmically, all beyond
    ``max_distance`` the last (Raffel et al., 2020, section 2.1). ``bidirectional`` gives half of
    the buckets to keys after the query, which otherwise count as distance 0.
    """
    # The bias is constant on diagonals: one row of the table for each of them, then each query
    # reads them one place further on. This is done by reshaping rows that are one too long, since
    # the gradient of reading with indices is a slow scatter.
    distances = jnp.arange(queries + keys) - (queries - 1) - start
    half = table.shape[0] // 2 if bidirectional else table.shape[0]
    apart = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    # The bucket of every distance, by NumPy: rounded as PyTorch does.
    exact, known = half // 2, np.arange(max_distance + 1)
    octaves = np.log(np.maximum(known, 1).astype(np.float32) / np.float32(exact))
    octaves /= np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (octaves * np.float32(half - exact)).astype(np.int32), half - 1)
    bucket_of = np.where(known < exact, known, far).astype(np.int32)
    buckets = jnp.asarray(bucket_of)[jnp.minimum(apart, max_distance)]
    if bidirectional:
        buckets = buckets + jnp.where(distances > 0, half, 0)
    heads, width = table.shape[1], queries + keys
    diagonals = jnp.take(table, buckets, axis=0).T[:, None]
    rows = jnp.broadcast_to(diagonals, (heads, queries, width)).reshape(heads, queries * width)
    shifted = rows[:, : queries * (width - 1)].reshape(heads, queries, width - 1)
    return shifted[None, :, :, queries - 1 :]


def resampling(given: int, wanted: int, kind: str) -> np.ndarray:
    """Return the matrix (wanted, given) that stretches a row of numbers, as PyTorch does.

    ``kind`` is ``"cubic"`` (with a = -0.75, where ``jax.image.resize`` has -0.5) or ``"linear"``;
    the ends are repeated, corners are not aligned, and nothing is smoothed where numbers are left
    out.
    """
    places = (np.arange(wanted) + 0.5) * (given / wanted) - 0.5
    if kind == "linear":
        places = np.maximum(places, 0.0)
    first = np.floor(places).astype(int)
    after = places - first
    if kind == "linear":
        taps = {0: 1 - after, 1: after}
    else:
        taps = {-1: _far(after + 1), 0: _near(after), 1: _near(1 - after), 2: _far(2 - after)}
    matrix = np.zeros((wanted, given))
    for shift, weights in taps.items():
        np.add.at(matrix, (np.arange(wanted), np.clip(first + shift, 0, given - 1)), weights)
    return matrix.astype(np.float32)


_CUBIC = -0.75


def _near(x: np.ndarray) -> np.ndarray:
    """Keys' kernel (1981) at distances of at most 1."""
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _far(x: np.ndarray) -> np.ndarray:
    """The same at distances from 1 to 2."""
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def stretched(table: jax.Array, size: tuple[int, int], kind: str = "cubic") -> jax.Array:
    """Resize a grid of vectors (height, width, features) to ``size``, in float32.

    The same size is the same table. ``kind`` is that of :func:`resampling`.
    """
    if table.shape[:2] == size:
        return table
    down, across = (
        jnp.asarray(resampling(given, wanted, kind))
        for given, wanted in zip(table.shape[:2], size, strict=True)
    )
    x = jnp.einsum("ih,hwf,jw->ijf", down, table.astype(jnp.float32), across, precision="highest")
    return x.astype(table.dtype)
