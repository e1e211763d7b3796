"""The FP8 encoder: MegatronBERT with options, stored as MegatronBERT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn
from hfseq.modeling import DerivedTensor
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.modeling import FlaxBertPreTrainedModel
from hfseq_plugins.common import StoredAsTwin
from hfseq_plugins.fp8_encoder.configuration import TWIN_TYPE_VOCAB_SIZE, Fp8EncoderConfig
from hfseq_plugins.megatron_bert import modeling as megatron

if TYPE_CHECKING:
    from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig


def kernel_init(config: Fp8EncoderConfig) -> nn.Initializer:
    """Return the initialiser of kernels: that of the stock classes, or of TransformerEngine."""
    if config.kernel_init == "normal":
        return nn.normal(config.initializer_range)
    return jax.nn.initializers.lecun_normal()


def linear(
    config: Fp8EncoderConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """A Linear with the chosen initialisation, with or without bias."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=config.use_bias)


def embedding_table(config: Fp8EncoderConfig, size: int, rngs: nnx.Rngs) -> nn.Embed:
    """Return ``size`` vectors with the chosen deviation."""
    std = config.embedding_init_std
    std = config.initializer_range if std is None else std
    return nn.Embed(size, config.hidden_size, nn.normal(std), rngs)


class Embeddings(nnx.Module):
    """Word vectors, and those of positions and token types where the model has them, summed."""

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        places = config.max_position_embeddings if config.positions == "learned" else 0
        types, rate = config.type_vocab_size, config.embedding_dropout_prob
        self.word_embeddings = embedding_table(config, config.vocab_size, rngs)
        self.position_embeddings = (
            embedding_table(config, places, rngs) if places else nnx.data(None)
        )
        self.token_type_embeddings = (
            embedding_table(config, types, rngs) if types else nnx.data(None)
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob if rate is None else rate)

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array, rngs: Keys | None):
        x = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return self.dropout(x, rngs)


class SelfAttention(encoder.SelfAttention):
    """Attention of a sequence to itself."""

    linear = staticmethod(linear)


class Output(megatron.Output):
    """Projection back to the residual stream, dropout, residual."""

    linear = staticmethod(linear)


class Intermediate(encoder.Intermediate):
    """The wide half of the feed-forward block; gated, a second projection multiplies the first."""

    linear = staticmethod(linear)

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        sizes = config.hidden_size, config.intermediate_size
        self.up = linear(config, *sizes, rngs) if config.gated_mlp else nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = super().__call__(x)
        return wide if self.up is None else wide * self.up(x)


class Attention(megatron.Attention):
    """Norm, attention and its output projection."""

    submodule_classes = (SelfAttention, Output)


class Layer(megatron.Layer):
    """Self-attention and feed-forward."""

    submodule_classes = (Attention, Intermediate, Output)


class Encoder(encoder.Encoder):
    """The stack of layers, normalised once more at its end unless told."""

    layer_class = Layer

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.ln = megatron.norm(config) if config.final_norm else nnx.data(None)

    def apply_final_norm(self, x: jax.Array) -> jax.Array:
        """Normalise the output of the last layer."""
        return x if self.ln is None else self.ln(x)


class Fp8EncoderModule(encoder.BertModule):
    """The encoder without a head."""

    submodule_classes = (Embeddings, Encoder)

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        config.check()  # options may have been set since it was made
        super().__init__(config, rngs, add_pooling_layer)


class MaskedLM(bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    module = Fp8EncoderModule


class FlatClassifier(nnx.Module):
    """All positions side by side through two products, then the labels; no activation between.

    Padding counts as zeros, so that a row gives the same logits however far it is padded
    (TransformerEngine's example reads what the encoder makes of padding).
    """

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, kernel_init(config)
        self.length = config.flatten_length
        self.flatten = nn.Linear(self.length * width, width, init, rngs)
        self.dense = nn.Linear(width, width, init, rngs)
        self.out_proj = nn.Linear(width, config.num_labels, init, rngs)

    def __call__(self, x: jax.Array, real: jax.Array | None) -> jax.Array:
        """Map (batch, length, hidden_size) to (batch, labels); ``real`` (batch, length) or all."""
        if real is not None:
            x = jnp.where(real[..., None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.length - x.shape[1]), (0, 0)))
        return self.out_proj(self.dense(self.flatten(x.reshape(x.shape[0], -1))))


class SequenceClassification(bert.ModelWithHead):
    """A label (or a number) for the whole sequence."""

    module = Fp8EncoderModule

    def __init__(self, config: Fp8EncoderConfig, rngs: nnx.Rngs):
        self.use_pooler = config.head == "pooled"  # type: ignore[misc]
        super().__init__(config, rngs)
        if self.use_pooler:
            self.classifier = encoder.dense(config, config.hidden_size, config.num_labels, rngs)
        else:
            self.classifier = FlatClassifier(config, rngs)

    def __call__(
        self, input_ids, attention_mask=None, *, segment_ids=None, rngs=None, **kwargs: Any
    ):
        encoded = self.encode(
            input_ids, attention_mask, segment_ids=segment_ids, rngs=rngs, **kwargs
        )
        if self.use_pooler:
            logits = self.classifier(self.dropout(encoded.pooler_output, rngs))
        else:
            real = real_tokens(attention_mask, segment_ids)
            logits = self.classifier(encoded.last_hidden_state, real)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


def real_tokens(
    attention_mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array | None:
    """Return which tokens are no padding, (batch, length), or None where all are real.

    ``attention_mask`` is (batch, length), or (batch, queries, length).
    """
    real = None if segment_ids is None else segment_ids > 0
    if attention_mask is None:
        return real
    seen = attention_mask.astype(bool)
    seen = seen if seen.ndim == 2 else seen.any(1)
    return seen if real is None else real & seen


class FlaxFp8EncoderPreTrainedModel(StoredAsTwin, FlaxBertPreTrainedModel):
    """Base of the FP8 encoder's classes.

    ``save_pretrained`` writes the stock twin (MegatronBERT) with its tensors, so that PyTorch's
    Auto classes load it. Options without an exact twin are written natively, with a warning that
    names them.
    """

    config_class = Fp8EncoderConfig

    def __init__(self, config: Fp8EncoderConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # What limits the length of a row: the table of positions, a flattened head, or nothing.
        if self.module_class is SequenceClassification and config.head == "te_flatten":
            self.position_table = "flatten_length"
        elif config.positions == "none":
            self.position_table = None

    def max_length(self) -> int | None:
        """Return the longest row that the positions or a flattened head allow, if any do."""
        return None if self.position_table is None else getattr(self.config, self.position_table)

    def accepts(self, name: str, method: str = "__call__") -> bool:
        """Tell whether ``name`` counts; token types do not where the model has no table of them."""
        if name == "token_type_ids" and not self.config.type_vocab_size:
            return False
        return super().accepts(name, method)

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return what the twin stores beside our parameters: zeros for what this model lacks."""
        config = self.config
        if config.twin_problems():
            return {}
        found = {} if config.use_bias else self._zero_biases()
        width, tables = config.hidden_size, "embeddings.{}_embeddings.weight"
        if config.positions == "none":
            zeros = np.zeros((config.max_position_embeddings, width), np.float32)
            found[tables.format("position")] = DerivedTensor(
                zeros, "load it with positions='learned'"
            )
        if not config.type_vocab_size:
            zeros = np.zeros((TWIN_TYPE_VOCAB_SIZE, width), np.float32)
            remedy = f"load it with type_vocab_size={TWIN_TYPE_VOCAB_SIZE}"
            found[tables.format("token_type")] = DerivedTensor(zeros, remedy)
        if self.module_class is Fp8EncoderModule:
            return found
        return {f"{self.base_model_prefix}.{name}": entry for name, entry in found.items()}

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
    """The FP8 encoder without a head: hidden states and the pooled first token."""

    module_class = Fp8EncoderModule
    twin_names = {"megatron-bert": "MegatronBertModel"}


class FlaxFp8EncoderForMaskedLM(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with the masked-LM head."""

    module_class = MaskedLM
    twin_names = {"megatron-bert": "MegatronBertForMaskedLM"}


class FlaxFp8EncoderForSequenceClassification(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with a classifier, on the pooled first token or on all positions."""

    module_class = SequenceClassification
    twin_names = {"megatron-bert": "MegatronBertForSequenceClassification"}
    # The two products of the flattened head are large; what makes the labels is not.
    precision_sites = (r"classifier/(flatten|dense)$",)
