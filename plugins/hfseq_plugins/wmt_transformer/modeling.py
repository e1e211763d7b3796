"""The WMT Transformer: BART's layers with options, stored as PEGASUS or Marian.

One option is the attention of the Differential Transformer (Ye et al., 2024,
https://arxiv.org/abs/2410.05258). Heads come in pairs. A pair mixes values of twice the head's
width with the difference of its two softmax maps, ``A1 - lambda A2``, and normalises the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn
from hfseq.modeling import DerivedTensor, Seq2SeqGeneration
from hfseq.nn.layers import dropout
from hfseq.nn.scores import attention_weights, softmax_scale
from hfseq.nn.visible import as_visibility
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import SinusoidalPositions, UnshiftedPositions, sinusoids
from hfseq_plugins.common import StoredAsTwin
from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig

if TYPE_CHECKING:
    from hfseq_plugins.bart.layers import Attention
    from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig


EPSILON = 1e-5
LAMBDA_NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def initial_lambdas(depth: int) -> jax.Array:
    """Return ``0.8 - 0.6 exp(-0.3 (l - 1))`` for the layers l = 1 … ``depth`` (section 3.1)."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.arange(depth, dtype=jnp.float32))


class DifferentialMix:
    """The mixing of values, in place of ``softmax(q k) v``.

    ``lambda`` is a number a layer, ``exp(q1 k1) - exp(q2 k2) + initial``, of four trained vectors;
    ``initial`` is fixed by the depth of the layer and scales the result too.
    """

    def __init__(
        self: Attention, config: WMTTransformerConfig, heads: int, rngs: nnx.Rngs, **kind: bool
    ):
        super().__init__(config, heads, rngs, **kind)  # type: ignore[call-arg]
        for name in LAMBDA_NAMES:
            drawn = nn.normal(0.1)(rngs.params(), (self.head_dim,), jnp.float32)
            setattr(self, name, nnx.Param(drawn))
        self.head_norm = nn.RMSNorm(2 * self.head_dim, EPSILON)

    def compute_attention(
        self: Attention,
        query,
        key,
        value,
        *,
        initial,
        mask=None,
        causal=False,
        dropout_rate=0.0,
        rngs=None,
        return_weights=False,
    ):
        """Mix: (batch, queries, heads, head_dim), and the difference of the maps if asked for.

        The batch of ``query`` may be a multiple of that of ``key``, as in
        :func:`hfseq.nn.attend`. The weights are (batch, pairs, queries, keys).
        """
        rows, keys = key.shape[:2]
        folded = query.reshape(rows, -1, *query.shape[2:])
        visible = as_visibility(mask, causal)
        maps = attention_weights(folded, key, visible, scale=softmax_scale(None, query))
        first, second = maps[:, 0::2], maps[:, 1::2]
        weights = first - self.strength(initial).astype(maps.dtype) * second
        weights = dropout(weights, dropout_rate, rngs)
        pairs = value.reshape(rows, keys, -1, 2 * self.head_dim)
        mixed = jnp.einsum("bhqs,bshd->bqhd", weights, pairs, preferred_element_type=jnp.float32)
        mixed = self.head_norm(mixed) * (1.0 - initial)
        seeing = visible.sees_any(folded.shape[1], keys)
        if seeing is not None:  # as in attend: between dropout and product it costs bits
            mixed = jnp.where(seeing.swapaxes(1, 2), mixed, 0)
            weights = jnp.where(seeing, weights, 0) if return_weights else weights
        mixed = mixed.astype(value.dtype).reshape(query.shape)
        return mixed, self._by_query(weights, query) if return_weights else None

    def strength(self: Attention, initial: jax.Array) -> jax.Array:
        """Return lambda, a float32 number."""
        q1, k1, q2, k2 = (getattr(self, name)[...].astype(jnp.float32) for name in LAMBDA_NAMES)
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + initial

    @staticmethod
    def _by_query(weights: jax.Array, query: jax.Array) -> jax.Array:
        """Give every beam its own rows of weights again."""
        rows, pairs, _, keys = weights.shape
        batch, queries = query.shape[:2]
        apart = weights.reshape(rows, pairs, batch // rows, queries, keys).swapaxes(1, 2)
        return apart.reshape(batch, pairs, queries, keys)


def kernel_init(config: WMTTransformerConfig) -> nn.Initializer:
    """Return the initialiser of kernels: that of the reference, or that of the stock classes."""
    if config.kernel_init == "normal":
        return nn.normal(config.init_std)
    return jax.nn.initializers.xavier_uniform()


def dense(
    config: WMTTransformerConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """A Linear with the chosen initialisation."""
    return nn.Linear(features_in, features_out, kernel_init(config), rngs)


def token_embedding(
    config: WMTTransformerConfig, rngs: nnx.Rngs, size: int | None = None
) -> nn.Embed:
    """Vectors of the vocabulary, of unit variance after ``scale_embedding`` unless told."""
    std = config.d_model**-0.5 if config.embedding_init_std is None else config.embedding_init_std
    return nn.Embed(size or config.vocab_size, config.d_model, nn.normal(std), rngs)


class Attention(layers.Attention):
    """Attention whose heads may be wider or narrower than the model, with or without biases."""

    @staticmethod
    def dense(
        config: WMTTransformerConfig, features_in: int, features_out: int, rngs: nnx.Rngs
    ) -> nn.Linear:
        """A Linear with the chosen initialisation, with or without bias."""
        bias = config.attention_bias
        return nn.Linear(features_in, features_out, kernel_init(config), rngs, use_bias=bias)

    @staticmethod
    def inner_width(config: WMTTransformerConfig) -> int:
        """Return the width of all heads together."""
        return config.inner_width


class DifferentialAttention(DifferentialMix, Attention):
    """Attention by the difference of two softmax maps."""


def attention(config: WMTTransformerConfig, *args: Any, **kind: Any) -> Attention:
    """Make the attention that the configuration names."""
    made = DifferentialAttention if config.attention == "differential" else Attention
    return made(config, *args, **kind)


class ConfigurableLayer:
    """What layers of both sides take from the configuration."""

    attention, dense = staticmethod(attention), staticmethod(dense)

    def __init__(self: layers.Layer, config: WMTTransformerConfig, rngs: nnx.Rngs):
        self.norm_first = config.norm == "pre"
        super().__init__(config, rngs)  # type: ignore[call-arg]


class EncoderLayer(ConfigurableLayer, layers.EncoderLayer):
    """Self-attention and feed-forward."""


class DecoderLayer(ConfigurableLayer, layers.DecoderLayer):
    """Causal self-attention, attention to the encoder's output, feed-forward."""


class ConfigurableSide:
    """What both sides take from the configuration."""

    embedding_norm = False
    token_embedding = staticmethod(token_embedding)

    def __init__(
        self: layers.Stack,
        config: WMTTransformerConfig,
        rngs: nnx.Rngs,
        own_token_embedding: bool,
        **kwargs: Any,
    ):
        self.norm_first, self.differential = config.norm == "pre", config.attention != "softmax"
        super().__init__(config, rngs, own_token_embedding, **kwargs)  # type: ignore[call-arg]
        self.depth = getattr(config, f"{self.side}_layers")

    @staticmethod
    def positions(config: WMTTransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
        """Places: a table that is trained, or sines and cosines."""
        learned = config.positions == "learned"
        return (UnshiftedPositions if learned else SinusoidalPositions)(config, rngs)

    def per_layer(self: layers.Stack) -> dict[str, jax.Array] | None:
        """Tell each layer how much of the second map it subtracts at the start."""
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

    def __init__(self, config: WMTTransformerConfig, rngs: nnx.Rngs):
        config.check()  # options may have been set since it was made
        self.shared = token_embedding(config, rngs) if config.share_embeddings else nnx.data(None)
        self.add_stacks(config, rngs, separate_embeddings=not config.share_embeddings)


def head(config: WMTTransformerConfig, rngs: nnx.Rngs, size: int) -> nn.Linear | None:
    """The head's own projection, or nothing where it is tied to the target's table."""
    if config.logits_via_embedding:
        return nnx.data(None)
    return nn.Linear(config.d_model, size, kernel_init(config), rngs, use_bias=False)


class ConditionalGeneration(heads.ConditionalGeneration):
    """The next target token; a head of its own has a bias that is trained."""

    module, make_head = WMTTransformerModule, staticmethod(head)

    def logits_bias(self) -> jax.Array:
        """Return what is added to the logits, (1, vocabulary)."""
        bias: jax.Array = jnp.asarray(self.final_logits_bias[...])
        return bias if self.lm_head is not None else jax.lax.stop_gradient(bias)


SIDES = ("encoder", "decoder")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class FlaxWMTTransformerPreTrainedModel(StoredAsTwin, FlaxBartPreTrainedModel):
    """Base of the WMT Transformer's classes.

    ``save_pretrained`` writes the stock twin of the configuration (PEGASUS for ``norm="pre"``,
    Marian for ``norm="post"``) with its tensors, so that PyTorch's Auto classes load it. Options
    without an exact twin are written natively, with a warning that names them.
    """

    config_class = WMTTransformerConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return what the twin stores beside our parameters: zero biases, copies, places."""
        if self.config.twin_problems():
            return {}
        found = {**self._zero_biases(), **self._copies()}
        has_head = self.module_class is ConditionalGeneration
        kept = self.config.norm == "pre" or not has_head  # Marian's head leaves them out
        if kept and self.config.positions == "sinusoidal":
            table = sinusoids(self.config.max_position_embeddings, self.config.d_model)
            remedy = "load it with positions='learned'"
            for side in SIDES:
                found[f"model.{side}.embed_positions.weight"] = DerivedTensor(table, remedy)
        if has_head:
            return found
        bare = {n.removeprefix("model."): one for n, one in found.items() if n[:5] == "model"}
        for name, one in bare.items():
            if isinstance(one.value, str):
                bare[name] = DerivedTensor(one.value.removeprefix("model."), one.remedy)
        return bare

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
        """Return the tables that the twin has several times."""
        config, tables = self.config, [f"model.{side}.embed_tokens.weight" for side in SIDES]
        if config.tied:
            return {}
        if config.share_embeddings:
            remedy = "load it with share_embeddings=False"
            return {table: DerivedTensor("model.shared.weight", remedy) for table in tables}
        if config.norm == "post":
            return {}
        copies = {"model.shared.weight": DerivedTensor(tables[0])}
        if config.logits_via_embedding:
            remedy = "load it with logits_via_embedding=False"
            copies["lm_head.weight"] = DerivedTensor(tables[1], remedy)
        return copies


class FlaxWMTTransformerModel(FlaxWMTTransformerPreTrainedModel):
    """The WMT Transformer without a head: hidden states of decoder and encoder."""

    module_class = WMTTransformerModule
    twin_names = {"pegasus": "PegasusModel", "marian": "MarianModel"}
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxWMTTransformerForConditionalGeneration(
    Seq2SeqGeneration, FlaxWMTTransformerPreTrainedModel
):
    """The WMT Transformer with its head: translation."""

    module_class = ConditionalGeneration
    twin_names = {"pegasus": "PegasusForConditionalGeneration", "marian": "MarianMTModel"}
