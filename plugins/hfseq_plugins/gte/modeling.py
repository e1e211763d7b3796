"""GTE (Zhang et al., 2024): BERT with rotary positions and gated feed-forward blocks.

The encoder is implemented by `hfseq_plugins.rotary_bert`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import GteConfig, PreTrainedConfig

from hfseq import nn
from hfseq.nn import Keys
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.gte.configuration import to_gte
from hfseq_plugins.modernbert.modeling import DecoderBias
from hfseq_plugins.rotary_bert import modeling as rotary
from hfseq_plugins.rotary_bert.modeling import linear


class Attention(rotary.Attention):
    """Attention, with the names of GTE."""

    projection_names = ("qkv_proj", "o_proj")


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer, 2020).

    The activation function is applied to the second half of the projection.
    """

    def __init__(self, config: GteConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.up_gate_proj = linear(config, width, 2 * inner, rngs, bias=False)
        self.down_proj = linear(config, inner, width, rngs, bias=True)
        self.act = nn.activation(config.hidden_act)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        up, gate = jnp.split(self.up_gate_proj(x), 2, -1)
        return self.down_proj(self.dropout(up * self.act(gate), rngs))


class Layer(rotary.Layer):
    """Post-norm layer: attention and gated feed-forward."""

    attention_class, mlp_class = Attention, MLP
    names = ("attention", "attn_ln", "mlp_ln")


class Gte(rotary.RotaryBert):
    """GTE encoder without a head."""

    layer_class = Layer
    stack_name, norm_name = "layer", "LayerNorm"


class GteMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in GTE checkpoints."""

    prefix = "gte"
    module = Gte


class LMHead(nnx.Module):
    """Language modeling head: projection, GELU, norm and projection to the vocabulary."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.dense = dense(config, width, width, rngs)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.tied = config.tie_word_embeddings
        self.decoder = (
            DecoderBias(config) if self.tied else dense(config, width, config.vocab_size, rngs)
        )

    def __call__(
        self,
        x: jax.Array,  # (..., hidden)
        embeddings: nn.Embed,
    ) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        x = self.norm(nn.activation("gelu")(self.dense(x)))
        if not self.tied:
            return self.decoder(x)
        return nn.add_bias(embeddings.attend(x), self.decoder.bias[...])  # type: ignore[index]  # it has a bias


class MaskedLM(GteMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head, with its name in checkpoints."""
        self.lm_head = LMHead(config, rngs)

    @property
    def vocabulary_head(self) -> LMHead:  # type: ignore[override]  # with its own bias
        """The language modeling head."""
        return self.lm_head


class SequenceClassification(GteMixin, bert.SequenceClassification):
    """Sequence classification or regression."""


class TokenClassification(GteMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class FlaxGtePreTrainedModel(rotary.FlaxRotaryBertPreTrainedModel):
    """Base class of the GTE models."""

    config_class = GteConfig
    base_model_prefix = "gte"
    weight_aliases = {"lm_head.decoder.weight": "gte.embeddings.word_embeddings.weight"}
    # Checkpoints that were published before Transformers supported GTE have the prefix `new`.
    weight_synonyms = {"new": "gte"}

    def __init__(self, config: GteConfig, *args: Any, **kwargs: Any):
        super().__init__(to_gte(config), *args, **kwargs)


class FlaxGteModel(FlaxGtePreTrainedModel):
    """GTE without a head. Returns hidden states."""

    module_class = Gte


class FlaxGteForMaskedLM(FlaxGtePreTrainedModel):
    """GTE with a masked language modeling head."""

    module_class = MaskedLM


class FlaxGteForSequenceClassification(FlaxGtePreTrainedModel):
    """GTE for sequence classification, from the pooled first token."""

    module_class = SequenceClassification


class FlaxGteForTokenClassification(FlaxGtePreTrainedModel):
    """GTE for token classification."""

    module_class = TokenClassification
