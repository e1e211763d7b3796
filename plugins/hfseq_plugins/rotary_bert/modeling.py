"""BERT with rotary positions on Flax NNX: the encoder of NomicBERT, GTE and Jina embeddings v3.

Layers are post-norm, as in BERT, and one projection computes queries, keys and values. The families
differ in their feed-forward blocks, in their biases, and in the names of modules. Module attributes
are named as in checkpoints. The PyTorch modules of Transformers have other names, so Transformers
renames, splits and joins tensors when it loads and saves checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.bert.encoder import Pooler
from hfseq_plugins.bert.sharding import RULES as BERT_RULES

RULES = [
    (r"(Wqkv|qkv_proj|fc1|fc11|fc12|up_gate_proj)/kernel$", "column"),
    (r"(Wqkv|qkv_proj|fc1|up_gate_proj)/bias$", "column_bias"),
    (r"encoder/.*(out_proj|o_proj|fc2|down_proj)/kernel$", "row"),
    (r"encoder/.*(out_proj|o_proj|fc2|down_proj)/bias$", "vector"),
    (r"(norm1|norm2|norm|emb_ln|attn_ln|mlp_ln)/(scale|bias)$", "vector"),
    (r"decoder/bias$", "vocab"),
    *BERT_RULES,
]


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """Returns a linear layer with the initialization of BERT."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=bias)


class Attention(nnx.Module):
    """Bidirectional attention with rotary positions.

    Attributes:
        projection_names: Names of the projection to queries, keys and values, and of the output
            projection.
        use_bias: Whether the projections have biases.
    """

    projection_names: ClassVar[tuple[str, str]] = ("Wqkv", "out_proj")
    use_bias: ClassVar[bool] = True

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        width, inner = config.hidden_size, self.heads * head_dim(config)
        joint, output = self.projection_names
        setattr(self, joint, linear(config, width, 3 * inner, rngs, self.use_bias))
        setattr(self, output, linear(config, inner, width, rngs, self.use_bias))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        joint, output = (getattr(self, name) for name in self.projection_names)
        # The queries, keys and values are split before the heads. If the projection is sharded,
        # each device then has the same heads of all three.
        query, key, value = (
            part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(joint(x), 3, -1)
        )
        attn_output, weights = nn.attend(
            nn.rotate(query, rotary_emb),
            nn.rotate(key, rotary_emb),
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return output(attn_output.reshape(*x.shape[:2], -1)), weights


def head_dim(config: PreTrainedConfig) -> int:
    """Returns the number of features of each attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Layer(nnx.Module):
    """Post-norm layer: attention and feed-forward.

    Attributes:
        attention_class: Class of the attention.
        mlp_class: Class of the feed-forward block.
        names: Names of the attention module, of the norm after attention, and of the norm after the
            feed-forward block.
    """

    attention_class: ClassVar[Callable[..., nnx.Module]] = Attention
    mlp_class: ClassVar[Callable[..., nnx.Module]]
    names: ClassVar[tuple[str, str, str]] = ("attn", "norm1", "norm2")

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, epsilon = config.hidden_size, config.layer_norm_eps
        attention, first_norm, second_norm = self.names
        setattr(self, attention, self.attention_class(config, rngs))
        self.mlp = self.mlp_class(config, rngs)
        setattr(self, first_norm, nn.LayerNorm(width, epsilon))
        setattr(self, second_norm, nn.LayerNorm(width, epsilon))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attention, first_norm, second_norm = (getattr(self, name) for name in self.names)
        attn_output, weights = attention(x, rotary_emb, mask, rngs, return_weights)
        x = first_norm(x + self.dropout(attn_output, rngs))
        return second_norm(x + self.dropout(self.mlp(x, rngs), rngs)), weights


class Embeddings(nnx.Module):
    """Sum of word embeddings and, if the model has token types, token type embeddings."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, init = config.hidden_size, nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        types = config.type_vocab_size
        self.token_type_embeddings = nn.Embed(types, width, init, rngs) if types else nnx.data(None)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array | None,  # (batch, length)
    ) -> jax.Array:
        x = self.word_embeddings(input_ids)
        if self.token_type_embeddings is None:
            return x
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return x + self.token_type_embeddings(types)


class RotaryBert(nnx.Module):
    """Encoder without a head. Subclasses define the names of its layers and norms.

    Attributes:
        layer_class: Class of the layers.
        stack_name: Name of the stack of layers in `encoder`.
        norm_name: Name of the norm after the embeddings. If it is `LayerNorm`, the norm is an
            attribute of `embeddings`, otherwise of this module.
    """

    layer_class: ClassVar[Callable[..., nnx.Module]]
    stack_name: ClassVar[str] = "layers"
    norm_name: ClassVar[str] = "emb_ln"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        self.embeddings = Embeddings(config, rngs)
        norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        setattr(self.embeddings if self.norm_name == "LayerNorm" else self, self.norm_name, norm)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        layers = [self.layer_class(config, rngs) for _ in range(config.num_hidden_layers)]
        self.encoder = nnx.Dict({self.stack_name: nn.Layers(layers)})
        self.rotary = nnx.static(nn.Rotary(config, head_dim(config)))
        self.pooler = Pooler(config, rngs) if add_pooling_layer else nnx.data(None)

    def embed(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        """Returns the normalized embeddings, `(batch, length, hidden)`."""
        norm: Any = getattr(self, self.norm_name, None) or self.embeddings.LayerNorm  # type: ignore[attr-defined]  # one of both
        return self.dropout(norm(self.embeddings(input_ids, token_type_ids)), rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
            if segment_ids is not None:
                position_ids = nn.positions_in_segments(segment_ids)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder[self.stack_name],
            self.embed(input_ids, token_type_ids, rngs),
            self.rotary(position_ids),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class FlaxRotaryBertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the models. Subclasses set the configuration and checkpoint names.

    `input_ids`, `attention_mask`, `token_type_ids` and `position_ids` are `(batch, length)`. If
    rows contain several packed documents, `segment_ids`, `(batch, length)`, contains the document
    number of each token, and 0 for padding.
    """

    # Old checkpoints contain the rotary frequencies, which the model computes.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"inv_freq$")
