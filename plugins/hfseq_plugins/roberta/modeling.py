"""RoBERTa (Liu et al., 2019): BERT with positions that start at `pad_token_id + 1`.

The language modeling head and the sequence classification head also differ from BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig, RobertaConfig

from hfseq import nn
from hfseq.generation import CausalGeneration
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, dense
from hfseq_plugins.common import num_labels


def default_positions(
    input_ids: jax.Array,  # (batch, length)
    segment_ids: jax.Array | None,  # (batch, length)
    pad_token_id: int,
) -> jax.Array:
    """Returns position IDs that start at `pad_token_id + 1` in each document."""
    if segment_ids is None:
        return nn.positions_after_padding(input_ids, pad_token_id)
    positions = nn.positions_in_segments(segment_ids) + pad_token_id + 1
    return jnp.where(segment_ids > 0, positions, pad_token_id)


class RobertaModule(BertModule):
    """RoBERTa encoder without a head. It is a decoder if `config.is_decoder` is set.

    Position IDs start at `pad_token_id + 1`.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        super().__init__(config, rngs, add_pooling_layer)
        self.pad_token_id = config.pad_token_id

    def positions(self, input_ids: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns the default position IDs, which count the tokens of each document.

        Args:
            input_ids: Token IDs, `(batch, length)`.
            segment_ids: Document number of each token in packed rows, `(batch, length)`, or `None`.

        Returns:
            Position IDs, `(batch, length)`.
        """
        return default_positions(input_ids, segment_ids, self.pad_token_id)


class RobertaMixin(bert.ModelWithHead):
    """Mixin that gives the encoder and the head their names in RoBERTa checkpoints."""

    prefix = "roberta"
    module: ClassVar[Callable[..., nnx.Module]] = RobertaModule  # subclasses have other encoders

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head."""
        self.lm_head = LMHead(config, rngs)

    @property
    def vocabulary_head(self) -> LMHead:
        """The language modeling head."""
        return self.lm_head


class LMHead(bert.VocabularyHead):
    """Language modeling head: projection, GELU, norm and projection to the vocabulary."""

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary."""
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Applies the layers before the projection to the vocabulary."""
        return self.layer_norm(nn.activation("gelu")(self.dense(x)))


class MaskedLM(RobertaMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(RobertaMixin, bert.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class ClassificationHead(nnx.Module):
    """Classification head on the first token: projection, activation, projection to the labels.

    Attributes:
        activation: Name of the activation. `None` means the activation of the configuration.
    """

    activation: ClassVar[str | None] = "tanh"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.hidden_size, rngs)
        self.out_proj = dense(config, config.hidden_size, num_labels(config), rngs)
        self.act = nn.activation(self.activation or config.hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        dropout: nn.Dropout,
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.act(self.dense(dropout(x[:, 0], rngs)))
        return self.out_proj(dropout(x, rngs))


class SequenceClassification(RobertaMixin, bert.ModelWithHead):
    """Encoder with a head for sequence classification or regression."""

    head: ClassVar[type[ClassificationHead]] = ClassificationHead

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = self.head(config, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        outputs = self.encode(*args, rngs=rngs, **kwargs)
        logits = self.classifier(outputs.last_hidden_state, self.dropout, rngs)
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class TokenClassification(RobertaMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(RobertaMixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class MultipleChoice(RobertaMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""


class FlaxRobertaPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base class of the RoBERTa models."""

    config_class: ClassVar[type[PreTrainedConfig]] = RobertaConfig
    base_model_prefix = "roberta"
    weight_aliases = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    @property
    def first_position(self) -> int:
        """The position ID of the first token."""
        return self.config.pad_token_id + 1

    def max_length(self) -> int:
        """Returns the maximum sequence length.

        Tokens do not use the first `pad_token_id + 1` position embeddings.
        """
        return self.config.max_position_embeddings - self.config.pad_token_id - 1


class FlaxRobertaModel(FlaxRobertaPreTrainedModel):
    """RoBERTa without a head. Returns hidden states and the pooled first token."""

    module_class = RobertaModule


class FlaxRobertaForMaskedLM(FlaxRobertaPreTrainedModel):
    """RoBERTa with a masked language modeling head."""

    module_class = MaskedLM


class FlaxRobertaForCausalLM(CausalGeneration, FlaxRobertaPreTrainedModel):
    """RoBERTa as a causal decoder. Requires `is_decoder=True` in the configuration."""

    module_class = CausalLM


class FlaxRobertaForSequenceClassification(FlaxRobertaPreTrainedModel):
    """RoBERTa for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxRobertaForTokenClassification(FlaxRobertaPreTrainedModel):
    """RoBERTa for token classification."""

    module_class = TokenClassification


class FlaxRobertaForQuestionAnswering(FlaxRobertaPreTrainedModel):
    """RoBERTa for extractive question answering."""

    module_class = QuestionAnswering


class FlaxRobertaForMultipleChoice(FlaxRobertaPreTrainedModel):
    """RoBERTa for multiple choice."""

    module_class = MultipleChoice
