"""BERT models: one module for each head, and the public classes.

Other families (RoBERTa, MegatronBERT) derive from these classes and replace the encoder and the
language modeling head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import BertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.bert.encoder import BertModule, dense, embedding_size
from hfseq_plugins.common import num_labels


class ModelWithHead(nnx.Module):
    """An encoder to which subclasses add a head.

    Attributes:
        prefix: Name of the encoder in checkpoints, which is also its attribute name.
        module: Class of the encoder.
        use_pooler: Whether the encoder has a pooler.
        classifier_dropout_field: Name of the configuration field with the dropout rate of the head.
            `hidden_dropout_prob` applies if the field is missing or `None`.
    """

    prefix: ClassVar[str] = "bert"
    module: ClassVar[Callable[..., nnx.Module]] = BertModule
    use_pooler: ClassVar[bool] = False
    classifier_dropout_field: ClassVar[str] = "classifier_dropout"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        setattr(self, self.prefix, self.module(config, rngs, add_pooling_layer=self.use_pooler))
        dropout_rate = getattr(config, self.classifier_dropout_field, None)
        self.dropout = nn.Dropout(
            config.hidden_dropout_prob if dropout_rate is None else dropout_rate
        )

    def encode(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return getattr(self, self.prefix)(*args, **kwargs)

    @property
    def word_embeddings(self) -> nn.Embed:
        """The word embeddings, which a tied head also uses."""
        return getattr(self, self.prefix).embeddings.word_embeddings


def untied_decoder(config: PreTrainedConfig, rngs: nnx.Rngs) -> nn.Linear | None:
    """Returns the projection to the vocabulary, or `None` for a tied head."""
    if config.tie_word_embeddings:
        return nnx.data(None)
    init = nn.normal(config.initializer_range)
    return nn.Linear(embedding_size(config), config.vocab_size, init, rngs, use_bias=False)


class Transform(nnx.Module):
    """Projection, activation and norm before the projection to the vocabulary."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width = embedding_size(config)
        self.dense = dense(config, config.hidden_size, width, rngs)
        self.act = nn.activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return self.LayerNorm(self.act(self.dense(x)))


class VocabularyHead(nnx.Module):
    """Language modeling head. A tied head projects with the word embeddings.

    Subclasses implement `add_transform` and `transform_states`.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.add_transform(config, rngs)
        self.decoder = untied_decoder(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        embeddings: nn.Embed,
    ) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        x = self.transform_states(x)
        logits = embeddings.attend(x) if self.decoder is None else self.decoder(x)
        return nn.add_bias(logits, self.bias[...])

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary."""
        raise NotImplementedError

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Applies the layers before the projection to the vocabulary."""
        raise NotImplementedError


class Predictions(VocabularyHead):
    """Language modeling head of BERT."""

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary."""
        self.transform = Transform(config, rngs)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Applies the layers before the projection to the vocabulary."""
        return self.transform(x)


class PreTrainingHeads(nnx.Module):
    """Heads for masked language modeling and next sentence prediction. Named `cls` in files.

    Attributes:
        predictions_class: Class of the language modeling head.
    """

    predictions_class: ClassVar[type[VocabularyHead]] = Predictions

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        predict: bool = True,
        next_sentence: bool = False,
    ):
        self.predictions = self.predictions_class(config, rngs) if predict else nnx.data(None)
        self.seq_relationship = (
            dense(config, config.hidden_size, 2, rngs) if next_sentence else nnx.data(None)
        )


class LanguageModel(ModelWithHead):
    """An encoder with a language modeling head.

    Attributes:
        heads_class: Class of `cls`.
    """

    heads_class: ClassVar[type[PreTrainingHeads]] = PreTrainingHeads

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.add_head(config, rngs)

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head, with its name in checkpoints."""
        self.cls = self.heads_class(config, rngs)

    @property
    def vocabulary_head(self) -> VocabularyHead:
        """The language modeling head."""
        return self.cls.predictions  # type: ignore[return-value]  # created in add_head


class MaskedLM(LanguageModel):
    """Encoder with a masked language modeling head."""

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
        outputs = self.encode(*args, **kwargs)
        head, words = self.vocabulary_head, self.word_embeddings
        logits = nn.vocabulary_logits(
            lambda x: head(x, words), outputs.last_hidden_state, masked_positions
        )
        return out.FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)


class CausalLM(LanguageModel):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the decoder. Returns logits, `(batch, length, vocab_size)`."""
        outputs = self.encode(*args, **kwargs)
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=nn.vocabulary_logits(
                lambda x: self.vocabulary_head(x, self.word_embeddings), outputs.last_hidden_state
            ),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


class PreTraining(ModelWithHead):
    """Encoder with heads for masked language modeling and next sentence prediction."""

    use_pooler = True
    heads_class: ClassVar[type[PreTrainingHeads]] = PreTrainingHeads

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.cls = self.heads_class(config, rngs, next_sentence=True)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns the logits of both heads."""
        outputs = self.encode(*args, **kwargs)
        return out.FlaxBertForPreTrainingOutput(
            prediction_logits=self.cls.predictions(outputs.last_hidden_state, self.word_embeddings),  # type: ignore[misc]  # created in __init__
            seq_relationship_logits=self.cls.seq_relationship(outputs.pooler_output),  # type: ignore[misc]  # created in __init__
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NextSentencePrediction(ModelWithHead):
    """Encoder with a next sentence prediction head."""

    use_pooler = True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.cls = PreTrainingHeads(config, rngs, predict=False, next_sentence=True)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, 2)`."""
        outputs = self.encode(*args, **kwargs)
        logits = self.cls.seq_relationship(outputs.pooler_output)  # type: ignore[misc]  # created in __init__
        return out.FlaxNextSentencePredictorOutput(
            logits, outputs.hidden_states, outputs.attentions
        )


class SequenceClassification(ModelWithHead):
    """Encoder with a head for sequence classification or regression."""

    use_pooler = True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        outputs = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output, rngs))
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class MultipleChoice(ModelWithHead):
    """Multiple choice. Inputs are `(batch, choices, length)`, logits are `(batch, choices)`.

    Attributes:
        token_inputs: Names of the other inputs with one entry per token.
    """

    use_pooler = True
    token_inputs: ClassVar[tuple[str, ...]] = ("attention_mask", "token_type_ids", "position_ids")

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, 1, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, choices, length)
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        choices = input_ids.shape[1]
        for name in kwargs.keys() & set(self.token_inputs):
            kwargs[name] = kwargs[name].reshape(-1, input_ids.shape[-1])
        outputs = self.encode(input_ids.reshape(-1, input_ids.shape[-1]), rngs=rngs, **kwargs)
        logits = self.classifier(self.pool(outputs, rngs)).reshape(-1, choices)
        return out.FlaxMultipleChoiceModelOutput(logits, outputs.hidden_states, outputs.attentions)

    def pool(self, outputs: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Returns the pooled hidden state of each choice, `(batch * choices, hidden)`."""
        return self.dropout(outputs.pooler_output, rngs)


class TokenClassification(ModelWithHead):
    """Encoder with a token classification head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, length, num_labels)`."""
        outputs = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state, rngs))
        return out.FlaxTokenClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class QuestionAnswering(ModelWithHead):
    """Encoder with a head for extractive question answering."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder.

        Returns start and end logits, `(batch, length)`.
        """
        outputs = self.encode(*args, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        return out.FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], outputs.hidden_states, outputs.attentions
        )


class FlaxBertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the BERT models: configuration, checkpoint names and call signature."""

    config_class: ClassVar[type[PreTrainedConfig]] = BertConfig
    base_model_prefix = "bert"
    position_table = "max_position_embeddings"
    weight_aliases = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        token_type_ids: Input = None,
        position_ids: Input = None,
        head_mask: Input = None,
        encoder_hidden_states: Input = None,
        encoder_attention_mask: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: trees.Params | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        Token IDs, positions and masks are `(batch, length)`, or `(batch, choices, length)` for
        multiple choice. For packed rows, `segment_ids`, `(batch, length)`, is the document number
        of each token, and 0 for padding.
        """
        model_inputs = {
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
            model_inputs,
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
    """BERT without a head. Returns hidden states and the pooled first token."""

    module_class = BertModule


class FlaxBertForPreTraining(FlaxBertPreTrainedModel):
    """BERT with masked language modeling and next sentence prediction heads."""

    module_class = PreTraining


class FlaxBertForMaskedLM(FlaxBertPreTrainedModel):
    """BERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxBertForCausalLM(CausalGeneration, FlaxBertPreTrainedModel):
    """BERT as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM

    @classmethod
    def torch_class_name(cls) -> str:
        """Returns the name of the PyTorch class, which does not follow the naming pattern."""
        return "BertLMHeadModel"


class FlaxBertForNextSentencePrediction(FlaxBertPreTrainedModel):
    """BERT with a next sentence prediction head."""

    module_class = NextSentencePrediction


class FlaxBertForSequenceClassification(FlaxBertPreTrainedModel):
    """BERT for sequence classification, from the pooled first token."""

    module_class = SequenceClassification


class FlaxBertForMultipleChoice(FlaxBertPreTrainedModel):
    """BERT for multiple choice."""

    module_class = MultipleChoice


class FlaxBertForTokenClassification(FlaxBertPreTrainedModel):
    """BERT for token classification."""

    module_class = TokenClassification


class FlaxBertForQuestionAnswering(FlaxBertPreTrainedModel):
    """BERT for extractive question answering."""

    module_class = QuestionAnswering
