"""Attention of all blocks on one device, in a scan or in parallel.

The parallel computation first computes the cache before each block, by a reduction over the blocks.
:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.vq_transformer.blocks import (
    AttentionInputs,
    AttentionOptions,
    Block,
    PastTokens,
    ScoreTerms,
    TokenBlocks,
    attend_block,
    attend_in_blocks,
    mask_cache,
)
from hfseq_plugins.vq_transformer.state import (
    Cache,
    State,
    merge,
    summarize_by_code,
    window_in_order,
)


def attend_on_device(
    inputs: AttentionInputs,
    terms: ScoreTerms,
    options: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Computes attention for several tokens on one device, see `layers.attend`."""
    past = None if state is None else PastTokens(*window_in_order(state), state.cache)
    tokens = TokenBlocks(inputs, terms.codebook.shape[1], options, past, lengths)
    out, cache = run_blocks(tokens, terms, options)
    return out, None if state is None else tokens.end(state, cache)


def run_blocks(
    tokens: TokenBlocks, terms: ScoreTerms, options: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Computes the attention of all blocks with the configured reduction.

    Returns:
        The attention output, `(B, Hk, G, T, V)`, and the cache after the last block.
    """
    attend = attend_in_blocks if options.reduction == "recurrent" else attend_in_parallel
    return attend(tokens, terms, options)


def attend_in_parallel(
    tokens: TokenBlocks, terms: ScoreTerms, options: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Computes all blocks in parallel.

    Returns:
        The attention output, `(B, Hk, G, T, V)`, and the cache after the last block.
    """
    value, code = tokens.leaving()
    evicted = summarize_by_code(value, code, tokens.codes)
    first = tokens.first_segments()
    reduce = {"serial": serial, "matmul": matmul, "associative_scan": associative}[
        options.reduction
    ]
    caches = reduce(tokens.cache, evicted, first)
    blocks = Block(
        tokens.queries(),
        _overlapping(tokens, tokens.key, 2, 0),
        _overlapping(tokens, tokens.value, 2, 0),
        _overlapping(tokens, tokens.code, 2, tokens.codes),
        None if tokens.segment is None else _overlapping(tokens, tokens.segment, 1, 0),
        None if first is None else first[:-1],
    )
    if options.stop_gradient:
        blocks = blocks._replace(
            key=_own_only(blocks.key, options.window), value=_own_only(blocks.value, options.window)
        )
    caches_before = jax.tree.map(lambda leaf: leaf[:-1], caches)
    out = jax.vmap(lambda block, cache: attend_block(block, cache, terms, options))(
        blocks, caches_before
    )
    return tokens.join(out), jax.tree.map(lambda leaf: leaf[-1], caches)


def _overlapping(tokens: TokenBlocks, x: jax.Array, axis: int, fill: int) -> jax.Array:
    """Returns, for each block, the M tokens of the window before it and its L tokens.

    The implementation concatenates whole blocks and removes the surplus at the front, because the
    gradient of a slice is cheaper than the gradient of indexing.

    Args:
        tokens: The tokens of the call.
        x: One of the arrays of `tokens`.
        axis: The axis of tokens in `x`.
        fill: Value for padding at the start.

    Returns:
        An array with the R blocks on the first axis.
    """
    window, block, blocks = tokens.options.window, tokens.options.block, tokens.blocks
    reach = math.ceil(window / block)
    sizes = [(0, 0)] * x.ndim
    sizes[axis] = (reach * block - window, 0)
    x = jnp.pad(x, sizes, constant_values=fill)
    shape = (*x.shape[:axis], reach + blocks, block, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x.reshape(shape), axis, 0)
    windows = jnp.concatenate([x[i : i + blocks] for i in range(reach + 1)], axis=axis + 1)
    return lax.slice_in_dim(windows, reach * block - window, None, axis=axis + 1)


def _own_only(x: jax.Array, window: int) -> jax.Array:
    """Stops the gradient of the window, whose tokens belong to earlier blocks."""
    past, current = x[..., :window, :], x[..., window:, :]
    return jnp.concatenate([lax.stop_gradient(past), current], axis=-2)


# -- reductions
# ---------------------------------------------------------------------------------------

# Each reduction has three arguments: the cache before the call, the tokens that each block moves to
# the cache, and the document numbers of TokenBlocks.first_segments. It returns the caches before
# each block and after the last block, (R + 1, B, ...).


def serial(start: Cache, evicted: Cache, first: jax.Array | None) -> Cache:
    """Merges the blocks one after the other, in a scan."""
    continues = None if first is None else first[1:] == first[:-1]

    def body(cache: Cache, x: tuple[Cache, jax.Array | None]) -> tuple[Cache, Cache]:
        new, rows = x
        return merge(mask_cache(cache, rows), new), cache

    last, caches = lax.scan(body, start, (evicted, continues))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), caches, last)


def associative(start: Cache, evicted: Cache, first: jax.Array | None) -> Cache:
    """Merges the blocks in an associative scan of logarithmic depth.

    At the start of a new document, the earlier cache is discarded.
    """
    caches = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, evicted)
    if first is None:
        return lax.associative_scan(lambda a, b: jax.vmap(merge)(a, b), caches)
    continues = jnp.concatenate([jnp.ones_like(first[:1], bool), first[1:] == first[:-1]])

    def join(a: tuple[Cache, jax.Array], b: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        (old, old_continues), (new, new_continues) = a, b
        merged = jax.vmap(lambda x, y, rows: merge(mask_cache(x, rows), y))(old, new, new_continues)
        return merged, old_continues & new_continues

    return lax.associative_scan(join, (caches, continues))[0]


def matmul(start: Cache, evicted: Cache, first: jax.Array | None) -> Cache:
    """Multiplies the means of all blocks by a triangular matrix of weights for each code.

    The cost is quadratic in the number of blocks.
    """
    caches = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, evicted)
    numbers = jnp.arange(len(caches.count))
    included = (numbers[:, None] >= numbers)[:, :, None]
    if first is not None:
        # The cache before block r only contains tokens of the document at the start of block r.
        included = included & (first[:, None] == first[None])
    counts = jnp.einsum("rqb,qbhs->rbhs", included.astype(jnp.int32), caches.count)
    weights = included[..., None, None] * caches.count[None] / jnp.maximum(counts, 1)[:, None]
    return Cache(jnp.einsum("rqbhs,qbhsv->rbhsv", weights, caches.mean), counts)
