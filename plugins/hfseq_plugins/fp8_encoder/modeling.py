"""The FP8 encoder on Flax NNX: MegatronBERT with more options, saved in its format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.layers import Initializer
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.modeling import FlaxBertPreTrainedModel
from hfseq_plugins.common import StoredAsTwin, num_labels
from hfseq_plugins.fp8_encoder.configuration import TWIN_TYPE_VOCAB_SIZE, Fp8EncoderConfig
from hfseq_plugins.megatron_bert import modeling as megatron


def kernel_init(config: PreTrainedConfig) -> Initializer:
    """Returns the initializer of kernels, as in Transformers or as in TransformerEngine."""
    if config.kernel_init == "normal":
        return nn.normal(config.initializer_range)
    return jax.nn.initializers.lecun_normal()


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Creates a linear layer with the configured initialization and bias."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=config.use_bias)


def embedding_table(config: PreTrainedConfig, size: int, rngs: nnx.Rngs) -> nn.Embed:
    """Creates `size` embeddings with the configured standard deviation."""
    std = config.embedding_init_std
    std = config.initializer_range if std is None else std
    return nn.Embed(size, config.hidden_size, nn.normal(std), rngs)


class Embeddings(nnx.Module):
    """The sum of word, position and token-type embeddings. The latter two are optional."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        positions = config.max_position_embeddings if config.positions == "learned" else 0
        types, rate = config.type_vocab_size, config.embedding_dropout_prob
        self.word_embeddings = embedding_table(config, config.vocab_size, rngs)
        self.position_embeddings = (
            embedding_table(config, positions, rngs) if positions else nnx.data(None)
        )
        self.token_type_embeddings = (
            embedding_table(config, types, rngs) if types else nnx.data(None)
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)

    def __call__(
        self,
        ids: jax.Array,  # (batch, length)
        types: jax.Array,  # (batch, length)
        positions: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:  # (batch, length, hidden)
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return self.dropout(x, rngs)


class SelfAttention(encoder.SelfAttention):
    """Multi-head self-attention."""

    linear = staticmethod(linear)


class Output(megatron.Output):
    """Output projection, dropout and residual connection."""

    linear = staticmethod(linear)


class Intermediate(encoder.Intermediate):
    """The first half of the feed-forward block, with an optional gate."""

    linear = staticmethod(linear)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        sizes = config.hidden_size, config.intermediate_size
        self.up = linear(config, *sizes, rngs) if config.gated_mlp else nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        inner = super().__call__(x)
        return inner if self.up is None else inner * self.up(x)


class Attention(megatron.Attention):
    """Pre-norm attention with output projection."""

    submodule_classes = (SelfAttention, Output)


class Layer(megatron.Layer):
    """Self-attention and feed-forward."""

    submodule_classes = (Attention, Intermediate, Output)


class Encoder(encoder.Encoder):
    """The stack of layers with an optional final norm."""

    layer_class = Layer

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = megatron.norm(config) if config.final_norm else nnx.data(None)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalizes the output of the last layer, `(batch, length, hidden)`."""
        return x if self.ln is None else self.ln(x)


class Fp8EncoderModule(encoder.BertModule):
    """The encoder without a head."""

    submodule_classes = (Embeddings, Encoder)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        config.check()  # options may have changed since its creation
        super().__init__(config, rngs, add_pooling_layer)


class MaskedLM(bert.MaskedLM):
    """Encoder with a masked language modeling head."""

    module = Fp8EncoderModule


class FlatClassifier(nnx.Module):
    """Three dense layers without activations on the concatenation of all positions.

    The hidden states of padding are replaced by zeros, so that the logits do not depend on the
    amount of padding. TransformerEngine's example does not replace them.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, kernel_init(config)
        self.length: int = config.flatten_length
        self.flatten = nn.Linear(self.length * width, width, init, rngs)
        self.dense = nn.Linear(width, width, init, rngs)
        self.out_proj = nn.Linear(width, num_labels(config), init, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: jax.Array | None,  # (batch, length), False for padding
    ) -> jax.Array:  # (batch, labels)
        if mask is not None:
            x = jnp.where(mask[..., None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.length - x.shape[1]), (0, 0)))
        return self.out_proj(self.dense(self.flatten(x.reshape(x.shape[0], -1))))


class SequenceClassification(bert.ModelWithHead):
    """The encoder with a classification or regression head for sequences."""

    module = Fp8EncoderModule

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.use_pooler = config.head == "pooled"  # type: ignore[misc]  # per instance
        super().__init__(config, rngs)
        self.classifier: Any
        if self.use_pooler:
            labels = num_labels(config)
            self.classifier = encoder.dense(config, config.hidden_size, labels, rngs)
        else:
            self.classifier = FlatClassifier(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        *,
        segment_ids: jax.Array | None = None,  # (batch, length)
        rngs: Keys | None = None,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        encoded = self.encode(
            input_ids, attention_mask, segment_ids=segment_ids, rngs=rngs, **kwargs
        )
        if self.use_pooler:
            logits = self.classifier(self.dropout(encoded.pooler_output, rngs))
        else:
            mask = real_tokens(attention_mask, segment_ids)
            logits = self.classifier(encoded.last_hidden_state, mask)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


def real_tokens(
    attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """Returns a mask that is False for padding, `(batch, length)`, or None without padding.

    Args:
        attention_mask: `(batch, length)` or `(batch, queries, length)`.
        segment_ids: Document number of each token in packed rows, `(batch, length)`, and 0 for
            padding.
    """
    in_document = None if segment_ids is None else segment_ids > 0
    if attention_mask is None:
        return in_document
    attended = attention_mask.astype(bool)
    attended = attended if attended.ndim == 2 else attended.any(1)
    return attended if in_document is None else in_document & attended


class FlaxFp8EncoderPreTrainedModel(StoredAsTwin, FlaxBertPreTrainedModel):
    """Base class of the FP8 encoder models.

    `save_pretrained` writes the model in the format of MegatronBERT, which PyTorch's Auto classes
    load. A model that MegatronBERT cannot represent exactly is saved in hfseq's own format, with a
    warning that names the reasons.
    """

    config_class = Fp8EncoderConfig

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # The option that limits the sequence length, if there is one.
        if self.module_class is SequenceClassification and config.head == "te_flatten":
            self.position_table = "flatten_length"
        elif config.positions == "none":
            self.position_table = None  # type: ignore[assignment]  # sequences of any length

    def max_length(self) -> int | None:
        """Returns the maximum sequence length, or `None` for no limit.

        The limit is the number of position embeddings, or the length of the `te_flatten` head.
        """
        return None if self.position_table is None else getattr(self.config, self.position_table)

    def accepts(self, name: str, method: str = "__call__") -> bool:
        """Returns whether the model uses the input `name`. A model may have no token types."""
        if name == "token_type_ids" and not self.config.type_vocab_size:
            return False
        return super().accepts(name, method)

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns zeros for the parameters that MegatronBERT has and this model does not have."""
        config = self.config
        if config.twin_problems():
            return {}
        tensors = {} if config.use_bias else self._zero_biases()
        width, template = config.hidden_size, "embeddings.{}_embeddings.weight"
        if config.positions == "none":
            zeros = np.zeros((config.max_position_embeddings, width), np.float32)
            tensors[template.format("position")] = DerivedTensor(
                zeros, "load it with positions='learned'"
            )
        if not config.type_vocab_size:
            zeros = np.zeros((TWIN_TYPE_VOCAB_SIZE, width), np.float32)
            remedy = f"load it with type_vocab_size={TWIN_TYPE_VOCAB_SIZE}"
            tensors[template.format("token_type")] = DerivedTensor(zeros, remedy)
        if self.module_class is Fp8EncoderModule:
            return tensors
        return {f"{self.base_model_prefix}.{name}": tensor for name, tensor in tensors.items()}

    def _zero_biases(self) -> dict[str, DerivedTensor]:
        sizes = dict.fromkeys(
            [*(f"attention.self.{n}" for n in ("query", "key", "value")), "attention.output.dense"],
            self.config.hidden_size,
        )
        sizes |= {
            "intermediate.dense": self.config.intermediate_size,
            "output.dense": self.config.hidden_size,
        }
        return {
            f"encoder.layer.{number}.{name}.bias": DerivedTensor(
                np.zeros(size, np.float32), "load it with use_bias=True"
            )
            for number in range(self.config.num_hidden_layers)
            for name, size in sizes.items()
        }


class FlaxFp8EncoderModel(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder without a head. Returns hidden states and the pooled first token."""

    module_class = Fp8EncoderModule
    twin_names = {"megatron-bert": "MegatronBertModel"}


class FlaxFp8EncoderForMaskedLM(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with a masked language modeling head."""

    module_class = MaskedLM
    twin_names = {"megatron-bert": "MegatronBertForMaskedLM"}


class FlaxFp8EncoderForSequenceClassification(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with a classifier on the pooled first token or on all positions."""

    module_class = SequenceClassification
    twin_names = {"megatron-bert": "MegatronBertForSequenceClassification"}
    # Of the kernels of the `te_flatten` head, only the first two are large enough for FP8.
    precision_sites = (r"classifier/(flatten|dense)$",)
