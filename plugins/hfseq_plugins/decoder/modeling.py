"""Llama-style decoders (Touvron et al., 2023) on Flax NNX. Module attributes are named as in
checkpoints.

A layer consists of norm, attention with rotary embeddings, norm and gated feed-forward block. Some
differences between families are not options of their configurations. `FAMILY_OPTIONS` contains
these differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

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

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class FamilyOptions:
    """Differences between a family and Llama that are not options of the configuration.

    Attributes:
        sliding_window: Whether every layer uses the configuration's `sliding_window`, if it is set.
        norm_offset: Number that is added to the weights of norms.
        scale_embeddings: Whether embeddings are multiplied by the square root of the hidden size.
        post_norms: Whether the output of each block is normalized before it is added to the
            residual.
        qk_norm: Whether queries and keys are normalized per head before rotary embeddings are
            applied.
        qkv_bias: Whether the query, key and value projections have biases. The output projection
            has none.
        softcap: Whether attention scores are capped by the configuration's
            `attn_logit_softcapping`.
        causal: Whether attention is causal.
    """

    sliding_window: bool = False
    norm_offset: float = 0.0
    scale_embeddings: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    softcap: bool = False
    causal: bool = True


_GEMMA = FamilyOptions(norm_offset=1.0, scale_embeddings=True)
FAMILY_OPTIONS = {
    "llama": FamilyOptions(),
    "mistral": FamilyOptions(sliding_window=True),
    "qwen2": FamilyOptions(qkv_bias=True),
    "qwen3": FamilyOptions(qk_norm=True),
    "smollm3": FamilyOptions(),
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(_GEMMA, post_norms=True, softcap=True),
    "gemma3_text": dataclasses.replace(_GEMMA, post_norms=True, qk_norm=True),
    "eurobert": FamilyOptions(causal=False),
}


def family_options(config: PreTrainedConfig) -> FamilyOptions:
    """Returns the `FamilyOptions` of the family that a configuration belongs to.

    For a subclass of a registered configuration class, these are the options of its parent.
    """
    types = (vars(parent).get("model_type") for parent in type(config).__mro__)
    return next(FAMILY_OPTIONS[name] for name in types if name in FAMILY_OPTIONS)


def is_causal(config: PreTrainedConfig) -> bool:
    """Returns whether attention is causal.

    `is_causal=False` in the configuration makes any family bidirectional, as in Transformers. In
    EmbeddingGemma, which is a bidirectional Gemma 3, `use_bidirectional_attention` is set instead.
    """
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    return family_options(config).causal and nn.is_causal(config) and not bidirectional


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Returns the attention type of each layer, `full_attention` or `sliding_attention`.

    Raises:
        UsageError: The configuration's `layer_types` is too short or contains other values.
    """
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = (
        getattr(config, "layer_types", None)
        or [SLIDING if family_options(config).sliding_window else FULL] * num_layers
    )
    if len(types) < num_layers or not set(types) <= {FULL, SLIDING}:
        raise UsageError(
            f"layer_types={types} in the configuration must contain '{FULL}' or '{SLIDING}' for "
            f"each of its {num_layers} layers"
        )
    return [FULL if window is None else layer_type for layer_type in types[:num_layers]]


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """Returns a linear layer with the initialization of the configuration."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=bias)


def head_size(config: PreTrainedConfig) -> int:
    """Returns the number of features per attention head, by default `hidden_size / heads`."""
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


class Attention(nn.CachedAttention):
    """Grouped-query attention: several query heads share a key and value head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__()
        self.kv_heads, self.head_dim = config.num_key_value_heads, head_size(config)
        if config.num_attention_heads % self.kv_heads:
            raise UsageError(
                f"num_attention_heads={config.num_attention_heads} in the configuration must be a "
                f"multiple of num_key_value_heads={self.kv_heads}: key and value heads are shared "
                "by groups of query heads of equal size"
            )
        options, scalar = family_options(config), getattr(config, "query_pre_attn_scalar", None)
        self.causal, self.rate = is_causal(config), config.attention_dropout
        self.scale = None if scalar is None else scalar**-0.5
        self.softcap = config.attn_logit_softcapping if options.softcap else None
        width, bias = config.hidden_size, getattr(config, "attention_bias", False)
        inner, kv_width = config.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = linear(config, width, inner, rngs, bias or options.qkv_bias)
        self.k_proj = linear(config, width, kv_width, rngs, bias or options.qkv_bias)
        self.v_proj = linear(config, width, kv_width, rngs, bias or options.qkv_bias)
        self.o_proj = linear(config, inner, width, rngs, bias)
        self.q_norm, self.k_norm = (
            norm(config, self.head_dim) if options.qk_norm else nnx.data(None) for _ in "qk"
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles | None,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        shape, causal = (*x.shape[:2], -1, self.head_dim), False
        query, key = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        value = self.v_proj(x).reshape(shape)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)  # type: ignore[misc]  # created in __init__
        if rotary_emb is not None:
            query, key = nn.rotate(query, rotary_emb), nn.rotate(key, rotary_emb)
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
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.o_proj(attn_output.reshape(*x.shape[:2], -1)), weights


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer, 2020)."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = linear(config, width, inner, rngs, bias)
        self.up_proj = linear(config, width, inner, rngs, bias)
        self.down_proj = linear(config, inner, width, rngs, bias)
        # A config.json may contain both names. Each family reads the name that its configuration
        # class defines.
        own_name = hasattr(type(config), "hidden_activation")
        name = "hidden_activation" if own_name else "hidden_act"
        self.act = nn.activation(getattr(config, name))

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def norm(config: PreTrainedConfig, width: int | None = None) -> nn.RMSNorm:
    """Returns an RMSNorm whose parameter is named `weight`, as in Transformers 4.

    Args:
        config: Model configuration.
        width: Number of features. The default is the hidden size.
    """
    width, offset = width or config.hidden_size, family_options(config).norm_offset
    return nn.RMSNorm(width, config.rms_norm_eps, leaf="weight", offset=offset)


class Layer(nnx.Module):
    """Attention and feed-forward block, each preceded by a norm.

    In some families, each block is also followed by a norm.

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        attention_type: `full_attention` or `sliding_attention`.
        use_rotary: Whether the layer uses rotary embeddings. Without them, the layer uses no
            position information.
    """

    def __init__(
        self, config: PreTrainedConfig, rngs: nnx.Rngs, attention_type: str, use_rotary: bool
    ):
        self.attention_type, self.use_rotary = attention_type, use_rotary
        self.post_norms = family_options(config).post_norms
        self.input_layernorm, self.self_attn = norm(config), Attention(config, rngs)
        self.post_attention_layernorm, self.mlp = norm(config), MLP(config, rngs)
        if self.post_norms:
            self.pre_feedforward_layernorm = norm(config)
            self.post_feedforward_layernorm = norm(config)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Mapping[str, Angles],  # by attention type
        masks: Mapping[str, Mask],  # by attention type
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.self_attn(
            self.input_layernorm(x),
            rotary_emb[self.attention_type] if self.use_rotary else None,
            masks[self.attention_type],
            rngs,
            return_weights,
        )
        if self.post_norms:
            x = x + self.post_attention_layernorm(attn_output)
            block = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(block), weights
        x = x + attn_output
        return x + self.mlp(self.post_attention_layernorm(x)), weights


class Decoder(nnx.Module):
    """Decoder without a head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        attention_types = layer_types(config)
        # Each attention type may have its own rotary embedding.
        self.rotary = {
            attention_type: nn.Rotary(config, head_size(config), attention_type)
            for attention_type in dict.fromkeys(attention_types)
        }
        self.windows: dict[str, tuple[int, int] | None] = (
            {FULL: None} if FULL in attention_types else {}
        )
        if SLIDING in attention_types:
            # The configured window size includes the query's own key, except with is_causal=False.
            side = config.sliding_window - nn.is_causal(config)
            self.windows[SLIDING] = (side, 0) if is_causal(config) else (side, side)
        use_rotary = getattr(config, "no_rope_layers", None) or [True] * len(attention_types)
        self.embedding_scale = (
            config.hidden_size**0.5 if family_options(config).scale_embeddings else None
        )
        init = nn.normal(config.initializer_range)
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.layers = nn.Layers(
            [
                Layer(config, rngs, attention_type, bool(enabled))
                for attention_type, enabled in zip(attention_types, use_rotary, strict=False)
            ]
        )
        self.norm = norm(config)

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
        x = self.embed_tokens(input_ids)
        if self.embedding_scale is not None:
            # As in PyTorch, the factor and the scaled embeddings are rounded to the dtype of `x`.
            # The `where` does not change the result. It keeps the compiler from fusing the
            # multiplication into the first layer without this rounding.
            scaled = x * jnp.asarray(self.embedding_scale, x.dtype)
            x = jnp.where(jnp.isnan(x), x, scaled)
        x, attentions, layer_inputs = nn.run_layers(
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
        )
        x = self.norm(x)
        return out.FlaxBaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class CausalLM(nnx.Module):
    """Causal language model. A tied head reuses the word embeddings."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        output = self.model(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(self.logits, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden_size)`, to logits, `(..., vocab_size)`."""
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        logits = head(x)
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
            "configuration. Set it, or pass a single row"
        )
    is_token = jnp.ones_like(input_ids) if pad is None else input_ids != pad
    last_index = (jnp.arange(length) * is_token).argmax(-1)
    return jnp.take_along_axis(states, last_index[:, None, None], 1)[:, 0]


class SequenceClassification(nnx.Module):
    """Sequence classification or regression, from the last token that is not padding."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model, self.pad = Decoder(config, rngs), config.pad_token_id
        self.score = linear(config, config.hidden_size, num_labels(config), rngs, bias=False)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        *args: Any,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, num_labels)`."""
        output = self.model(input_ids, *args, **kwargs)
        states = last_token_states(output.last_hidden_state, input_ids, self.pad)
        return out.FlaxSequenceClassifierOutput(
            logits=self.score(states),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class TokenClassification(nnx.Module):
    """Token classification."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        bias = getattr(config, "token_classification_bias", True)
        self.score = linear(config, config.hidden_size, num_labels(config), rngs, bias)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, num_labels)`."""
        output = self.model(*args, rngs=rngs, **kwargs)
        return out.FlaxTokenClassifierOutput(
            logits=self.score(self.dropout(output.last_hidden_state, rngs)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class QuestionAnswering(nnx.Module):
    """Extractive question answering.

    Attributes:
        decoder_name: Name of the decoder in checkpoints.
    """

    decoder_name = "transformer"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        setattr(self, self.decoder_name, Decoder(config, rngs))
        self.qa_outputs = linear(config, config.hidden_size, 2, rngs, bias=True)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder.

        Returns start and end logits, `(batch, length)`.
        """
        output = getattr(self, self.decoder_name)(*args, **kwargs)
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
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `input_ids`, `attention_mask` and `position_ids` are `(batch, length)`. For packed rows,
        `segment_ids`, `(batch, length)`, is the document number of each token, and 0 for padding.
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

        YaRN and linear scaling of rotary embeddings multiply the trained length by a factor.
        `max_position_embeddings` in published configurations does not include this factor. With
        dynamic scaling, the length has no limit.
        """
        rope, length = nn.rope_parameters(self.config), super().max_length()
        if rope["rope_type"] == "dynamic" or length is None:
            return None
        if rope["rope_type"] in ("yarn", "linear") and rope.get("factor"):
            trained_length = rope.get("original_max_position_embeddings") or length
            length = max(length, int(trained_length * rope["factor"]))
        return length
