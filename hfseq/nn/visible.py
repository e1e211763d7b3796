"""What queries see: said by models and the loop, and written down as a mask only where needed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError
from hfseq.nn.context import current_row_guarantees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those that every field lets through, all of them by default.

    **Arguments:** ``causal`` attention is aligned at the end: the last query sees the last key.
    ``window`` counts the keys seen before and after a query's own, which is aligned likewise.
    A query sees the keys of its own segment: ``query_segments`` is (batch, queries) and
    ``key_segments`` (batch, keys), int32; keys without segments have those of the queries, and
    queries without segments see every key whose segment is not 0. Of the keys of a row the first
    ``key_lengths`` (batch,) are there. ``max_runs`` bounds the runs of equal segments in a row,
    where a bound is known. ``dense`` is any other mask, boolean, of four axes, and broadcasts to
    (batch, heads, queries, keys).
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
                f"an attention window of {self.window} keys before and after a query's own leaves "
                "that out: the configuration's sliding_window (window_size, local_attention) "
                "counts at least the query's own key, so it is 1 or more, or None for no window"
            )

    @property
    def segments(self) -> str:
        """Who has segments: "" nobody, "keys", "same" queries and keys alike, "both" their own."""
        if self.query_segments is None:
            return "" if self.key_segments is None else "keys"
        return "same" if self.key_segments is None else "both"

    def array(self, queries: int, keys: int) -> jax.Array | None:
        """Return the mask, (batch, heads, queries, keys) or 1 for each; None if all is seen."""
        mask, band = self.without_band(keys), self.band(queries, keys, keys - queries)
        if band is None or mask is None:
            return mask if band is None else band[None, None]
        return mask & band

    def without_band(self, keys: int) -> jax.Array | None:
        """Return the mask of all but ``causal`` and ``window``."""
        masks = []
        if self.query_segments is not None:
            other = self.query_segments if self.key_segments is None else self.key_segments
            masks.append((self.query_segments[:, :, None] == other[:, None, :])[:, None])
        elif self.key_segments is not None:
            masks.append((self.key_segments != 0)[:, None, None, :])
        if self.key_lengths is not None:
            masks.append((jnp.arange(keys) < self.key_lengths[:, None])[:, None, None, :])
        if self.dense is not None:
            masks.append(self.dense)
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        return mask

    def band(self, queries: int, keys: int, offset: int | jax.Array) -> jax.Array | None:
        """Return what ``causal`` and ``window`` let ``queries`` see of ``keys``, (queries, keys).

        The query of number i stands at the key i + ``offset``.
        """
        if not self.causal and self.window is None:
            return None
        own = jnp.arange(queries)[:, None] + offset
        key = jnp.arange(keys)[None]
        left, right = self.window or (keys + queries, keys + queries)
        band = key <= own + (0 if self.causal else right)
        return band if self.window is None else band & (key >= own - left)

    def sees_any(self, queries: int, keys: int) -> jax.Array | None:
        """Tell which queries see a key, (batch, heads, queries, 1) or 1 for each; None if all do.

        Without an array of all queries and keys, but where segments of both meet a window or
        ``causal``, or a mask is dense.
        """
        banded, whole = self.causal or self.window is not None, self.key_lengths is None
        if self.dense is None and self.segments == "same" and queries == keys and whole:
            return None  # each sees itself
        if self.dense is None and self.segments in ("", "keys"):
            return self._sees_any_there(queries, keys)
        if self.dense is None and not banded:
            return self._sees_own_segment(keys)
        mask = self.array(queries, keys)
        assert mask is not None
        return mask.any(-1, keepdims=True)

    def _sees_any_there(self, queries: int, keys: int) -> jax.Array | None:
        """Tell it of keys that are there or not, by counting those of each query's band."""
        described = dataclasses.replace(self, causal=False, window=None)
        there = described.without_band(keys)
        if not self.causal and self.window is None:
            return None if there is None else there.any(-1, keepdims=True)
        if there is None and queries <= keys:
            return None
        own = jnp.arange(queries) + keys - queries
        before, after = self.window or (queries + keys, queries + keys)
        low = jnp.clip(own - before, 0, keys)
        high = jnp.clip(own + (0 if self.causal else after) + 1, 0, keys)
        if there is None:
            return (high > low)[None, None, :, None]
        counts = jnp.cumsum(there[:, 0, 0], -1, dtype=jnp.int32)
        counts = jnp.pad(counts, ((0, 0), (1, 0)))
        return (counts[:, high] > counts[:, low])[:, None, :, None]

    def _sees_own_segment(self, keys: int) -> jax.Array:
        """Tell whose segment is among those of the keys, which are sorted to find it."""
        assert self.query_segments is not None
        other = self.query_segments if self.key_segments is None else self.key_segments
        if self.key_lengths is not None:
            within = jnp.arange(keys) < self.key_lengths[:, None]
            other = jnp.where(within, other, jnp.iinfo(jnp.int32).min)
        other = jnp.sort(other, axis=-1)
        place = jax.vmap(jnp.searchsorted)(other, self.query_segments)
        found = jnp.take_along_axis(other, jnp.minimum(place, keys - 1), axis=-1)
        return (found == self.query_segments)[:, None, :, None]

    def part(self, start: int, stop: int, keys: int) -> Visibility:
        """Return what the queries from ``start`` to ``stop`` see of the first ``keys`` keys.

        All but ``causal`` and ``window``, which :meth:`band` knows.
        """

        def cut(x: jax.Array | None, *bounds: tuple[int, int]) -> jax.Array | None:
            if x is None:
                return None
            for axis, (low, high) in enumerate(bounds, x.ndim - len(bounds)):
                if x.shape[axis] > 1:
                    x = jax.lax.slice_in_dim(x, low, high, axis=axis)
            return x

        other = self.query_segments if self.key_segments is None else self.key_segments
        return Visibility(
            query_segments=cut(self.query_segments, (start, stop)),
            key_segments=cut(other, (0, keys)),
            key_lengths=self.key_lengths,
            dense=cut(self.dense, (start, stop), (0, keys)),
        )


#: What is hidden, as attention takes it: described, or a mask that broadcasts to (batch, heads,
#: queries, keys), True where a key is visible; None hides nothing.
Mask = Visibility | jax.Array | None


def as_visibility(mask: Mask, causal: bool = False) -> Visibility:
    """Return what is described by ``mask`` and ``causal`` together."""
    visible = mask if isinstance(mask, Visibility) else Visibility(dense=mask)
    if visible.dense is not None and visible.dense.ndim < 4:
        four = (1,) * (4 - visible.dense.ndim) + visible.dense.shape
        visible = dataclasses.replace(visible, dense=visible.dense.reshape(four))
    return dataclasses.replace(visible, causal=True) if causal else visible


def visible(
    attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Visibility | None:
    """Describe what attention of a sequence to itself, or to a padded one, sees.

    **Arguments:** ``attention_mask`` is (batch, keys), non-zero where a key may be seen, holes
    allowed, or (batch, queries, keys). ``segment_ids`` (batch, length) restricts every query to
    keys of its own document; 0 is padding. ``window`` counts the keys seen before and after a
    query's own. Returns None where all is seen.
    """
    if attention_mask is None and segment_ids is None and not causal and window is None:
        return None
    described = Visibility(causal=causal, window=window, query_segments=segment_ids)
    if attention_mask is not None and attention_mask.ndim == 3:
        return dataclasses.replace(described, dense=attention_mask.astype(bool)[:, None])
    rows = current_row_guarantees()
    if segment_ids is not None and rows is not None:  # which say all that a mask would
        return dataclasses.replace(described, max_runs=rows.max_runs)
    if attention_mask is None:
        return described
    seen = attention_mask != 0
    if segment_ids is not None:
        hidden = jnp.where(seen, segment_ids, HIDDEN_SEGMENT)
        return dataclasses.replace(described, key_segments=hidden)
    if rows is not None:
        return dataclasses.replace(described, key_lengths=seen.sum(-1, dtype=jnp.int32))
    return dataclasses.replace(described, key_segments=seen.astype(jnp.int32))


#: The segment of keys that no query sees.
HIDDEN_SEGMENT = -1


def visible_across(
    encoder_attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> Visibility | None:
    """Describe what a decoder's attention to an encoder sees.

    ``encoder_attention_mask`` is (batch, keys). With the segments of both sides, (batch, keys) and
    (batch, queries), a target sees only the source that was packed under its number.
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
    """Build a boolean mask that broadcasts to (batch, heads, queries, keys); True is visible.

    Arguments are those of :func:`visible`, which kernels understand; a mask has to be explicit
    products where they do not take one.
    """
    described = visible(attention_mask, segment_ids)
    length = next((x.shape[-1] for x in (attention_mask, segment_ids) if x is not None), 0)
    return None if described is None else described.array(length, length)


def cross_attention_mask(
    encoder_attention_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
) -> jax.Array | None:
    """Build the mask of a decoder's attention to an encoder, (batch, heads, queries, keys).

    Arguments are those of :func:`visible_across`.
    """
    described = visible_across(encoder_attention_mask, segment_ids, decoder_segment_ids)
    keys = next((x.shape[-1] for x in (encoder_attention_mask, segment_ids) if x is not None), 0)
    return None if described is None else described.without_band(keys)
