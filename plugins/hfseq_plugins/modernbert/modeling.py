"""ModernBERT (Warner et al., 2024) on Flax NNX. Module attributes are named as in checkpoints.

Layers are pre-norm, except that the first layer has no norm before attention. One projection
computes queries, keys and values. Another projection computes both halves of the gated feed-forward
block. Layers with full attention and layers with a sliding window have different RoPE bases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ModernBertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask

FULL, SLIDING = "full_attention", "sliding_attention"

RULES = [
    (r"tok_embeddings/embedding$", "embedding"),
    (r"head/dense/kernel$", "table"),
    (r"(Wqkv|Wi)/kernel$", "column"),
    (r"(Wqkv|Wi)/bias$", "column_bias"),
    (r"Wo/kernel$", "row"),
    (r"decoder/kernel$", "vocab_column"),
    (r"decoder/bias$", "vocab"),
    (r"classifier/kernel$", "row_table"),
    (r"classifier/bias$", "replicated"),
    (r"norm/scale$|bias$", "vector"),
]


def linear(
    config: PreTrainedConfig,
    features_in: int,
    features_out: int,
    rngs: nnx.Rngs,
    bias: bool,
    std: float | None = None,
) -> nn.Linear:
    """Returns a linear layer that is initialized from a truncated normal distribution.

    Args:
        config: Model configuration.
        features_in: Number of input features.
        features_out: Number of output features.
        rngs: Random number generators for the initial values.
        bias: Whether the projection has a bias.
        std: Standard deviation. The default is for projections whose output is added to the
            residual stream. It is smaller in models with more layers.
    """
    std = std or config.initializer_range * (2 * config.num_hidden_layers) ** -0.5
    return nn.Linear(features_in, features_out, truncated_normal(config, std), rngs, use_bias=bias)


def truncated_normal(config: PreTrainedConfig, std: float) -> jax.nn.initializers.Initializer:
    """Returns a truncated normal initializer with the cutoff of the configuration."""
    cutoff = config.initializer_cutoff_factor or 3.0
    return jax.nn.initializers.truncated_normal(std, lower=-cutoff, upper=cutoff)


def norm(config: PreTrainedConfig) -> nn.LayerNorm:
    """Returns a LayerNorm over the hidden size, with a bias if `config.norm_bias` is set."""
    return nn.LayerNorm(config.hidden_size, config.norm_eps, use_bias=config.norm_bias)


class Attention(nnx.Module):
    """Bidirectional attention with a fused projection of queries, keys and values."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.Wqkv = linear(config, width, 3 * width, rngs, bias, config.initializer_range)
        self.Wo = linear(config, width, width, rngs, bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        # Split queries, keys and values before splitting heads, so that each device of a sharded
        # projection keeps its part of all three.
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.Wqkv(x), 3, -1)
        )
        attn_output, weights = nn.attend(
            nn.rotate(query, rotary_emb),
            nn.rotate(key, rotary_emb),
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_drop(self.Wo(attn_output.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer, 2020).

    The activation function is applied to the first half of the projection.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.Wi = linear(config, width, 2 * inner, rngs, bias, config.initializer_range)
        self.Wo = linear(config, inner, width, rngs, bias)
        self.act = nn.activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        h, gate = jnp.split(self.Wi(x), 2, -1)
        return self.Wo(self.drop(self.act(h) * gate, rngs))


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward. The first layer has no attention norm."""

    attention_class: ClassVar[Any] = Attention

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, layer_idx: int):
        self.attention_type = config.layer_types[layer_idx]
        self.attn_norm = norm(config) if layer_idx else nnx.data(None)
        self.attn, self.mlp = self.attention_class(config, rngs), MLP(config, rngs)
        self.mlp_norm = norm(config)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Mapping[str, Angles],  # by attention type
        masks: Mapping[str, Mask],  # by attention type
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        h = x if self.attn_norm is None else self.attn_norm(x)
        attn_output, weights = self.attn(
            h, rotary_emb[self.attention_type], masks[self.attention_type], rngs, return_weights
        )
        x = x + attn_output
        return x + self.mlp(self.mlp_norm(x), rngs), weights


class Embeddings(nnx.Module):
    """Word embeddings, followed by a norm and dropout."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        init = truncated_normal(config, config.initializer_range)
        self.tok_embeddings = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.norm = norm(config)
        self.drop = nn.Dropout(config.embedding_dropout)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.drop(self.norm(self.tok_embeddings(input_ids)), rngs)


class ModernBert(nnx.Module):
    """ModernBERT encoder without a head."""

    layer: ClassVar[Any] = Layer
    output: ClassVar[Any] = out.FlaxBaseModelOutput

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        types, num_layers = config.layer_types, config.num_hidden_layers
        if len(types) < num_layers or not set(types) <= {FULL, SLIDING}:
            raise UsageError(
                f"layer_types={types} in the configuration must contain '{FULL}' or '{SLIDING}' "
                f"for each of its {num_layers} layers"
            )
        width = config.hidden_size // config.num_attention_heads
        self.rotary = {
            attention_type: nn.Rotary(config, width, attention_type)
            for attention_type in (FULL, SLIDING)
        }
        self.windows = {FULL: None, SLIDING: self.window(config)}
        self.embeddings = Embeddings(config, rngs)
        self.layers = nn.Layers(
            [self.layer(config, rngs, layer_idx) for layer_idx in range(num_layers)]
        )
        self.final_norm = norm(config)

    def window(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Returns how many tokens before and after its own position a query may attend to."""
        return config.sliding_window, config.sliding_window

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
        rotary_emb = {
            attention_type: rotary(position_ids) for attention_type, rotary in self.rotary.items()
        }
        x, attentions, layer_inputs = nn.run_layers(
            self.layers,
            self.embeddings(input_ids, rngs),
            rotary_emb,
            masks,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.final_norm(x)
        return self.output(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class PredictionHead(nnx.Module):
    """Projection, activation and norm, the first layers of every head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.dense = linear(config, width, width, rngs, config.classifier_bias)
        self.act, self.norm = nn.activation(config.classifier_activation), norm(config)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.norm(self.act(self.dense(x)))


class DecoderBias(nnx.Module):
    """Bias of a tied language modeling head."""

    def __init__(self, config: PreTrainedConfig):
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))


class VocabularyProjection(nnx.Module):
    """Base class of language models. The projection to the vocabulary may be tied.

    Subclasses set `model` before they call `add_decoder`.
    """

    model: Any

    def add_decoder(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the parameters of the projection that are not tied."""
        self.tied, use_bias = config.tie_word_embeddings, config.decoder_bias
        self.decoder: Any = nnx.data(None)
        if not self.tied:
            self.decoder = linear(config, config.hidden_size, config.vocab_size, rngs, use_bias)
        elif use_bias:
            self.decoder = DecoderBias(config)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        if not self.tied:
            return self.decoder(x)
        logits = self.model.embeddings.tok_embeddings.attend(x)
        return logits if self.decoder is None else nn.add_bias(logits, self.decoder.bias[...])


class MaskedLM(VocabularyProjection):
    """Encoder with a masked language modeling head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model, self.head = ModernBert(config, rngs), PredictionHead(config, rngs)
        self.add_decoder(config, rngs)

    def __call__(
        self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any
    ) -> out.FlaxModelOutput:
        """Passes all other arguments to the encoder, then applies the head.

        Args:
            masked_positions: Indices of the `k` tokens to predict in each group of rows,
                `(groups, k)`, see `hfseq.nn.gather_positions`. The default is all tokens.

        Returns:
            Logits, `(batch, length, vocab_size)`, or `(groups, k, vocab_size)` with
                `masked_positions`.
        """
        outputs = self.model(*args, **kwargs)
        logits = nn.vocabulary_logits(
            lambda x: self.logits(self.head(x)), outputs.last_hidden_state, masked_positions
        )
        return out.FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)


class Classifier(nnx.Module):
    """Base class of classifiers: encoder, prediction head and projection to the outputs.

    Args:
        config: Model configuration.
        rngs: Random number generators for the initial values.
        num_outputs: Number of outputs, `config.num_labels` by default.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, num_outputs: int | None = None):
        width, num_outputs = config.hidden_size, num_outputs or config.num_labels
        self.model, self.head = ModernBert(config, rngs), PredictionHead(config, rngs)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = linear(config, width, num_outputs, rngs, bias=True, std=width**-0.5)  # type: ignore[arg-type]  # num_labels is set
        self.pooling = config.classifier_pooling

    def classify(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., num_outputs)`."""
        return self.classifier(self.drop(self.head(x), rngs))

    def pool(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Returns the state of the first token, or the mean over tokens that are not padding.

        Args:
            x: Hidden states, `(batch, length, hidden)`.
            mask: Attention mask, `(batch, length)`, or `None`.

        Returns:
            Pooled hidden states, `(batch, hidden)`.
        """
        if self.pooling == "cls":
            return x[:, 0]
        weights = jnp.ones(x.shape[:2]) if mask is None else mask
        weights = (weights / weights.sum(1, keepdims=True)).astype(x.dtype)
        return (x * weights[..., None]).sum(1)


class SequenceClassification(Classifier):
    """Encoder with a head for sequence classification or regression."""

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        *args: Any,
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        outputs = self.model(input_ids, attention_mask, *args, rngs=rngs, **kwargs)
        logits = self.classify(self.pool(outputs.last_hidden_state, attention_mask), rngs)
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class TokenClassification(Classifier):
    """Encoder with a token classification head."""

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, length, num_labels)`."""
        outputs = self.model(*args, rngs=rngs, **kwargs)
        logits = self.classify(outputs.last_hidden_state, rngs)
        return out.FlaxTokenClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class QuestionAnswering(Classifier):
    """Encoder with a head for extractive question answering."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, num_outputs=2)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder.

        Returns start and end logits, `(batch, length)`.
        """
        outputs = self.model(*args, rngs=rngs, **kwargs)
        start, end = jnp.moveaxis(self.classify(outputs.last_hidden_state, rngs), -1, 0)
        return out.FlaxQuestionAnsweringModelOutput(
            start, end, outputs.hidden_states, outputs.attentions
        )


class MultipleChoice(Classifier):
    """Multiple choice. Inputs are `(batch, choices, length)`, logits are `(batch, choices)`."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, num_outputs=1)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, choices, length)
        attention_mask: jax.Array | None = None,  # (batch, choices, length)
        position_ids: jax.Array | None = None,  # (batch, choices, length)
        segment_ids: jax.Array | None = None,  # (batch, choices, length)
        *,
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        model_inputs = (input_ids, attention_mask, position_ids, segment_ids)
        flat = [None if x is None else x.reshape(-1, x.shape[-1]) for x in model_inputs]
        outputs, mask = self.model(*flat, rngs=rngs, **kwargs), flat[1]  # type: ignore[arg-type]  # input_ids is not None
        x = outputs.last_hidden_state
        if self.pooling == "cls" and mask is not None:
            # Select the first token that is not padding, because rows may be padded on the left.
            x = jnp.take_along_axis(x, mask.argmax(-1)[:, None, None], 1)
        logits = self.classify(self.pool(x, mask), rngs).reshape(input_ids.shape[:2])
        return out.FlaxMultipleChoiceModelOutput(logits, outputs.hidden_states, outputs.attentions)


class FlaxModernBertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the ModernBERT models: configuration, checkpoint names and call signature.

    `input_ids`, `attention_mask` and `position_ids` are `(batch, length)`, or `(batch, choices,
    length)` for multiple choice. For packed rows, `segment_ids`, `(batch, length)`, is the document
    number of each token, and 0 for padding.
    """

    config_class = ModernBertConfig
    base_model_prefix = "model"
    weight_aliases = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`."""
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
            extra=extra,
        )


class FlaxModernBertModel(FlaxModernBertPreTrainedModel):
    """ModernBERT without a head. Returns hidden states."""

    module_class = ModernBert


class FlaxModernBertForMaskedLM(FlaxModernBertPreTrainedModel):
    """ModernBERT with a language modeling head."""

    module_class = MaskedLM


class FlaxModernBertForSequenceClassification(FlaxModernBertPreTrainedModel):
    """ModernBERT for sequence classification."""

    module_class = SequenceClassification


class FlaxModernBertForTokenClassification(FlaxModernBertPreTrainedModel):
    """ModernBERT for token classification."""

    module_class = TokenClassification


class FlaxModernBertForQuestionAnswering(FlaxModernBertPreTrainedModel):
    """ModernBERT for extractive question answering."""

    module_class = QuestionAnswering


class FlaxModernBertForMultipleChoice(FlaxModernBertPreTrainedModel):
    """ModernBERT for multiple choice."""

    module_class = MultipleChoice
