"""Attention on a mesh, including rows that are sharded over the mesh axis `sequence`.

Each device of that axis has a contiguous piece of each row. The device groups the tokens of its
piece that leave the window by code, which gives a cache for the piece. The cache at the start of a
piece is obtained by merging the caches of all pieces before it. This is exact because merging
caches is associative. The devices with the preceding pieces send the window before a piece. No
device gathers all keys and values.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
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
from hfseq.nn.sharding import batch_axes
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
# The axes of inputs and outputs that may be sharded: b batch, h key heads, g query heads per key
# head, t tokens, v width of values. A dot is an axis that is never sharded.
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
    """Returns the mesh on which attention is computed, or `None` for a single device.

    If the mesh axis `sequence` does not split rows of `tokens` tokens into whole blocks, the result
    is `None` and a warning is logged. If such rows were split, the blocks, and therefore the
    gradients, would differ from those on one device.
    """
    mesh = nn.current_options().mesh
    if mesh is None or mesh.size == 1:
        return None
    axis_size = _pieces(mesh)
    if axis_size > 1 and tokens % (axis_size * block):
        _warn_not_split(tokens, axis_size, block)
        return None
    return mesh


def _pieces(mesh: Mesh) -> int:
    return dict(mesh.shape).get(AXIS, 1)


@functools.cache
def _warn_not_split(tokens: int, axis_size: int, block: int) -> None:
    """Logs a warning. It is cached, so that the warning appears once and not for every layer."""
    logger.warning(
        "rows of %d tokens are not split over --mesh sequence=%d: their length has to be a "
        "multiple of %d (sequence=%d times block_size=%d)",
        tokens,
        axis_size,
        axis_size * block,
        axis_size,
        block,
    )


def attend(
    mesh: Mesh,
    inputs: AttentionInputs,
    terms: ScoreTerms,
    options: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Computes attention on a mesh, see `layers.attend`. Each device computes a piece of the rows.

    The computation uses `shard_map` over all mesh axes, because XLA does not shard the scatters
    over the axes other than `sequence` automatically.
    """
    split, axis_size = _split(mesh, inputs), _pieces(mesh)

    def local(
        inputs: AttentionInputs, terms: ScoreTerms, state: State | None, lengths: jax.Array | None
    ) -> tuple[jax.Array, State | None]:
        """Computes attention for this device's piece. All devices return the same final state."""
        if axis_size == 1:
            return attend_on_device(inputs, terms, options, state, lengths)
        index, tokens, codes = lax.axis_index(AXIS), inputs.code.shape[-1], terms.codebook.shape[1]
        local_lengths = None if lengths is None else jnp.clip(lengths - index * tokens, 0, tokens)
        piece = TokenBlocks(
            inputs,
            codes,
            options,
            _window(inputs, options, codes, state, index, axis_size),
            local_lengths,
        )
        piece.cache = _prefix(piece, None if state is None else state.cache, index)
        out, cache = run_blocks(piece, terms, options)
        if state is None:
            return out, None
        start_state = state._replace(position=state.position + index * tokens)
        last: Any = axis_size - 1 if lengths is None else jnp.maximum(lengths - 1, 0) // tokens

        def broadcast_last(leaf: jax.Array) -> jax.Array:
            is_last = jnp.reshape(last == index, (-1, *(1,) * (leaf.ndim - 1)))
            return lax.psum(jnp.where(is_last, leaf, jnp.zeros_like(leaf)), AXIS)

        return out, State(*map(broadcast_last, piece.end(start_state, cache)))

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
    """Returns the mesh axes that shard each array axis. They must divide its size evenly."""
    batch, heads, groups = inputs.query.shape[:3]
    rows = batch_axes(mesh)
    split: dict[str, Any] = {"t": AXIS} if AXIS in mesh.shape else {}
    if batch % math.prod(mesh.shape[name] for name in rows) == 0:
        split["b"] = rows
    axis_size = dict(mesh.shape).get("tensor", 1)
    sizes = {"h": heads, "g": groups, "v": inputs.value.shape[-1]}
    tensor_dim = next((dim for dim, size in sizes.items() if size % axis_size == 0), None)
    return split if axis_size == 1 or tensor_dim is None else {**split, tensor_dim: "tensor"}


def _spec(dims: str, split: dict[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(split.get(dim) for dim in dims))


def _specs(
    leaves: AttentionInputs | ScoreTerms | State | None,
    dims: dict[str, str],
    split: dict[str, Any],
) -> Any:
    """Returns a named tuple of partition specs, with `None` for missing leaves."""
    if leaves is None:
        return None
    present = {name for name, leaf in leaves._asdict().items() if leaf is not None}
    specs: dict[str, Any] = {name: _spec(dims[name], split) for name in present}
    return leaves._replace(**specs)


# -- window and cache from the preceding pieces
# ---------------------------------------------------------------------------------------


def _window(
    inputs: AttentionInputs,
    options: AttentionOptions,
    codes: int,
    state: State | None,
    index: jax.Array,
    axis_size: int,
) -> PastTokens:
    """Returns the M tokens before this piece, with an empty cache."""
    batch, heads, _ = inputs.code.shape
    window: tuple[Any, ...] = (None, None, None) if state is None else window_in_order(state)

    def past_tokens(x: jax.Array, earlier: jax.Array | None, fill: int, axis: int) -> jax.Array:
        if earlier is None:
            shape = (*x.shape[:axis], options.window, *x.shape[axis + 1 :])
            earlier = jnp.full(shape, fill, x.dtype)
        if not options.window:
            return earlier.astype(x.dtype)
        # The window can cover tokens of several preceding pieces, and tokens of the state before
        # the row.
        tokens = x.shape[axis]
        hops = math.ceil(options.window / tokens)
        unit = options.window if hops == 1 else tokens
        sizes = [(0, 0)] * x.ndim
        sizes[axis] = (hops * unit - options.window, 0)
        padded = jnp.pad(earlier.astype(x.dtype), sizes, constant_values=fill)
        tail = lax.slice_in_dim(x, tokens - unit, None, axis=axis)
        parts = []
        for hop in range(hops, 0, -1):
            start = jnp.clip(hops - hop + index, 0, hops - 1) * unit
            from_state = lax.dynamic_slice_in_dim(padded, start, unit, axis=axis)
            parts.append(jnp.where(index < hop, from_state, _shift(tail, hop, axis_size)))
        tokens_before = jnp.concatenate(parts, axis)
        return lax.slice_in_dim(tokens_before, hops * unit - options.window, None, axis=axis)

    segment, following = inputs.segment, None
    if segment is not None:
        following = _shift(segment[:, 0], -1, axis_size)
        segment = past_tokens(segment, None, 0, 1)
    empty = Cache(
        jnp.zeros((batch, heads, codes, inputs.value.shape[-1])),
        jnp.zeros((batch, heads, codes), jnp.int32),
    )
    return PastTokens(
        past_tokens(inputs.key, window[0], 0, 2),
        past_tokens(inputs.value, window[1], 0, 2),
        past_tokens(inputs.code, window[2], codes, 2),
        empty,
        segment,
        following,
    )


def _shift(x: jax.Array, hops: int, axis_size: int) -> jax.Array:
    """Sends `x` to the device with the piece `hops` pieces later.

    Devices that receive nothing get 0.
    """
    pairs = [(i, i + hops) for i in range(axis_size) if 0 <= i + hops < axis_size]
    return lax.ppermute(x, AXIS, pairs) if pairs else jnp.zeros_like(x)


def _prefix(piece: TokenBlocks, start: Cache | None, index: jax.Array) -> Cache:
    """Returns the cache at the start of this piece, with all tokens before its window.

    For packed rows, it contains only tokens of the document at the start of the piece.

    Args:
        piece: The tokens of this device.
        start: The cache at the start of the row, or `None`.
        index: Index of the piece.
    """
    # Concatenate the blocks: (R, B, H, L, ...) to (B, H, R * L, ...).
    leaving = (jnp.moveaxis(leaf, 0, 2) for leaf in piece.leaving())
    value, code = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in leaving)
    first = piece.first_segments()
    if first is not None and piece.segment is not None:
        same_document = piece.segment[:, : code.shape[-1]] == first[-1][:, None]
        code = jnp.where(same_document[:, None], code, piece.codes)
    totals = lax.all_gather(summarize_by_code(value, code, piece.codes), AXIS)
    numbers = jnp.arange(len(totals.count))
    included = jnp.broadcast_to((numbers < index)[:, None], totals.count.shape[:2])
    if first is not None:
        included &= lax.all_gather(first[-1], AXIS) == first[0]
    counts = jnp.where(included[..., None, None], totals.count, 0)
    count = counts.sum(0)
    shares = counts / jnp.maximum(count, 1)
    evicted = Cache((shares[..., None] * totals.mean).sum(0), count)
    return evicted if start is None else merge(start, evicted)
