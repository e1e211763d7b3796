"""Model outputs: dataclasses with tuple, dict and attribute access that are pytrees.

The classes have the names and fields that Transformers 4 gave its Flax models. The tuple and dict
views leave out fields that are `None`, as users of `outputs[0]` expect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.tree_util import GetAttrKey


def _field_names(cls: type[FlaxModelOutput]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


class FlaxModelOutput:
    """Base class of all outputs: a dataclass and pytree with tuple, dict and attribute access."""

    if TYPE_CHECKING:  # the fields of the classes below

        def __init__(self, *values: object, **fields: object) -> None: ...

        last_hidden_state: jax.Array
        pooler_output: jax.Array
        logits: jax.Array
        logits_per_image: jax.Array
        logits_per_text: jax.Array
        text_embeds: jax.Array
        image_embeds: jax.Array
        extract_features: jax.Array
        projected_states: jax.Array
        projected_quantized_states: jax.Array
        codevector_perplexity: jax.Array
        text_model_output: FlaxModelOutput
        vision_model_output: FlaxModelOutput
        start_logits: jax.Array
        end_logits: jax.Array
        prediction_logits: jax.Array
        seq_relationship_logits: jax.Array
        sop_logits: jax.Array
        past_key_values: dict[str, Any] | None
        hidden_states: tuple[jax.Array, ...] | None
        attentions: tuple[jax.Array, ...] | None
        cross_attentions: tuple[jax.Array, ...] | None
        decoder_hidden_states: tuple[jax.Array, ...] | None
        decoder_attentions: tuple[jax.Array, ...] | None
        encoder_last_hidden_state: jax.Array | None
        encoder_hidden_states: tuple[jax.Array, ...] | None
        encoder_attentions: tuple[jax.Array, ...] | None
        auxiliary_loss: jax.Array | None

    def __init_subclass__(cls) -> None:
        def flatten(output: FlaxModelOutput) -> tuple[list[tuple[GetAttrKey, object]], None]:
            return [(GetAttrKey(name), getattr(output, name)) for name in _field_names(cls)], None

        def unflatten(_: None, children: Iterable[Any]) -> FlaxModelOutput:
            output = object.__new__(cls)
            output.__dict__.update(zip(_field_names(cls), children, strict=True))
            return output

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the fields that are set, in order. Nested outputs become tuples too."""
        return tuple(v.to_tuple() if isinstance(v, FlaxModelOutput) else v for v in self.values())

    def keys(self) -> tuple[str, ...]:
        """Returns the names of the fields that are set."""
        return tuple(name for name, _ in self.items())

    def values(self) -> list[Any]:
        """Returns the values of the fields that are set."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, Any]]:
        """Returns pairs (name, value) of the fields that are set."""
        pairs = [(name, getattr(self, name)) for name in _field_names(type(self))]
        return [(name, value) for name, value in pairs if value is not None]

    def get(self, name: str, default: object = None) -> Any:
        """Returns the field `name`, or `default` if it is not set."""
        return dict(self.items()).get(name, default)

    def replace(self, **changes: object) -> Self:
        """Returns a copy with changed fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __getitem__(self, key: str | int | slice) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, name: str, value: object) -> None:
        if name not in _field_names(type(self)):
            raise KeyError(f"{type(self).__name__} has no field '{name}'")
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


def _output(
    name: str, doc: str, fields: str, base: type[FlaxModelOutput] = FlaxModelOutput
) -> type[FlaxModelOutput]:
    """Creates an output class.

    Args:
        name: Name of the class.
        doc: Docstring of the class.
        fields: Names of the fields that the class adds to the base class, separated by spaces.
        base: The base class.
    """
    cls = dataclasses.make_dataclass(
        name,
        [(field, Any, None) for field in fields.split()],
        bases=(base,),
        namespace={"__doc__": doc},
    )
    cls.__module__ = __name__
    return cls


FlaxBaseModelOutput = _output(
    "FlaxBaseModelOutput",
    "Hidden states of an encoder.",
    "last_hidden_state hidden_states attentions",
)
FlaxBaseModelOutputWithNoAttention = _output(
    "FlaxBaseModelOutputWithNoAttention",
    "Feature maps of a convolutional network.",
    "last_hidden_state hidden_states",
)
FlaxBaseModelOutputWithPoolingAndNoAttention = _output(
    "FlaxBaseModelOutputWithPoolingAndNoAttention",
    "Feature maps of a convolutional network, and their mean over all positions.",
    "last_hidden_state pooler_output hidden_states",
)
FlaxImageClassifierOutputWithNoAttention = _output(
    "FlaxImageClassifierOutputWithNoAttention",
    "Logits `(batch, labels)` of images, from a convolutional network.",
    "logits hidden_states",
)
FlaxBaseModelOutputWithPast = _output(
    "FlaxBaseModelOutputWithPast",
    "Hidden states and cache of a decoder.",
    "last_hidden_state past_key_values hidden_states attentions",
)
FlaxBaseModelOutputWithPastAndLoss = _output(
    "FlaxBaseModelOutputWithPastAndLoss",
    "Hidden states and cache of a decoder, and an auxiliary training loss, summed over tokens.",
    "auxiliary_loss",
    FlaxBaseModelOutputWithPast,
)
FlaxBaseModelOutputWithPooling = _output(
    "FlaxBaseModelOutputWithPooling",
    "Hidden states, and the pooled output, which is computed from the first token.",
    "last_hidden_state pooler_output hidden_states attentions",
)
FlaxBeitModelOutputWithPooling = _output(
    "FlaxBeitModelOutputWithPooling",
    "Hidden states, and the pooled output, which is computed from the mean over all patches or "
    "from the first token.",
    "",
    FlaxBaseModelOutputWithPooling,
)
FlaxBaseModelOutputWithPoolingAndCrossAttentions = _output(
    "FlaxBaseModelOutputWithPoolingAndCrossAttentions",
    "Hidden states, the pooled output, which is computed from the first token, and the cache and "
    "cross-attentions of a decoder.",
    "last_hidden_state pooler_output hidden_states past_key_values attentions cross_attentions",
)
FlaxBaseModelOutputWithPastAndCrossAttentions = _output(
    "FlaxBaseModelOutputWithPastAndCrossAttentions",
    "Hidden states, cache and cross-attentions of a decoder.",
    "last_hidden_state past_key_values hidden_states attentions cross_attentions",
)
FlaxMaskedLMOutput = _output(
    "FlaxMaskedLMOutput",
    "Logits `(batch, length, vocab_size)`. If the model call gets `masked_positions`, the logits "
    "have the shape `(groups, k, vocab_size)`, for the `k` selected positions of each group of "
    "sequences.",
    "logits hidden_states attentions",
)
FlaxCausalLMOutput = _output(
    "FlaxCausalLMOutput",
    "Logits of the next token.",
    "logits hidden_states attentions",
)
FlaxCausalLMOutputWithCrossAttentions = _output(
    "FlaxCausalLMOutputWithCrossAttentions",
    "Logits of the next token, cache and cross-attentions.",
    "logits past_key_values hidden_states attentions cross_attentions",
)
FlaxCausalLMOutputWithPast = _output(
    "FlaxCausalLMOutputWithPast",
    "Logits of the next token, cache, and an auxiliary training loss. `auxiliary_loss` is a sum "
    "over tokens (float32 scalar), like the loss that it is added to.",
    "logits past_key_values hidden_states attentions auxiliary_loss",
)
FlaxNextSentencePredictorOutput = _output(
    "FlaxNextSentencePredictorOutput",
    "Logits `(batch, 2)` of next sentence prediction. Class 0 means that the second sentence "
    "follows the first one.",
    "logits hidden_states attentions",
)
FlaxSequenceClassifierOutput = _output(
    "FlaxSequenceClassifierOutput",
    "Logits `(batch, labels)` of a sequence.",
    "logits hidden_states attentions",
)
FlaxSequenceClassifierOutputWithPast = _output(
    "FlaxSequenceClassifierOutputWithPast",
    "Logits `(batch, labels)`, cache, and an auxiliary training loss, summed over tokens.",
    "logits past_key_values hidden_states attentions auxiliary_loss",
)
FlaxMultipleChoiceModelOutput = _output(
    "FlaxMultipleChoiceModelOutput",
    "Logits `(batch, choices)`.",
    "logits hidden_states attentions",
)
FlaxTokenClassifierOutput = _output(
    "FlaxTokenClassifierOutput",
    "Logits `(batch, length, labels)`.",
    "logits hidden_states attentions",
)
FlaxQuestionAnsweringModelOutput = _output(
    "FlaxQuestionAnsweringModelOutput",
    "Logits `(batch, length)` of the first and the last token of the answer.",
    "start_logits end_logits hidden_states attentions",
)
FlaxBertForPreTrainingOutput = _output(
    "FlaxBertForPreTrainingOutput",
    "Logits of the masked tokens and of the next sentence.",
    "prediction_logits seq_relationship_logits hidden_states attentions",
)
FlaxAlbertForPreTrainingOutput = _output(
    "FlaxAlbertForPreTrainingOutput",
    "Logits of the masked tokens and of the sentence order.",
    "prediction_logits sop_logits hidden_states attentions",
)
FlaxBigBirdForPreTrainingOutput = _output(
    "FlaxBigBirdForPreTrainingOutput",
    "Logits of the masked tokens and of the next sentence.",
    "prediction_logits seq_relationship_logits hidden_states attentions",
)
FlaxBigBirdForQuestionAnsweringModelOutput = _output(
    "FlaxBigBirdForQuestionAnsweringModelOutput",
    "Logits of the first and the last token of the answer. The logits of question tokens are so "
    "low that these tokens are never selected.",
    "start_logits end_logits pooler_output hidden_states attentions",
)
FlaxElectraForPreTrainingOutput = _output(
    "FlaxElectraForPreTrainingOutput",
    "One logit per token. A positive logit predicts that the token was replaced.",
    "logits hidden_states attentions",
)
FlaxSeq2SeqModelOutput = _output(
    "FlaxSeq2SeqModelOutput",
    "Hidden states of a decoder and of its encoder.",
    "last_hidden_state past_key_values decoder_hidden_states decoder_attentions "
    "cross_attentions encoder_last_hidden_state encoder_hidden_states encoder_attentions",
)
FlaxSeq2SeqLMOutput = _output(
    "FlaxSeq2SeqLMOutput",
    "Logits of the next target token, and hidden states of decoder and encoder.",
    "logits past_key_values decoder_hidden_states decoder_attentions cross_attentions "
    "encoder_last_hidden_state encoder_hidden_states encoder_attentions",
)
FlaxSeq2SeqSequenceClassifierOutput = _output(
    "FlaxSeq2SeqSequenceClassifierOutput",
    "Logits `(batch, labels)` of a sequence, from an encoder-decoder.",
    "",
    FlaxSeq2SeqLMOutput,
)
FlaxSeq2SeqQuestionAnsweringModelOutput = _output(
    "FlaxSeq2SeqQuestionAnsweringModelOutput",
    "Logits `(batch, length)` of the first and the last token of the answer.",
    "start_logits end_logits past_key_values decoder_hidden_states decoder_attentions "
    "cross_attentions encoder_last_hidden_state encoder_hidden_states encoder_attentions",
)
FlaxCLIPTextModelOutput = _output(
    "FlaxCLIPTextModelOutput",
    "The projected embedding of a text, and hidden states.",
    "text_embeds last_hidden_state hidden_states attentions",
)
FlaxCLIPOutput = _output(
    "FlaxCLIPOutput",
    "Similarities of images and texts, `(images, texts)` and `(texts, images)`, the normalized "
    "embeddings of images and texts, and the outputs of the text model and the vision model.",
    "logits_per_image logits_per_text text_embeds image_embeds text_model_output "
    "vision_model_output",
)
FlaxWav2Vec2BaseModelOutput = _output(
    "FlaxWav2Vec2BaseModelOutput",
    "Hidden states, and the audio features that they are computed from.",
    "last_hidden_state extract_features hidden_states attentions",
)
FlaxWav2Vec2ForPreTrainingOutput = _output(
    "FlaxWav2Vec2ForPreTrainingOutput",
    "Predicted and target representations of the frames, `(batch, frames, features)`, and the "
    "perplexity of the codebook. The contrastive loss uses the masked frames.",
    "projected_states projected_quantized_states codevector_perplexity hidden_states attentions",
)


def seq2seq_output(
    decoder_outputs: FlaxModelOutput, encoder_outputs: FlaxModelOutput
) -> FlaxModelOutput:
    """Returns the outputs of decoder and encoder as one `FlaxSeq2SeqModelOutput`."""
    return FlaxSeq2SeqModelOutput(
        last_hidden_state=decoder_outputs.last_hidden_state,
        decoder_hidden_states=decoder_outputs.hidden_states,
        decoder_attentions=decoder_outputs.attentions,
        cross_attentions=decoder_outputs.cross_attentions,
        encoder_last_hidden_state=encoder_outputs.last_hidden_state,
        encoder_hidden_states=encoder_outputs.hidden_states,
        encoder_attentions=encoder_outputs.attentions,
    )
