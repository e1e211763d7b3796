"""hfseq's implementations of attention, masks and experts for Transformers' registries.

They are registered under the name "hfseq". Only modules that `hfseq_plugins.bridge.modules` builds
select this name, so other PyTorch models in the process are not affected.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfseq import nn
from hfseq.nn.sharding import TACTICS
from hfseq.nn.visible import Visibility
from hfseq_plugins.bridge import state
from hfseq_plugins.bridge.layout import expert_tactic
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.tensor import JaxTensor, as_arrays, from_array

NAME = "hfseq"
#: Arguments of attention functions that `attention` supports.
_ATTENTION_ARGUMENTS = {
    *("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"),
    *("softcap", "sliding_window", "position_bias", "indices", "output_attentions", "kwargs"),
    *("query_states", "key_states", "value_states", "head_mask"),
}
#: Arguments that some models pass to attention functions, but that do not affect the result.
_IGNORED_ARGUMENTS = {
    *(
        "position_ids",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "cache",
        "cache_position",
    ),
    *("position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("tgt_len", "src_len", "position_embeddings_global", "layer_idx", "token_type_ids", "labels"),
    *("num_items_in_batch", "output_router_logits", "deterministic", "mm_token_type_ids"),
    "logits_to_keep",
}


@functools.cache
def register() -> None:
    """Adds hfseq's functions to Transformers' registries, once per process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def select(module: torch.nn.Module) -> None:
    """Makes the layers of a module that use Transformers' registries call hfseq's functions."""
    from transformers import PreTrainedModel

    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if isinstance(part, PreTrainedModel) and part._can_set_attn_implementation():
            is_supported = part._supports_attention_backend or part._supports_sdpa
            config._attn_implementation_internal = NAME if is_supported else "eager"
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = NAME


# -- attention
# ---------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention with `hfseq.nn.attend`, in place of PyTorch's functions.

    Args:
        module: The attention layer.
        query: Queries, `(batch, heads, queries, head_dim)`.
        key: Keys, `(batch, kv_heads, keys, head_dim)`.
        value: Values, `(batch, kv_heads, keys, value_dim)`.
        attention_mask: A boolean mask, True where a key is visible, or numbers that are added to
            the scores. `(batch, heads or 1, queries, keys)`.
        scaling: Factor by which the scores are multiplied. Default: `head_dim ** -0.5`.
        dropout: Dropout rate of the attention weights.
        is_causal: Whether attention without a mask is causal. Default: the attribute `is_causal` of
            the layer.
        softcap: Maximum absolute value of the scores, which `tanh` limits.
        position_bias: Numbers that are added to the scores, for example relative position biases.
        indices: Numbers of the keys that each query can see, `(batch, queries, count)`. Default:
            all keys that the mask allows.
        output_attentions: Whether to return the attention weights.
        **kwargs: Other arguments of the layer. If the modeling file defines its own attention
            function that uses them, this function is called instead.

    Returns:
        The outputs, `(batch, queries, heads, value_dim)`, and the attention weights or `None`.

    Raises:
        UnsupportedModel: The layer passes an argument that hfseq does not know.
    """
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    extra = {name for name, argument in kwargs.items() if argument is not None}
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    queries = query.shape[2]
    is_causal = bool(is_causal) and attention_mask is None and queries > 1
    if own is not None and (extra - _IGNORED_ARGUMENTS) & (_parameters(own) | {"s_aux", "sinks"}):
        # The attention function of the modeling file supports options that hfseq's function does
        # not, such as attention sinks.
        additive = _additive_mask(attention_mask, is_causal, query, key)
        if softcap is not None:
            kwargs["softcap"] = softcap
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return own(module, query, key, value, additive, scaling=scaling, dropout=dropout, **kwargs)
    unknown = extra - _IGNORED_ARGUMENTS - _ATTENTION_ARGUMENTS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedModel(
            f"the model passes the arguments {names} to its attention function. hfseq does not "
            "know these arguments",
            operator=f"attention with {names}",
            solution="The model needs a native implementation",
        )
    if is_causal and key.shape[2] > queries:  # the cache is longer than the prompt
        key, value = key[:, :, :queries], value[:, :, :queries]
    q, k, v = (as_arrays(x).swapaxes(1, 2) for x in (query, key, value))
    bias = None if position_bias is None else as_arrays(position_bias)[..., : k.shape[1]]
    visible = getattr(attention_mask, "visible", None)
    if attention_mask is not None and visible is None:
        dense = as_arrays(attention_mask)[..., : k.shape[1]]
        if dense.dtype == bool:
            visible = Visibility(dense=dense.reshape((1,) * (4 - dense.ndim) + dense.shape))
        else:
            bias = dense if bias is None else bias + dense
    if indices is not None:
        chosen = _chosen_keys(as_arrays(indices), k.shape[1])
        visible = Visibility(dense=chosen & _dense(visible, q.shape[1], k.shape[1]))
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    if isinstance(scale, torch.Tensor):
        q, scale = q * as_arrays(scale).astype(q.dtype), 1.0
    output, weights = nn.attend(
        *_same_width(q, k, v),
        mask=visible,
        bias=bias,
        causal=is_causal,
        scale=scale,
        softcap=softcap,
        dropout_rate=dropout,
        rngs=state.current().keys,
        return_weights=bool(output_attentions),
    )
    output = output[..., : v.shape[-1]]
    return from_array(output), None if weights is None else from_array(weights)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the parameters of an attention function that `attention` does not support."""
    return frozenset(inspect.signature(function).parameters) - _ATTENTION_ARGUMENTS


def _same_width(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pads queries, keys and values with zeros so that their heads have the same width."""
    width = max(query.shape[-1], value.shape[-1])

    def pad(x: jax.Array) -> jax.Array:
        missing = width - x.shape[-1]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x

    return pad(query), pad(key), pad(value)


def _chosen_keys(indices: jax.Array, keys: int) -> jax.Array:
    """Returns a mask that is True for the keys whose numbers are in `indices`."""
    rows, queries, _ = indices.shape
    mask = jnp.zeros((rows, queries, keys), bool)
    place = (jnp.arange(rows)[:, None, None], jnp.arange(queries)[None, :, None], indices)
    return mask.at[place].set(True)[:, None]


def _dense(visible: Visibility | None, queries: int, keys: int) -> jax.Array:
    mask = None if visible is None else visible.array(queries, keys)
    return jnp.ones((1, 1, 1, 1), bool) if mask is None else mask


def _additive_mask(
    attention_mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Returns a mask of numbers that are added to the scores, as eager attention expects."""
    if attention_mask is None and not is_causal:
        return None
    dtype = as_arrays(query).dtype
    if attention_mask is None:
        queries, keys = query.shape[2], key.shape[2]
        visible = jnp.tril(jnp.ones((1, 1, queries, keys), bool))
    else:
        visible = as_arrays(attention_mask)
        if visible.dtype != bool:
            return attention_mask
    return from_array(jnp.where(visible, 0, jnp.finfo(dtype).min).astype(dtype))


# -- masks
# ---------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Builds a boolean mask as Transformers does, with a description for `hfseq.nn.attend`.

    The result is an ordinary mask tensor, so the code of the model may change it. If the mask only
    combines causal attention, windows, padding and packed documents, its attribute `visible`
    describes the mask without an array of all queries and keys.

    Args:
        batch_size: Number of rows.
        q_length: Number of queries.
        kv_length: Number of keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Function of the positions of a query and a key. It returns whether the query
            attends to the key. Default: causal attention.
        attention_mask: Zero for keys that are padding, otherwise nonzero. `(batch, keys)`.
        **kwargs: Further arguments of `transformers.masking_utils.sdpa_mask`.

    Returns:
        The mask, True where a key is visible, or `None` if attention needs no mask because the
        attribute `is_causal` of the layer describes it completely.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    segments = state.current().segment_ids
    is_packed = segments is not None and q_length == kv_length == segments.shape[1]
    if is_packed:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    kwargs["use_vmap"] = False
    dense = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    if dense is None:
        return None
    if is_packed:
        assert segments is not None
        same = segments[:, None, :, None] == segments[:, None, None, :]
        dense = from_array(as_arrays(dense) & same)
    is_aligned = all(isinstance(offset, int) for offset in (q_offset, kv_offset))
    is_aligned = is_aligned and q_offset + q_length == kv_offset + kv_length
    length = None if attention_mask is None else attention_mask.shape[-1]
    if is_aligned and (length in (None, kv_length)) and isinstance(dense, JaxTensor):
        description = _describe(mask_function)
        if description is not None:
            padding = None if attention_mask is None else as_arrays(attention_mask)
            own_segments = segments if is_packed else description.pop("segments", None)
            description.pop("segments", None)
            dense.visible = nn.visible(padding, own_segments, **description)  # type: ignore[attr-defined]
    return dense


def _describe(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Returns the arguments with which `nn.visible` describes a mask function.

    Returns:
        The arguments by name, or `None` if `nn.visible` cannot describe the function.
    """
    name = getattr(function, "__qualname__", "").partition(".")[0]
    values = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name == "causal_mask_function":
        return {"causal": True}
    if name == "bidirectional_mask_function":
        return {}
    if name == "sliding_window_overlay":
        # A window of 0 would hide all keys. Some models build such a mask, but do not use it.
        window = values["sliding_window"]
        return {"left": window - 1} if window else None
    if name == "sliding_window_bidirectional_overlay":
        return {"window": (values["sliding_window"], values["sliding_window"])}
    if name == "packed_sequence_mask_function":
        return {"segments": as_arrays(values["packed_sequence_mask"]) + 1}
    if name != "and_masks":
        return None
    description: dict[str, Any] = {}
    for part in values["mask_functions"]:
        entries = _describe(part)
        if entries is None or description.keys() & entries.keys() - {"causal"}:
            return None
        description |= entries
    if "left" in description:
        if "window" in description or not description.get("causal"):
            return None
        description["window"] = (description.pop("left"), 0)
    return description


# -- experts
# ---------------------------------------------------------------------------------------


def experts(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes a mixture of experts with `hfseq.nn.mix_sharded_experts`.

    Args:
        self: The PyTorch layer with the weights of the experts.
        hidden_states: The inputs, `(tokens, features)`.
        top_k_index: Numbers of the experts of each token, `(tokens, choices)`.
        top_k_weights: The weight of each of these experts in the output, `(tokens, choices)`.

    Returns:
        The outputs, `(tokens, features)`.
    """

    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    names = [up_name, "down_proj"]
    names += [f"{name}_bias" for name in names] if self.has_bias else []
    arrays = {name: as_arrays(getattr(self, name)) for name in names}

    def compute(
        rows: jax.Array, layout: nn.ExpertRows, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        def parameters(name: str) -> tuple[jax.Array, jax.Array | None]:
            kernel = arrays[name] if self.is_transposed else arrays[name].swapaxes(1, 2)
            return kernel, arrays.get(f"{name}_bias")

        inner = from_array(layout.product(rows, *parameters(up_name)))
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        outputs = layout.product(as_arrays(inner), *parameters("down_proj"))
        if self.has_post_expert_norm:
            outputs = as_arrays(self.post_expert_norm(from_array(outputs)))
        return outputs

    # Each token is a sequence of its own, so that the mesh splits tokens like rows of a batch.
    x, index, weights = (
        as_arrays(tensor)[:, None] for tensor in (hidden_states, top_k_index, top_k_weights)
    )
    axes = {name: TACTICS[expert_tactic(array.shape)] for name, array in arrays.items()}
    outputs = nn.mix_sharded_experts(x, index, weights, self.num_experts, compute, arrays, axes)
    return from_array(outputs[:, 0])
