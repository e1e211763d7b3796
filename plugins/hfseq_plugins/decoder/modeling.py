"""Decoders of Llama's kind (Touvron et al., 2023) on Flax NNX; names are the checkpoint's.

Norm, attention with rotary positions, norm, gated feed-forward: what a family does otherwise is a
row of :data:`SWITCHES`, the rest is in its configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class FamilyOptions:
    """How a family differs from Llama where its configuration does not say so.

    ``sliding``: every layer has the configuration's ``sliding_window``, if that is a number.
    ``norm_offset`` is added to the norms' weights. ``scaled_embeddings`` are multiplied by the
    root of their width. ``norms_behind`` each block too, before it is added. ``head_norms`` of
    queries and keys before they are turned. ``qkv_bias`` of queries, keys and values, never of what
    mixes heads. ``softcap`` of scores, by the configuration's ``attn_logit_softcapping``.
    ``causal``, or every token sees all.
    """

    sliding_window: bool = False
    norm_offset: float = 0.0
    scale_embeddings: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    softcap: bool = False
    causal: bool = True


_GEMMA = FamilyOptions(norm_offset=1.0, scale_embeddings=True)
FAMILY_OPTIONS = {
    "llama": FamilyOptions(),
    "mistral": FamilyOptions(sliding_window=True),
    "qwen2": FamilyOptions(qkv_bias=True),
    "qwen3": FamilyOptions(qk_norm=True),
    "smollm3": FamilyOptions(),
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(_GEMMA, post_norms=True, softcap=True),
    "gemma3_text": dataclasses.replace(_GEMMA, post_norms=True, qk_norm=True),
    "eurobert": FamilyOptions(causal=False),
}


def family_options(config: PreTrainedConfig) -> FamilyOptions:
    """Return the row of a configuration's family; classes derived from one have their parent's."""
    types = (vars(parent).get("model_type") for parent in type(config).__mro__)
    return next(FAMILY_OPTIONS[name] for name in types if name in FAMILY_OPTIONS)


def is_causal(config: PreTrainedConfig) -> bool:
    """Whether a token sees only what came before it; EmbeddingGemma is a Gemma 3 that sees all."""
    return family_options(config).causal and not getattr(
        config, "use_bidirectional_attention", None
    )


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return what each layer attends to: all, or the window."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None)
        or [SLIDING if family_options(config).sliding_window else FULL] * count
    )
    if len(kinds) < count or not set(kinds) <= {FULL, SLIDING}:
        raise UsageError(
            f"layer_types={kinds} of the configuration: give '{FULL}' or '{SLIDING}' for each of "
            f"its {count} layers"
        )
    return [FULL if window is None else kind for kind in kinds[:count]]


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs, bias: bool
) -> nn.Linear:
    """A Linear with the configuration's initialisation."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=bias)


def head_size(config: PreTrainedConfig) -> int:
    """Return the width of a head, which need not be its share of the hidden size."""
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


class Attention(nn.CachedAttention):
    """Attention to what came before; several query heads may share a key and a value head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__()
        self.kv_heads, self.head_dim = config.num_key_value_heads, head_size(config)
        if config.num_attention_heads % self.kv_heads:
            raise UsageError(
                f"num_attention_heads={config.num_attention_heads} of the configuration is no "
                f"multiple of num_key_value_heads={self.kv_heads}: query heads share key and "
                "value heads in groups of one size"
            )
        kind, scalar = family_options(config), getattr(config, "query_pre_attn_scalar", None)
        self.causal, self.rate = is_causal(config), config.attention_dropout
        self.scale = None if scalar is None else scalar**-0.5
        self.softcap = config.attn_logit_softcapping if kind.softcap else None
        width, bias = config.hidden_size, getattr(config, "attention_bias", False)
        inner, shared = config.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = linear(config, width, inner, rngs, bias or kind.qkv_bias)
        self.k_proj = linear(config, width, shared, rngs, bias or kind.qkv_bias)
        self.v_proj = linear(config, width, shared, rngs, bias or kind.qkv_bias)
        self.o_proj = linear(config, inner, width, rngs, bias)
        self.q_norm, self.k_norm = (
            norm(config, self.head_dim) if kind.qk_norm else nnx.data(None) for _ in "qk"
        )

    def __call__(self, x, angles, mask, rngs, return_weights=False):
        shape, causal = (*x.shape[:2], -1, self.head_dim), False
        query, key = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        value = self.v_proj(x).reshape(shape)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = nn.rotate(query, angles), nn.rotate(key, angles)
        if self.causal:
            key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=causal,
            scale=self.scale,
            softcap=self.softcap,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), weights


class MLP(nnx.Module):
    """The gated feed-forward block (Shazeer, 2020)."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = linear(config, width, inner, rngs, bias)
        self.up_proj = linear(config, width, inner, rngs, bias)
        self.down_proj = linear(config, inner, width, rngs, bias)
        name = "hidden_act" if hasattr(config, "hidden_act") else "hidden_activation"
        self.act = nn.activation(getattr(config, name))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def norm(config: PreTrainedConfig, width: int | None = None) -> nn.RMSNorm:
    """A norm over ``width``, or the hidden size, whose parameter is ``weight`` as in version 4."""
    width, offset = width or config.hidden_size, family_options(config).norm_offset
    return nn.RMSNorm(width, config.rms_norm_eps, leaf="weight", offset=offset)


class Layer(nnx.Module):
    """Attention and feed-forward, a norm before each, and in some families one behind each.

    ``kind`` says what it sees; where it is not ``turned``, its queries and keys have no positions.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, kind: str, turned: bool):
        self.kind, self.turned = kind, turned
        self.post_norms = family_options(config).post_norms
        self.input_layernorm, self.self_attn = norm(config), Attention(config, rngs)
        self.post_attention_layernorm, self.mlp = norm(config), MLP(config, rngs)
        if self.post_norms:
            self.pre_feedforward_layernorm = norm(config)
            self.post_feedforward_layernorm = norm(config)

    def __call__(self, x, angles, masks, *, rngs, return_weights=False):
        mixed, weights = self.self_attn(
            self.input_layernorm(x),
            angles[self.kind] if self.turned else None,
            masks[self.kind],
            rngs,
            return_weights,
        )
        if self.post_norms:
            x = x + self.post_attention_layernorm(mixed)
            block = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(block), weights
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), weights


class Decoder(nnx.Module):
    """The decoder without a head."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        kinds = layer_types(config)
        # Every kind may have angles of its own.
        self.rotary = {
            kind: nn.Rotary(config, head_size(config), kind) for kind in dict.fromkeys(kinds)
        }
        self.windows: dict[str, tuple[int, int] | None] = {FULL: None} if FULL in kinds else {}
        if SLIDING in kinds:
            # A window counts the query's own key.
            side = config.sliding_window - 1
            self.windows[SLIDING] = (side, 0) if is_causal(config) else (side, side)
        turned = getattr(config, "no_rope_layers", None) or [True] * len(kinds)
        self.factor = config.hidden_size**0.5 if family_options(config).scale_embeddings else None
        init = nn.normal(config.initializer_range)
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        self.layers = nn.Layers(
            [Layer(config, rngs, kind, bool(at)) for kind, at in zip(kinds, turned, strict=False)]
        )
        self.norm = norm(config)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if position_ids is None:
            whole = jnp.arange(input_ids.shape[1])[None]
            position_ids = whole if segment_ids is None else nn.positions_in_segments(segment_ids)
        masks = {
            kind: nn.visible(attention_mask, segment_ids, window=window)
            for kind, window in self.windows.items()
        }
        x = self.embed_tokens(input_ids)
        if self.factor is not None:
            # The factor is rounded in half types, as in PyTorch. The choice, which always falls on
            # the product, keeps the compiler from adding to it unrounded in the first layer.
            scaled = x * jnp.asarray(self.factor, x.dtype)
            x = jnp.where(jnp.isnan(x), x, scaled)
        x, weights, inputs = nn.run_layers(
            self.layers,
            x,
            {kind: turn(position_ids) for kind, turn in self.rotary.items()},
            masks,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.norm(x)
        return out.FlaxBaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class CausalLM(nnx.Module):
    """Next-token prediction, with the word embeddings where the head is tied to them."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs, bias=False)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        logits = head(output.last_hidden_state)
        if self.softcap is not None:
            logits = jnp.tanh(logits / self.softcap) * self.softcap
        return out.FlaxCausalLMOutputWithCrossAttentions(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


def last_token_states(states: jax.Array, input_ids: jax.Array, pad: int | None) -> jax.Array:
    """Return the vector of each row's last token that is not ``pad``: (batch, hidden_size)."""
    rows, length = input_ids.shape
    if pad is None and rows > 1:
        raise UsageError(
            f"{rows} rows are classified by their last tokens, and the configuration has no "
            "pad_token_id by which padding could be told: set it, or give one row"
        )
    real = jnp.ones_like(input_ids) if pad is None else input_ids != pad
    last = (jnp.arange(length) * real).argmax(-1)
    return jnp.take_along_axis(states, last[:, None, None], 1)[:, 0]


class SequenceClassification(nnx.Module):
    """A label (or a number) for the whole sequence, by its last token that is no padding."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model, self.pad = Decoder(config, rngs), config.pad_token_id
        self.score = linear(config, config.hidden_size, config.num_labels, rngs, bias=False)

    def __call__(self, input_ids: jax.Array, *args: Any, **kwargs: Any):
        output = self.model(input_ids, *args, **kwargs)
        states = last_token_states(output.last_hidden_state, input_ids, self.pad)
        return out.FlaxSequenceClassifierOutput(
            logits=self.score(states),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class TokenClassification(nnx.Module):
    """A label for every token."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.model = Decoder(config, rngs)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        self.score = linear(config, config.hidden_size, config.num_labels, rngs, bias=True)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        output = self.model(*args, rngs=rngs, **kwargs)
        return out.FlaxTokenClassifierOutput(
            logits=self.score(self.dropout(output.last_hidden_state, rngs)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class QuestionAnswering(nnx.Module):
    """The first and the last token of the answer; most files call the decoder ``transformer``."""

    decoder_name = "transformer"

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        setattr(self, self.decoder_name, Decoder(config, rngs))
        self.qa_outputs = linear(config, config.hidden_size, 2, rngs, bias=True)

    def __call__(self, *args: Any, **kwargs: Any):
        output = getattr(self, self.decoder_name)(*args, **kwargs)
        start, end = jnp.moveaxis(self.qa_outputs(output.last_hidden_state), -1, 0)
        return out.FlaxQuestionAnsweringModelOutput(
            start_logits=start,
            end_logits=end,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class FlaxDecoderOnlyPreTrainedModel(FlaxPreTrainedModel):
    """The call that Transformers 4 gave decoders without an encoder."""

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        past_key_values=None,
        dropout_rng: jax.Array | Keys | None = None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids``, ``attention_mask`` and ``position_ids`` are (batch, length). ``segment_ids``
        (batch, length) numbers the documents of packed rows, 0 being padding.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )


class FlaxDecoderPreTrainedModel(FlaxDecoderOnlyPreTrainedModel):
    """Base of the families: checkpoint names."""

    base_model_prefix = "model"
    weight_aliases: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"rotary_emb\.inv_freq$")

    def max_length(self) -> int | None:
        """The rows of training; ``None`` where angles are stretched for any length."""
        dynamic = nn.rope_parameters(self.config)["rope_type"] == "dynamic"
        return None if dynamic else super().max_length()
