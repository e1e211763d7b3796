"""cuDNN's fused attention on NVIDIA GPUs: lengths, packed rows, left windows, biases.

Its own dropout is never taken: the masks depend on how often a process ran a program, not on seed,
step and row. What jax's public function does not offer comes through the one that is behind it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.random import LazyBits
from hfseq.nn.sharding import BATCH_AXES, SEQUENCE, TENSOR
from hfseq.nn.visible import Visibility

#: Part of a device's memory that the statistics of packed rows may take, and what is taken for a
#: device that does not tell how much it has.
MAX_STATISTICS_SHARE, DEFAULT_MEMORY = 0.1, 64e9


def unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why cuDNN does not serve without a bias and without documents, or None."""
    if facts.segments:
        return "it knows padding by lengths only, not where any key may be hidden"
    if facts.mask is not None or facts.bias is not None:
        return "a mask or a bias is written down for all queries and keys (cudnn_bias)"
    return _common_unsupported_reason(facts)


def packed_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why cuDNN does not serve for documents packed into rows, or None."""
    if facts.segments != "same" or facts.lengths:
        return "it is for rows that are packed with documents, attending to themselves"
    if facts.mask is not None or facts.bias is not None:
        return "it takes no mask and no bias"
    if facts.capability is not None and facts.capability < (9, 0):
        return "packed rows need compute capability 9.0 or more"
    if facts.max_runs is None:
        return "nobody counted how many documents a row has at most"
    rows, heads = (
        facts.batch / facts.num_shards(*BATCH_AXES),
        facts.heads / facts.num_shards(TENSOR),
    )
    needed, usable = (
        rows * facts.max_runs * heads * facts.queries * 4,
        facts.memory or DEFAULT_MEMORY,
    )
    if needed > MAX_STATISTICS_SHARE * usable:
        return (
            f"statistics for {facts.max_runs} documents a row would take {needed / 1e9:.1f} GB a "
            f"layer, more than {MAX_STATISTICS_SHARE:.0%} of the memory"
        )
    return _common_unsupported_reason(facts)


def bias_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why cuDNN does not serve with the bias or the dense mask that was asked for, or None.

    What else is hidden comes as a mask of all rows, queries and keys: :func:`refuses_mask`.
    """
    if facts.mask is None and facts.bias is None:
        return "neither a bias nor a dense mask is there"
    if facts.segments or facts.lengths:
        return "padding and documents would be written down as a mask of all queries and keys"
    return mask_unsupported_reason(facts)


def mask_unsupported_reason(facts: AttentionSpec) -> str | None:
    """Return why cuDNN does not serve with all that is hidden as a mask, or None."""
    if facts.queries % 2 or facts.keys % 2:
        return f"{facts.queries} queries and {facts.keys} keys must both be even"
    if facts.window is not None:
        return "it takes no window beside a mask"
    return _common_unsupported_reason(facts)


def _common_unsupported_reason(facts: AttentionSpec) -> str | None:
    widest = 256 if facts.capability is None or facts.capability >= (9, 0) else 128
    if facts.platform != "cuda":
        return "cuDNN runs on NVIDIA GPUs only"
    if facts.capability is not None and facts.capability < (8, 0):
        return "it needs compute capability 8.0 or more"
    if facts.dropout:
        return "its dropout is no function of seed, step and row"
    if facts.dtype not in ("bfloat16", "float16"):
        return f"it computes in half types, not in {facts.dtype}"
    if facts.head_dim > widest or facts.head_dim % 8:
        return f"a head of {facts.head_dim} is no multiple of 8 up to {widest}"
    if facts.causal and facts.queries != facts.keys:
        return "causal attention needs as many queries as keys"
    if facts.window is not None and (not facts.causal or facts.window[0] < 1):
        return "a window needs causal attention"
    if facts.window is not None and facts.lengths:
        return "it takes no window beside lengths"
    if facts.num_shards(SEQUENCE) > 1:
        return "the mesh cuts sequences"
    if facts.batch % facts.num_shards(*BATCH_AXES) or facts.heads % facts.num_shards(TENSOR):
        return "the mesh does not divide the rows or the heads"
    return None


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend without a mask in memory: causal, left windows, padding at the end by lengths.

    A query of a row without keys comes out as something; :func:`hfseq.nn.attend` makes it zero.
    """
    lengths = visible.key_lengths
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
        # Padding queries see what their row has, like those of the other forms.
        queries = jnp.full_like(lengths, query.shape[1])
        lengths = jnp.maximum(lengths, 1)
        return _attend(
            query,
            key,
            value,
            causal=visible.causal,
            scale=scale,
            mesh=mesh,
            q_seqlen=queries,
            kv_seqlen=lengths,
        )
    # cuDNN counts the query's own key among those of its window.
    window = None if visible.window is None else visible.window[0] + 1
    return _attend(
        query,
        key,
        value,
        causal=visible.causal,
        scale=scale,
        mesh=mesh,
        sliding_window_length=window,
    )


def packed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend within the runs of equal segments, of which ``visible.max_runs`` are looked at.

    Whoever packed the rows answers for the bound: keys of runs beyond it would be lost.
    """
    assert visible.query_segments is not None and visible.max_runs is not None
    lengths, offsets = run_offsets(visible.query_segments, visible.max_runs)
    return _attend(
        query,
        key,
        value,
        causal=visible.causal,
        scale=scale,
        mesh=mesh,
        equal_heads=True,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        sliding_window_length=None if visible.window is None else visible.window[0] + 1,
    )


def bias_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None = None,
    scale: float,
    rate: float = 0.0,
    drawn: LazyBits | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend with a bias, or a mask that is added as one, of all queries and keys."""
    queries, keys = query.shape[1], key.shape[1]
    mask = visible.without_band(keys)

    def whole(x: jax.Array) -> jax.Array:
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        return jnp.broadcast_to(x, (*x.shape[:2], queries, keys))

    if bias is not None:
        bias = whole(bias).astype(query.dtype)
        bias = jnp.broadcast_to(bias, (bias.shape[0], query.shape[2], queries, keys))
    return _attend(
        query,
        key,
        value,
        causal=visible.causal,
        scale=scale,
        mesh=mesh,
        bias=bias,
        mask=None if mask is None else whole(mask),
    )


def run_offsets(segments: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return lengths (batch, most) and offsets (batch, most + 1) of the runs of equal segments.

    Unused entries are -1. A run of padding is one of them, so every query sees a key.
    """
    length = segments.shape[1]
    first = jnp.ones_like(segments[:, :1], bool)
    starts = jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)
    count = starts.sum(1)[:, None]
    begin = jax.vmap(lambda row: jnp.nonzero(row, size=most, fill_value=length)[0])(starts)
    edges = jnp.concatenate([begin, jnp.full_like(begin[:, :1], length)], 1)
    number = jnp.arange(most + 1)[None]
    lengths = jnp.where(number[:, :-1] < count, edges[:, 1:] - edges[:, :-1], -1)
    return lengths.astype(jnp.int32), jnp.where(number <= count, edges, -1).astype(jnp.int32)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    scale: float,
    mesh: Mesh | None,
    equal_heads: bool = False,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    sliding_window_length: int | None = None,
    **runs: Any,
) -> jax.Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    heads, kv_heads = query.shape[2], key.shape[2]
    cut = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    # jax 0.10 counts the offsets of packed keys in heads of queries (mended in 0.11): silently
    # wrong with fewer heads of keys. Over a mesh queries and keys must be laid out alike.
    old = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
    if heads != kv_heads and ((equal_heads and old) or kv_heads % cut):
        key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    kinds = cudnn.MaskType
    if "q_seqlen" in runs:
        kind = kinds.PADDING_CAUSAL if causal else kinds.PADDING
    else:
        kind = kinds.CAUSAL if causal else kinds.NO_MASK
    mixed: jax.Array = cudnn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        mask_type=kind,
        sliding_window_length=sliding_window_length,
        **runs,
    )
    return mixed.astype(value.dtype)
