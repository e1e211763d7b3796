"""MPNet (Song et al., 2020) on Flax NNX. Module attributes are named as in checkpoints.

MPNet is BERT without token types. All layers add the same relative position bias to the attention
scores. Permuted language modeling, the pretraining method of MPNet, is not implemented.
"""

from __future__ import annotations

import jax
from flax import nnx
from transformers import MPNetConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.bert.sharding import RULES as BERT_RULES
from hfseq_plugins.roberta import modeling as roberta

#: As in PyTorch's class, which ignores `pad_token_id` of the configuration.
PAD_TOKEN_ID = 1
#: The number of buckets and the maximum distance of relative positions. As in PyTorch's class, they
#: do not depend on `relative_attention_num_buckets` of the configuration.
BUCKETS, MAX_DISTANCE = 32, 128

RULES = [
    (r"relative_attention_bias/embedding$", "heads"),
    (r"attn/(q|k|v)/kernel$", "column"),
    (r"attn/(q|k|v)/bias$", "column_bias"),
    (r"attn/o/kernel$", "row"),
    (r"attn/o/bias$", "vector"),
    *BERT_RULES,
]


class Embeddings(nnx.Module):
    """Sum of word and position embeddings, followed by a norm and dropout."""

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.position_embeddings = nn.Embed(config.max_position_embeddings, width, init, rngs)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x), rngs)


class SelfAttention(nnx.Module):
    """Multi-head self-attention with a relative position bias, and its output projection."""

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.q, self.k, self.v, self.o = (dense(config, width, width, rngs) for _ in range(4))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        bias: jax.Array,  # (1, heads, length, length)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1) for part in (self.q, self.k, self.v)
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.o(attn_output.reshape(x.shape)), weights


class Attention(nnx.Module):
    """Attention, dropout, residual connection and norm."""

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs):
        self.attn = SelfAttention(config, rngs)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        bias: jax.Array,  # (1, heads, length, length)
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attn(x, bias, mask, rngs, return_weights)
        return self.LayerNorm(x + self.dropout(attn_output, rngs)), weights


class Layer(nnx.Module):
    """Post-norm layer: attention and feed-forward."""

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.intermediate = encoder.Intermediate(config, rngs)
        self.output = encoder.Output(config, config.intermediate_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        bias: jax.Array,  # (1, heads, length, length)
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        x, weights = self.attention(x, bias, mask, rngs, return_weights)
        return self.output(self.intermediate(x), x, rngs), weights


class Encoder(encoder.Encoder):
    """Stack of layers, and the relative position bias that they share."""

    layer_class = Layer

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs):
        if config.relative_attention_num_buckets < BUCKETS:
            raise UsageError(
                f"relative_attention_num_buckets={config.relative_attention_num_buckets} in the "
                f"configuration is too small: MPNet always uses {BUCKETS} buckets, so set at least "
                f"{BUCKETS}"
            )
        super().__init__(config, rngs)
        self.relative_attention_bias = nn.Embed(
            config.relative_attention_num_buckets,
            config.num_attention_heads,
            nn.normal(config.initializer_range),
            rngs,
        )

    def position_bias(self, length: int) -> jax.Array:
        """Returns the bias of the attention scores, `(1, heads, length, length)`.

        It is also correct for packed rows, because it only depends on the distance between tokens.
        """
        return nn.relative_position_bias(
            self.relative_attention_bias.embedding[:BUCKETS],
            length,
            length,
            bidirectional=True,
            max_distance=MAX_DISTANCE,
        )


class MPNetModule(nnx.Module):
    """MPNet encoder without a head. The position ID of the first token is 2."""

    def __init__(self, config: MPNetConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        self.pooler = encoder.Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

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
            position_ids = roberta.default_positions(input_ids, segment_ids, PAD_TOKEN_ID)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(input_ids, position_ids, rngs),
            self.encoder.position_bias(input_ids.shape[1]),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class MPNetMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in MPNet checkpoints."""

    prefix = "mpnet"
    module = MPNetModule
    classifier_dropout_field = "hidden_dropout_prob"


class MaskedLM(MPNetMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class SequenceClassification(MPNetMixin, roberta.SequenceClassification):
    """Sequence classification or regression."""


class MultipleChoice(MPNetMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""


class TokenClassification(MPNetMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(MPNetMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxMPNetPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the MPNet models: configuration and checkpoint names.

    `input_ids`, `attention_mask` and `position_ids` are `(batch, length)`, or `(batch, choices,
    length)` for multiple choice. If rows contain several packed documents, `segment_ids`,
    `(batch, length)`, contains the document number of each token, and 0 for padding.
    """

    config_class = MPNetConfig
    base_model_prefix = "mpnet"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def max_length(self) -> int:
        """Returns the maximum sequence length. Tokens do not use the first two position IDs."""
        return self.config.max_position_embeddings - PAD_TOKEN_ID - 1


class FlaxMPNetModel(FlaxMPNetPreTrainedModel):
    """MPNet without a head. Returns hidden states and the pooled first token."""

    module_class = MPNetModule


class FlaxMPNetForMaskedLM(FlaxMPNetPreTrainedModel):
    """MPNet with a masked language modeling head."""

    module_class = MaskedLM


class FlaxMPNetForSequenceClassification(FlaxMPNetPreTrainedModel):
    """MPNet for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxMPNetForMultipleChoice(FlaxMPNetPreTrainedModel):
    """MPNet for multiple choice."""

    module_class = MultipleChoice


class FlaxMPNetForTokenClassification(FlaxMPNetPreTrainedModel):
    """MPNet for token classification."""

    module_class = TokenClassification


class FlaxMPNetForQuestionAnswering(FlaxMPNetPreTrainedModel):
    """MPNet for extractive question answering."""

    module_class = QuestionAnswering
