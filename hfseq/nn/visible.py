"""Descriptions of which keys each query may attend to.

Models and the training loop pass a `Visibility` to the attention functions. It is converted to an
explicit mask only for implementations that need one.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError
from hfseq.nn.context import current_row_guarantees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Describes which keys each query may attend to.

    A key is visible to a query if every field allows it. By default all keys are visible.

    Attributes:
        causal: Whether a query may only attend to keys at or before its position. Queries and keys
            are aligned at their ends: the last query has the position of the last key.
        window: Number of visible keys before a query's own position, and number of visible keys
            after it. Positions are aligned as for `causal`.
        max_runs: Maximum number of runs in a sequence, or `None` if it is unknown. A run consists
            of all adjacent positions with the same segment number.
        query_segments: Segment number of each query, int32 `(batch, queries)`. A query sees only
            keys with the same segment number. Packed documents have different numbers.
        key_segments: Segment number of each key, int32 `(batch, keys)`. If this is `None`, the keys
            have the same segment numbers as the queries. If only `query_segments` is `None`, every
            key with a nonzero segment number is visible.
        key_lengths: Number of keys in each sequence that are not padding, `(batch,)`. All keys
            after them are hidden.
        dense: Any other boolean mask with four axes, True where a key is visible. It broadcasts to
            `(batch, heads, queries, keys)`.
    """

    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    max_runs: int | None = dataclasses.field(default=None, metadata={"static": True})
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    dense: jax.Array | None = None

    def __post_init__(self) -> None:
        if self.window is not None and min(self.window) < 0:
            raise UsageError(
                f"the attention window {self.window} (keys before and after a query's own) "
                "excludes the query's own key. The value of sliding_window, window_size or "
                "local_attention in the configuration includes that key, so it must be at least 1, "
                "or None to disable the window"
            )

    @property
    def segments(self) -> str:
        """Whether queries and keys have segment numbers.

        * `""`: Neither queries nor keys have segment numbers.
        * `"keys"`: Only keys have segment numbers.
        * `"same"`: The keys have the same segment numbers as the queries.
        * `"both"`: Queries and keys have separate segment numbers.
        """
        if self.query_segments is None:
            return "" if self.key_segments is None else "keys"
        return "same" if self.key_segments is None else "both"

    def array(self, queries: int, keys: int) -> jax.Array | None:
        """Returns the boolean mask, or `None` if all keys are visible.

        Args:
            queries: Number of queries.
            keys: Number of keys.

        Returns:
            A boolean mask with four axes that broadcasts to `(batch, heads, queries, keys)`.
        """
        mask, band = self.without_band(keys), self.band(queries, keys, keys - queries)
        if band is None or mask is None:
            return mask if band is None else band[None, None]
        return mask & band

    def without_band(self, keys: int) -> jax.Array | None:
        """Returns the boolean mask without the effect of `causal` and `window`.

        Returns:
            A mask that broadcasts to `(batch, heads, queries, keys)`, or `None` if the other fields
            hide nothing.
        """
        masks = []
        if self.query_segments is not None:
            key_segments = self.query_segments if self.key_segments is None else self.key_segments
            masks.append((self.query_segments[:, :, None] == key_segments[:, None, :])[:, None])
        elif self.key_segments is not None:
            masks.append((self.key_segments != 0)[:, None, None, :])
        if self.key_lengths is not None:
            masks.append((jnp.arange(keys) < self.key_lengths[:, None])[:, None, None, :])
        if self.dense is not None:
            masks.append(self.dense)
        if not masks:
            return None
        mask = masks[0]
        for other_mask in masks[1:]:
            mask = mask & other_mask
        return mask

    def band(self, queries: int, keys: int, offset: int | jax.Array) -> jax.Array | None:
        """Returns the boolean mask that only `causal` and `window` determine.

        Args:
            queries: Number of queries.
            keys: Number of keys.
            offset: The position of the first query, counted from the first key.

        Returns:
            A mask `(queries, keys)`, or `None` if the attention is not causal and has no window.
        """
        if not self.causal and self.window is None:
            return None
        query_position = jnp.arange(queries)[:, None] + offset
        key_position = jnp.arange(keys)[None]
        left, right = self.window or (keys + queries, keys + queries)
        band = key_position <= query_position + (0 if self.causal else right)
        return band if self.window is None else band & (key_position >= query_position - left)

    def sees_any(self, queries: int, keys: int) -> jax.Array | None:
        """Returns which queries see at least one key.

        An array of all query-key pairs is built in two cases only: for dense masks, and if query
        segments are combined with `causal` or a window.

        Returns:
            A boolean array `(batch, heads, queries, 1)`, where each of the first three axes has its
            full size or size 1. The result is `None` if every query sees a key.
        """
        banded, no_lengths = self.causal or self.window is not None, self.key_lengths is None
        if self.dense is None and self.segments == "same" and queries == keys and no_lengths:
            return None  # each query sees itself
        if self.dense is None and self.segments in ("", "keys"):
            return self._sees_any_in_band(queries, keys)
        if self.dense is None and not banded:
            return self._sees_own_segment(keys)
        mask = self.array(queries, keys)
        assert mask is not None
        return mask.any(-1, keepdims=True)

    def _sees_any_in_band(self, queries: int, keys: int) -> jax.Array | None:
        """Implements `sees_any` if queries have no segment numbers.

        Counts the visible keys within the range that `causal` and `window` allow for each query.
        """
        without_band = dataclasses.replace(self, causal=False, window=None)
        key_mask = without_band.without_band(keys)
        if not self.causal and self.window is None:
            return None if key_mask is None else key_mask.any(-1, keepdims=True)
        if key_mask is None and queries <= keys:
            return None
        query_position = jnp.arange(queries) + keys - queries
        left, right = self.window or (queries + keys, queries + keys)
        low = jnp.clip(query_position - left, 0, keys)
        high = jnp.clip(query_position + (0 if self.causal else right) + 1, 0, keys)
        if key_mask is None:
            return (high > low)[None, None, :, None]
        counts = jnp.cumsum(key_mask[:, 0, 0], -1, dtype=jnp.int32)
        counts = jnp.pad(counts, ((0, 0), (1, 0)))
        return (counts[:, high] > counts[:, low])[:, None, :, None]

    def _sees_own_segment(self, keys: int) -> jax.Array:
        """Implements `sees_any` if queries have segment numbers.

        Searches the segment number of each query in the sorted segment numbers of the keys.
        """
        assert self.query_segments is not None
        key_segments = self.query_segments if self.key_segments is None else self.key_segments
        if self.key_lengths is not None:
            within = jnp.arange(keys) < self.key_lengths[:, None]
            key_segments = jnp.where(within, key_segments, jnp.iinfo(jnp.int32).min)
        key_segments = jnp.sort(key_segments, axis=-1)
        index = jax.vmap(jnp.searchsorted)(key_segments, self.query_segments)
        candidate = jnp.take_along_axis(key_segments, jnp.minimum(index, keys - 1), axis=-1)
        return (candidate == self.query_segments)[:, None, :, None]

    def part(self, start: int, stop: int, keys: int) -> Visibility:
        """Returns the visibility of the first `keys` keys to the queries from `start` to `stop`.

        The result does not include `causal` and `window`. Use `band` for them.
        """

        def slice_axes(x: jax.Array | None, *bounds: tuple[int, int]) -> jax.Array | None:
            if x is None:
                return None
            for axis, (low, high) in enumerate(bounds, x.ndim - len(bounds)):
                if x.shape[axis] > 1:
                    x = jax.lax.slice_in_dim(x, low, high, axis=axis)
            return x

        key_segments = self.query_segments if self.key_segments is None else self.key_segments
        return Visibility(
            query_segments=slice_axes(self.query_segments, (start, stop)),
            key_segments=slice_axes(key_segments, (0, keys)),
            key_lengths=self.key_lengths,
            dense=slice_axes(self.dense, (start, stop), (0, keys)),
        )


#: The `mask` argument of attention functions: a `Visibility`, or a boolean array that broadcasts to
#: `(batch, heads, queries, keys)` and is True where a key is visible. `None` hides nothing.
Mask = Visibility | jax.Array | None


def as_visibility(mask: Mask, causal: bool = False) -> Visibility:
    """Converts a mask and a `causal` flag to a `Visibility`. An array mask gets four axes."""
    visible = mask if isinstance(mask, Visibility) else Visibility(dense=mask)
    if visible.dense is not None and visible.dense.ndim < 4:
        shape = (1,) * (4 - visible.dense.ndim) + visible.dense.shape
        visible = dataclasses.replace(visible, dense=visible.dense.reshape(shape))
    return dataclasses.replace(visible, causal=True) if causal else visible


def visible(
    attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Visibility | None:
    """Describes which keys are visible in self-attention, or in attention to padded sequences.

    Args:
        attention_mask: `(batch, keys)` or `(batch, queries, keys)`, nonzero where a key may be
            attended to. Padding may be at any position.
        segment_ids: Number of the document of each token, `(batch, length)`. Each query sees only
            keys of its own document. 0 is padding.
        causal: Whether a query may only attend to keys at or before its position.
        window: Number of visible keys before a query's own position, and number of visible keys
            after it.

    Returns:
        The `Visibility`, or `None` if all keys are visible.
    """
    if attention_mask is None and segment_ids is None and not causal and window is None:
        return None
    description = Visibility(causal=causal, window=window, query_segments=segment_ids)
    if attention_mask is not None and attention_mask.ndim == 3:
        return dataclasses.replace(description, dense=attention_mask.astype(bool)[:, None])
    rows = current_row_guarantees()
    if segment_ids is not None and rows is not None:
        # The guarantees say that the mask is nonzero where segment IDs are, so it is not needed.
        return dataclasses.replace(description, max_runs=rows.max_runs)
    if attention_mask is None:
        return description
    is_visible = attention_mask != 0
    if segment_ids is not None:
        key_segments = jnp.where(is_visible, segment_ids, HIDDEN_SEGMENT)
        return dataclasses.replace(description, key_segments=key_segments)
    if rows is not None:
        return dataclasses.replace(description, key_lengths=is_visible.sum(-1, dtype=jnp.int32))
    return dataclasses.replace(description, key_segments=is_visible.astype(jnp.int32))


#: The segment of keys that no query may attend to.
HIDDEN_SEGMENT = -1


def visible_across(
    encoder_attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> Visibility | None:
    """Describes which encoder positions are visible in cross-attention.

    Args:
        encoder_attention_mask: `(batch, keys)`, nonzero where an encoder position may be attended
            to.
        segment_ids: Segment numbers of the encoder's tokens, `(batch, keys)`.
        decoder_segment_ids: Segment numbers of the decoder's tokens, `(batch, queries)`. If both
            `segment_ids` and `decoder_segment_ids` are passed, a decoder token sees only encoder
            positions with the same segment number. If one of these two arguments is `None`, the
            other argument is ignored.

    Returns:
        The `Visibility`, or `None` if all keys are visible.
    """
    if segment_ids is None or decoder_segment_ids is None:
        return visible(encoder_attention_mask)
    if encoder_attention_mask is not None and current_row_guarantees() is None:
        segment_ids = jnp.where(encoder_attention_mask != 0, segment_ids, HIDDEN_SEGMENT)
    return Visibility(query_segments=decoder_segment_ids, key_segments=segment_ids)


def attention_mask(
    attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Builds a boolean attention mask, True where a key is visible.

    The mask broadcasts to `(batch, heads, queries, keys)`. The arguments have the same meaning as
    in `visible`. Prefer `visible` where possible: fused attention kernels accept the `Visibility`
    that it returns, but most of them do not support explicit masks.
    """
    description = visible(attention_mask, segment_ids)
    length = next((x.shape[-1] for x in (attention_mask, segment_ids) if x is not None), 0)
    return None if description is None else description.array(length, length)


def cross_attention_mask(
    encoder_attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Builds a boolean cross-attention mask, True where a key is visible.

    The mask broadcasts to `(batch, heads, queries, keys)`. The arguments have the same meaning as
    in `visible_across`.
    """
    description = visible_across(encoder_attention_mask, segment_ids, decoder_segment_ids)
    keys = next((x.shape[-1] for x in (encoder_attention_mask, segment_ids) if x is not None), 0)
    return None if description is None else description.without_band(keys)
