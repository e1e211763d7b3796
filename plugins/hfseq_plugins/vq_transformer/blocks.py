"""What all evaluations of attention over a window and a cache of codes share: a call's tokens.

A :class:`Tape` lays them in blocks, :func:`mix` attends with one block, and
:func:`attend_in_blocks` goes from block to block. Each query sees the keys of its own block and the
window before it one by one, and all older keys by their code (Lingle, 2024, section 3). Heads come
before tokens in every array here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.vq_transformer.positions import EXACT, window_scores
from hfseq_plugins.vq_transformer.state import (
    Cache,
    State,
    merge,
    ring_order,
    summarize_by_code,
    take,
)

#: Below every score, and finite: what is masked keeps finite gradients.
MASKED_SCORE = -1e30


class AttentionInputs(NamedTuple):
    """One call's tokens: ``query`` (B, Hk, G, T, K), ``key`` (B, Hk, T, K) by their codes, both
    float32; ``value`` (B, Hk, T, V); ``code`` (B, Hk, T), S where a token is none; ``segment``
    (B, T) numbers the documents of a packed row.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    code: jax.Array
    segment: jax.Array | None = None


class ScoreTerms(NamedTuple):
    """What scores are made of: the ``codebook`` (Hk, S, K), the ``relative`` rows (M + 1, Hk, K),
    and the offsets of queries, ``content`` and ``position`` (Hk, G, 1, K).

    For one token ``relative`` is a pair, sinusoids (M + 1, D) and their projection (D, Hk, K).
    """

    codebook: jax.Array
    relative: Any
    content: jax.Array
    position: jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static choices: window M, block L, how blocks are reduced, and what the cache does."""

    window: int
    block: int
    reduction: str = "recurrent"
    compressive: bool = True
    stop_gradient: bool = False


class Block(NamedTuple):
    """A block's ``query`` (B, Hk, G, L, K) and what it sees one by one: M + L keys.

    ``segment`` (B, M + L) is that of the keys; ``first`` (B,) the segment the cache belongs to.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    code: jax.Array
    segment: jax.Array | None
    first: jax.Array | None


def attend_block(block: Block, cache: Cache, terms: ScoreTerms, how: AttentionOptions) -> jax.Array:
    """Return the values that a block's queries attend to, (B, Hk, G, L, V) float32.

    One softmax over the keys and the codes; a code that stands for n keys has the score of one and
    log n (equation 20). The weights are divided before they meet the values.
    """
    content = block.query + terms.content
    near = jnp.einsum("bhglk,bhck->bhglc", content, block.key, precision=EXACT)
    near += window_scores(block.query + terms.position, terms.relative)
    # Which of the M + L keys each of the L queries sees: (B, L, M + L).
    rows, columns = jnp.arange(content.shape[-2])[:, None], jnp.arange(block.code.shape[-1])
    seen = columns <= rows + how.window
    if not how.compressive:
        seen &= columns >= rows
    seen = seen[None] & (block.code[:, 0, None] < terms.codebook.shape[1])
    if block.segment is not None:
        seen &= block.segment[:, how.window :, None] == block.segment[:, None]
    near = jnp.where(seen[:, None, None], near, MASKED_SCORE)
    top = near.max(-1, keepdims=True)
    far = None
    if how.compressive:
        far = cache_scores(content, cache.count, terms.codebook)
        if block.first is not None and block.segment is not None:
            same = block.segment[:, how.window :] == block.first[:, None]
            far = jnp.where(same[:, None, None, :, None], far, MASKED_SCORE)
        top = jnp.maximum(top, far.max(-1, keepdims=True))
    top = lax.stop_gradient(top)
    near = jnp.exp(near - top)
    total = near.sum(-1, keepdims=True)
    if far is None:
        return weighted_sum(near / total, block.value, block.value.dtype)
    far = jnp.exp(far - top)
    total += far.sum(-1, keepdims=True)
    mean = lax.stop_gradient(cache.mean) if how.stop_gradient else cache.mean
    dtype = block.value.dtype
    return weighted_sum(near / total, block.value, dtype) + weighted_sum(far / total, mean, dtype)


def weighted_sum(weights: jax.Array, values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiply in ``dtype``, summing in float32: (B, H, G, L, C) and (B, H, C, V)."""
    return jnp.einsum(
        "bhglc,bhcv->bhglv",
        weights.astype(dtype),
        values.astype(dtype),
        preferred_element_type=jnp.float32,
    )


def cache_scores(content: jax.Array, count: jax.Array, codebook: jax.Array) -> jax.Array:
    """Score the codes, (B, Hk, G, L, S); one that stands for n tokens has log n added."""
    bonus = jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), MASKED_SCORE)
    scores = jnp.einsum("bhglk,hsk->bhgls", content, codebook, precision=EXACT)
    return scores + bonus[:, :, None, None]


# -- a call of many tokens
# ---------------------------------------------------------------------------------------


class PastTokens(NamedTuple):
    """What comes before a call's tokens: ``key``, ``value`` and ``code`` of the M last ones, oldest
    first, and the ``cache`` of all others.

    Of packed rows also the ``segment`` (B, M) of the former, and that ``following`` (B,) the call.
    """

    key: jax.Array
    value: jax.Array
    code: jax.Array
    cache: Cache
    segment: jax.Array | None = None
    following: jax.Array | None = None


class TokenBlocks:
    """The window before a call and the call's tokens in a row, padded to whole blocks.

    ``key``, ``value``, ``code`` (and ``segment``) have M + R * L places along their tokens; the
    first R * L of them leave the window by the end of the last block.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        codes: int,
        how: AttentionOptions,
        past: PastTokens | None,
        lengths: jax.Array | None,
    ):
        self.inputs, self.how, self.codes, self.lengths = inputs, how, codes, lengths
        batch, heads, self.tokens = inputs.code.shape
        self.batch, self.heads = batch, heads
        self.blocks = max(1, math.ceil(self.tokens / how.block))
        self.spare = self.blocks * how.block - self.tokens
        before: tuple[Any, ...] = (None, None, None) if past is None else past[:3]
        if how.stop_gradient:
            before = tuple(lax.stop_gradient(part) for part in before)
        self.key = self._extend(before[0], inputs.key, 0, 2)
        self.value = self._extend(before[1], inputs.value, 0, 2)
        self.code = self._extend(before[2], inputs.code, codes, 2)
        segment, earlier = inputs.segment, None if past is None else past.segment
        self.segment = None if segment is None else self._extend(earlier, segment, 0, 1)
        self.following = None if past is None else past.following
        self.cache = self._empty() if past is None else past.cache

    def _extend(self, before: jax.Array | None, x: jax.Array, fill: int, axis: int) -> jax.Array:
        sizes = [(0, 0)] * x.ndim
        sizes[axis] = (self.how.window if before is None else 0, self.spare)
        if before is not None:
            x = jnp.concatenate([before.astype(x.dtype), x], axis)
        return jnp.pad(x, sizes, constant_values=fill)

    def _empty(self) -> Cache:
        shape = (self.batch, self.heads, self.codes)
        mean = jnp.zeros((*shape, self.inputs.value.shape[-1]))
        return Cache(mean, jnp.zeros(shape, jnp.int32))

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
        """Cut R * L places into blocks, which become the first axis."""
        shape = (*x.shape[:axis], self.blocks, self.how.block, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def queries(self) -> jax.Array:
        """Return the queries by blocks, (R, B, Hk, G, L, K)."""
        query = self.inputs.query
        sizes = [(0, 0)] * 3 + [(0, self.spare), (0, 0)]
        return self.cut(jnp.pad(query, sizes), 3)

    def first_segments(self) -> jax.Array | None:
        """Return the segment of each block's first token, and of what follows, (R + 1, B)."""
        if self.segment is None:
            return None
        starts = self.segment[:, self.how.window :: self.how.block].T
        last = jnp.zeros_like(starts[0]) if self.following is None else self.following
        return jnp.concatenate([starts, last[None]])

    def leaving(self) -> tuple[jax.Array, jax.Array]:
        """Return values (R, B, Hk, L, V) and codes of what leaves the window after each block.

        Tokens that stay in the window of a shorter row, and those of another document than the
        next block begins with, have the code S.
        """
        places = self.blocks * self.how.block
        code = self.code[..., :places]
        lengths = self.tokens if self.lengths is None else self.lengths[:, None, None]
        code = jnp.where(jnp.arange(places) < lengths, code, self.codes)
        codes, first = self.cut(code, 2), self.first_segments()
        if first is not None and self.segment is not None:
            segments = self.cut(self.segment[:, :places], 1)
            codes = jnp.where((segments == first[1:, :, None])[:, :, None], codes, self.codes)
        return self.cut(self.value[:, :, :places], 2), codes

    def join(self, out: jax.Array) -> jax.Array:
        """Put the blocks' results (R, B, Hk, G, L, V) in a row again, without the padding."""
        out = jnp.moveaxis(out, 0, 3)
        out = out.reshape(*out.shape[:3], -1, out.shape[-1])
        return out[:, :, :, : self.tokens]

    def end(self, state: State, cache: Cache) -> State:
        """Return the state after the call, whose cache is ``cache``.

        With ``stop_gradient`` nothing is learned through it, by whatever pieces it was computed.
        """
        new = self.tokens if self.lengths is None else self.lengths
        position = state.position + new
        places = (
            ring_order(position, self.how.window) + jnp.broadcast_to(new, position.shape)[:, None]
        )
        after = State(
            take(self.key, places),
            take(self.value, places).astype(state.window_value.dtype),
            take(self.code, places),
            cache.mean,
            cache.count,
            position,
        )
        return jax.tree.map(lax.stop_gradient, after) if self.how.stop_gradient else after


def attend_in_blocks(
    tape: TokenBlocks, terms: ScoreTerms, how: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Run the blocks one after the other; returns (B, Hk, G, T, V) and the last cache."""
    window, first = how.window, tape.first_segments()
    _, codes = tape.leaving()  # the carried window has the values
    xs = {
        "query": tape.queries(),
        "key": tape.cut(tape.key[:, :, window:], 2),
        "value": tape.cut(tape.value[:, :, window:], 2),
        "code": tape.cut(tape.code[:, :, window:], 2),
        "leaving": codes,
    }
    before = {
        "key": tape.key[:, :, :window],
        "value": tape.value[:, :, :window],
        "code": tape.code[:, :, :window],
    }
    if tape.segment is not None and first is not None:
        xs["segment"] = tape.cut(tape.segment[:, window:], 1)
        xs |= {"first": first[:-1], "continues": first[1:] == first[:-1]}
        before["segment"] = tape.segment[:, :window]

    def body(
        carry: tuple[dict[str, jax.Array], Cache], x: dict[str, jax.Array]
    ) -> tuple[tuple[dict[str, jax.Array], Cache], jax.Array]:
        before, cache = carry
        if how.stop_gradient:
            before = jax.tree.map(lax.stop_gradient, before)
        seen = {n: jnp.concatenate([b, x[n]], _axis(n)) for n, b in before.items()}
        block = Block(
            x["query"],
            seen["key"],
            seen["value"],
            seen["code"],
            seen.get("segment"),
            x.get("first"),
        )
        out = attend_block(block, cache, terms, how)
        left = summarize_by_code(seen["value"][:, :, : how.block], x["leaving"], tape.codes)
        cache = merge(mask_cache(cache, x.get("continues")), left)
        after = {n: lax.slice_in_dim(s, how.block, None, axis=_axis(n)) for n, s in seen.items()}
        return (after, cache), out

    (_, cache), out = lax.scan(body, (before, tape.cache), xs)
    return tape.join(out), cache


def _axis(name: str) -> int:
    return 1 if name == "segment" else 2


def mask_cache(cache: Cache, rows: jax.Array | None) -> Cache:
    """Empty the cache of rows (B,) that are False: another document begins."""
    if rows is None:
        return cache
    return Cache(
        jnp.where(rows[:, None, None, None], cache.mean, 0.0),
        jnp.where(rows[:, None, None], cache.count, 0),
    )
