"""One attention for every model: the fastest implementation that serves, explicit where it must be.

:func:`attend` is what model files call; they say what a query sees (:mod:`hfseq.nn.visible`).
:func:`hfseq.nn.dispatch.first_supported` takes the first candidate of the platform that serves, or the one
that was named (``attn_implementation``). Those of accelerators are in :mod:`hfseq.nn.kernels`,
those of CPUs in :mod:`hfseq.nn.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfseq.nn import cpu
from hfseq.nn.context import capability, current_options, platform, target_device
from hfseq.nn.dispatch import AttentionSpec, Implementation, first_supported, log_selection
from hfseq.nn.kernels import cudnn, flash, splash
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import Keys, LazyBits
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
    dropout_rate: float = 0.0,
    rngs: Keys | None = None,
    head_mask: jax.Array | None = None,
    return_weights: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Multi-head attention; returns (batch, queries, heads, head_dim) and the weights if asked for.

    **Arguments:** ``query`` (batch, queries, heads, head_dim); ``key`` and ``value`` (batch, keys,
    kv_heads, head_dim), where ``heads`` is a multiple of ``kv_heads`` (grouped queries); ``mask``
    is what :func:`hfseq.nn.visible` describes, or boolean, and ``bias`` additive, both of which
    broadcast to (batch, heads, queries, keys); ``scale`` defaults to head_dim ** -0.5, and
    ``softcap`` keeps scaled scores within that distance of zero (Gemma 2). Weights, a head mask and
    a soft cap take the explicit form, whatever was named.

    Whatever runs, ``causal`` attention is aligned at the end (the last query sees the last key,
    also where there are more or fewer queries than keys), a query that sees no key gives zero
    and passes no gradient on, and dropout is that of the explicit form, bit for bit.

    The batch of ``query`` may be a multiple of that of ``key``: several beams that look at one
    source, whose keys are then read once. ``mask`` and ``bias`` must then be the same for all
    queries of a row.

    Raises:
        UsageError: the implementation that was named cannot serve.
    """
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
            dropout_rate=dropout_rate,
            rngs=rngs,
            head_mask=head_mask,
            return_weights=return_weights,
        )
        if weights is not None:  # every beam gets its own rows of weights again
            rows, heads, _, keys = weights.shape
            weights = weights.reshape(rows, heads, beams, -1, keys).swapaxes(1, 2)
            weights = weights.reshape(rows * beams, heads, -1, keys)
        return folded.reshape(query.shape), weights
    rate = 0.0 if rngs is None else dropout_rate
    scale, named = softmax_scale(scale, query), current_options().attention
    seeing = visible.sees_any(query.shape[1], key.shape[1])
    if return_weights or head_mask is not None or softcap is not None or rate >= 1:
        weights = attention_weights(query, key, visible, bias=bias, scale=scale, softcap=softcap)
        if rate >= 1:
            weights = jnp.zeros_like(weights)
        elif rate > 0:
            assert rngs is not None
            weights = dropout_with_bits(weights, rate, rngs.bits(weights.shape))
        if head_mask is not None:
            weights = weights * head_mask.astype(weights.dtype)
        mixed = _zero_where_blind(mix_values(weights, value), seeing)
        if return_weights and seeing is not None:
            weights = jnp.where(seeing, weights, 0)
        return mixed, weights if return_weights else None
    facts = attention_spec(query, key, visible, bias, rate)
    implementation = select_implementation(facts, named)
    if implementation.zeroes_masked_queries:
        seeing = None
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    mesh = current_options().mesh
    mixed = implementation.attend(
        query,
        key,
        value,
        visible,
        bias=bias,
        scale=scale,
        rate=rate,
        drawn=rngs.draw(shape) if rngs is not None and rate > 0 else None,
        mesh=mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None,
    )
    return _zero_where_blind(mixed, seeing), None


def _zero_where_blind(mixed: jax.Array, seeing: jax.Array | None) -> jax.Array:
    """Zero what queries returned that see nothing, and so stop its gradient."""
    if seeing is None:
        return mixed
    return jnp.where(seeing.swapaxes(1, 2), mixed, 0).astype(mixed.dtype)


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
    """Attend with arguments as those of ``jax.nn.dot_product_attention``, by :func:`attend`."""
    window = local_window_size
    visible = Visibility(
        causal=is_causal,
        window=(window, window) if isinstance(window, int) else window,
        key_lengths=key_value_seq_lengths,
        dense=mask,
    )
    if query.ndim == 3:
        one, two, three = (x[None] for x in (query, key, value))
        return attend(one, two, three, mask=visible, bias=bias, scale=scale)[0][0]
    return attend(query, key, value, mask=visible, bias=bias, scale=scale)[0]


# -- the implementations
# ---------------------------------------------------------------------------------------


def explicit_attention(
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
    """Attend with all weights at once: scores, softmax, mix; what PyTorch calls eager."""
    weights = attention_weights(query, key, visible, bias=bias, scale=scale)
    if drawn is not None:
        weights = dropout_with_bits(weights, rate, drawn.all())
    return mix_values(weights, value)


def xla_attention(
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
    """``jax.nn.dot_product_attention`` as XLA compiles it, which knows no dropout."""
    queries, keys = query.shape[1], key.shape[1]
    # jax aligns causal attention at the start.
    causal = visible.causal and visible.window is None and queries == keys
    mask = visible.without_band(keys) if causal else visible.array(queries, keys)
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=causal, implementation="xla"
    )


def _xla_refuses(facts: AttentionSpec) -> str | None:
    if facts.dropout:
        return "it knows no dropout"
    if facts.half and facts.platform == "cpu":
        # jax asks for its second product in the half type, which XLA's CPU kernels compute in
        # float32, after copies of weights and values.
        return "its second product is in the half type, which is slow on a CPU"
    return None


# What plugins register by these names: several are asked in turn, AUTO leaves it to the platform.
AUTO = ()
EXPLICIT = EAGER = Implementation("explicit", explicit_attention)
XLA = (Implementation("xla", xla_attention, _xla_refuses), EXPLICIT)
FLASH = Implementation(
    "flash", flash.flash_attention, flash.unsupported_reason, zeroes_masked_queries=True
)
SPLASH = Implementation("splash", splash.splash_attention, splash.unsupported_reason)
CUDNN = (
    Implementation("cudnn", cudnn.cudnn_attention, cudnn.unsupported_reason),
    Implementation("cudnn_packed", cudnn.packed_attention, cudnn.packed_unsupported_reason),
    Implementation("cudnn_bias", cudnn.bias_attention, cudnn.bias_unsupported_reason),
    Implementation("cudnn_mask", cudnn.bias_attention, cudnn.mask_unsupported_reason),
)
CPU = (
    Implementation("few_queries", cpu.few_queries_attention, cpu.few_queries_unsupported_reason),
    Implementation("blocked", cpu.blocked_attention, cpu.blocked_unsupported_reason),
    Implementation("direct", cpu.direct_attention, cpu.direct_unsupported_reason),
)

#: What is asked on each platform, in this order; the last one never refuses.
IMPLEMENTATIONS_BY_PLATFORM: Mapping[str, tuple[Implementation, ...]] = {
    "cpu": (*CPU, *XLA),
    "cuda": (*CUDNN[:3], FLASH, CUDNN[3], EXPLICIT),
    "tpu": (SPLASH, EXPLICIT),
}
# A step of decoding has fewer queries than a kernel is made for.
FEW_QUERIES = 4


def attention_spec(
    query: jax.Array, key: jax.Array, visible: Visibility, bias: jax.Array | None, rate: float
) -> AttentionSpec:
    """Return the facts of attention that is traced for the platform in force."""
    mesh, device = current_options().mesh, target_device()
    # A device of another process tells nothing, and those of a run are alike.
    stats = jax.local_devices()[0].memory_stats() if device in jax.devices() else None

    def four(x: jax.Array | None) -> tuple[int, ...] | None:
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
        mask=four(visible.dense),
        bias=four(bias),
        dropout=rate,
        mesh=() if mesh is None else tuple((k, n) for k, n in mesh.shape.items() if n > 1),
        devices=1 if cpu.is_single_cpu() else max(2, jax.device_count()),
    )


def select_implementation(facts: AttentionSpec, named: Any) -> Implementation:
    """Return what attends: the first that serves of those named, or of the platform's."""
    if callable(named):
        return wrap_dot_product(named)
    candidates = (named,) if isinstance(named, Implementation) else named
    few = facts.queries <= FEW_QUERIES < facts.keys
    if not candidates or few:
        wanted, candidates = "auto", IMPLEMENTATIONS_BY_PLATFORM.get(facts.platform, XLA)
        if few and facts.platform != "cpu":
            candidates = (EXPLICIT,)
    else:
        wanted = candidates[0].name
    choice = first_supported(facts, candidates, wanted)
    if facts.platform != "cpu":
        log_selection(facts, choice)
    return next(one for one in candidates if one.name == choice.name)


def wrap_dot_product(product: Callable[..., jax.Array]) -> Implementation:
    """Wrap a function with the signature of ``jax.nn.dot_product_attention``.

    It comes by all masks as one array, and dropout takes the explicit form.
    """

    def attend_by(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        visible: Visibility,
        *,
        bias: jax.Array | None,
        scale: float,
        rate: float,
        drawn: LazyBits | None,
        mesh: Mesh | None,
    ) -> jax.Array:
        if drawn is not None:
            return explicit_attention(
                query, key, value, visible, bias=bias, scale=scale, rate=rate, drawn=drawn
            )
        queries, keys = query.shape[1], key.shape[1]
        causal = visible.causal and visible.window is None and queries == keys
        mask = visible.without_band(keys) if causal else visible.array(queries, keys)
        seeing = visible.sees_any(queries, keys)
        if seeing is not None and mask is not None:
            # Not a number times the gradient zero is not a number: it sees all, which is dropped.
            mask = mask | ~seeing
        return product(query, key, value, bias=bias, mask=mask, is_causal=causal, scale=scale)

    return Implementation(getattr(product, "__name__", "registered"), attend_by)


def resolve_attention(name: str | None) -> Any:
    """Return what is registered as ``name``, as :class:`hfseq.nn.context.Options` takes it."""
    if name is None:
        return None
    from hfseq import plugins

    return plugins.load().attention.get(name) or None
