"""Attention on a mesh, above all of rows that are cut over its ``sequence`` axis.

Every device of that axis has a piece of the text. What leaves its window is summed up by code
there, and the sums of all pieces before one are its cache when it begins: the cache is a monoid.
The window before a piece comes from its left neighbours. Keys and values never come together on one
device.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hfseq import nn
from hfseq_plugins.vq_transformer.blocks import (
    AttentionInputs,
    AttentionOptions,
    PastTokens,
    ScoreTerms,
    TokenBlocks,
)
from hfseq_plugins.vq_transformer.parallel import attend_on_device, run_blocks
from hfseq_plugins.vq_transformer.state import (
    Cache,
    State,
    merge,
    summarize_by_code,
    window_in_order,
)

logger = logging.getLogger(__name__)

AXIS = "sequence"
# The axes of all that goes in and out: batch, heads, groups of queries, tokens, widths of values.
_INPUTS = {"query": "bhgt.", "key": "bht.", "value": "bhtv", "code": "bht", "segment": "bt"}
_TERMS = {"codebook": "h..", "relative": ".h.", "content": "hg..", "position": "hg.."}
_STATE = {
    "window_key": "bh..",
    "window_value": "bh.v",
    "window_code": "bh.",
    "cache_mean": "bh.v",
    "cache_count": "bh.",
    "position": "b",
}


def mesh_for(tokens: int, block: int) -> Mesh | None:
    """Return the mesh, if any, if its ``sequence`` axis cuts rows of ``tokens`` into whole blocks.

    Pieces of other lengths would have other blocks than one device has, and so other gradients.
    """
    mesh = nn.current_options().mesh
    if mesh is None or mesh.size == 1:
        return None
    ways = _pieces(mesh)
    if ways > 1 and tokens % (ways * block):
        _say_whole(tokens, ways, block)
        return None
    return mesh


def _pieces(mesh: Mesh) -> int:
    return dict(mesh.shape).get(AXIS, 1)


@functools.cache
def _say_whole(tokens: int, ways: int, block: int) -> None:
    """Warn, once and not for every layer."""
    logger.warning(
        "rows of %d tokens are not cut over --mesh sequence=%d: their length has to be a multiple "
        "of %d (sequence=%d times block_size=%d)",
        tokens,
        ways,
        ways * block,
        ways,
        block,
    )


def attend(
    mesh: Mesh,
    inputs: AttentionInputs,
    terms: ScoreTerms,
    how: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Do what ``attention.attend`` does, each device on its piece of the rows.

    All axes of the mesh are divided here: XLA cannot divide scatters over the others by itself.
    """
    split, ways = _split(mesh, inputs), _pieces(mesh)

    def local(
        inputs: AttentionInputs, terms: ScoreTerms, state: State | None, lengths: jax.Array | None
    ) -> tuple[jax.Array, State | None]:
        """Attend with this device's piece; the state after the whole row comes out everywhere."""
        if ways == 1:
            return attend_on_device(inputs, terms, how, state, lengths)
        here, tokens, codes = lax.axis_index(AXIS), inputs.code.shape[-1], terms.codebook.shape[1]
        mine = None if lengths is None else jnp.clip(lengths - here * tokens, 0, tokens)
        tape = TokenBlocks(inputs, codes, how, _window(inputs, how, codes, state, here, ways), mine)
        tape.cache = _prefix(tape, None if state is None else state.cache, here)
        out, cache = run_blocks(tape, terms, how)
        if state is None:
            return out, None
        begun = state._replace(position=state.position + here * tokens)
        last: Any = ways - 1 if lengths is None else jnp.maximum(lengths - 1, 0) // tokens

        def of_last(leaf: jax.Array) -> jax.Array:
            chosen = jnp.reshape(last == here, (-1, *(1,) * (leaf.ndim - 1)))
            return lax.psum(jnp.where(chosen, leaf, jnp.zeros_like(leaf)), AXIS)

        return out, State(*map(of_last, tape.end(begun, cache)))

    states = _specs(state, _STATE, split)
    call = jax.shard_map(
        local,
        mesh=mesh,
        check_vma=False,
        in_specs=(
            _specs(inputs, _INPUTS, split),
            _specs(terms, _TERMS, split),
            states,
            _spec("b", split),
        ),
        out_specs=(_spec("bhgtv", split), states),
    )
    return jax.jit(call)(inputs, terms, state, lengths)


def _split(mesh: Mesh, inputs: AttentionInputs) -> dict[str, Any]:
    """Return the axes of the mesh that cut each kind of axis, where their size divides it."""
    batch, heads, groups = inputs.query.shape[:3]
    rows = tuple(name for name in ("data", "fsdp") if name in mesh.shape)
    split: dict[str, Any] = {"t": AXIS} if AXIS in mesh.shape else {}
    if batch % math.prod(mesh.shape[name] for name in rows) == 0:
        split["b"] = rows
    ways = dict(mesh.shape).get("tensor", 1)
    sizes = {"h": heads, "g": groups, "v": inputs.value.shape[-1]}
    chosen = next((kind for kind, size in sizes.items() if size % ways == 0), None)
    return split if ways == 1 or chosen is None else {**split, chosen: "tensor"}


def _spec(kinds: str, split: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(split.get(kind) for kind in kinds))


def _specs(
    leaves: AttentionInputs | ScoreTerms | State | None,
    kinds: dict[str, str],
    split: dict[str, Any],
) -> Any:
    """Return where each of the named ``leaves`` lies; None where there is none."""
    if leaves is None:
        return None
    present = {name for name, leaf in leaves._asdict().items() if leaf is not None}
    return leaves._replace(**{name: _spec(kinds[name], split) for name in present})


# -- what comes from the left
# ---------------------------------------------------------------------------------------


def _window(
    inputs: AttentionInputs,
    how: AttentionOptions,
    codes: int,
    state: State | None,
    here: jax.Array,
    ways: int,
) -> PastTokens:
    """Return the M tokens before this piece; the cache is still to be found."""
    batch, heads, _ = inputs.code.shape
    before: tuple[Any, ...] = (None, None, None) if state is None else window_in_order(state)

    def of(x: jax.Array, earlier: jax.Array | None, fill: int, axis: int) -> jax.Array:
        if earlier is None:
            shape = (*x.shape[:axis], how.window, *x.shape[axis + 1 :])
            earlier = jnp.full(shape, fill, x.dtype)
        if not how.window:
            return earlier.astype(x.dtype)
        # The pieces to the left, as many as the window reaches; before them the row's beginning.
        tokens = x.shape[axis]
        hops = math.ceil(how.window / tokens)
        unit = how.window if hops == 1 else tokens
        sizes = [(0, 0)] * x.ndim
        sizes[axis] = (hops * unit - how.window, 0)
        padded = jnp.pad(earlier.astype(x.dtype), sizes, constant_values=fill)
        tail = lax.slice_in_dim(x, tokens - unit, None, axis=axis)
        parts = []
        for hop in range(hops, 0, -1):
            start = jnp.clip(hops - hop + here, 0, hops - 1) * unit
            known = lax.dynamic_slice_in_dim(padded, start, unit, axis=axis)
            parts.append(jnp.where(here < hop, known, _shift(tail, hop, ways)))
        joined = jnp.concatenate(parts, axis)
        return lax.slice_in_dim(joined, hops * unit - how.window, None, axis=axis)

    segment, following = inputs.segment, None
    if segment is not None:
        following = _shift(segment[:, 0], -1, ways)
        segment = of(segment, None, 0, 1)
    empty = Cache(
        jnp.zeros((batch, heads, codes, inputs.value.shape[-1])),
        jnp.zeros((batch, heads, codes), jnp.int32),
    )
    return PastTokens(
        of(inputs.key, before[0], 0, 2),
        of(inputs.value, before[1], 0, 2),
        of(inputs.code, before[2], codes, 2),
        empty,
        segment,
        following,
    )


def _shift(x: jax.Array, places: int, ways: int) -> jax.Array:
    """Send ``x`` so many devices to the right; 0 comes where nothing does."""
    pairs = [(i, i + places) for i in range(ways) if 0 <= i + places < ways]
    return lax.ppermute(x, AXIS, pairs) if pairs else jnp.zeros_like(x)


def _prefix(tape: TokenBlocks, start: Cache | None, here: jax.Array) -> Cache:
    """Return the cache before this piece: what has left the window in all pieces before it.

    Of packed rows only what belongs to the document that the piece begins with.
    """
    # Blocks (R, B, H, L, ...) side by side: (B, H, R * L, ...).
    leaving = (jnp.moveaxis(leaf, 0, 2) for leaf in tape.leaving())
    value, code = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in leaving)
    first = tape.first_segments()
    if first is not None and tape.segment is not None:
        own = tape.segment[:, : code.shape[-1]] == first[-1][:, None]
        code = jnp.where(own[:, None], code, tape.codes)
    totals = lax.all_gather(summarize_by_code(value, code, tape.codes), AXIS)
    places = jnp.arange(len(totals.count))
    taken = jnp.broadcast_to((places < here)[:, None], totals.count.shape[:2])
    if first is not None:
        taken &= lax.all_gather(first[-1], AXIS) == first[0]
    counts = jnp.where(taken[..., None, None], totals.count, 0)
    count = counts.sum(0)
    shares = counts / jnp.maximum(count, 1)
    before = Cache((shares[..., None] * totals.mean).sum(0), count)
    return before if start is None else merge(start, before)
