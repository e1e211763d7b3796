"""RoBERTa (Liu et al., 2019): BERT with positions after the padding id and two heads of its own."""

from __future__ import annotations

from typing import Any, ClassVar

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


class RobertaMixin:
    """RoBERTa's encoder, and its head over the vocabulary, under their checkpoint names."""

    prefix, module = "roberta", RobertaModule

    def add_head(self, config: RobertaConfig, rngs: nnx.Rngs) -> None:
        """Make the head over the vocabulary."""
        self.lm_head = LMHead(config, rngs)

    @property
    def vocabulary_head(self) -> LMHead:
        """The head over the vocabulary."""
        return self.lm_head


class LMHead(bert.VocabularyHead):
    """Dense, GELU, norm, then logits over the vocabulary (tied to the word embeddings, or not)."""

    def add_transform(self, config: RobertaConfig, rngs: nnx.Rngs) -> None:
        """Make what comes before the vocabulary."""
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Map hidden states to what the vocabulary is multiplied with."""
        return self.layer_norm(nn.activation("gelu")(self.dense(x)))


class MaskedLM(RobertaMixin, bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class CausalLM(RobertaMixin, bert.CausalLM):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""


class ClassificationHead(nnx.Module):
    """The first token through a tanh layer (siblings have other ones), then the labels."""

    activation: ClassVar[str | None] = "tanh"  # None: that of the configuration

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.out_proj = dense(config, config.hidden_size, config.num_labels, rngs)
        self.act = nn.activation(self.activation or config.hidden_act)

    def __call__(self, x: jax.Array, dropout: nn.Dropout, rngs: Keys | None) -> jax.Array:
        x = self.act(self.dense(dropout(x[:, 0], rngs)))
        return self.out_proj(dropout(x, rngs))


class SequenceClassification(RobertaMixin, bert.ModelWithHead):
    """A label (or a number) for the whole sequence."""

    head: ClassVar[type[ClassificationHead]] = ClassificationHead

    def __init__(self, config: RobertaConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = self.head(config, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(encoded.last_hidden_state, self.dropout, rngs)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class TokenClassification(RobertaMixin, bert.TokenClassification):
    """A label for every token."""


class QuestionAnswering(RobertaMixin, bert.QuestionAnswering):
    """The first and the last token of the answer."""


class MultipleChoice(RobertaMixin, bert.MultipleChoice):
    """One of several continuations."""


class FlaxRobertaPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base of the RoBERTa classes."""

    config_class = RobertaConfig
    base_model_prefix = "roberta"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    @property
    def first_position(self) -> int:
        """The place of the first token in the table."""
        return self.config.pad_token_id + 1

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
