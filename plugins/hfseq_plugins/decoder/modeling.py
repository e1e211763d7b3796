"""Llama-style decoders (Touvron et al., 2023) on Flax NNX. Module attributes are named as in
checkpoints.

A layer consists of a norm, attention with rotary embeddings, a second norm, and a gated
feed-forward block. `hfseq_plugins.decoder.options` describes the differences between the families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.common import num_labels
from hfseq_plugins.decoder.experts import RouterStatistics, SparseBlock, load_balancing_loss
from hfseq_plugins.decoder.mlp import feed_forward, linear
from hfseq_plugins.decoder.options import (
    FAMILY_OPTIONS,
    FULL,
    SLIDING,
    FamilyOptions,
    dropout_rate,
    family_options,
    head_size,
    is_causal,
    is_enabled,
    layer_types,
    rotary_layers,
    rotary_size,
    sparse_layers,
)

__all__ = ["FAMILY_OPTIONS", "FamilyOptions", "family_options"]


def norm(config: PreTrainedConfig, width: int | None = None) -> nn.RMSNorm | nn.LayerNorm:
    """Creates a norm of the type that `FamilyOptions.norm` selects.

    The parameter of an RMSNorm is named `weight`, as in Transformers 4.

    Args:
        config: Model configuration.
        width: Number of features. The default is the hidden size.
    """
    options, width = family_options(config), width or config.hidden_size
    epsilon = norm_epsilon(config)
    if options.norm == "rms":
        return nn.RMSNorm(width, epsilon, leaf="weight", offset=options.norm_offset)
    return nn.LayerNorm(
        width,
        epsilon,
        use_bias=options.norm == "layer",
        use_scale=options.norm != "layer_without_weights",
    )


def norm_epsilon(config: PreTrainedConfig) -> float:
    """Returns the epsilon of the norms."""
    epsilon = family_options(config).norm_epsilon
    return cast("float", getattr(config, epsilon)) if isinstance(epsilon, str) else epsilon


class NormList(nnx.Module):
    """A separate LayerNorm module for each attention head."""

    def __init__(self, heads: int, head_dim: int, epsilon: float):
        self.norms = nnx.List(
            [nn.LayerNorm(head_dim, epsilon, use_bias=False) for _ in range(heads)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, heads, head_dim)
        return jnp.stack([norm(x[..., head, :]) for head, norm in enumerate(self.norms)], -2)


def qk_norm(config: PreTrainedConfig, heads: int) -> nnx.Module:
    """Returns the norm of queries or keys that `FamilyOptions.qk_norm` selects.

    Args:
        config: Model configuration.
        heads: Number of query or key heads.
    """
    norm_type, width = family_options(config).qk_norm, head_size(config)
    epsilon = norm_epsilon(config)
    if norm_type == "rms":
        return norm(config, width)
    if norm_type == "rms_all_heads":
        return norm(config, heads * width)
    if norm_type == "layer":
        return nn.LayerNorm(width, epsilon)
    if norm_type == "layer_per_head":
        return nn.LayerNorm((heads, width), epsilon, use_bias=False)
    return NormList(heads, width, epsilon)


class Attention(nn.CachedAttention):
    """Grouped-query attention: several query heads share a key and value head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", self.heads)
        self.head_dim = head_size(config)
        if self.heads % self.kv_heads:
            raise UsageError(
                f"num_attention_heads={self.heads} in the configuration must be a "
                f"multiple of num_key_value_heads={self.kv_heads}, because the same number of "
                "query heads shares each key and value head"
            )
        options = family_options(config)
        self.causal, self.rate = is_causal(config), getattr(config, "attention_dropout", 0.0)
        scalar = getattr(config, "query_pre_attn_scalar", None)
        self.scale = None if scalar is None else scalar**-0.5
        if options.multipliers:
            self.scale = config.attention_multiplier
        self.softcap = config.attn_logit_softcapping if options.softcap else None
        self.sinks = nnx.data(None)
        if options.sinks:
            init = nn.normal(config.initializer_range)
            self.sinks = nnx.Param(init(rngs.params(), (self.heads,), jnp.float32))
        self.limit = config.clip_qkv if options.clip_qkv else None
        self.interleaved, self.output_name = options.interleaved, options.output_name
        self.add_projections(config, rngs, is_enabled(config, options.qkv_bias))
        inner, bias = self.heads * self.head_dim, is_enabled(config, options.output_bias)
        if options.square_output and inner != config.hidden_size:
            raise UsageError(
                f"num_attention_heads={self.heads} times head_dim={self.head_dim} in the "
                f"configuration must equal hidden_size={config.hidden_size}"
            )
        output = linear(config, inner, config.hidden_size, rngs, bias)
        setattr(self, self.output_name, output)
        self.norm_names: tuple[str, ...] = ()
        self.norms_all_heads = options.qk_norm == "rms_all_heads"
        if options.qk_norm and is_enabled(config, options.qk_norm_enabled):
            self.norm_names = (f"q_{options.qk_norm_name}", f"k_{options.qk_norm_name}")
            for name, heads in zip(self.norm_names, (self.heads, self.kv_heads), strict=True):
                setattr(self, name, qk_norm(config, heads))

    def add_projections(self, config: PreTrainedConfig, rngs: nnx.Rngs, bias: bool) -> None:
        """Creates the projections that compute queries, keys and values."""
        width, kv_width = config.hidden_size, self.kv_heads * self.head_dim
        self.q_proj = linear(config, width, self.heads * self.head_dim, rngs, bias)
        self.k_proj = linear(config, width, kv_width, rngs, bias)
        self.v_proj = linear(config, width, kv_width, rngs, bias)

    def project(
        self,
        x: jax.Array,  # (batch, length, hidden)
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, `(batch, length, heads * head_dim)` each."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles | None,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = self.project(x)
        if self.norms_all_heads:
            query, key = self.normalize(query, key)
        if self.limit is not None:
            query, key, value = (
                jnp.clip(states, -self.limit, self.limit) for states in (query, key, value)
            )
        shape, causal = (*x.shape[:2], -1, self.head_dim), False
        query, key, value = query.reshape(shape), key.reshape(shape), value.reshape(shape)
        if not self.norms_all_heads:
            query, key = self.normalize(query, key)
        if rotary_emb is not None:
            query = nn.rotate(query, rotary_emb, interleaved=self.interleaved)
            key = nn.rotate(key, rotary_emb, interleaved=self.interleaved)
        if self.causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        output = getattr(self, self.output_name)
        return output(attn_output.reshape(*x.shape[:2], -1)), weights

    def normalize(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Applies the norms of queries and keys, if the model has them."""
        if not self.norm_names:
            return query, key
        query_norm, key_norm = (getattr(self, name) for name in self.norm_names)
        return query_norm(query), key_norm(key)


class FusedAttention(Attention):
    """Attention with one projection for queries, keys and values."""

    def add_projections(self, config: PreTrainedConfig, rngs: nnx.Rngs, bias: bool) -> None:
        """Creates the projection."""
        options = family_options(config)
        self.fused_name, self.per_head = options.fused_qkv, options.qkv_per_head
        features = (self.heads + 2 * self.kv_heads) * self.head_dim
        setattr(self, self.fused_name, linear(config, config.hidden_size, features, rngs, bias))

    def project(
        self,
        x: jax.Array,  # (batch, length, hidden)
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, `(batch, length, heads * head_dim)` each."""
        fused = getattr(self, self.fused_name)(x)
        if self.per_head:
            fused = fused.reshape(*x.shape[:2], self.heads, 3, self.head_dim)
            query, key, value = (fused[..., part, :].reshape(*x.shape[:2], -1) for part in range(3))
            return query, key, value
        ends = self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim
        query, key, value = jnp.split(fused, ends, axis=-1)
        return query, key, value


class Layer(nnx.Module):
    """Attention and feed-forward block with their norms. `NormNames` lists the norms.

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        attention_type: `full_attention` or `sliding_attention`.
        use_rotary: Whether the layer uses rotary embeddings. Without them, the layer uses no
            position information.
        is_sparse: Whether the feed-forward block is a mixture of experts.

    Attributes:
        attention_class: Class of attention, with the signature of `Attention`. `None` stands for
            the class that the options of the family describe.
        mlp_class: Class of the dense feed-forward block, with the signature of `MLP`. `None` stands
            for the class that the options of the family describe.
    """

    attention_class: ClassVar[Any] = None
    mlp_class: ClassVar[Any] = None

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        attention_type: str,
        use_rotary: bool,
        is_sparse: bool,
    ):
        options = family_options(config)
        self.attention_type, self.use_rotary = attention_type, use_rotary
        self.parallel = is_enabled(config, options.parallel)
        self.norm_names = dataclasses.astuple(options.norm_names)
        self.shared_norm = self.parallel and options.shared_norm
        if self.shared_norm:
            self.norm_names = (*self.norm_names[:2], None, self.norm_names[3])
        for name in filter(None, self.norm_names):
            setattr(self, name, norm(config))
        self.attention_name = options.attention_name
        default_class = FusedAttention if options.fused_qkv else Attention
        setattr(self, self.attention_name, (self.attention_class or default_class)(config, rngs))
        self.is_sparse = is_sparse
        self.mlp_name = options.experts.block_name if options.experts else "mlp"
        block_class = SparseBlock if is_sparse else self.mlp_class or feed_forward
        setattr(self, self.mlp_name, block_class(config, rngs))
        self.dropouts = tuple(
            dropout_rate(config, name)
            for name in (options.attention_output_dropout, options.mlp_dropout)
        )
        self.multiplier = config.residual_multiplier if options.multipliers else None

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Mapping[str, Angles],  # by attention type
        masks: Mapping[str, Mask],  # by attention type
        *,
        rngs: Keys | None,
        return_weights: bool = False,
        token_mask: jax.Array | None = None,  # (batch, length)
    ) -> tuple[jax.Array, tuple[jax.Array | None, RouterStatistics | None]]:
        before_attention, after_attention, before_mlp, after_mlp = (
            getattr(self, name) if name else lambda x: x for name in self.norm_names
        )
        attention_dropout, mlp_dropout = self.dropouts
        residual, normed = x, before_attention(x)
        attn_output, weights = getattr(self, self.attention_name)(
            normed,
            rotary_emb[self.attention_type] if self.use_rotary else None,
            masks[self.attention_type],
            rngs,
            return_weights,
        )
        attn_output = nn.dropout(after_attention(attn_output), attention_dropout, rngs)
        x = self.add(x, attn_output)
        if not self.shared_norm:
            normed = before_mlp(residual if self.parallel else x)
        statistics, block = None, getattr(self, self.mlp_name)
        if self.is_sparse:
            output, statistics = block(normed, token_mask, rngs)
        else:
            output = block(normed)
        x = self.add(x, nn.dropout(after_mlp(output), mlp_dropout, rngs))
        return x, (weights, statistics)

    def add(self, x: jax.Array, branch: jax.Array) -> jax.Array:
        """Adds the output of a block to the residual."""
        return x + branch if self.multiplier is None else x + branch * self.multiplier


class Decoder(nnx.Module):
    """Decoder without a head.

    Attributes:
        layer_class: Class of the layers.
    """

    layer_class: ClassVar[Any] = Layer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        attention_types, options = layer_types(config), family_options(config)
        # Each attention type may have its own rotary embedding.
        self.rotary = {
            attention_type: nn.Rotary(config, rotary_size(config, attention_type), attention_type)
            for attention_type in dict.fromkeys(attention_types)
        }
        self.windows: dict[str, tuple[int, int] | None] = (
            {FULL: None} if FULL in attention_types else {}
        )
        if SLIDING in attention_types:
            # The configured window size includes the query's own key, except with is_causal=False.
            side = config.sliding_window - nn.is_causal(config)
            self.windows[SLIDING] = (side, 0) if is_causal(config) else (side, side)
        self.embedding_scale = config.hidden_size**0.5 if options.scale_embeddings else None
        if options.multipliers:
            self.embedding_scale = config.embedding_multiplier
        self.embedding_dropout = dropout_rate(config, options.embedding_dropout)
        self.auxiliary_factor = 0.0
        if options.experts is not None and config.output_router_logits:
            self.auxiliary_factor = config.router_aux_loss_coef
        init = nn.normal(config.initializer_range)
        self.embeddings_name = options.embeddings_name
        embeddings = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        setattr(self, self.embeddings_name, embeddings)
        self.layers = nn.Layers(
            [
                self.layer_class(config, rngs, *properties)
                for properties in zip(
                    attention_types, rotary_layers(config), sparse_layers(config), strict=False
                )
            ]
        )
        self.final_norm_name = options.final_norm_name
        setattr(self, self.final_norm_name, norm(config))

    @property
    def embeddings(self) -> nn.Embed:
        """The token embeddings."""
        return cast("nn.Embed", getattr(self, self.embeddings_name))

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            positions = jnp.arange(input_ids.shape[1])[None]
            position_ids = (
                positions if segment_ids is None else nn.positions_in_segments(segment_ids)
            )
        masks = {
            attention_type: nn.visible(attention_mask, segment_ids, window=window)
            for attention_type, window in self.windows.items()
        }
        x = self.embeddings(input_ids)
        if self.embedding_scale is not None:
            # As in PyTorch, the factor and the scaled embeddings are rounded to the dtype of `x`.
            # The `where` does not change the values. Without it, the compiler would fuse the
            # multiplication with the first layer and omit the rounding.
            scaled = x * jnp.asarray(self.embedding_scale, x.dtype)
            x = jnp.where(jnp.isnan(x), x, scaled)
        x = nn.dropout(x, self.embedding_dropout, rngs)
        x, layer_results, layer_inputs = nn.run_layers(
            self.layers,
            x,
            {
                attention_type: rotary(position_ids)
                for attention_type, rotary in self.rotary.items()
            },
            masks,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            token_mask=self.token_mask(input_ids, attention_mask, segment_ids),
        )
        attentions, statistics = zip(*layer_results, strict=True)
        x = getattr(self, self.final_norm_name)(x)
        auxiliary_loss = self.auxiliary_loss([entry for entry in statistics if entry is not None])
        return out.FlaxBaseModelOutputWithPastAndLoss(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
            auxiliary_loss=auxiliary_loss,
        )

    def token_mask(
        self, input_ids: jax.Array, attention_mask: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array | None:
        """Returns a mask of the positions that contain tokens, `(batch, length)`.

        The result is `None` if the auxiliary loss is disabled, or if the attention mask covers the
        tokens of a cache.
        """
        if not self.auxiliary_factor:
            return None
        is_token = jnp.ones(input_ids.shape, bool)
        for mask in (attention_mask, segment_ids):
            if mask is not None and mask.shape != input_ids.shape:
                return None
            is_token = is_token if mask is None else is_token & (mask != 0)
        return is_token

    def auxiliary_loss(self, statistics: Sequence[RouterStatistics]) -> jax.Array | None:
        """Returns the weighted load-balancing loss, multiplied by the number of tokens."""
        if not statistics:
            return None
        loss = load_balancing_loss(statistics)
        return self.auxiliary_factor * loss * statistics[0].tokens


class Head(nnx.Module):
    """Base class of task heads.

    Attributes:
        decoder_class: Class of the decoder without a head.
        decoder_name: Name of this decoder in checkpoints.
    """

    decoder_class: ClassVar[Callable[..., Any]] = Decoder
    decoder_name: ClassVar[str] = "model"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        setattr(self, self.decoder_name, self.decoder_class(config, rngs))

    @property
    def decoder(self) -> Any:
        """The decoder."""
        return getattr(self, self.decoder_name)


class CausalLM(Head):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        options = family_options(config)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head: Any = nnx.data(None)
        if not tied or options.head_bias:
            self.lm_head = linear(config, *sizes, rngs, options.head_bias)
        if tied and options.head_bias:
            self.lm_head.kernel = nnx.data(None)
        self.tied = tied
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = config.logit_scale if options.logit_scale else None
        self.divisor = config.logits_scaling if options.multipliers else None

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.decoder(*args, **kwargs)
        return out.FlaxCausalLMOutputWithPast(
            logits=nn.vocabulary_logits(self.logits, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            auxiliary_loss=getattr(output, "auxiliary_loss", None),
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden_size)`, to logits, `(..., vocab_size)`."""
        if self.tied:
            bias = None if self.lm_head is None else self.lm_head.bias
            logits = self.decoder.embeddings.attend(x, None if bias is None else bias[...])
        else:
            logits = self.lm_head(x)
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        return logits if self.softcap is None else jnp.tanh(logits / self.softcap) * self.softcap


def last_token_states(states: jax.Array, input_ids: jax.Array, pad: int | None) -> jax.Array:
    """Returns the hidden state of the last token that is not padding, for each sequence.

    Args:
        states: Hidden states, `(batch, length, hidden)`.
        input_ids: Token IDs, `(batch, length)`.
        pad: ID of the padding token, or `None`.

    Returns:
        Hidden states, `(batch, hidden)`.

    Raises:
        UsageError: The batch has several rows, and `pad` is `None`.
    """
    rows, length = input_ids.shape
    if pad is None and rows > 1:
        raise UsageError(
            f"cannot find the last token of {rows} rows without a pad_token_id in the "
            "configuration. Set pad_token_id, or pass a single row"
        )
    is_token = jnp.ones_like(input_ids) if pad is None else input_ids != pad
    last_index = (jnp.arange(length) * is_token).argmax(-1)
    return jnp.take_along_axis(states, last_index[:, None, None], 1)[:, 0]


class SequenceClassification(Head):
    """Sequence classification or regression, from the last token that is not padding."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pad = config.pad_token_id
        self.score = linear(config, config.hidden_size, num_labels(config), rngs, bias=False)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        *args: Any,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, num_labels)`."""
        output = self.decoder(input_ids, *args, **kwargs)
        states = last_token_states(output.last_hidden_state, input_ids, self.pad)
        return out.FlaxSequenceClassifierOutput(
            logits=self.score(states),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class TokenClassification(Head):
    """Decoder with a token classification head.

    Attributes:
        classifier_name: Name of the classifier in checkpoints.
    """

    classifier_name: ClassVar[str] = "score"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        bias = getattr(config, "token_classification_bias", True)
        classifier = linear(config, config.hidden_size, num_labels(config), rngs, bias)
        setattr(self, self.classifier_name, classifier)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, num_labels)`."""
        output = self.decoder(*args, rngs=rngs, **kwargs)
        states = self.dropout(output.last_hidden_state, rngs)
        return out.FlaxTokenClassifierOutput(
            logits=getattr(self, self.classifier_name)(states),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class QuestionAnswering(Head):
    """Decoder with a head for extractive question answering."""

    decoder_name = "transformer"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = linear(config, config.hidden_size, 2, rngs, bias=True)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder.

        Returns start and end logits, `(batch, length)`.
        """
        output = self.decoder(*args, **kwargs)
        start, end = jnp.moveaxis(self.qa_outputs(output.last_hidden_state), -1, 0)
        return out.FlaxQuestionAnsweringModelOutput(
            start_logits=start,
            end_logits=end,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxDecoderOnlyPreTrainedModel(FlaxPreTrainedModel):
    """Base class of models with the call signature of decoder-only models in Transformers 4."""

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model. `FlaxPreTrainedModel.run` describes the other arguments.

        `input_ids`, `attention_mask` and `position_ids` are `(batch, length)`. If rows contain
        several packed documents, `segment_ids`, `(batch, length)`, contains the document number of
        each token, and 0 for padding.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxDecoderPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base class of the Llama-style families, with their names in checkpoints."""

    base_model_prefix = "model"
    weight_aliases: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"rotary_emb\.inv_freq$")

    def max_length(self) -> int | None:
        """Returns the maximum sequence length, or `None` for no limit.

        With YaRN and linear scaling of rotary embeddings, this is `max_position_embeddings`
        multiplied by the scaling factor, which published configurations do not include in
        `max_position_embeddings`. With dynamic scaling, the length has no limit.
        """
        rope, length = nn.rope_parameters(self.config), super().max_length()
        if rope["rope_type"] == "dynamic" or length is None:
            return None
        if rope["rope_type"] in ("yarn", "linear") and rope.get("factor"):
            trained_length = rope.get("original_max_position_embeddings") or length
            length = max(length, int(trained_length * rope["factor"]))
        return length
