"""The classes of BERT: each head as a module, then its public class.

A sibling (RoBERTa, MegatronBERT) names its own encoder, and its own head over the vocabulary, in a
subclass and reuses the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import BertConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert.encoder import BertModule, dense, embedding_size


class ModelWithHead(nnx.Module):
    """An encoder under its checkpoint name (``prefix``), with room for a head beside it."""

    prefix: ClassVar[str] = "bert"
    module: ClassVar[type[nnx.Module]] = BertModule
    use_pooler: ClassVar[bool] = False
    #: The configuration's name for the rate of dropout before a classifier.
    classifier_dropout_field: ClassVar[str] = "classifier_dropout"

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        setattr(self, self.prefix, self.module(config, rngs, add_pooling_layer=self.use_pooler))
        rate = getattr(config, self.classifier_dropout_field, None)
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)

    def encode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Run the encoder."""
        return getattr(self, self.prefix)(*args, **kwargs)

    @property
    def word_embeddings(self) -> nn.Embed:
        """The table that a tied head shares."""
        return getattr(self, self.prefix).embeddings.word_embeddings


def untied_decoder(config: BertConfig, rngs: nnx.Rngs) -> nn.Linear | None:
    """The head's own projection, or nothing where it is tied to the word embeddings."""
    if config.tie_word_embeddings:
        return nnx.data(None)
    init = nn.normal(config.initializer_range)
    return nn.Linear(embedding_size(config), config.vocab_size, init, rngs, use_bias=False)


class Transform(nnx.Module):
    """Dense, activation and norm before the vocabulary."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        width = embedding_size(config)
        self.dense = dense(config, config.hidden_size, width, rngs)
        self.act = nn.activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.LayerNorm(self.act(self.dense(x)))


class VocabularyHead(nnx.Module):
    """Logits over the vocabulary, with the word embeddings where the head is tied to them."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.add_transform(config, rngs)
        self.decoder = untied_decoder(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(self, x: jax.Array, embeddings: nn.Embed) -> jax.Array:
        x = self.transform_states(x)
        logits = embeddings.attend(x) if self.decoder is None else self.decoder(x)
        return nn.add_bias(logits, self.bias[...])


class Predictions(VocabularyHead):
    """BERT's head over the vocabulary."""

    def add_transform(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        """Make what comes before the vocabulary."""
        self.transform = Transform(config, rngs)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Map hidden states to what the vocabulary is multiplied with."""
        return self.transform(x)


class PreTrainingHeads(nnx.Module):
    """``cls``: the masked-LM head and, where asked for, the next-sentence head."""

    def __init__(
        self, config: BertConfig, rngs: nnx.Rngs, predict: bool = True, next_sentence: bool = False
    ):
        self.predictions = Predictions(config, rngs) if predict else nnx.data(None)
        self.seq_relationship = (
            dense(config, config.hidden_size, 2, rngs) if next_sentence else nnx.data(None)
        )


class LanguageModel(ModelWithHead):
    """An encoder with a head over the vocabulary."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.add_head(config, rngs)

    def add_head(self, config: BertConfig, rngs: nnx.Rngs) -> None:
        """Make the head under its checkpoint name."""
        self.cls = PreTrainingHeads(config, rngs)

    @property
    def vocabulary_head(self) -> VocabularyHead:
        """The head over the vocabulary."""
        return self.cls.predictions


class MaskedLM(LanguageModel):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    def __call__(self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        x = nn.gather_positions(encoded.last_hidden_state, masked_positions)
        logits = self.vocabulary_head(x, self.word_embeddings)
        return out.FlaxMaskedLMOutput(logits, encoded.hidden_states, encoded.attentions)


class CausalLM(LanguageModel):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=self.vocabulary_head(encoded.last_hidden_state, self.word_embeddings),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            cross_attentions=encoded.cross_attentions,
        )


class PreTraining(ModelWithHead):
    """Masked language modelling and next-sentence prediction together."""

    use_pooler = True

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.cls = PreTrainingHeads(config, rngs, next_sentence=True)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        return out.FlaxBertForPreTrainingOutput(
            prediction_logits=self.cls.predictions(encoded.last_hidden_state, self.word_embeddings),
            seq_relationship_logits=self.cls.seq_relationship(encoded.pooler_output),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


class NextSentencePrediction(ModelWithHead):
    """Is the second sentence the next one?"""

    use_pooler = True

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.cls = PreTrainingHeads(config, rngs, predict=False, next_sentence=True)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        logits = self.cls.seq_relationship(encoded.pooler_output)
        return out.FlaxNextSentencePredictorOutput(
            logits, encoded.hidden_states, encoded.attentions
        )


class SequenceClassification(ModelWithHead):
    """A label (or a number) for the whole sequence."""

    use_pooler = True

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(encoded.pooler_output, rngs))
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class MultipleChoice(ModelWithHead):
    """One of several continuations: inputs are (batch, choices, length)."""

    use_pooler = True

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, 1, rngs)

    def __call__(self, input_ids: jax.Array, rngs: Keys | None = None, **kwargs: Any):
        choices = input_ids.shape[1]
        for name in {"attention_mask", "token_type_ids", "position_ids"} & kwargs.keys():
            kwargs[name] = kwargs[name].reshape(-1, input_ids.shape[-1])
        encoded = self.encode(input_ids.reshape(-1, input_ids.shape[-1]), rngs=rngs, **kwargs)
        logits = self.classifier(self.pool(encoded, rngs)).reshape(-1, choices)
        return out.FlaxMultipleChoiceModelOutput(logits, encoded.hidden_states, encoded.attentions)

    def pool(self, encoded: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Return a vector a choice, which is scored."""
        return self.dropout(encoded.pooler_output, rngs)


class TokenClassification(ModelWithHead):
    """A label for every token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(encoded.last_hidden_state, rngs))
        return out.FlaxTokenClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class QuestionAnswering(ModelWithHead):
    """The first and the last token of the answer."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(self, *args: Any, **kwargs: Any):
        encoded = self.encode(*args, **kwargs)
        logits = self.qa_outputs(encoded.last_hidden_state)
        return out.FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], encoded.hidden_states, encoded.attentions
        )


class FlaxBertPreTrainedModel(FlaxPreTrainedModel):
    """Base of the BERT classes: configuration, checkpoint names and the call of Transformers 4."""

    config_class = BertConfig
    base_model_prefix = "bert"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __call__(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None,
        head_mask=None, encoder_hidden_states=None, encoder_attention_mask=None, params=None,
        dropout_rng=None, train=False, output_attentions=None, output_hidden_states=None,
        return_dict=None, past_key_values=None, *, extra=None, **inputs,
    ):  # fmt: skip
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` and the masks are (batch, length), or (batch, choices, length) for multiple
        choice. ``segment_ids`` (batch, length) numbers the documents of packed rows, 0 being
        padding.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "head_mask": head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
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
            past_key_values,
            extra,
        )


class FlaxBertModel(FlaxBertPreTrainedModel):
    """BERT without a head: hidden states and the pooled first token."""

    module_class = BertModule


class FlaxBertForPreTraining(FlaxBertPreTrainedModel):
    """BERT with the masked-LM and the next-sentence head."""

    module_class = PreTraining


class FlaxBertForMaskedLM(FlaxBertPreTrainedModel):
    """BERT with the masked-LM head."""

    module_class = MaskedLM


class FlaxBertForCausalLM(CausalGeneration, FlaxBertPreTrainedModel):
    """BERT as a decoder; set ``is_decoder=True`` in the configuration."""

    module_class = CausalLM

    @classmethod
    def torch_class_name(cls) -> str:
        """PyTorch calls it ``BertLMHeadModel``."""
        return "BertLMHeadModel"


class FlaxBertForNextSentencePrediction(FlaxBertPreTrainedModel):
    """BERT with the next-sentence head."""

    module_class = NextSentencePrediction


class FlaxBertForSequenceClassification(FlaxBertPreTrainedModel):
    """BERT with a classifier on the pooled first token."""

    module_class = SequenceClassification


class FlaxBertForMultipleChoice(FlaxBertPreTrainedModel):
    """BERT that scores continuations."""

    module_class = MultipleChoice


class FlaxBertForTokenClassification(FlaxBertPreTrainedModel):
    """BERT with a classifier on every token."""

    module_class = TokenClassification


class FlaxBertForQuestionAnswering(FlaxBertPreTrainedModel):
    """BERT that marks the span of an answer."""

    module_class = QuestionAnswering
