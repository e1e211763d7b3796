"""RoBERTa (Liu et al., 2019): BERT with positions after the padding id and two heads of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import RobertaConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, dense


class RobertaModule(BertModule):
    """BERT's encoder, with positions counted from ``pad_token_id + 1``."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        super().__init__(config, rngs, add_pooling_layer)
        self.pad_token_id = config.pad_token_id

    def positions(self, input_ids: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Count the tokens that are not padding, in every document of a packed row."""
        if segment_ids is None:
            return nn.positions_after_padding(input_ids, self.pad_token_id)
        counted = nn.positions_in_segments(segment_ids) + self.pad_token_id + 1
        return jnp.where(segment_ids > 0, counted, self.pad_token_id)


class Headed(bert.Headed):
    """An encoder under the name ``roberta``."""

    prefix, module = "roberta", RobertaModule


class LMHead(nnx.Module):
    """Dense, GELU, norm, then logits over the vocabulary (tied to the word embeddings, or not)."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.decoder = bert.untied_decoder(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(self, x: jax.Array, embeddings: nn.Embed) -> jax.Array:
        x = self.layer_norm(nn.activation("gelu")(self.dense(x)))
        logits = embeddings.attend(x) if self.decoder is None else self.decoder(x)
        return nn.add_bias(logits, self.bias[...])


class MaskedLM(Headed):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.lm_head = LMHead(config, rngs)

    def __call__(self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        x = nn.gather_positions(encoded.last_hidden_state, masked_positions)
        logits = self.lm_head(x, self.word_embeddings)
        return out.FlaxMaskedLMOutput(logits, encoded.hidden_states, encoded.attentions)


class CausalLM(Headed):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.lm_head = LMHead(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=self.lm_head(encoded.last_hidden_state, self.word_embeddings),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            cross_attentions=encoded.cross_attentions,
        )


class ClassificationHead(nnx.Module):
    """The first token through a tanh layer, then the labels."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.out_proj = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(self, x: jax.Array, dropout: nn.Dropout, rngs: Keys | None) -> jax.Array:
        x = jnp.tanh(self.dense(dropout(x[:, 0], rngs)))
        return self.out_proj(dropout(x, rngs))


class SequenceClassification(Headed):
    """A label (or a number) for the whole sequence."""

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = ClassificationHead(config, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(encoded.last_hidden_state, self.dropout, rngs)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class TokenClassification(bert.TokenClassification):
    """A label for every token."""

    prefix, module = "roberta", RobertaModule


class QuestionAnswering(bert.QuestionAnswering):
    """The first and the last token of the answer."""

    prefix, module = "roberta", RobertaModule


class MultipleChoice(bert.MultipleChoice):
    """One of several continuations."""

    prefix, module = "roberta", RobertaModule


class FlaxRobertaPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base of the RoBERTa classes."""

    config_class = RobertaConfig
    base_model_prefix = "roberta"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def max_length(self) -> int:
        """The position table holds ``pad_token_id + 1`` places that no token uses."""
        return self.config.max_position_embeddings - self.config.pad_token_id - 1


class FlaxRobertaModel(FlaxRobertaPreTrainedModel):
    """RoBERTa without a head: hidden states and the pooled first token."""

    module_class = RobertaModule


class FlaxRobertaForMaskedLM(FlaxRobertaPreTrainedModel):
    """RoBERTa with the masked-LM head."""

    module_class = MaskedLM


class FlaxRobertaForCausalLM(CausalGeneration, FlaxRobertaPreTrainedModel):
    """RoBERTa as a decoder; set ``is_decoder=True`` in the configuration."""

    module_class = CausalLM


class FlaxRobertaForSequenceClassification(FlaxRobertaPreTrainedModel):
    """RoBERTa with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxRobertaForTokenClassification(FlaxRobertaPreTrainedModel):
    """RoBERTa with a classifier on every token."""

    module_class = TokenClassification


class FlaxRobertaForQuestionAnswering(FlaxRobertaPreTrainedModel):
    """RoBERTa that marks the span of an answer."""

    module_class = QuestionAnswering


class FlaxRobertaForMultipleChoice(FlaxRobertaPreTrainedModel):
    """RoBERTa that scores continuations."""

    module_class = MultipleChoice
