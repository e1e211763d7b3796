"""ModernBERT (Warner et al., 2024) on Flax NNX; attribute names are those of the checkpoint.

Norms before each block and none before the first attention, fused projections, rotary positions of
one base for layers that see all and another for those that see a window.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ModernBertConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out

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
    config: ModernBertConfig,
    features_in: int,
    features_out: int,
    rngs: nnx.Rngs,
    bias: bool,
    std: float | None = None,
) -> nn.Linear:
    """A Linear, drawn from a truncated normal distribution.

    Without ``std`` of that of what adds to the stream of layers, which is narrower in deep models.
    """
    std = std or config.initializer_range * (2 * config.num_hidden_layers) ** -0.5
    return nn.Linear(features_in, features_out, truncated_normal(config, std), rngs, use_bias=bias)


def truncated_normal(config: ModernBertConfig, std: float) -> jax.nn.initializers.Initializer:
    """A normal distribution that is cut where the configuration says, in standard deviations."""
    cut = config.initializer_cutoff_factor or 3.0
    return jax.nn.initializers.truncated_normal(std, lower=-cut, upper=cut)


def norm(config: ModernBertConfig) -> nn.LayerNorm:
    """A LayerNorm over the hidden size, most often without a bias."""
    return nn.LayerNorm(config.hidden_size, config.norm_eps, use_bias=config.norm_bias)


class Attention(nnx.Module):
    """Attention whose queries, keys and values are one product."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.rate = config.num_attention_heads, config.attention_dropout
        self.Wqkv = linear(config, width, 3 * width, rngs, bias, config.initializer_range)
        self.Wo = linear(config, width, width, rngs, bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def __call__(self, x, angles, mask, rngs, return_weights=False):
        # Split before heads are apart: devices that share the product keep their part of each.
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(self.Wqkv(x), 3, -1)
        )
        mixed, weights = nn.attend(
            nn.rotate(query, angles),
            nn.rotate(key, angles),
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.out_drop(self.Wo(mixed.reshape(x.shape)), rngs), weights


class MLP(nnx.Module):
    """The gated feed-forward block (Shazeer, 2020): the first half is activated."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.Wi = linear(config, width, 2 * inner, rngs, bias, config.initializer_range)
        self.Wo = linear(config, inner, width, rngs, bias)
        self.act = nn.activation(config.hidden_activation)
        self.drop = nn.Dropout(config.mlp_dropout)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        h, gate = jnp.split(self.Wi(x), 2, -1)
        return self.Wo(self.drop(self.act(h) * gate, rngs))


class Layer(nnx.Module):
    """Attention and feed-forward, a norm before each; the embeddings are normed for the first."""

    attention_class: ClassVar[Any] = Attention

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs, number: int):
        self.kind = config.layer_types[number]
        self.attn_norm = norm(config) if number else nnx.data(None)
        self.attn, self.mlp = self.attention_class(config, rngs), MLP(config, rngs)
        self.mlp_norm = norm(config)

    def __call__(self, x, angles, masks, *, rngs, return_weights=False):
        h = x if self.attn_norm is None else self.attn_norm(x)
        mixed, weights = self.attn(h, angles[self.kind], masks[self.kind], rngs, return_weights)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), rngs), weights


class Embeddings(nnx.Module):
    """Words, normed."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        init = truncated_normal(config, config.initializer_range)
        self.tok_embeddings = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.norm = norm(config)
        self.drop = nn.Dropout(config.embedding_dropout)

    def __call__(self, input_ids: jax.Array, rngs: Keys | None) -> jax.Array:
        return self.drop(self.norm(self.tok_embeddings(input_ids)), rngs)


class ModernBert(nnx.Module):
    """The encoder without a head."""

    layer: ClassVar[Any] = Layer
    output: ClassVar[Any] = out.FlaxBaseModelOutput

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        kinds, count = config.layer_types, config.num_hidden_layers
        if len(kinds) < count or not set(kinds) <= {FULL, SLIDING}:
            raise UsageError(
                f"layer_types={kinds} of the configuration: give '{FULL}' or '{SLIDING}' for each "
                f"of its {count} layers"
            )
        width = config.hidden_size // config.num_attention_heads
        self.rotary = {kind: nn.Rotary(config, width, kind) for kind in (FULL, SLIDING)}
        self.windows = {FULL: None, SLIDING: self.window(config)}
        self.embeddings = Embeddings(config, rngs)
        self.layers = nn.Layers([self.layer(config, rngs, number) for number in range(count)])
        self.final_norm = norm(config)

    def window(self, config: ModernBertConfig) -> tuple[int, int]:
        """Return how many tokens are seen to each side."""
        return config.sliding_window, config.sliding_window

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None:
            whole = jnp.arange(input_ids.shape[1])[None]
            position_ids = whole if segment_ids is None else nn.positions_in_segments(segment_ids)
        masks = {
            kind: nn.visible(attention_mask, segment_ids, window=window)
            for kind, window in self.windows.items()
        }
        angles = {kind: turn(position_ids) for kind, turn in self.rotary.items()}
        x, weights, inputs = nn.run_layers(
            self.layers,
            self.embeddings(input_ids, rngs),
            angles,
            masks,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.final_norm(x)
        return self.output(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class PredictionHead(nnx.Module):
    """What every head begins with: a layer, an activation, a norm."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.dense = linear(config, width, width, rngs, config.classifier_bias)
        self.act, self.norm = nn.activation(config.classifier_activation), norm(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.act(self.dense(x)))


class DecoderBias(nnx.Module):
    """The bias of a head that is the table of words."""

    def __init__(self, config: ModernBertConfig):
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))


class VocabularyProjection(nnx.Module):
    """Logits over the vocabulary, by the table of words or a layer of their own.

    A subclass has ``model`` before it calls ``add_decoder``.
    """

    model: Any

    def add_decoder(self, config: ModernBertConfig, rngs: nnx.Rngs) -> None:
        """Make what is not the table's."""
        self.tied, biased = config.tie_word_embeddings, config.decoder_bias
        self.decoder: Any = nnx.data(None)
        if not self.tied:
            self.decoder = linear(config, config.hidden_size, config.vocab_size, rngs, biased)
        elif biased:
            self.decoder = DecoderBias(config)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map (..., hidden_size) to (..., vocab_size)."""
        if not self.tied:
            return self.decoder(x)
        logits = self.model.embeddings.tok_embeddings.attend(x)
        return logits if self.decoder is None else nn.add_bias(logits, self.decoder.bias[...])


class MaskedLM(VocabularyProjection):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        self.model, self.head = ModernBert(config, rngs), PredictionHead(config, rngs)
        self.add_decoder(config, rngs)

    def __call__(self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any):
        encoded = self.model(*args, **kwargs)
        x = self.head(nn.gather_positions(encoded.last_hidden_state, masked_positions))
        return out.FlaxMaskedLMOutput(self.logits(x), encoded.hidden_states, encoded.attentions)


class Classifier(nnx.Module):
    """The encoder, what every head begins with, and ``labels`` numbers of it."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs, labels: int | None = None):
        width, labels = config.hidden_size, labels or config.num_labels
        self.model, self.head = ModernBert(config, rngs), PredictionHead(config, rngs)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = linear(config, width, labels, rngs, bias=True, std=width**-0.5)
        self.pooling = config.classifier_pooling

    def classify(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Return the numbers of vectors (..., hidden_size)."""
        return self.classifier(self.drop(self.head(x), rngs))

    def pool(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Return the vector of each sequence, its first token or the mean of all that are real."""
        if self.pooling == "cls":
            return x[:, 0]
        weights = jnp.ones(x.shape[:2]) if mask is None else mask
        weights = (weights / weights.sum(1, keepdims=True)).astype(x.dtype)
        return (x * weights[..., None]).sum(1)


class SequenceClassification(Classifier):
    """A label (or a number) for the whole sequence."""

    def __call__(self, input_ids, attention_mask=None, *args: Any, rngs=None, **kwargs: Any):
        encoded = self.model(input_ids, attention_mask, *args, rngs=rngs, **kwargs)
        logits = self.classify(self.pool(encoded.last_hidden_state, attention_mask), rngs)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class TokenClassification(Classifier):
    """A label for every token."""

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.model(*args, rngs=rngs, **kwargs)
        logits = self.classify(encoded.last_hidden_state, rngs)
        return out.FlaxTokenClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class QuestionAnswering(Classifier):
    """The first and the last token of the answer."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, labels=2)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.model(*args, rngs=rngs, **kwargs)
        start, end = jnp.moveaxis(self.classify(encoded.last_hidden_state, rngs), -1, 0)
        return out.FlaxQuestionAnsweringModelOutput(
            start, end, encoded.hidden_states, encoded.attentions
        )


class MultipleChoice(Classifier):
    """One of several continuations: inputs are (batch, choices, length)."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, labels=1)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        **kwargs: Any,
    ):
        given = (input_ids, attention_mask, position_ids, segment_ids)
        flat = [None if x is None else x.reshape(-1, x.shape[-1]) for x in given]
        encoded, mask = self.model(*flat, rngs=rngs, **kwargs), flat[1]
        x = encoded.last_hidden_state
        if self.pooling == "cls" and mask is not None:
            # The first token that is real: rows may be padded on the left.
            x = jnp.take_along_axis(x, mask.argmax(-1)[:, None, None], 1)
        logits = self.classify(self.pool(x, mask), rngs).reshape(input_ids.shape[:2])
        return out.FlaxMultipleChoiceModelOutput(logits, encoded.hidden_states, encoded.attentions)


class FlaxModernBertPreTrainedModel(FlaxPreTrainedModel):
    """Base of the ModernBERT classes: configuration, checkpoint names and the call.

    ``input_ids``, ``attention_mask`` and ``position_ids`` are (batch, length), or (batch, choices,
    length) for multiple choice. ``segment_ids`` (batch, length) numbers the documents of packed
    rows, 0 being padding.
    """

    config_class = ModernBertConfig
    base_model_prefix = "model"
    weight_aliases = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng: jax.Array | Keys | None = None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )


class FlaxModernBertModel(FlaxModernBertPreTrainedModel):
    """ModernBERT without a head: hidden states."""

    module_class = ModernBert


class FlaxModernBertForMaskedLM(FlaxModernBertPreTrainedModel):
    """ModernBERT with its language-modelling head."""

    module_class = MaskedLM


class FlaxModernBertForSequenceClassification(FlaxModernBertPreTrainedModel):
    """ModernBERT with a classifier on the sequence."""

    module_class = SequenceClassification


class FlaxModernBertForTokenClassification(FlaxModernBertPreTrainedModel):
    """ModernBERT with a classifier on every token."""

    module_class = TokenClassification


class FlaxModernBertForQuestionAnswering(FlaxModernBertPreTrainedModel):
    """ModernBERT that marks the span of an answer."""

    module_class = QuestionAnswering


class FlaxModernBertForMultipleChoice(FlaxModernBertPreTrainedModel):
    """ModernBERT that scores continuations."""

    module_class = MultipleChoice
