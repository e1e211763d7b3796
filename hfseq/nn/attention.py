"""Attention for all models, computed by the fastest implementation that supports the inputs.

Model files call `attend` and describe the visible keys with `hfseq.nn.visible`. Users may request
an implementation (`attn_implementation`). Otherwise each platform has a list of candidates, and the
first one that supports the call is used (`hfseq.nn.dispatch.first_supported`). Implementations for
accelerators are in `hfseq.nn.kernels`, and implementations for CPUs are in `hfseq.nn.cpu`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfseq.nn import cpu
from hfseq.nn.context import capability, current_options, platform, target_device
from hfseq.nn.dispatch import (
    AttentionCall,
    AttentionSpec,
    BuiltInImplementation,
    Implementation,
    first_supported,
    log_selection,
)
from hfseq.nn.kernels import cudnn, flash, splash
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import Keys
from hfseq.nn.scores import attention_weights, mix_values, softmax_scale
from hfseq.nn.visible import Mask, Visibility, as_visibility


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask = None,
    bias: jax.Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    rngs: Keys | None = None,
    head_mask: jax.Array | None = None,
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes multi-head attention with the fastest available implementation.

    All implementations agree on three points:

    * In causal attention, queries and keys are aligned at their ends: the last query sees the last
      key, even if the numbers of queries and keys differ.
    * A fully masked query produces zeros and no gradient.
    * Dropout drops exactly the same weights as the explicit implementation.

    The batch size of `query` may be a multiple of the batch size of `key`, if several beams attend
    to the same source. The beams of a source must then be adjacent. Keys and values are read once
    for all of them. `mask` and `bias` have the batch size of `key`, and must be the same for all
    queries of a source.

    The arguments `softcap`, `sinks`, `head_mask` and `return_weights` always select the explicit
    implementation.

    Args:
        query: Queries, `(batch, queries, heads, head_dim)`.
        key: Keys, `(batch, keys, kv_heads, head_dim)`. `heads` must be a multiple of `kv_heads`
            (grouped-query attention).
        value: Values, same shape as `key`.
        mask: A description of the visible keys from `hfseq.nn.visible`, or a boolean array that
            broadcasts to `(batch, heads, queries, keys)`. An array of floats is added to the scores
            like `bias`, as in PyTorch.
        bias: Added to the scaled scores; broadcasts to `(batch, heads, queries, keys)`.
        causal: Whether a query may only attend to keys at or before its position.
        scale: Factor of the scores. Default: `head_dim ** -0.5`.
        softcap: Limits scaled scores to this absolute value (Gemma 2).
        sinks: One score per head, `(heads,)`, that takes part in the softmax and has no value
            (gpt-oss).
        dropout_rate: Dropout rate of the attention weights.
        rngs: PRNG keys for dropout. `None` disables dropout.
        head_mask: Factors of the attention weights. They broadcast to
            `(batch, heads, queries, keys)`.
        return_weights: Whether to return the attention weights.

    Returns:
        The attention output, `(batch, queries, heads, head_dim)`, and the weights,
        `(batch, heads, queries, keys)`, or `None`.

    Raises:
        UsageError: The requested implementation does not support these inputs.
    """
    if isinstance(mask, jax.Array) and jnp.issubdtype(mask.dtype, jnp.floating):
        bias, mask = mask if bias is None else bias + mask, None
    visible = as_visibility(mask, causal)
    if query.shape[0] != key.shape[0]:
        beams = query.shape[0] // key.shape[0]
        if visible.causal or visible.window:
            dense = visible.array(query.shape[1], key.shape[1])
            assert dense is not None
            visible = Visibility(dense=jnp.tile(dense, (1, 1, beams, 1)))
        folded, weights = attend(
            query.reshape(key.shape[0], beams * query.shape[1], *query.shape[2:]),
            key,
            value,
            mask=visible,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_rate=dropout_rate,
            rngs=rngs,
            head_mask=head_mask,
            return_weights=return_weights,
        )
        if weights is not None:  # separate the beams again
            rows, heads, _, keys = weights.shape
            weights = weights.reshape(rows, heads, beams, -1, keys).swapaxes(1, 2)
            weights = weights.reshape(rows * beams, heads, -1, keys)
        return folded.reshape(query.shape), weights
    rate = 0.0 if rngs is None else dropout_rate
    scale, requested = softmax_scale(scale, query), current_options().attention
    sees_any = visible.sees_any(query.shape[1], key.shape[1])
    special = head_mask is not None or softcap is not None or sinks is not None
    if return_weights or special or rate >= 1:
        weights = attention_weights(
            query, key, visible, bias=bias, scale=scale, softcap=softcap, sinks=sinks
        )
        if rate >= 1:
            weights = jnp.zeros_like(weights)
        elif rate > 0:
            assert rngs is not None
            weights = dropout_with_bits(weights, rate, rngs.bits(weights.shape))
        if head_mask is not None:
            weights = weights * head_mask.astype(weights.dtype)
        mixed = _zero_masked_queries(mix_values(weights, value), sees_any)
        if return_weights and sees_any is not None:
            weights = jnp.where(sees_any, weights, 0)
        return mixed, weights if return_weights else None
    spec = attention_spec(query, key, visible, bias, rate)
    implementation = select_implementation(spec, requested)
    if implementation.zeroes_masked_queries:
        sees_any = None
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    mesh = current_options().mesh
    call = AttentionCall(
        query,
        key,
        value,
        visible,
        scale,
        bias=bias,
        dropout_rate=rate,
        dropout_bits=rngs.draw(shape) if rngs is not None and rate > 0 else None,
        mesh=mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None,
    )
    return _zero_masked_queries(implementation.run(call), sees_any), None


def _zero_masked_queries(mixed: jax.Array, sees_any: jax.Array | None) -> jax.Array:
    """Sets the outputs of fully masked queries to zero, which also stops their gradients."""
    if sees_any is None:
        return mixed
    return jnp.where(sees_any.swapaxes(1, 2), mixed, 0).astype(mixed.dtype)


def dot_product(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> jax.Array:
    """Computes attention like `jax.nn.dot_product_attention`, but with `attend`.

    The arguments have the same meaning as in `jax.nn.dot_product_attention`. Inputs without a batch
    axis are accepted too.
    """
    window = local_window_size
    visible = Visibility(
        causal=is_causal,
        window=(window, window) if isinstance(window, int) else window,
        key_lengths=key_value_seq_lengths,
        dense=mask,
    )
    if query.ndim == 3:
        query, key, value = (x[None] for x in (query, key, value))
        return attend(query, key, value, mask=visible, bias=bias, scale=scale)[0][0]
    return attend(query, key, value, mask=visible, bias=bias, scale=scale)[0]


# -- the implementations
# ---------------------------------------------------------------------------------------


def explicit_attention(call: AttentionCall) -> jax.Array:
    """Computes scores, softmax and weighted values one after the other.

    This is the implementation that Transformers calls "eager".
    """
    weights = attention_weights(
        call.query, call.key, call.visible, bias=call.bias, scale=call.scale
    )
    if call.dropout_bits is not None:
        weights = dropout_with_bits(weights, call.dropout_rate, call.dropout_bits.all())
    return mix_values(weights, call.value)


def xla_attention(call: AttentionCall) -> jax.Array:
    """Computes attention without dropout, with `jax.nn.dot_product_attention`."""
    is_causal, mask = _causal_and_mask(call)
    return jax.nn.dot_product_attention(
        call.query,
        call.key,
        call.value,
        call.bias,
        mask,
        scale=call.scale,
        is_causal=is_causal,
        implementation="xla",
    )


def _causal_and_mask(call: AttentionCall) -> tuple[bool, jax.Array | None]:
    """Returns the arguments `is_causal` and `mask` of `jax.nn.dot_product_attention`.

    jax aligns queries and keys at their starts, and hfseq at their ends. So `is_causal` is used
    only if there are as many queries as keys.
    """
    visible = call.visible
    if visible.causal and visible.window is None and call.queries == call.keys:
        return True, visible.without_band(call.keys)
    return False, visible.array(call.queries, call.keys)


def _xla_unsupported_reason(spec: AttentionSpec) -> str | None:
    if spec.dropout:
        return "it does not support dropout"
    if spec.half and spec.platform == "cpu":
        # jax multiplies weights and values with a half precision result. XLA's CPU kernels compute
        # this in float32, after they copy the weights and values.
        return "it multiplies weights and values in half precision, which is slow on a CPU"
    return None


# Plugins register these constants as values of `attn_implementation`. A tuple contains candidates
# in order of preference. The empty tuple stands for the candidates of the platform.
AUTO = ()
EXPLICIT = EAGER = BuiltInImplementation("explicit", explicit_attention)
XLA = (BuiltInImplementation("xla", xla_attention, _xla_unsupported_reason), EXPLICIT)
FLASH = BuiltInImplementation(
    "flash", flash.flash_attention, flash.unsupported_reason, zeroes_masked_queries=True
)
SPLASH = BuiltInImplementation("splash", splash.splash_attention, splash.unsupported_reason)
CUDNN = (
    BuiltInImplementation("cudnn", cudnn.cudnn_attention, cudnn.unsupported_reason),
    BuiltInImplementation("cudnn_packed", cudnn.packed_attention, cudnn.packed_unsupported_reason),
    BuiltInImplementation("cudnn_bias", cudnn.bias_attention, cudnn.bias_unsupported_reason),
    BuiltInImplementation("cudnn_mask", cudnn.bias_attention, cudnn.mask_unsupported_reason),
)
CPU = (
    BuiltInImplementation(
        "few_queries", cpu.few_queries_attention, cpu.few_queries_unsupported_reason
    ),
    BuiltInImplementation("blocked", cpu.blocked_attention, cpu.blocked_unsupported_reason),
    BuiltInImplementation("direct", cpu.direct_attention, cpu.direct_unsupported_reason),
)

#: The candidates of each platform in order of preference. The last one supports every call.
IMPLEMENTATIONS_BY_PLATFORM: Mapping[str, tuple[Implementation, ...]] = {
    "cpu": (*CPU, *XLA),
    "cuda": (CUDNN[0], CUDNN[2], FLASH, CUDNN[1], CUDNN[3], EXPLICIT),
    "tpu": (SPLASH, EXPLICIT),
}
_DETERMINISTIC_FLAG = re.compile(
    r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=(true|1))?(\s|$)", re.IGNORECASE
)
# Up to this number of queries, as in a decoding step, fused attention kernels of accelerators are
# not faster than explicit attention.
FEW_QUERIES = 4


def attention_spec(
    query: jax.Array, key: jax.Array, visible: Visibility, bias: jax.Array | None, rate: float
) -> AttentionSpec:
    """Returns the static properties of an attention call on the target platform."""
    mesh, device = current_options().mesh, target_device()
    # Devices of other processes do not report their memory, so ask a local device. All devices of a
    # run are of the same kind.
    stats = jax.local_devices()[0].memory_stats() if device in jax.devices() else None

    def four_axes(x: jax.Array | None) -> tuple[int, ...] | None:
        return None if x is None else (1,) * (4 - x.ndim) + x.shape

    return AttentionSpec(
        platform=platform(),
        capability=capability(),
        memory=(stats or {}).get("bytes_limit"),
        batch=query.shape[0],
        queries=query.shape[1],
        keys=key.shape[1],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        dtype=str(query.dtype),
        causal=visible.causal,
        window=visible.window,
        segments=visible.segments,
        lengths=visible.key_lengths is not None,
        max_runs=visible.max_runs,
        mask=four_axes(visible.dense),
        bias=four_axes(bias),
        dropout=rate,
        mesh=() if mesh is None else tuple((k, n) for k, n in mesh.shape.items() if n > 1),
        devices=1 if cpu.is_single_cpu() else max(2, jax.device_count()),
        deterministic=bool(_DETERMINISTIC_FLAG.search(os.environ.get("XLA_FLAGS", ""))),
    )


def select_implementation(spec: AttentionSpec, requested: Any) -> Implementation:
    """Returns the implementation for a call.

    Args:
        spec: The properties of the call.
        requested: The value of `Options.attention`: a function, an implementation, several
            implementations, or `None` for the candidates of the platform.

    Raises:
        UsageError: No requested implementation supports the call.
    """
    if callable(requested):
        return wrap_dot_product(requested)
    candidates = (requested,) if isinstance(requested, Implementation) else requested
    few_queries = spec.queries <= FEW_QUERIES < spec.keys
    if not candidates or few_queries:
        name, candidates = "auto", IMPLEMENTATIONS_BY_PLATFORM.get(spec.platform, XLA)
        if few_queries and spec.platform != "cpu":
            candidates = (EXPLICIT,)
    else:
        name = candidates[0].name
    selection = first_supported(spec, candidates, name)
    if spec.platform != "cpu":
        log_selection(spec, selection)
    return next(candidate for candidate in candidates if candidate.name == selection.name)


def wrap_dot_product(product: Callable[..., jax.Array]) -> Implementation:
    """Wraps a function with the signature of `jax.nn.dot_product_attention`.

    The function gets one mask array that combines padding, segments and windows. Calls with dropout
    use the explicit implementation instead.
    """

    def attend_with_product(call: AttentionCall) -> jax.Array:
        if call.dropout_bits is not None:
            return explicit_attention(call)
        is_causal, mask = _causal_and_mask(call)
        sees_any = call.visible.sees_any(call.queries, call.keys)
        if sees_any is not None and mask is not None:
            # The function would return NaN for a fully masked query, and NaN times a zero gradient
            # is NaN. So the query sees all keys here. `attend` replaces its output by zeros.
            mask = mask | ~sees_any
        return product(
            call.query,
            call.key,
            call.value,
            bias=call.bias,
            mask=mask,
            is_causal=is_causal,
            scale=call.scale,
        )

    return BuiltInImplementation(getattr(product, "__name__", "registered"), attend_with_product)


def resolve_attention(name: str | None) -> Any:
    """Returns the value of `Options.attention` for an implementation that is registered as `name`.

    Returns:
        The implementation or implementations, or `None` for the candidates of the platform.
    """
    if name is None:
        return None
    from hfseq import plugins

    return plugins.load().attention.get(name) or None
