"""All blocks on one device: one after the other, or at once.

At once they run after a reduction over blocks of what left the window before each.
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
    how: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Do what ``attention.attend`` does for many tokens, on one device."""
    past = None if state is None else PastTokens(*window_in_order(state), state.cache)
    tape = TokenBlocks(inputs, terms.codebook.shape[1], how, past, lengths)
    out, cache = run_blocks(tape, terms, how)
    return out, None if state is None else tape.end(state, cache)


def run_blocks(
    tape: TokenBlocks, terms: ScoreTerms, how: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Run the blocks as the options say; returns (B, Hk, G, T, V) and the last cache."""
    chosen = attend_in_blocks if how.reduction == "recurrent" else attend_in_parallel
    return chosen(tape, terms, how)


def attend_in_parallel(
    tape: TokenBlocks, terms: ScoreTerms, how: AttentionOptions
) -> tuple[jax.Array, Cache]:
    """Compute every block in parallel; returns (B, Hk, G, T, V) and the last cache."""
    value, code = tape.leaving()
    left = summarize_by_code(value, code, tape.codes)
    first = tape.first_segments()
    reduce = {"serial": serial, "matmul": matmul, "associative_scan": associative}[how.reduction]
    caches = reduce(tape.cache, left, first)
    blocks = Block(
        tape.queries(),
        _overlapping(tape, tape.key, 2, 0),
        _overlapping(tape, tape.value, 2, 0),
        _overlapping(tape, tape.code, 2, tape.codes),
        None if tape.segment is None else _overlapping(tape, tape.segment, 1, 0),
        None if first is None else first[:-1],
    )
    if how.stop_gradient:
        blocks = blocks._replace(
            key=_own_only(blocks.key, how.window), value=_own_only(blocks.value, how.window)
        )
    before = jax.tree.map(lambda leaf: leaf[:-1], caches)
    out = jax.vmap(lambda block, cache: attend_block(block, cache, terms, how))(blocks, before)
    return tape.join(out), jax.tree.map(lambda leaf: leaf[-1], caches)


def _overlapping(tape: TokenBlocks, x: jax.Array, axis: int, fill: int) -> jax.Array:
    """Return for each block the M + L places that it sees, as the first axis and then ``axis``.

    Whole blocks are put side by side, and what is too many in front is cut off: slices have a
    cheap gradient, an index has not.
    """
    window, block, blocks = tape.how.window, tape.how.block, tape.blocks
    reach = math.ceil(window / block)
    sizes = [(0, 0)] * x.ndim
    sizes[axis] = (reach * block - window, 0)
    x = jnp.pad(x, sizes, constant_values=fill)
    shape = (*x.shape[:axis], reach + blocks, block, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x.reshape(shape), axis, 0)
    seen = jnp.concatenate([x[i : i + blocks] for i in range(reach + 1)], axis=axis + 1)
    return lax.slice_in_dim(seen, reach * block - window, None, axis=axis + 1)


def _own_only(x: jax.Array, window: int) -> jax.Array:
    """Stop the gradient into what comes from earlier blocks."""
    before, own = x[..., :window, :], x[..., window:, :]
    return jnp.concatenate([lax.stop_gradient(before), own], axis=-2)


# -- reductions: caches (R + 1, B, ...) before each block and after the last
# ---------------------------------------------------------------------------------------


def serial(start: Cache, left: Cache, first: jax.Array | None) -> Cache:
    """Merge block after block."""
    stays = None if first is None else first[1:] == first[:-1]

    def body(cache: Cache, x: tuple[Cache, jax.Array | None]) -> tuple[Cache, Cache]:
        new, rows = x
        return merge(mask_cache(cache, rows), new), cache

    last, caches = lax.scan(body, start, (left, stays))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), caches, last)


def associative(start: Cache, left: Cache, first: jax.Array | None) -> Cache:
    """Merge in a tree, in logarithmically many steps; a new document drops what came before."""
    caches = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, left)
    if first is None:
        return lax.associative_scan(lambda a, b: jax.vmap(merge)(a, b), caches)
    stays = jnp.concatenate([jnp.ones_like(first[:1], bool), first[1:] == first[:-1]])

    def join(a: tuple[Cache, jax.Array], b: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        return jax.vmap(lambda x, y, rows: merge(mask_cache(x, rows), y))(a[0], b[0], b[1]), a[
            1
        ] & b[1]

    return lax.associative_scan(join, (caches, stays))[0]


def matmul(start: Cache, left: Cache, first: jax.Array | None) -> Cache:
    """Weigh all blocks' means with a triangular matrix for each code; quadratic in the blocks."""
    caches = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, left)
    places = jnp.arange(len(caches.count))
    taken = (places[:, None] >= places)[:, :, None]
    if first is not None:
        # What left before block r belongs to the document that r begins with, or to none.
        taken = taken & (first[:, None] == first[None])
    counts = jnp.einsum("rqb,qbhs->rbhs", taken.astype(jnp.int32), caches.count)
    weights = taken[..., None, None] * caches.count[None] / jnp.maximum(counts, 1)[:, None]
    return Cache(jnp.einsum("rqbhs,qbhsv->rbhsv", weights, caches.mean), counts)
