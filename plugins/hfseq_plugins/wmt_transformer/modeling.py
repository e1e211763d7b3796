"""The WMT Transformer on Flax NNX: BART with more options, in PEGASUS or Marian format.

Differential attention is an option (Differential Transformer, Ye et al., 2024,
https://arxiv.org/abs/2410.05258). In this attention, heads form pairs. The attention weights of a
pair are the difference `A1 - lambda * A2`, where A1 and A2 are the softmax weights of its two
heads. The values of a pair have twice the width of a head. The weighted sum of the values is
normalized.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.nn import Keys
from hfseq.nn.layers import Initializer, dropout
from hfseq.nn.scores import attention_weights, softmax_scale
from hfseq.nn.visible import Mask, as_visibility
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import SinusoidalPositions, UnshiftedPositions, sinusoids
from hfseq_plugins.common import StoredAsTwin
from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig

EPSILON = 1e-5
LAMBDA_NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def initial_lambdas(depth: int) -> jax.Array:
    """Returns `0.8 - 0.6 * exp(-0.3 * (l - 1))` for the layers l = 1 ... `depth` (section 3.1)."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.arange(depth, dtype=jnp.float32))


def kernel_init(config: PreTrainedConfig) -> Initializer:
    """Returns the initializer of kernels, as in the Flax example or as in Transformers."""
    if config.kernel_init == "normal":
        return nn.normal(config.init_std)
    return jax.nn.initializers.xavier_uniform()


def dense(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Creates a linear layer with the configured initialization."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs)


def token_embedding(config: PreTrainedConfig, rngs: nnx.Rngs, size: int | None = None) -> nn.Embed:
    """Creates token embeddings. By default, they have unit variance after they are scaled."""
    std = config.d_model**-0.5 if config.embedding_init_std is None else config.embedding_init_std
    return nn.Embed(size or config.vocab_size, config.d_model, nn.normal(std), rngs)


class Attention(layers.Attention):
    """Attention with a configurable total width of the heads and optional biases."""

    @staticmethod
    def dense(
        config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
    ) -> nn.Linear:
        """Creates a linear layer with the configured initialization and bias."""
        bias = config.attention_bias
        return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=bias)

    @staticmethod
    def inner_width(config: PreTrainedConfig) -> int:
        """Returns the total width of all attention heads."""
        return config.inner_width


class DifferentialAttention(Attention):
    """Differential attention, whose weights are the difference of two softmax functions.

    Each layer has a scalar `lambda = exp(q1 · k1) - exp(q2 · k2) + initial`, where q1, k1, q2 and
    k2 are trained vectors. The constant `initial` depends on the index of the layer. The output is
    multiplied by `1 - initial`.
    """

    def __init__(self, config: PreTrainedConfig, heads: int, rngs: nnx.Rngs, **options: bool):
        super().__init__(config, heads, rngs, **options)
        for name in LAMBDA_NAMES:
            vector = nn.normal(0.1)(rngs.params(), (self.head_dim,), jnp.float32)
            setattr(self, name, nnx.Param(vector))
        self.head_norm = nn.RMSNorm(2 * self.head_dim, EPSILON)

    def compute_attention(  # type: ignore[override]  # needs the initial lambda
        self,
        query: jax.Array,  # (batch, queries, heads, head_dim)
        key: jax.Array,  # (rows, keys, heads, head_dim), batch % rows == 0
        value: jax.Array,  # (rows, keys, heads, head_dim)
        *,
        initial: jax.Array,  # ()
        mask: Mask = None,
        causal: bool = False,
        dropout_rate: float = 0.0,
        rngs: Keys | None = None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes differential attention.

        The batch size of `query` may be a multiple of the batch size of `key`, as in
        :func:`hfseq.nn.attend`.

        Returns:
            The attention output, `(batch, queries, heads, head_dim)`, and with `return_weights` the
            attention weights, `(batch, pairs, queries, keys)`.
        """
        rows, keys = key.shape[:2]
        folded = query.reshape(rows, -1, *query.shape[2:])
        visible = as_visibility(mask, causal)
        maps = attention_weights(folded, key, visible, scale=softmax_scale(None, query))
        first, second = maps[:, 0::2], maps[:, 1::2]
        weights = first - self.current_lambda(initial).astype(maps.dtype) * second
        weights = dropout(weights, dropout_rate, rngs)
        pairs = value.reshape(rows, keys, -1, 2 * self.head_dim)
        output = jnp.einsum("bhqs,bshd->bqhd", weights, pairs, preferred_element_type=jnp.float32)
        output = self.head_norm(output) * (1.0 - initial)
        has_keys = visible.sees_any(folded.shape[1], keys)
        # As in `attend`, mask after the multiplication, because masking before costs precision.
        if has_keys is not None:
            output = jnp.where(has_keys.swapaxes(1, 2), output, 0)
            weights = jnp.where(has_keys, weights, 0) if return_weights else weights
        output = output.astype(value.dtype).reshape(query.shape)
        return output, self._weights_per_query(weights, query) if return_weights else None

    def current_lambda(self, initial: jax.Array) -> jax.Array:
        """Returns the current value of lambda, a float32 scalar."""
        q1, k1, q2, k2 = (getattr(self, name)[...].astype(jnp.float32) for name in LAMBDA_NAMES)
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + initial

    @staticmethod
    def _weights_per_query(weights: jax.Array, query: jax.Array) -> jax.Array:
        """Reshapes attention weights to the batch size of `query`.

        In beam search, several beams can share keys. Their queries are then folded into one row.
        """
        rows, pairs, _, keys = weights.shape
        batch, queries = query.shape[:2]
        beams = weights.reshape(rows, pairs, batch // rows, queries, keys).swapaxes(1, 2)
        return beams.reshape(batch, pairs, queries, keys)


def attention(config: PreTrainedConfig, *args: Any, **options: Any) -> Attention:
    """Creates the configured attention."""
    attention_class = DifferentialAttention if config.attention == "differential" else Attention
    return attention_class(config, *args, **options)


class ConfigurableLayer(layers.Layer):
    """Mixin that applies the configuration options to encoder and decoder layers."""

    attention, dense = staticmethod(attention), staticmethod(dense)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.norm_first = config.norm == "pre"
        # The next class in the MRO, an encoder or decoder layer, reads the sizes from `config`.
        super().__init__(config, rngs)  # type: ignore[call-arg, arg-type]


class EncoderLayer(ConfigurableLayer, layers.EncoderLayer):
    """Self-attention and feed-forward."""


class DecoderLayer(ConfigurableLayer, layers.DecoderLayer):
    """Causal self-attention, cross-attention and feed-forward."""


class ConfigurableSide(layers.Stack):
    """Mixin that applies the configuration options to encoder and decoder.

    Attributes:
        side: `"encoder"` or `"decoder"`.
    """

    embedding_norm = False
    token_embedding = staticmethod(token_embedding)
    side: ClassVar[str]

    def __init__(
        self,
        config: PreTrainedConfig,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        **kwargs: Any,
    ):
        self.norm_first, self.differential = config.norm == "pre", config.attention != "softmax"
        # The next class in the MRO, the encoder or decoder, reads the depth from `config`.
        super().__init__(config, rngs, own_token_embedding, **kwargs)  # type: ignore[arg-type]
        self.depth = getattr(config, f"{self.side}_layers")

    @staticmethod
    def positions(config: PreTrainedConfig, rngs: nnx.Rngs) -> nnx.Module:
        """Creates learned or sinusoidal position embeddings."""
        learned = config.positions == "learned"
        return (UnshiftedPositions if learned else SinusoidalPositions)(config, rngs)

    def per_layer(self) -> dict[str, jax.Array] | None:
        """Returns the initial lambda of each layer."""
        return {"initial": initial_lambdas(self.depth)} if self.differential else None


class Encoder(ConfigurableSide, layers.Encoder):
    """The encoder."""

    layer, side = EncoderLayer, "encoder"


class Decoder(ConfigurableSide, layers.Decoder):
    """The decoder."""

    layer, side = DecoderLayer, "decoder"


class WMTTransformerModule(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        config.check()  # options may have changed since its creation
        self.shared = token_embedding(config, rngs) if config.share_embeddings else nnx.data(None)  # type: ignore[assignment]  # absent with separate vocabularies
        self.add_stacks(config, rngs, separate_embeddings=not config.share_embeddings)


def head(config: PreTrainedConfig, rngs: nnx.Rngs, size: int) -> nn.Linear | None:
    """Creates the projection of the head, or returns `None` for a tied head."""
    if config.logits_via_embedding:
        return nnx.data(None)
    return nn.Linear(config.d_model, size, kernel_init(config), rngs, use_bias=False)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder and decoder with a language modeling head. An untied head has a trained bias."""

    module, make_head = WMTTransformerModule, staticmethod(head)

    def logits_bias(self) -> jax.Array:
        """Returns the bias of the logits, `(1, vocab_size)`."""
        bias: jax.Array = jnp.asarray(self.final_logits_bias[...])
        return bias if self.lm_head is not None else jax.lax.stop_gradient(bias)


SIDES = ("encoder", "decoder")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class FlaxWMTTransformerPreTrainedModel(StoredAsTwin, FlaxBartPreTrainedModel):
    """Base class of the WMT Transformer models.

    `save_pretrained` writes the model in the format of PEGASUS (for `norm="pre"`) or Marian (for
    `norm="post"`), which PyTorch's Auto classes load. A model that these classes cannot represent
    exactly is saved in hfseq's own format, with a warning that names the reasons.
    """

    config_class = WMTTransformerConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the tensors that PEGASUS or Marian store and this model does not have.

        These are biases of zero, copies of embeddings, and position embeddings.
        """
        if self.config.twin_problems():
            return {}
        tensors = {**self._zero_biases(), **self._copies()}
        has_head = self.module_class is ConditionalGeneration
        # Marian's class with a head does not save its position embeddings.
        saves_positions = self.config.norm == "pre" or not has_head
        if saves_positions and self.config.positions == "sinusoidal":
            table = sinusoids(self.config.max_position_embeddings, self.config.d_model)
            remedy = "load it with positions='learned'"
            for side in SIDES:
                tensors[f"model.{side}.embed_positions.weight"] = DerivedTensor(table, remedy)
        if has_head:
            return tensors
        unprefixed = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name[:5] == "model"
        }
        for name, tensor in unprefixed.items():
            if isinstance(tensor.value, str):
                source = tensor.value.removeprefix("model.")
                unprefixed[name] = DerivedTensor(source, tensor.remedy)
        return unprefixed

    def _zero_biases(self) -> dict[str, DerivedTensor]:
        if self.config.attention_bias:
            return {}
        zeros = DerivedTensor(
            np.zeros(self.config.d_model, np.float32), "load it with attention_bias=True"
        )
        return {
            f"model.{side}.layers.{number}.{attention}.{projection}.bias": zeros
            for side in SIDES
            for number in range(getattr(self.config, f"{side}_layers"))
            for attention in ("self_attn", *(("encoder_attn",) if side == "decoder" else ()))
            for projection in PROJECTIONS
        }

    def _copies(self) -> dict[str, DerivedTensor]:
        """Returns the copies of embeddings that PEGASUS or Marian store."""
        config, tables = self.config, [f"model.{side}.embed_tokens.weight" for side in SIDES]
        if config.tied:
            return {}
        if config.share_embeddings:
            remedy = "load it with share_embeddings=False"
            return {table: DerivedTensor("model.shared.weight", remedy) for table in tables}
        if config.norm == "post":
            return {}
        copies = {"model.shared.weight": DerivedTensor(tables[0], unused=True)}
        if config.logits_via_embedding:
            remedy = "load it with logits_via_embedding=False"
            copies["lm_head.weight"] = DerivedTensor(tables[1], remedy)
        return copies


class FlaxWMTTransformerModel(FlaxWMTTransformerPreTrainedModel):
    """The WMT Transformer without a head. Returns the hidden states of decoder and encoder."""

    module_class = WMTTransformerModule
    twin_names = {"pegasus": "PegasusModel", "marian": "MarianModel"}
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxWMTTransformerForConditionalGeneration(
    Seq2SeqGeneration, FlaxWMTTransformerPreTrainedModel
):
    """The WMT Transformer with a language modeling head, for translation."""

    module_class = ConditionalGeneration
    twin_names = {"pegasus": "PegasusForConditionalGeneration", "marian": "MarianMTModel"}
