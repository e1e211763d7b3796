"""ELECTRA (Clark et al., 2020): BERT without a pooler.

The embeddings may be narrower than the hidden size. The discriminator detects replaced tokens. The
generator is a masked language model. Module attributes are named as in checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from transformers import ElectraConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, dense, embedding_size
from hfseq_plugins.roberta import modeling as roberta


class ElectraModule(BertModule):
    """ELECTRA encoder without a head. It is a decoder if `config.is_decoder` is set."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        super().__init__(config, rngs, add_pooling_layer=False)


class GeneratorPredictions(nnx.Module):
    """Projection, GELU and norm before the projection to the vocabulary."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.LayerNorm = nn.LayerNorm(embedding_size(config), config.layer_norm_eps)
        self.dense = dense(config, config.hidden_size, embedding_size(config), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.LayerNorm(nn.activation("gelu")(self.dense(x)))


class DiscriminatorPredictions(nnx.Module):
    """Discriminator head: one logit per token, positive for replaced tokens."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.act = nn.activation(config.hidden_act)
        self.dense_prediction = dense(config, config.hidden_size, 1, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.dense_prediction(self.act(self.dense(x)))[..., 0]


class ElectraMixin(bert.ModelWithHead):
    """Mixin that gives the encoder and the head their names in ELECTRA checkpoints."""

    prefix = "electra"
    module = ElectraModule

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head."""
        self.generator_predictions = GeneratorPredictions(config, rngs)
        self.generator_lm_head = dense(config, embedding_size(config), config.vocab_size, rngs)
        if config.tie_word_embeddings:
            self.generator_lm_head.kernel = nnx.data(None)  # type: ignore[arg-type]  # the kernel is tied

    def vocabulary_head(self, x: jax.Array, embeddings: nn.Embed) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        x, head = self.generator_predictions(x), self.generator_lm_head
        return embeddings.attend(x, head.bias[...]) if head.kernel is None else head(x)


class MaskedLM(ElectraMixin, bert.MaskedLM):  # type: ignore[misc]  # a method instead of a property
    """ELECTRA generator: a masked language model."""


class CausalLM(ElectraMixin, bert.CausalLM):  # type: ignore[misc]  # a method instead of a property
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class PreTraining(ElectraMixin, bert.ModelWithHead):
    """ELECTRA discriminator."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.discriminator_predictions = DiscriminatorPredictions(config, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, length)`."""
        outputs = self.encode(*args, **kwargs)
        logits = self.discriminator_predictions(outputs.last_hidden_state)
        return out.FlaxElectraForPreTrainingOutput(
            logits, outputs.hidden_states, outputs.attentions
        )


class ClassificationHead(roberta.ClassificationHead):
    """Classification head on the first token, with a GELU activation."""

    activation = "gelu"


class SequenceClassification(ElectraMixin, roberta.SequenceClassification):  # type: ignore[misc]  # a method instead of a property
    """Encoder with a head for sequence classification or regression."""

    head = ClassificationHead


class TokenClassification(ElectraMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(ElectraMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class SequenceSummary(nnx.Module):
    """Summarizes each sequence by one vector.

    The vector is the hidden state of the first or last token, or the mean over tokens, with an
    optional projection. The configuration options `summary_*` are those of `SequenceSummary` in
    Transformers.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.summary_type = getattr(config, "summary_type", "last")
        if self.summary_type not in ("first", "last", "cls_index", "mean"):
            raise UsageError(
                f"summary_type='{self.summary_type}' in the configuration is not supported "
                "(supported: first, last, cls_index, mean)"
            )
        self.summary = nnx.data(None)
        if getattr(config, "summary_use_proj", False):
            self.summary = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.act = nn.activation(getattr(config, "summary_activation", None) or "linear")
        self.first_dropout, self.last_dropout = (
            nn.Dropout(getattr(config, f"summary_{place}_dropout", None) or 0.0)
            for place in ("first", "last")
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        if self.summary_type == "mean":
            x = x.mean(1)
        else:  # cls_index is the last token if the caller passes no indices, as here
            x = x[:, 0 if self.summary_type == "first" else -1]
        x = self.first_dropout(x, rngs)
        x = x if self.summary is None else self.summary(x)
        return self.last_dropout(self.act(x), rngs)


class MultipleChoice(ElectraMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sequence_summary = SequenceSummary(config, rngs)

    def pool(self, outputs: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Returns the summary of each choice, `(batch * choices, hidden)`."""
        return self.sequence_summary(outputs.last_hidden_state, rngs)


class FlaxElectraPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base class of the ELECTRA models."""

    config_class = ElectraConfig
    base_model_prefix = "electra"
    weight_aliases = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


class FlaxElectraModel(FlaxElectraPreTrainedModel):
    """ELECTRA without a head. Returns hidden states."""

    module_class = ElectraModule


class FlaxElectraForPreTraining(FlaxElectraPreTrainedModel):
    """ELECTRA discriminator, which detects replaced tokens."""

    module_class = PreTraining
    weight_aliases = {}


class FlaxElectraForMaskedLM(FlaxElectraPreTrainedModel):
    """ELECTRA generator, a masked language model."""

    module_class = MaskedLM


class FlaxElectraForCausalLM(CausalGeneration, FlaxElectraPreTrainedModel):
    """ELECTRA as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxElectraForSequenceClassification(FlaxElectraPreTrainedModel):
    """ELECTRA for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxElectraForTokenClassification(FlaxElectraPreTrainedModel):
    """ELECTRA for token classification."""

    module_class = TokenClassification


class FlaxElectraForQuestionAnswering(FlaxElectraPreTrainedModel):
    """ELECTRA for extractive question answering."""

    module_class = QuestionAnswering


class FlaxElectraForMultipleChoice(FlaxElectraPreTrainedModel):
    """ELECTRA for multiple choice."""

    module_class = MultipleChoice
