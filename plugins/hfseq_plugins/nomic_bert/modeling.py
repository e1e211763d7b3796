"""NomicBERT (Nussbaum et al., 2024): BERT with rotary positions and gated layers without biases.

The encoder is implemented by `hfseq_plugins.rotary_bert`.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
from flax import nnx
from transformers import NomicBertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import Keys
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.rotary_bert import modeling as rotary
from hfseq_plugins.rotary_bert.modeling import linear

#: The option names of Transformers, by their names in configurations that were published before
#: Transformers supported the model. Transformers itself ignores the old names and uses its
#: defaults, which are the values of nomic-embed-text-v1.5.
OLD_OPTIONS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
#: Options of the old configurations for which hfseq supports only one value.
REQUIRED = {
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "use_rms_norm": False,
    "moe_every_n_layers": 0,
}
#: The activation functions in Transformers, by the name of the gated activation function in the old
#: configurations.
GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


class Attention(rotary.Attention):
    """Attention without biases."""

    use_bias = False


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer, 2020) without biases."""

    def __init__(self, config: NomicBertConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.fc11 = linear(config, width, inner, rngs, bias=False)
        self.fc12 = linear(config, width, inner, rngs, bias=False)
        self.fc2 = linear(config, inner, width, rngs, bias=False)
        self.act = nn.activation(config.hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.fc2(self.fc11(x) * self.act(self.fc12(x)))


class Layer(rotary.Layer):
    """Post-norm layer: attention and gated feed-forward."""

    attention_class, mlp_class = Attention, MLP


class NomicBert(rotary.RotaryBert):
    """NomicBERT encoder without a head."""

    layer_class = Layer


class NomicBertMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in NomicBERT checkpoints."""

    prefix = "nomic_bert"
    module = NomicBert


class Predictions(bert.VocabularyHead):
    """BERT's language modeling head, with a different name for the norm."""

    def add_transform(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the layers before the projection to the vocabulary."""
        width = config.hidden_size
        norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.transform = nnx.Dict(dense=dense(config, width, width, rngs), layer_norm=norm)
        self.act = nn.activation(config.hidden_act)

    def transform_states(self, x: jax.Array) -> jax.Array:
        """Applies the layers before the projection to the vocabulary."""
        return self.transform["layer_norm"](self.act(self.transform["dense"](x)))


class PreTrainingHeads(bert.PreTrainingHeads):
    """Contains the language modeling head. Checkpoints name it `cls`."""

    predictions_class = Predictions


class MaskedLM(NomicBertMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""

    heads_class = PreTrainingHeads


class SequenceClassification(NomicBertMixin, bert.SequenceClassification):
    """Sequence classification or regression."""


class TokenClassification(NomicBertMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


def translate_options(config: NomicBertConfig) -> NomicBertConfig:
    """Converts the option names of the published configurations to those of Transformers.

    Args:
        config: The configuration. It is returned unchanged if it already has Transformers' names.

    Raises:
        UsageError: An option has a value that Transformers does not support.
    """
    if getattr(config, "n_embd", None) is None:
        return config
    for option, required in REQUIRED.items():
        value = getattr(config, option, required)
        if value != required and (value or required):
            raise UsageError(
                f"{option}={value} in the configuration is not supported (supported: {required})"
            )
    gate = getattr(config, "activation_function", "swiglu")
    if gate not in GATES:
        raise UsageError(
            f"activation_function='{gate}' in the configuration is not supported (supported: "
            f"{', '.join(GATES)})"
        )
    config = copy.deepcopy(config)
    for old, name in OLD_OPTIONS.items():
        if getattr(config, old, None) is not None:
            setattr(config, name, getattr(config, old))
        if hasattr(config, old):
            delattr(config, old)
    config.hidden_act = GATES[gate]
    config.head_dim = config.hidden_size // config.num_attention_heads
    theta = getattr(config, "rotary_emb_base", None) or config.default_theta
    config.rope_parameters = {"rope_type": "default", "rope_theta": float(theta)}
    return config


class FlaxNomicBertPreTrainedModel(rotary.FlaxRotaryBertPreTrainedModel):
    """Base class of the NomicBERT models."""

    config_class = NomicBertConfig
    base_model_prefix = "nomic_bert"
    weight_aliases = {
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: NomicBertConfig, *args: Any, **kwargs: Any):
        super().__init__(translate_options(config), *args, **kwargs)


class FlaxNomicBertModel(FlaxNomicBertPreTrainedModel):
    """NomicBERT without a head. Returns hidden states."""

    module_class = NomicBert


class FlaxNomicBertForMaskedLM(FlaxNomicBertPreTrainedModel):
    """NomicBERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxNomicBertForSequenceClassification(FlaxNomicBertPreTrainedModel):
    """NomicBERT for sequence classification, from the pooled first token."""

    module_class = SequenceClassification


class FlaxNomicBertForTokenClassification(FlaxNomicBertPreTrainedModel):
    """NomicBERT for token classification."""

    module_class = TokenClassification
