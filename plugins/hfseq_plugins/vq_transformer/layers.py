"""The parts of a layer: norms, attention over a codebook, and the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn.kv_cache import StateAttention
from hfseq_plugins.vq_transformer.attention import attend, attend_to_all
from hfseq_plugins.vq_transformer.codebook import Codebook, quantise
from hfseq_plugins.vq_transformer.positions import sinusoids
from hfseq_plugins.vq_transformer.sharding import split_heads
from hfseq_plugins.vq_transformer.state import RANKS, State, empty_state, reset
from hfseq_plugins.vq_transformer.tape import How, Inputs, Terms

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig


class Tokens(NamedTuple):
    """What all layers know of the batch: ``lengths`` (B,), and (B, T) which tokens are real, which
    count in statistics, and the document of each; ``fresh`` (B,) rows forget their state.
    """

    lengths: jax.Array | None = None
    valid: jax.Array | None = None
    counted: jax.Array | None = None
    segment: jax.Array | None = None
    fresh: jax.Array | None = None


def linear(config: VQTransformerConfig, size_in: int, size_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A product without a bias, with the family's initialisation."""
    spread = (config.initializer_scale / size_in) ** 0.5
    return nn.Linear(size_in, size_out, nn.normal(spread), rngs, use_bias=False)


def rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Scale the last axis to a root mean square of 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """RMS normalisation in float32, with gain and bias where the configuration has them."""

    compute_dtype: DTypeLike | None = None

    def __init__(self, config: VQTransformerConfig):
        affine, width = config.norm_affine, config.hidden_size
        self.scale = nnx.Param(jnp.ones(width)) if affine else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(width)) if affine else nnx.data(None)
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (..., hidden_size)."""
        y = rms(x, self.epsilon)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...] + self.bias[...]
        return y.astype(self.compute_dtype or x.dtype)


class Attention(StateAttention):
    """Attention of a text to itself, its keys replaced by codes; gated, or with plain heads."""

    entries = tuple(RANKS)
    compute_dtype: DTypeLike | None = None

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        super().__init__()
        self.config, width = config, config.hidden_size
        queries, keys = config.query_heads * config.head_dim, config.key_heads * config.head_dim
        values = config.key_heads * config.value_width
        mixed = config.query_heads * config.value_width
        self.input_norm = Norm(config)
        self.q_proj = linear(config, width, queries, rngs)
        self.k_proj = linear(config, width, keys, rngs)
        self.v_proj = linear(config, width, values, rngs)
        self.g_proj = linear(config, width, mixed, rngs) if config.gated else nnx.data(None)
        self.r_proj = linear(config, width, keys, rngs)
        self.o_proj = linear(config, mixed, width, rngs)
        self.content_bias = nnx.Param(jnp.zeros(queries))
        self.position_bias = nnx.Param(jnp.zeros(queries))
        sizes = (config.key_heads, config.num_codes, config.head_dim)
        self.codebook = Codebook(*sizes, config.count_floor, rngs)
        self.wave_dropout = nn.Dropout(config.sinusoid_dropout)
        # sqrt(K) divides the scores: half of it is in the queries, half in all they meet.
        self.scale = config.head_dim**-0.25

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Return the state before the first token."""
        return empty_state(batch_size, self.config, dtype)._asdict()

    def __call__(
        self, x: jax.Array, tokens: Tokens, rngs: Keys | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Map (B, T, D) to the residual (B, T, D) and the sum of the quantisation errors."""
        config, heads, y = self.config, self.config.key_heads, self.input_norm(x)
        query = self._narrow(self.q_proj(y), config.query_heads)
        key = self._narrow(self.k_proj(y), heads)
        value, gate = self.v_proj(y), None
        if self.g_proj is not None:
            value, gate = jax.nn.silu(value), jax.nn.silu(self.g_proj(y))
        key, codes, loss = self._quantise(key, tokens)
        inputs = Inputs(
            jnp.moveaxis(query.reshape(*query.shape[:2], heads, -1, config.head_dim), 1, 3),
            jnp.moveaxis(key, 1, 2),
            jnp.moveaxis(value.reshape(*value.shape[:2], heads, -1), 1, 2),
            jnp.moveaxis(codes, 1, 2),
            tokens.segment,
        )
        mixed = jnp.moveaxis(self._mix(inputs, tokens, rngs), 2, 1).astype(x.dtype)
        mixed = mixed.reshape(*x.shape[:2], -1)
        return self.o_proj(mixed if gate is None else mixed * gate), loss

    def _narrow(self, x: jax.Array, heads: int) -> jax.Array:
        """Cut queries or keys into heads and give them all the same length, in float32."""
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return rms(x, self.config.rms_norm_eps) * self.scale

    def _quantise(self, key: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Any]:
        """Return keys by their codes, the codes, and while training the sum of the errors.

        Attention to the keys as they are needs no codes: they are 0, nothing is counted or lost.
        """
        train, counted = nn.current_options().train, tokens.counted
        if self.config.attention_type == "full":
            codes = jnp.zeros(key.shape[:3], jnp.int32)
            return key, codes, jnp.zeros(()) if train else None
        found, loss = quantise(key, self.codebook.rows()), None
        if train:
            self.codebook.count(key, found.codes, counted)
            errors = found.errors.sum(-1)
            loss = (errors if counted is None else jnp.where(counted > 0, errors, 0.0)).sum()
        codes = found.codes
        if tokens.valid is not None:
            codes = jnp.where(tokens.valid[..., None], codes, self.config.num_codes)
        return found.keys, codes, loss

    def _terms(self, distances: int, rngs: Keys | None, one: bool = False) -> Terms:
        """Return what scores are made of, with positions for distances below ``distances``.

        For ``one`` token the rows stay apart in two factors: the query meets the projection, which
        is less work than to project all sinusoids.
        """
        config, heads = self.config, self.config.key_heads
        waves = sinusoids(jnp.arange(distances), config.hidden_size, config.sinusoid_base)
        # One mask for the batch, and for all windows of a sequence.
        waves = self.wave_dropout(waves, rngs and rngs.per_sequence.shared)
        shape = (heads, -1, 1, config.head_dim)
        if one:
            kernel = self.r_proj.gathered_kernel().astype(jnp.float32) * self.scale
            relative = waves, kernel.reshape(-1, heads, config.head_dim)
        else:
            rows = self.r_proj(waves).astype(jnp.float32) * self.scale
            relative = rows.reshape(distances, heads, config.head_dim)
        return Terms(
            self.codebook.rows(),
            relative,
            self.content_bias[...].reshape(shape) * self.scale,
            self.position_bias[...].reshape(shape) * self.scale,
        )

    def _mix(self, inputs: Inputs, tokens: Tokens, rngs: Keys | None) -> jax.Array:
        """Attend, and keep the state where there is one: (B, Hq, T, V) float32."""
        config, held = self.config, self.read_cache()
        # A short call is one short block.
        block = min(config.block_size, inputs.code.shape[-1])
        how = How(
            config.window_size, block, config.reduction, config.use_compressive_cache,
            config.stop_gradient_cache,
        )  # fmt: skip
        kind, inputs = config.attention_type, split_heads(inputs)
        if kind == "full" or (kind == "vq_quadratic" and held is None):
            reach = inputs.code.shape[-1] if kind == "full" else config.window_size + 1
            terms = self._terms(reach, rngs)
            out = attend_to_all(inputs, terms, how, tokens.lengths, quantised=kind != "full")
        else:
            state = None if held is None else State(**held)
            if state is not None and tokens.fresh is not None:
                state = reset(state, tokens.fresh, config.num_codes)
            one = state is not None and inputs.code.shape[-1] == 1
            terms = self._terms(config.window_size + 1, rngs, one)
            out, after = attend(inputs, terms, how, state, tokens.lengths)
            if after is not None:
                self.write_cache(after._asdict())
        return out.reshape(out.shape[0], -1, *out.shape[3:])


class MLP(nnx.Module):
    """The feed-forward block of plain heads, with squared rectified units (So et al., 2021)."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.input_norm = Norm(config)
        self.up_proj = linear(config, config.hidden_size, config.inner_width, rngs)
        self.down_proj = linear(config, config.inner_width, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, T, D) to the residual."""
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(self.input_norm(x)))))


class Layer(nnx.Module):
    """Two residual parts: two gated attentions, or attention and MLP."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.attention_2 = Attention(config, rngs) if config.gated else nnx.data(None)
        self.mlp = nnx.data(None) if config.gated else MLP(config, rngs)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.layer_dropout = nn.Dropout(config.layer_dropout)

    def __call__(self, x: jax.Array, tokens: Tokens, *, rngs: Keys | None) -> Any:
        """Map (B, T, D) to the next layer's input, and the sum of the errors of its keys."""
        x, loss = self._attend(self.attention, x, tokens, rngs)
        if self.attention_2 is not None:
            x, more = self._attend(self.attention_2, x, tokens, rngs)
            return x, None if loss is None else loss + more
        return x + self._whole(self.mlp(x), rngs and rngs.child()), loss

    def _attend(self, part: Attention, x: jax.Array, tokens: Tokens, rngs: Keys | None) -> Any:
        keys = rngs and rngs.child()
        change, loss = part(x, tokens, keys)
        return x + self._whole(self.dropout(change, keys), keys), loss

    def _whole(self, change: jax.Array, rngs: Keys | None) -> jax.Array:
        """Leave a part out for some rows, for as long as their sequences last (LayerDrop)."""
        if rngs is None or not self.layer_dropout.rate:
            return change
        return change * self.layer_dropout(
            jnp.ones((len(change), 1, 1), change.dtype), rngs.per_sequence
        )
