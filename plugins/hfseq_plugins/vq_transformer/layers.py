"""Layers of the VQ Transformer: norm, attention over a window and a cache of codes, MLP.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from hfseq import nn
from hfseq.nn import Keys
from hfseq.nn.kv_cache import StateAttention
from hfseq_plugins.vq_transformer import parallel, sequence
from hfseq_plugins.vq_transformer.blocks import (
    MASKED_SCORE,
    AttentionInputs,
    AttentionOptions,
    ScoreTerms,
    cache_scores,
    weighted_sum,
)
from hfseq_plugins.vq_transformer.codebook import Codebook, quantize
from hfseq_plugins.vq_transformer.positions import EXACT, shift_right, sinusoids
from hfseq_plugins.vq_transformer.sharding import split_heads
from hfseq_plugins.vq_transformer.state import STATE_RANKS, State, empty_state, reset, take

if TYPE_CHECKING:
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig


def attend(
    inputs: AttentionInputs,
    terms: ScoreTerms,
    options: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Computes attention over a window and a cache of codes.

    Args:
        inputs: The tokens of the call.
        terms: The parameters of the scores.
        options: Static options.
        state: The state before the call. `None` at the start of a text.
        lengths: The number of tokens of each row, `(B,)`. Padding follows these tokens. `None` for
            rows without padding.

    Returns:
        The attention output, float32 `(B, Hk, G, T, V)`, and the state after the call. The state is
        `None` if `state` is `None`.
    """
    if state is not None and inputs.code.shape[-1] == 1:
        return attend_one_token(inputs, terms, options, state)
    mesh = sequence.mesh_for(inputs.code.shape[-1], options.block)
    if mesh is not None:
        return sequence.attend(mesh, inputs, terms, options, state, lengths)
    return parallel.attend_on_device(inputs, terms, options, state, lengths)


_dot = functools.partial(jnp.einsum, precision=EXACT)


def attend_one_token(
    inputs: AttentionInputs, terms: ScoreTerms, options: AttentionOptions, state: State
) -> tuple[jax.Array, State]:
    """Computes attention for one token per row, and updates the state.

    The token replaces the oldest token in the window, and the oldest token moves to the cache.
    Padding does not change the state. The cost is that of attention to M + S keys, and does not
    depend on the length of the text.

    Returns:
        The attention output, float32 `(B, Hk, G, 1, V)`, and the new state.
    """
    codes, window = terms.codebook.shape[1], options.window
    if options.stop_gradient:
        state = State(*map(lax.stop_gradient, state))
    real = inputs.code[:, 0, 0] < codes
    content = inputs.query + terms.content
    waves, projection = terms.relative
    biases = _dot("bhglk,dhk->bhgld", inputs.query + terms.position, projection)
    biases = _dot("bhglk,dk->bhgld", biases, waves)
    # The distance from each slot of the window to the token, from 1 to M. The token will replace
    # the slot at distance M.
    distances = (state.position[:, None] - 1 - jnp.arange(window)) % max(window, 1) + 1
    near = _dot("bhglk,bhck->bhglc", content, state.window_key)
    near += jnp.take_along_axis(biases, distances[:, None, None, None], axis=-1, mode="clip")
    near = jnp.where(state.window_code[:, :1, None, None] < codes, near, MASKED_SCORE)
    self_scores = _dot("bhglk,bhck->bhglc", content, inputs.key) + biases[..., :1]
    groups = [(self_scores, inputs.value), (near, state.window_value)]
    if options.compressive:
        groups.append((cache_scores(content, state.cache_count, terms.codebook), state.cache_mean))
    # A single softmax covers all groups. A window of size 0 has no scores.
    groups = [group for group in groups if group[0].shape[-1]]
    top = functools.reduce(jnp.maximum, (score.max(-1, keepdims=True) for score, _ in groups))
    weights = [jnp.exp(score - top) for score, _ in groups]
    total = sum(weight.sum(-1, keepdims=True) for weight in weights)
    parts = [
        weighted_sum(weight / total, value, inputs.value.dtype)
        for weight, (_, value) in zip(weights, groups, strict=True)
    ]
    out = sum(parts[1:], parts[0])
    return out, _advance(inputs, state, real, codes, _zero(out))


def _advance(
    inputs: AttentionInputs, state: State, real: jax.Array, codes: int, zero: jax.Array
) -> State:
    """Moves the oldest token of each row to the cache, and writes the new token into its slot.

    Args:
        inputs: The new tokens.
        state: The state before the call.
        real: False for rows whose new token is padding, `(B,)`.
        codes: The number of codes S.
        zero: An int32 0 that depends on all reads of the old state. If a write did not depend on
            all reads, XLA would copy the whole buffer.
    """
    window, rows = state.window_code.shape[-1], jnp.arange(len(real))
    slot = state.position % max(window, 1)
    value, code = inputs.value, inputs.code
    if window:
        value = take(state.window_value, slot[:, None])
        code = take(state.window_code, slot[:, None])
    code = jnp.where(real[:, None], code[..., 0], codes)
    source = (rows[:, None], jnp.arange(code.shape[1])[None], code)
    count = state.cache_count.at[source].get(mode="fill", fill_value=0) + 1
    mean = state.cache_mean.at[source].get(mode="fill", fill_value=0.0)
    mean = mean + (value[:, :, 0].astype(jnp.float32) - mean) / count[..., None]
    target = (rows[:, None], source[1], code + zero)
    means = state.cache_mean.at[target].set(mean, mode="drop")
    counts = state.cache_count.at[target].set(count, mode="drop")
    slot = jnp.where(real, slot, window) + _zero(means) + _zero(counts)

    def put(ring: jax.Array, new: jax.Array) -> jax.Array:
        if not window:
            return ring
        return ring.at[rows, :, slot].set(new[:, :, 0].astype(ring.dtype), mode="drop")

    return State(
        put(state.window_key, inputs.key),
        put(state.window_value, inputs.value),
        put(state.window_code, inputs.code),
        means,
        counts,
        state.position + real,
    )


def _zero(x: jax.Array) -> jax.Array:
    """Returns an int32 0 that, for the compiler, depends on `x`."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    return ((first > 3e38) & (first < -3e38)).astype(jnp.int32)


# -- all pairs of tokens
# ---------------------------------------------------------------------------------------


_score = functools.partial(jnp.einsum, "bhglk,bhck->bhglc", precision=EXACT)


def attend_to_all(
    inputs: AttentionInputs,
    terms: ScoreTerms,
    options: AttentionOptions,
    lengths: jax.Array | None,
    *,
    quantized: bool,
) -> jax.Array:
    """Computes attention over all earlier keys, with quadratic cost.

    Args:
        inputs: The tokens of the call.
        terms: The parameters of the scores. `relative` has one entry for each distance with a
            position score.
        options: Static options.
        lengths: The number of tokens of each row, `(B,)`, or `None` for rows without padding.
        quantized: Whether keys are quantized. If so, a key only gets gradients from the queries
            that attend to it individually in the computation with blocks of `options.block` tokens.

    Returns:
        The attention output, float32 `(B, Hk, G, T, V)`.
    """
    tokens = inputs.code.shape[-1]
    positions = jnp.arange(tokens)
    content, key, exact = inputs.query + terms.content, inputs.key, None
    if quantized:
        # The keys in the block of each query and in the window before it, (T, T). Only these keys
        # get a gradient.
        starts = positions - positions % options.block
        exact = positions >= (starts - (0 if options.stop_gradient else options.window))[:, None]
        constant_key = lax.stop_gradient(key)
        scores = _score(content, constant_key)
        scores += jnp.where(exact, _score(lax.stop_gradient(content), key - constant_key), 0.0)
    else:
        scores = _score(content, key)
    # Position scores of all pairs, (B, Hk, G, T, T). They are 0 for distances without an entry.
    reach = min(len(terms.relative), tokens)
    query, rows = inputs.query + terms.position, terms.relative[:reach][::-1]
    biases = shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows, precision=EXACT))
    scores += biases[..., reach - 1 : reach - 1 + tokens]
    visible = (positions[:, None] >= positions)[None]
    if lengths is not None:
        visible = visible & (positions < lengths[:, None])[:, None]
    if inputs.segment is not None:
        visible = visible & (inputs.segment[:, :, None] == inputs.segment[:, None])
    visible = visible[:, None, None]
    if quantized and not options.compressive:
        visible &= positions[:, None] - positions <= options.window
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED_SCORE), axis=-1)
    if exact is not None and options.stop_gradient:
        return _values(weights * exact, inputs.value) + _values(
            weights * ~exact, lax.stop_gradient(inputs.value)
        )
    return _values(weights, inputs.value)


def _values(weights: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bhglc,bhcv->bhglv", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )


class TokenInfo(NamedTuple):
    """Masks and lengths of a batch, shared by all layers.

    Attributes:
        lengths: The number of tokens of each row, `(B,)`.
        valid: False for padding, `(B, T)`.
        counted: Whether each token is included in the statistics of the codebooks, `(B, T)`.
        segment: Document number of each token in packed rows, `(B, T)`.
        fresh: Whether each row starts with an empty state, `(B,)`.
    """

    lengths: jax.Array | None = None
    valid: jax.Array | None = None
    counted: jax.Array | None = None
    segment: jax.Array | None = None
    fresh: jax.Array | None = None


def linear(config: VQTransformerConfig, size_in: int, size_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """Creates a linear layer without bias, with the initialization of the family."""
    std = (config.initializer_scale / size_in) ** 0.5
    return nn.Linear(size_in, size_out, nn.normal(std), rngs, use_bias=False)


def rms_normalize(x: jax.Array, epsilon: float) -> jax.Array:
    """Scales the last axis to a root mean square of 1, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


class Norm(nnx.Module):
    """RMSNorm in float32 with optional scale and bias."""

    compute_dtype: DTypeLike | None = None

    def __init__(self, config: VQTransformerConfig):
        affine, width = config.norm_affine, config.hidden_size
        self.scale = nnx.Param(jnp.ones(width)) if affine else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(width)) if affine else nnx.data(None)
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes hidden states, `(..., hidden)`."""
        y = rms_normalize(x, self.epsilon)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...] + self.bias[...]
        return y.astype(self.compute_dtype or x.dtype)


class Attention(StateAttention):
    """Causal self-attention with quantized keys. Heads are gated if `config.gated` is true."""

    entries = tuple(STATE_RANKS)
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
        # Queries, keys and the vectors that are added to queries are each multiplied by K ** -0.25,
        # so that scores are scaled by 1 / sqrt(K).
        self.scale = config.head_dim**-0.25

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Returns the state before the first token."""
        return empty_state(batch_size, self.config, dtype)._asdict()

    def __call__(
        self,
        x: jax.Array,  # (B, T, D)
        tokens: TokenInfo,
        rngs: Keys | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Applies norm and attention to `(B, T, D)`.

        Returns:
            The output without residual connection, `(B, T, D)`, and the sum of the quantization
            errors in training, otherwise `None`.
        """
        config, heads, y = self.config, self.config.key_heads, self.input_norm(x)
        query = self._split_heads(self.q_proj(y), config.query_heads)
        key = self._split_heads(self.k_proj(y), heads)
        value, gate = self.v_proj(y), None
        if self.g_proj is not None:
            value, gate = jax.nn.silu(value), jax.nn.silu(self.g_proj(y))
        key, codes, loss = self._quantize(key, tokens)
        inputs = AttentionInputs(
            jnp.moveaxis(query.reshape(*query.shape[:2], heads, -1, config.head_dim), 1, 3),
            jnp.moveaxis(key, 1, 2),
            jnp.moveaxis(value.reshape(*value.shape[:2], heads, -1), 1, 2),
            jnp.moveaxis(codes, 1, 2),
            tokens.segment,
        )
        mixed = jnp.moveaxis(self._mix(inputs, tokens, rngs), 2, 1).astype(x.dtype)
        mixed = mixed.reshape(*x.shape[:2], -1)
        return self.o_proj(mixed if gate is None else mixed * gate), loss

    def _split_heads(self, x: jax.Array, heads: int) -> jax.Array:
        """Splits queries or keys into heads and normalizes them, in float32."""
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return rms_normalize(x, self.config.rms_norm_eps) * self.scale

    def _quantize(self, key: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array, Any]:
        """Returns quantized keys, their codes, and the sum of quantization errors in training.

        For full attention, the keys are returned unchanged. The codes and the sum are 0.
        """
        train, counted = nn.current_options().train, tokens.counted
        if self.config.attention_type == "full":
            codes = jnp.zeros(key.shape[:3], jnp.int32)
            return key, codes, jnp.zeros(()) if train else None
        quantized, loss = quantize(key, self.codebook.rows()), None
        if train:
            self.codebook.count(key, quantized.codes, counted)
            errors = quantized.errors.sum(-1)
            loss = (errors if counted is None else jnp.where(counted > 0, errors, 0.0)).sum()
        codes = quantized.codes
        if tokens.valid is not None:
            codes = jnp.where(tokens.valid[..., None], codes, self.config.num_codes)
        return quantized.keys, codes, loss

    def _terms(self, distances: int, rngs: Keys | None, single_token: bool = False) -> ScoreTerms:
        """Returns the parameters of the scores, with positions for distances below `distances`.

        For a single token, the relative positions are returned as two factors, because multiplying
        the query by the projection is cheaper than projecting all sinusoids.
        """
        config, heads = self.config, self.config.key_heads
        waves = sinusoids(jnp.arange(distances), config.hidden_size, config.sinusoid_base)
        # All rows, and all calls of a sequence, have the same dropout mask.
        waves = self.wave_dropout(waves, rngs and rngs.per_sequence.shared)
        shape = (heads, -1, 1, config.head_dim)
        if single_token:
            kernel = self.r_proj.gathered_kernel().astype(jnp.float32) * self.scale
            relative = waves, kernel.reshape(-1, heads, config.head_dim)
        else:
            rows = self.r_proj(waves).astype(jnp.float32) * self.scale
            relative = rows.reshape(distances, heads, config.head_dim)
        return ScoreTerms(
            self.codebook.rows(),
            relative,
            self.content_bias[...].reshape(shape) * self.scale,
            self.position_bias[...].reshape(shape) * self.scale,
        )

    def _mix(self, inputs: AttentionInputs, tokens: TokenInfo, rngs: Keys | None) -> jax.Array:
        """Computes attention and updates the state, if there is one.

        Returns:
            The attention output of all Hq query heads, float32 `(B, Hq, T, V)`.
        """
        config, cached = self.config, self.read_cache()
        # If the call is shorter than a block, it is computed as one short block.
        block = min(config.block_size, inputs.code.shape[-1])
        options = AttentionOptions(
            config.window_size,
            block,
            config.reduction,
            config.use_compressive_cache,
            config.stop_gradient_cache,
        )
        attention_type, inputs = config.attention_type, split_heads(inputs)
        if attention_type == "full" or (attention_type == "vq_quadratic" and cached is None):
            reach = inputs.code.shape[-1] if attention_type == "full" else config.window_size + 1
            terms = self._terms(reach, rngs)
            out = attend_to_all(
                inputs, terms, options, tokens.lengths, quantized=attention_type != "full"
            )
        else:
            state = None if cached is None else State(**cached)
            if state is not None and tokens.fresh is not None:
                state = reset(state, tokens.fresh, config.num_codes)
            single_token = state is not None and inputs.code.shape[-1] == 1
            terms = self._terms(config.window_size + 1, rngs, single_token)
            out, next_state = attend(inputs, terms, options, state, tokens.lengths)
            if next_state is not None:
                self.write_cache(next_state._asdict())
        return out.reshape(out.shape[0], -1, *out.shape[3:])


class MLP(nnx.Module):
    """The feed-forward block of layers without gated heads, with squared ReLU (So et al., 2021)."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.input_norm = Norm(config)
        self.up_proj = linear(config, config.hidden_size, config.inner_width, rngs)
        self.down_proj = linear(config, config.inner_width, config.hidden_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies norm and MLP to hidden states, `(B, T, D)`, without residual connection."""
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(self.input_norm(x)))))


class Layer(nnx.Module):
    """Two residual blocks: two gated attentions, or attention and MLP."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.attention_2 = Attention(config, rngs) if config.gated else nnx.data(None)
        self.mlp = nnx.data(None) if config.gated else MLP(config, rngs)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.layer_dropout = nn.Dropout(config.layer_dropout)

    def __call__(
        self,
        x: jax.Array,  # (B, T, D)
        tokens: TokenInfo,
        *,
        rngs: Keys | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the input of the next layer, `(B, T, D)`, and the sum of quantization errors."""
        x, loss = self._attend(self.attention, x, tokens, rngs)
        if self.attention_2 is not None:
            x, second_loss = self._attend(self.attention_2, x, tokens, rngs)
            return x, None if loss is None else loss + second_loss
        # Layers without gated heads have an MLP.
        return x + self._drop_block(self.mlp(x), rngs and rngs.child()), loss  # type: ignore[misc]

    def _attend(
        self, attention: Attention, x: jax.Array, tokens: TokenInfo, rngs: Keys | None
    ) -> Any:
        keys = rngs and rngs.child()
        residual, loss = attention(x, tokens, keys)
        return x + self._drop_block(self.dropout(residual, keys), keys), loss

    def _drop_block(self, residual: jax.Array, rngs: Keys | None) -> jax.Array:
        """Drops a block for some rows (LayerDrop): the same rows in all calls of a sequence."""
        if rngs is None or not self.layer_dropout.rate:
            return residual
        return residual * self.layer_dropout(
            jnp.ones((len(residual), 1, 1), residual.dtype), rngs.per_sequence
        )
