"""Block-wise attention over a window of keys and a cache of codes (Lingle, 2024, section 3).

A key is quantized to the nearest vector of a codebook. Its code is the index of this vector. A
query attends individually to the keys of its block and of the window before the block. All older
keys with the same code are represented by the vector of the code, their number, and the mean of
their values, which are stored in a cache.

:class:`TokenBlocks` splits the tokens of a call into blocks. :func:`attend_block` computes the
attention of one block, and :func:`attend_in_blocks` scans over the blocks.

Shapes in this package use these symbols: B batch size, Hk key heads, G query heads per key head,
T tokens, K width of queries and keys, V width of values, S number of codes, M window size, L block
size, R number of blocks, D hidden size. In all arrays of this module, the axis of heads precedes
the axis of tokens.
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

#: The score of masked keys. It is finite, so that gradients are finite as well.
MASKED_SCORE = -1e30


class AttentionInputs(NamedTuple):
    """The tokens of a call.

    Attributes:
        query: Queries, float32 `(B, Hk, G, T, K)`.
        key: Quantized keys, float32 `(B, Hk, T, K)`.
        value: Values, `(B, Hk, T, V)`.
        code: The codes of the keys, `(B, Hk, T)`. The code of padding is S.
        segment: Document number of each token in packed rows, `(B, T)`, or `None`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    code: jax.Array
    segment: jax.Array | None = None


class ScoreTerms(NamedTuple):
    """The parameters of attention scores.

    As in Transformer-XL, the score of a key is the sum of a content score, which depends on the
    key, and a position score, which depends on its distance to the query.

    Attributes:
        codebook: The key vector of each code, `(Hk, S, K)`.
        relative: The key vectors of relative positions by distance, `(M + 1, Hk, K)`. For a single
            token, these are two factors: sinusoids, `(M + 1, D)`, and their projection, `(D, Hk,
            K)`.
        content: Vector that is added to queries for content scores, `(Hk, G, 1, K)`.
        position: Vector that is added to queries for position scores, `(Hk, G, 1, K)`.
    """

    codebook: jax.Array
    relative: Any
    content: jax.Array
    position: jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of attention.

    Attributes:
        window: The window size M.
        block: The block size L.
        reduction: How the caches of all blocks are computed: `recurrent`, `serial`, `matmul` or
            `associative_scan`.
        compressive: Whether queries attend to keys before the window through the codes of the keys.
        stop_gradient: Whether a block passes no gradient to earlier blocks.
    """

    window: int
    block: int
    reduction: str = "recurrent"
    compressive: bool = True
    stop_gradient: bool = False


class Block(NamedTuple):
    """The L queries of a block, and the M + L keys of the block and the window before the block.

    Attributes:
        query: Queries, `(B, Hk, G, L, K)`.
        key: Keys, `(B, Hk, M + L, K)`.
        value: Values, `(B, Hk, M + L, V)`.
        code: Codes of the keys, `(B, Hk, M + L)`.
        segment: Document number of each key, `(B, M + L)`, or `None`.
        first: Document number of the tokens in the cache, `(B,)`, or `None`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    code: jax.Array
    segment: jax.Array | None
    first: jax.Array | None


def attend_block(
    block: Block, cache: Cache, terms: ScoreTerms, options: AttentionOptions
) -> jax.Array:
    """Computes the attention output of a block, float32 `(B, Hk, G, L, V)`.

    A single softmax covers the keys of block and window and the codes in the cache. A code that
    represents n keys has the score of one key plus log n (equation 20). The weights are normalized
    before they are multiplied with the values.
    """
    content = block.query + terms.content
    near = jnp.einsum("bhglk,bhck->bhglc", content, block.key, precision=EXACT)
    near += window_scores(block.query + terms.position, terms.relative)
    # Which of the M + L keys each of the L queries attends to: (B, L, M + L).
    rows, columns = jnp.arange(content.shape[-2])[:, None], jnp.arange(block.code.shape[-1])
    visible = columns <= rows + options.window
    if not options.compressive:
        visible &= columns >= rows
    visible = visible[None] & (block.code[:, 0, None] < terms.codebook.shape[1])
    if block.segment is not None:
        visible &= block.segment[:, options.window :, None] == block.segment[:, None]
    near = jnp.where(visible[:, None, None], near, MASKED_SCORE)
    top = near.max(-1, keepdims=True)
    far = None
    if options.compressive:
        far = cache_scores(content, cache.count, terms.codebook)
        if block.first is not None and block.segment is not None:
            same = block.segment[:, options.window :] == block.first[:, None]
            far = jnp.where(same[:, None, None, :, None], far, MASKED_SCORE)
        top = jnp.maximum(top, far.max(-1, keepdims=True))
    top = lax.stop_gradient(top)
    near = jnp.exp(near - top)
    total = near.sum(-1, keepdims=True)
    if far is None:
        return weighted_sum(near / total, block.value, block.value.dtype)
    far = jnp.exp(far - top)
    total += far.sum(-1, keepdims=True)
    mean = lax.stop_gradient(cache.mean) if options.stop_gradient else cache.mean
    dtype = block.value.dtype
    return weighted_sum(near / total, block.value, dtype) + weighted_sum(far / total, mean, dtype)


def weighted_sum(weights: jax.Array, values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies attention weights with values in `dtype`, and sums the results in float32.

    Args:
        weights: Weights of C keys or codes, `(B, Hk, G, L, C)`.
        values: Their values, `(B, Hk, C, V)`.
        dtype: Dtype of the multiplication.
    """
    return jnp.einsum(
        "bhglc,bhcv->bhglv",
        weights.astype(dtype),
        values.astype(dtype),
        preferred_element_type=jnp.float32,
    )


def cache_scores(content: jax.Array, count: jax.Array, codebook: jax.Array) -> jax.Array:
    """Returns the scores of codes, `(B, Hk, G, L, S)`, including log n for a code with n keys.

    Args:
        content: Queries for content scores, `(B, Hk, G, L, K)`.
        count: Number of keys of each code, `(B, Hk, S)`.
        codebook: The key vector of each code, `(Hk, S, K)`.
    """
    bonus = jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), MASKED_SCORE)
    scores = jnp.einsum("bhglk,hsk->bhgls", content, codebook, precision=EXACT)
    return scores + bonus[:, :, None, None]


# -- a call with many tokens
# ---------------------------------------------------------------------------------------


class PastTokens(NamedTuple):
    """The tokens before a call.

    Attributes:
        key: The keys of the last M tokens, oldest first.
        value: The values of the last M tokens.
        code: The codes of the last M tokens.
        cache: The cache of all older tokens.
        segment: Document number of each of the last M tokens, `(B, M)`. `None` if rows are not
            packed.
        following: Document number of the token after the call, `(B,)`. `None` if rows are not
            packed.
    """

    key: jax.Array
    value: jax.Array
    code: jax.Array
    cache: Cache
    segment: jax.Array | None = None
    following: jax.Array | None = None


class TokenBlocks:
    """The window before a call and the tokens of the call, padded to whole blocks.

    The arrays `key`, `value`, `code` and `segment` contain M + R * L tokens. After the last block,
    the first R * L of these tokens are no longer in the window.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        codes: int,
        options: AttentionOptions,
        past: PastTokens | None,
        lengths: jax.Array | None,
    ):
        self.inputs, self.options, self.codes, self.lengths = inputs, options, codes, lengths
        batch, heads, self.tokens = inputs.code.shape
        self.batch, self.heads = batch, heads
        self.blocks = max(1, math.ceil(self.tokens / options.block))
        self.spare = self.blocks * options.block - self.tokens
        window: tuple[Any, ...] = (None, None, None) if past is None else past[:3]
        if options.stop_gradient:
            window = tuple(lax.stop_gradient(part) for part in window)
        self.key = self._extend(window[0], inputs.key, 0, 2)
        self.value = self._extend(window[1], inputs.value, 0, 2)
        self.code = self._extend(window[2], inputs.code, codes, 2)
        segment, earlier = inputs.segment, None if past is None else past.segment
        self.segment = None if segment is None else self._extend(earlier, segment, 0, 1)
        self.following = None if past is None else past.following
        self.cache = self._empty() if past is None else past.cache

    def _extend(self, window: jax.Array | None, x: jax.Array, fill: int, axis: int) -> jax.Array:
        sizes = [(0, 0)] * x.ndim
        sizes[axis] = (self.options.window if window is None else 0, self.spare)
        if window is not None:
            x = jnp.concatenate([window.astype(x.dtype), x], axis)
        return jnp.pad(x, sizes, constant_values=fill)

    def _empty(self) -> Cache:
        shape = (self.batch, self.heads, self.codes)
        mean = jnp.zeros((*shape, self.inputs.value.shape[-1]))
        return Cache(mean, jnp.zeros(shape, jnp.int32))

    def cut(self, x: jax.Array, axis: int) -> jax.Array:
        """Splits an axis of R * L tokens into R blocks. The blocks become the first axis."""
        shape = (*x.shape[:axis], self.blocks, self.options.block, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def queries(self) -> jax.Array:
        """Returns the queries in blocks, `(R, B, Hk, G, L, K)`."""
        query = self.inputs.query
        sizes = [(0, 0)] * 3 + [(0, self.spare), (0, 0)]
        return self.cut(jnp.pad(query, sizes), 3)

    def first_segments(self) -> jax.Array | None:
        """Returns the document numbers at the start of each block and after the last block.

        The shape is `(R + 1, B)`. The result is `None` if rows are not packed.
        """
        if self.segment is None:
            return None
        starts = self.segment[:, self.options.window :: self.options.block].T
        last = jnp.zeros_like(starts[0]) if self.following is None else self.following
        return jnp.concatenate([starts, last[None]])

    def leaving(self) -> tuple[jax.Array, jax.Array]:
        """Returns the values and codes of the tokens that leave the window after each block.

        Tokens that leave the window move to the cache. The result also contains tokens that do not
        move to the cache. They have the code S. These are tokens that stay in the window because
        the row is shorter, and tokens that do not belong to the document of the next block's first
        token.

        Returns:
            Values, `(R, B, Hk, L, V)`, and codes, `(R, B, Hk, L)`.
        """
        size = self.blocks * self.options.block
        code = self.code[..., :size]
        lengths = self.tokens if self.lengths is None else self.lengths[:, None, None]
        code = jnp.where(jnp.arange(size) < lengths, code, self.codes)
        codes, first = self.cut(code, 2), self.first_segments()
        if first is not None and self.segment is not None:
            segments = self.cut(self.segment[:, :size], 1)
            codes = jnp.where((segments == first[1:, :, None])[:, :, None], codes, self.codes)
        return self.cut(self.value[:, :, :size], 2), codes

    def join(self, out: jax.Array) -> jax.Array:
        """Concatenates the outputs of the blocks and removes the padding.

        Args:
            out: Outputs of the blocks, `(R, B, Hk, G, L, V)`.

        Returns:
            The output, `(B, Hk, G, T, V)`.
        """
        out = jnp.moveaxis(out, 0, 3)
        out = out.reshape(*out.shape[:3], -1, out.shape[-1])
        return out[:, :, :, : self.tokens]

    def end(self, state: State, cache: Cache) -> State:
        """Returns the state after the call.

        With the option `stop_gradient`, no gradient flows through this state.

        Args:
            state: The state before the call.
            cache: The cache after the call.
        """
        count = self.tokens if self.lengths is None else self.lengths
        position = state.position + count
        indices = (
            ring_order(position, self.options.window)
            + jnp.broadcast_to(count, position.shape)[:, None]
        )
        end_state = State(
            take(self.key, indices),
            take(self.value, indices).astype(state.window_value.dtype),
            take(self.code, indices),
            cache.mean,
            cache.count,
            position,
        )
        return (
            jax.tree.map(lax.stop_gradient, end_state) if self.options.stop_gradient else end_state
        )


def attend_in_blocks(
    tokens: TokenBlocks, terms: ScoreTerms, options: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Computes one block after the other, in a scan.

    Returns:
        The attention output, `(B, Hk, G, T, V)`, and the cache after the last block.
    """
    window, first = options.window, tokens.first_segments()
    _, codes = tokens.leaving()  # the values are in `past`, which the scan carries
    xs = {
        "query": tokens.queries(),
        "key": tokens.cut(tokens.key[:, :, window:], 2),
        "value": tokens.cut(tokens.value[:, :, window:], 2),
        "code": tokens.cut(tokens.code[:, :, window:], 2),
        "leaving": codes,
    }
    past = {
        "key": tokens.key[:, :, :window],
        "value": tokens.value[:, :, :window],
        "code": tokens.code[:, :, :window],
    }
    if tokens.segment is not None and first is not None:
        xs["segment"] = tokens.cut(tokens.segment[:, window:], 1)
        xs |= {"first": first[:-1], "continues": first[1:] == first[:-1]}
        past["segment"] = tokens.segment[:, :window]

    def body(
        carry: tuple[dict[str, jax.Array], Cache], x: dict[str, jax.Array]
    ) -> tuple[tuple[dict[str, jax.Array], Cache], jax.Array]:
        past, cache = carry
        if options.stop_gradient:
            past = jax.tree.map(lax.stop_gradient, past)
        context = {n: jnp.concatenate([b, x[n]], _axis(n)) for n, b in past.items()}
        block = Block(
            x["query"],
            context["key"],
            context["value"],
            context["code"],
            context.get("segment"),
            x.get("first"),
        )
        out = attend_block(block, cache, terms, options)
        evicted = summarize_by_code(
            context["value"][:, :, : options.block], x["leaving"], tokens.codes
        )
        cache = merge(mask_cache(cache, x.get("continues")), evicted)
        next_past = {
            n: lax.slice_in_dim(s, options.block, None, axis=_axis(n)) for n, s in context.items()
        }
        return (next_past, cache), out

    (_, cache), out = lax.scan(body, (past, tokens.cache), xs)
    return tokens.join(out), cache


def _axis(name: str) -> int:
    return 1 if name == "segment" else 2


def mask_cache(cache: Cache, rows: jax.Array | None) -> Cache:
    """Empties the cache of each row in which a new document starts.

    Args:
        cache: The cache.
        rows: Whether each row continues its document, `(B,)`. `None` keeps all rows.
    """
    if rows is None:
        return cache
    return Cache(
        jnp.where(rows[:, None, None, None], cache.mean, 0.0),
        jnp.where(rows[:, None, None], cache.count, 0),
    )
