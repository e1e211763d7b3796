"""What queries see: said by models and the loop, and written down as a mask only where needed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp



@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
    """Which keys a query sees: those that every field lets through, all of them by default.

    **Arguments:** ``causal`` attention is aligned at the end: the last query sees the last key.
    ``window`` counts the keys seen before and after a query's own, which is aligned likewise.
    A query sees the keys of its own segment: ``query_segments`` is (batch, queries) and
    ``key_segments`` (batch, keys), int32; keys without segments have those of the queries, and
    queries without segments see every key whose segment is not 0. Of the keys of a row the first
    ``key_lengths`` (batch,) are there. ``max_runs`` bounds the runs of equal segments in a row,
    where a bound is known. ``dense`` is any other mask, boolean, and broadcasts to (batch, heads,
    queries, keys).
    """

    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    max_runs: int | None = dataclasses.field(default=None, metadata={"static": True})
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    dense: jax.Array | None = None

    def array(self, queries: int, keys: int) -> jax.Array | None:
        """Return the mask, which broadcasts to (batch, heads, queries, keys); None if all is seen."""
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
            masks.append(self.dense.reshape((1,) * (4 - self.dense.ndim) + self.dense.shape))
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        return mask

    def band(self, queries: int, keys: int, offset: int) -> jax.Array | None:
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
