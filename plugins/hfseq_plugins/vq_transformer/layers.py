"""The parts of a layer: norms, attention over a window and a cache of codes, and the MLP."""

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
    how: AttentionOptions,
    state: State | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, State | None]:
    """Return the values attended to, (B, Hk, G, T, V) float32, and the state after the call.

    ``lengths`` (B,) is how many tokens of each row are real, the others being at its end; None if
    all are. Without a ``state`` the text begins here, and none is returned.
    """
    if state is not None and inputs.code.shape[-1] == 1:
        return attend_one_token(inputs, terms, how, state)
    mesh = sequence.mesh_for(inputs.code.shape[-1], how.block)
    if mesh is not None:
        return sequence.attend(mesh, inputs, terms, how, state, lengths)
    return parallel.attend_on_device(inputs, terms, how, state, lengths)


_dot = functools.partial(jnp.einsum, precision=EXACT)


def attend_one_token(
    inputs: AttentionInputs, terms: ScoreTerms, how: AttentionOptions, state: State
) -> tuple[jax.Array, State]:
    """Attend with one token, and let it into the ring for the oldest, which joins the cache.

    Returns (B, Hk, G, 1, V) float32 and the new state. Tokens that are none change nothing. The
    cost is that of M + S keys, however long the text is.
    """
    codes, window = terms.codebook.shape[1], how.window
    if how.stop_gradient:
        state = State(*map(lax.stop_gradient, state))
    real = inputs.code[:, 0, 0] < codes
    content = inputs.query + terms.content
    waves, projection = terms.relative
    biases = _dot("bhglk,dhk->bhgld", inputs.query + terms.position, projection)
    biases = _dot("bhglk,dk->bhgld", biases, waves)
    # The slots are 1 to M places behind the token, which will replace the last of them.
    behind = (state.position[:, None] - 1 - jnp.arange(window)) % max(window, 1) + 1
    near = _dot("bhglk,bhck->bhglc", content, state.window_key)
    near += jnp.take_along_axis(biases, behind[:, None, None, None], axis=-1, mode="clip")
    near = jnp.where(state.window_code[:, :1, None, None] < codes, near, MASKED_SCORE)
    own = _dot("bhglk,bhck->bhglc", content, inputs.key) + biases[..., :1]
    groups = [(own, inputs.value), (near, state.window_value)]
    if how.compressive:
        groups.append((cache_scores(content, state.cache_count, terms.codebook), state.cache_mean))
    # One softmax over all groups; a window of nothing has none.
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
    inputs: AttentionInputs, state: State, real: jax.Array, codes: int, after: jax.Array
) -> State:
    """Put real tokens in their slots, and what was there into the cache.

    ``after`` is 0, but known only when everything was read: XLA copies whole rings and caches
    unless each write depends on all that reads what was there before.
    """
    window, rows = state.window_code.shape[-1], jnp.arange(len(real))
    slot = state.position % max(window, 1)
    value, code = inputs.value, inputs.code
    if window:
        value = take(state.window_value, slot[:, None])
        code = take(state.window_code, slot[:, None])
    code = jnp.where(real[:, None], code[..., 0], codes)
    at = (rows[:, None], jnp.arange(code.shape[1])[None], code)
    count = state.cache_count.at[at].get(mode="fill", fill_value=0) + 1
    mean = state.cache_mean.at[at].get(mode="fill", fill_value=0.0)
    mean = mean + (value[:, :, 0].astype(jnp.float32) - mean) / count[..., None]
    place = (rows[:, None], at[1], code + after)
    means = state.cache_mean.at[place].set(mean, mode="drop")
    counts = state.cache_count.at[place].set(count, mode="drop")
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
    """Return an int32 0 that the compiler takes for something that depends on ``x``."""
    first = x.reshape(-1)[0].astype(jnp.float32)
    return ((first > 3e38) & (first < -3e38)).astype(jnp.int32)


# -- all pairs of tokens
# ---------------------------------------------------------------------------------------


_score = functools.partial(jnp.einsum, "bhglk,bhck->bhglc", precision=EXACT)


def attend_to_all(
    inputs: AttentionInputs,
    terms: ScoreTerms,
    how: AttentionOptions,
    lengths: jax.Array | None,
    *,
    quantised: bool,
) -> jax.Array:
    """Return the values attended to, (B, Hk, G, T, V) float32, by softmax over all earlier keys.

    ``terms.relative`` has a row for each distance that has a position. ``quantised`` keys have
    gradients exactly where the evaluation in blocks of ``how.block`` gives them.
    """
    tokens = inputs.code.shape[-1]
    places = jnp.arange(tokens)
    content, key, exact = inputs.query + terms.content, inputs.key, None
    if quantised:
        # Which keys a query's block sees one by one, (T, T): only these get a gradient.
        starts = places - places % how.block
        exact = places >= (starts - (0 if how.stop_gradient else how.window))[:, None]
        fixed = lax.stop_gradient(key)
        scores = _score(content, fixed)
        scores += jnp.where(exact, _score(lax.stop_gradient(content), key - fixed), 0.0)
    else:
        scores = _score(content, key)
    # The distances that have a row, of all pairs: (B, Hk, G, T, T).
    reach = min(len(terms.relative), tokens)
    query, rows = inputs.query + terms.position, terms.relative[:reach][::-1]
    biases = shift_right(jnp.einsum("bhglk,dhk->bhgld", query, rows, precision=EXACT))
    scores += biases[..., reach - 1 : reach - 1 + tokens]
    seen = (places[:, None] >= places)[None]
    if lengths is not None:
        seen = seen & (places < lengths[:, None])[:, None]
    if inputs.segment is not None:
        seen = seen & (inputs.segment[:, :, None] == inputs.segment[:, None])
    seen = seen[:, None, None]
    if quantised and not how.compressive:
        seen &= places[:, None] - places <= how.window
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED_SCORE), axis=-1)
    if exact is not None and how.stop_gradient:
        return _values(weights * exact, inputs.value) + _values(
            weights * ~exact, lax.stop_gradient(inputs.value)
        )
    return _values(weights, inputs.value)


def _values(weights: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum(
        "bhglc,bhcv->bhglv", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )


class TokenInfo(NamedTuple):
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


def rms_normalize(x: jax.Array, epsilon: float) -> jax.Array:
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
        y = rms_normalize(x, self.epsilon)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...] + self.bias[...]
        return y.astype(self.compute_dtype or x.dtype)


class Attention(StateAttention):
    """Attention of a text to itself, its keys replaced by codes; gated, or with plain heads."""

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
        # sqrt(K) divides the scores: half of it is in the queries, half in all they meet.
        self.scale = config.head_dim**-0.25

    def empty_cache(self, batch_size: int, dtype: DTypeLike) -> dict[str, jax.Array]:
        """Return the state before the first token."""
        return empty_state(batch_size, self.config, dtype)._asdict()

    def __call__(
        self, x: jax.Array, tokens: TokenInfo, rngs: Keys | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Map (B, T, D) to the residual (B, T, D) and the sum of the quantisation errors."""
        config, heads, y = self.config, self.config.key_heads, self.input_norm(x)
        query = self._narrow(self.q_proj(y), config.query_heads)
        key = self._narrow(self.k_proj(y), heads)
        value, gate = self.v_proj(y), None
        if self.g_proj is not None:
            value, gate = jax.nn.silu(value), jax.nn.silu(self.g_proj(y))
        key, codes, loss = self._quantise(key, tokens)
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

    def _narrow(self, x: jax.Array, heads: int) -> jax.Array:
        """Cut queries or keys into heads and give them all the same length, in float32."""
        x = x.reshape(*x.shape[:2], heads, self.config.head_dim)
        return rms_normalize(x, self.config.rms_norm_eps) * self.scale

    def _quantise(self, key: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array, Any]:
        """Return keys by their codes, the codes, and while training the sum of the errors.

        Attention to the keys as they are needs no codes: they are 0, nothing is counted or lost.
        """
        train, counted = nn.current_options().train, tokens.counted
        if self.config.attention_type == "full":
            codes = jnp.zeros(key.shape[:3], jnp.int32)
            return key, codes, jnp.zeros(()) if train else None
        found, loss = quantize(key, self.codebook.rows()), None
        if train:
            self.codebook.count(key, found.codes, counted)
            errors = found.errors.sum(-1)
            loss = (errors if counted is None else jnp.where(counted > 0, errors, 0.0)).sum()
        codes = found.codes
        if tokens.valid is not None:
            codes = jnp.where(tokens.valid[..., None], codes, self.config.num_codes)
        return found.keys, codes, loss

    def _terms(self, distances: int, rngs: Keys | None, one: bool = False) -> ScoreTerms:
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
        return ScoreTerms(
            self.codebook.rows(),
            relative,
            self.content_bias[...].reshape(shape) * self.scale,
            self.position_bias[...].reshape(shape) * self.scale,
        )

    def _mix(self, inputs: AttentionInputs, tokens: TokenInfo, rngs: Keys | None) -> jax.Array:
        """Attend, and keep the state where there is one: (B, Hq, T, V) float32."""
        config, held = self.config, self.read_cache()
        # A short call is one short block.
        block = min(config.block_size, inputs.code.shape[-1])
        how = AttentionOptions(
            config.window_size,
            block,
            config.reduction,
            config.use_compressive_cache,
            config.stop_gradient_cache,
        )
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

    def __call__(self, x: jax.Array, tokens: TokenInfo, *, rngs: Keys | None) -> Any:
        """Map (B, T, D) to the next layer's input, and the sum of the errors of its keys."""
        x, loss = self._attend(self.attention, x, tokens, rngs)
        if self.attention_2 is not None:
            x, more = self._attend(self.attention_2, x, tokens, rngs)
            return x, None if loss is None else loss + more
        return x + self._whole(self.mlp(x), rngs and rngs.child()), loss

    def _attend(self, part: Attention, x: jax.Array, tokens: TokenInfo, rngs: Keys | None) -> Any:
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
