"""ELECTRA (Clark et al., 2020): BERT without a pooler, with tables that may be narrower.

The discriminator tells of each token whether it was replaced; the generator is a masked language
model. Attribute names are the checkpoint's.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from transformers import ElectraConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, dense, embedding_size
from hfseq_plugins.roberta import modeling as roberta


class ElectraModule(BertModule):
    """The encoder (or decoder) without a head."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        super().__init__(config, rngs, add_pooling_layer=False)


class GeneratorPredictions(nnx.Module):
    """Dense, GELU and norm before the vocabulary."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        self.LayerNorm = nn.LayerNorm(embedding_size(config), config.layer_norm_eps)
        self.dense = dense(config, config.hidden_size, embedding_size(config), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.LayerNorm(nn.activation("gelu")(self.dense(x)))


class DiscriminatorPredictions(nnx.Module):
    """One number a token: above zero where it was replaced."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.act = nn.activation(config.hidden_act)
        self.dense_prediction = dense(config, config.hidden_size, 1, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense_prediction(self.act(self.dense(x)))[..., 0]


class ElectraMixin:
    """ELECTRA's encoder, and its head over the vocabulary, under their checkpoint names."""

    prefix, module = "electra", ElectraModule

    def add_head(self, config: ElectraConfig, rngs: nnx.Rngs) -> None:
        """Make the head over the vocabulary."""
        self.generator_predictions = GeneratorPredictions(config, rngs)
        self.generator_lm_head = dense(config, embedding_size(config), config.vocab_size, rngs)
        if config.tie_word_embeddings:
            self.generator_lm_head.kernel = nnx.data(None)

    def vocabulary_head(self, x: jax.Array, embeddings: nn.Embed) -> jax.Array:
        """Return logits over the vocabulary."""
        x, head = self.generator_predictions(x), self.generator_lm_head
        return embeddings.attend(x, head.bias[...]) if head.kernel is None else head(x)


class MaskedLM(ElectraMixin, bert.MaskedLM):
    """The generator; ``masked_positions`` (groups, k) restricts the head to them."""


class CausalLM(ElectraMixin, bert.CausalLM):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""


class PreTraining(ElectraMixin, bert.ModelWithHead):
    """The discriminator."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.discriminator_predictions = DiscriminatorPredictions(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        logits = self.discriminator_predictions(encoded.last_hidden_state)
        return out.FlaxElectraForPreTrainingOutput(
            logits, encoded.hidden_states, encoded.attentions
        )


class ClassificationHead(roberta.ClassificationHead):
    """The first token through a GELU layer, then the labels."""

    activation = "gelu"


class SequenceClassification(ElectraMixin, roberta.SequenceClassification):
    """A label (or a number) for the whole sequence."""

    head = ClassificationHead


class TokenClassification(ElectraMixin, bert.TokenClassification):
    """A label for every token."""


class QuestionAnswering(ElectraMixin, bert.QuestionAnswering):
    """The first and the last token of the answer."""


class SequenceSummary(nnx.Module):
    """The first token through a layer whose activation and dropout the configuration names."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        self.summary = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.act = nn.activation(config.summary_activation or "linear")
        self.first_dropout = nn.Dropout(getattr(config, "summary_first_dropout", None) or 0.0)
        self.last_dropout = nn.Dropout(config.summary_last_dropout or 0.0)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        x = self.summary(self.first_dropout(x[:, 0], rngs))
        return self.last_dropout(self.act(x), rngs)


class MultipleChoice(ElectraMixin, bert.MultipleChoice):
    """One of several continuations."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sequence_summary = SequenceSummary(config, rngs)

    def pool(self, encoded: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Return the summary of each choice."""
        return self.sequence_summary(encoded.last_hidden_state, rngs)


class FlaxElectraPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base of the ELECTRA classes."""

    config_class = ElectraConfig
    base_model_prefix = "electra"
    weight_aliases = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


class FlaxElectraModel(FlaxElectraPreTrainedModel):
    """ELECTRA without a head: hidden states."""

    module_class = ElectraModule


class FlaxElectraForPreTraining(FlaxElectraPreTrainedModel):
    """ELECTRA's discriminator: was this token replaced?"""

    module_class = PreTraining


class FlaxElectraForMaskedLM(FlaxElectraPreTrainedModel):
    """ELECTRA's generator, a masked language model."""

    module_class = MaskedLM


class FlaxElectraForCausalLM(CausalGeneration, FlaxElectraPreTrainedModel):
    """ELECTRA as a decoder; set ``is_decoder=True`` in the configuration."""

    module_class = CausalLM


class FlaxElectraForSequenceClassification(FlaxElectraPreTrainedModel):
    """ELECTRA with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxElectraForTokenClassification(FlaxElectraPreTrainedModel):
    """ELECTRA with a classifier on every token."""

    module_class = TokenClassification


class FlaxElectraForQuestionAnswering(FlaxElectraPreTrainedModel):
    """ELECTRA that marks the span of an answer."""

    module_class = QuestionAnswering


class FlaxElectraForMultipleChoice(FlaxElectraPreTrainedModel):
    """ELECTRA that scores continuations."""

    module_class = MultipleChoice
