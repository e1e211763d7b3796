"""ERNIE (Sun et al., 2019): BERT pretrained by masking whole phrases and entities.

Since ERNIE 2, the model can have embeddings of the pretraining task.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import ErnieConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.sharding import RULES as BERT_RULES

RULES = [(r"task_type_embeddings/embedding$", "table"), *BERT_RULES]


class Embeddings(encoder.Embeddings):
    """Sum of word, position, token type and task type embeddings, followed by a norm and dropout.

    Task type embeddings exist only if `config.use_task_id` is set.
    """

    def __init__(self, config: ErnieConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        sizes = config.task_type_vocab_size, config.hidden_size
        self.task_type_embeddings = (
            nn.Embed(*sizes, nn.normal(config.initializer_range), rngs)
            if config.use_task_id
            else nnx.data(None)
        )

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
        task_type_ids: jax.Array | None = None,  # (batch, length)
    ) -> jax.Array:
        if self.task_type_embeddings is None:
            return super().__call__(input_ids, token_type_ids, position_ids, rngs)
        task_types = jnp.zeros_like(input_ids) if task_type_ids is None else task_type_ids
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(position_ids) + self.task_type_embeddings(task_types)
        return self.dropout(self.LayerNorm(x), rngs)  # type: ignore[misc]  # ERNIE has a norm


class ErnieModule(encoder.BertModule):
    """ERNIE encoder without a head. It is a decoder if `config.is_decoder` is set."""

    submodule_classes = (Embeddings, encoder.Encoder)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        encoder_hidden_states: jax.Array | None = None,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, source_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        task_type_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        positions = self.positions(input_ids, segment_ids) if position_ids is None else position_ids
        return self.run_encoder(
            self.embeddings(input_ids, token_types, positions, rngs, task_type_ids),
            attention_mask,
            head_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class ErnieMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in ERNIE checkpoints."""

    prefix = "ernie"
    module = ErnieModule


class PreTraining(ErnieMixin, bert.PreTraining):
    """Masked language modeling and next sentence prediction."""


class MaskedLM(ErnieMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(ErnieMixin, bert.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class NextSentencePrediction(ErnieMixin, bert.NextSentencePrediction):
    """Encoder with a head for next sentence prediction."""


class SequenceClassification(ErnieMixin, bert.SequenceClassification):
    """Sequence classification or regression."""


class MultipleChoice(ErnieMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""

    token_inputs = (*bert.MultipleChoice.token_inputs, "task_type_ids")


class TokenClassification(ErnieMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(ErnieMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxErniePreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base class of the ERNIE models.

    In addition to the inputs of BERT, the models accept `task_type_ids`, `(batch, length)`, which
    contains the number of the pretraining task of each token, by default 0.
    """

    config_class = ErnieConfig
    base_model_prefix = "ernie"
    weight_aliases = {
        "cls.predictions.decoder.weight": "ernie.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


class FlaxErnieModel(FlaxErniePreTrainedModel):
    """ERNIE without a head. Returns hidden states and the pooled first token."""

    module_class = ErnieModule


class FlaxErnieForPreTraining(FlaxErniePreTrainedModel):
    """ERNIE with masked language modeling and next sentence prediction heads."""

    module_class = PreTraining


class FlaxErnieForMaskedLM(FlaxErniePreTrainedModel):
    """ERNIE with a masked language modeling head."""

    module_class = MaskedLM


class FlaxErnieForCausalLM(CausalGeneration, FlaxErniePreTrainedModel):
    """ERNIE as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxErnieForNextSentencePrediction(FlaxErniePreTrainedModel):
    """ERNIE with a next sentence prediction head."""

    module_class = NextSentencePrediction


class FlaxErnieForSequenceClassification(FlaxErniePreTrainedModel):
    """ERNIE for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxErnieForMultipleChoice(FlaxErniePreTrainedModel):
    """ERNIE for multiple choice."""

    module_class = MultipleChoice


class FlaxErnieForTokenClassification(FlaxErniePreTrainedModel):
    """ERNIE for token classification."""

    module_class = TokenClassification


class FlaxErnieForQuestionAnswering(FlaxErniePreTrainedModel):
    """ERNIE for extractive question answering."""

    module_class = QuestionAnswering
