"""What models return: read by attribute, by name or by position, and pass through ``jax.jit``.

The classes have the names and fields that Transformers 4 gave its Flax models. Fields that are
``None`` are absent from the tuple and dict views, as users of ``outputs[0]`` expect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
from jax.tree_util import GetAttrKey

Hidden = tuple[jax.Array, ...] | None


class FlaxModelOutput:
    """Base of all outputs: a dataclass that is a pytree with tuple, dict and attribute access."""

    def __init_subclass__(cls) -> None:
        names = [
            name
            for base in reversed(cls.__mro__)
            for name in base.__dict__.get("__annotations__", ())
        ]
        names = list(dict.fromkeys(names))

        def flatten(output: Any) -> tuple[list[Any], None]:
            return [(GetAttrKey(name), getattr(output, name)) for name in names], None

        def unflatten(_: None, children: Any) -> Any:
            output = object.__new__(cls)
            output.__dict__.update(zip(names, children, strict=True))
            return output

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are set, in order."""
        return tuple(self.values())

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields that are set."""
        return tuple(name for name, _ in self.items())

    def values(self) -> list[Any]:
        """Return the fields that are set."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[str, Any]]:
        """Return pairs (name, value) of the fields that are set."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field ``name``, or ``default`` where it is not set."""
        return dict(self.items()).get(name, default)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __getitem__(self, key: str | int | slice) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in {field.name for field in dataclasses.fields(self)}:  # type: ignore[arg-type]
            raise KeyError(f"{type(self).__name__} has no field '{name}'")
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclasses.dataclass
class FlaxBaseModelOutput(FlaxModelOutput):
    """Hidden states of an encoder."""

    last_hidden_state: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxBaseModelOutputWithPast(FlaxModelOutput):
    """Hidden states of a decoder with its cache."""

    last_hidden_state: Any = None
    past_key_values: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxBaseModelOutputWithPastAndLoss(FlaxBaseModelOutputWithPast):
    """The same, and what the model adds to the loss while it trains: a sum over tokens."""

    auxiliary_loss: Any = None


@dataclasses.dataclass
class FlaxBaseModelOutputWithPooling(FlaxModelOutput):
    """Hidden states and the pooled first token."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxBaseModelOutputWithPoolingAndCrossAttentions(FlaxModelOutput):
    """Hidden states, the pooled first token, and what a decoder adds."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Hidden = None
    past_key_values: Any = None
    attentions: Hidden = None
    cross_attentions: Hidden = None


@dataclasses.dataclass
class FlaxBaseModelOutputWithPastAndCrossAttentions(FlaxModelOutput):
    """Hidden states of a decoder, its cache and its cross-attentions."""

    last_hidden_state: Any = None
    past_key_values: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None
    cross_attentions: Hidden = None


@dataclasses.dataclass
class FlaxMaskedLMOutput(FlaxModelOutput):
    """Logits (batch, length, vocabulary), or (groups, k, vocabulary) at masked positions only."""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxCausalLMOutput(FlaxModelOutput):
    """Logits of the next token."""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxCausalLMOutputWithCrossAttentions(FlaxModelOutput):
    """Logits of the next token, the cache and the cross-attentions."""

    logits: Any = None
    past_key_values: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None
    cross_attentions: Hidden = None


@dataclasses.dataclass
class FlaxCausalLMOutputWithPast(FlaxModelOutput):
    """Logits of the next token, the cache, and what the model adds to the loss while it trains.

    ``auxiliary_loss`` is a sum over tokens (0-d float32), like the loss that it is added to.
    """

    logits: Any = None
    past_key_values: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None
    auxiliary_loss: Any = None


@dataclasses.dataclass
class FlaxNextSentencePredictorOutput(FlaxModelOutput):
    """Logits (batch, 2): is the second sentence the next one?"""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxSequenceClassifierOutput(FlaxModelOutput):
    """Logits (batch, labels) of a whole sequence."""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxSequenceClassifierOutputWithPast(FlaxModelOutput):
    """Logits (batch, labels), the cache, and a sum over tokens that is added to the loss."""

    logits: Any = None
    past_key_values: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None
    auxiliary_loss: Any = None


@dataclasses.dataclass
class FlaxMultipleChoiceModelOutput(FlaxModelOutput):
    """Logits (batch, choices)."""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxTokenClassifierOutput(FlaxModelOutput):
    """Logits (batch, length, labels)."""

    logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxQuestionAnsweringModelOutput(FlaxModelOutput):
    """Logits (batch, length) of the first and the last token of the answer."""

    start_logits: Any = None
    end_logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxBertForPreTrainingOutput(FlaxModelOutput):
    """Logits of the masked tokens and of the next sentence."""

    prediction_logits: Any = None
    seq_relationship_logits: Any = None
    hidden_states: Hidden = None
    attentions: Hidden = None


@dataclasses.dataclass
class FlaxSeq2SeqModelOutput(FlaxModelOutput):
    """Hidden states of a decoder, then those of its encoder."""

    last_hidden_state: Any = None
    past_key_values: Any = None
    decoder_hidden_states: Hidden = None
    decoder_attentions: Hidden = None
    cross_attentions: Hidden = None
    encoder_last_hidden_state: Any = None
    encoder_hidden_states: Hidden = None
    encoder_attentions: Hidden = None


@dataclasses.dataclass
class FlaxSeq2SeqLMOutput(FlaxModelOutput):
    """Logits of the next target token, then the hidden states of decoder and encoder."""

    logits: Any = None
    past_key_values: Any = None
    decoder_hidden_states: Hidden = None
    decoder_attentions: Hidden = None
    cross_attentions: Hidden = None
    encoder_last_hidden_state: Any = None
    encoder_hidden_states: Hidden = None
    encoder_attentions: Hidden = None


@dataclasses.dataclass
class FlaxSeq2SeqSequenceClassifierOutput(FlaxSeq2SeqLMOutput):
    """Logits (batch, labels) of a whole sequence, from an encoder-decoder."""


@dataclasses.dataclass
class FlaxSeq2SeqQuestionAnsweringModelOutput(FlaxModelOutput):
    """Logits (batch, length) of the first and the last token of the answer."""

    start_logits: Any = None
    end_logits: Any = None
    past_key_values: Any = None
    decoder_hidden_states: Hidden = None
    decoder_attentions: Hidden = None
    cross_attentions: Hidden = None
    encoder_last_hidden_state: Any = None
    encoder_hidden_states: Hidden = None
    encoder_attentions: Hidden = None
