"""A VQ Transformer from its equations: quadratic in the length, in float64.

It shares no code with the plugin and has neither blocks nor state: all queries attend to all keys
at once. Blocks only matter for the gradient of keys, which exists only for keys in the exact region
of the query's block (Lingle, 2024, arXiv 2309.16354).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GATED = ("shga", "mhga")


class Module(NamedTuple):
    """Arrays of one attention: keys and errors, `(batch, length, key head)`, values, statistics."""

    keys: Any
    codes: Any
    errors: Any
    values: Any
    codebook: Any
    sums: Any
    counts: Any


class Result(NamedTuple):
    """Logits (batch, length, vocabulary), the commitment sum, residuals in order, attentions."""

    logits: Any
    commitment: Any
    residuals: list[Any]
    final: Any
    modules: list[Module]


class TokenPlaces(NamedTuple):
    """Positions, attention mask, the pairs that pass gradients to keys, and token masks."""

    positions: Any
    visible: Any
    exact: Any
    counted: Any
    window: Any


def rms(x: Any, epsilon: float) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def sinusoids(positions: Any, width: int, base: float) -> Any:
    rates = base ** (-2.0 * jnp.arange(width // 2) / width)
    angles = jnp.asarray(positions)[..., None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def norm(config: Any, params: Any, x: Any) -> Any:
    y = rms(x, config.rms_norm_eps)
    return y * params["scale"] + params["bias"] if config.norm_affine else y


def find_place(config: Any, mask: Any, segments: Any, code_mask: Any, window: Any, block: Any):
    """Returns the :class:`TokenPlaces` for a mask or for segments."""
    valid = (mask if segments is None else segments).astype(bool)
    length = valid.shape[1]
    index = jnp.arange(length)
    positions = jnp.cumsum(valid, 1) - 1
    visible = (index[:, None] >= index[None, :])[None] & valid[:, None, :] & valid[:, :, None]
    if segments is not None:
        alike = segments[:, :, None] == segments[:, None, :]
        visible, positions = visible & alike, (visible & alike).sum(-1) - 1
    start = block * (index // block)
    exact = index[None, :] >= start[:, None] - window
    if config.stop_gradient_cache:
        exact = index[None, :] >= start[:, None]
    counted = valid if code_mask is None else valid & code_mask.astype(bool)
    return TokenPlaces(positions, visible, exact[None], counted, window)


def quantize(config: Any, codebook: Any, keys: Any):
    """Returns codebook, `(Hk, S, K)`, codes and squared errors, `(batch, length, Hk)`."""
    table = codebook["sums"] / jnp.maximum(codebook["counts"], config.count_floor)[..., None]
    table = jax.lax.stop_gradient(table)
    apart = jnp.sum((keys[:, :, :, None] - table) ** 2, -1)
    codes = jnp.argmin(apart, -1)
    errors_of_codes = jnp.take_along_axis(apart, codes[..., None], -1)[..., 0]
    return table, codes, errors_of_codes


def scores_of(config: Any, params: Any, query: Any, keys: Any, nearest: Any, tokens: TokenPlaces):
    """Returns scores, `(batch, Hk, group, query, key)`, and distances."""
    heads, width = keys.shape[2:]
    groups, scale = query.shape[3], width**-0.25
    content, position = (
        query + params[name].reshape(heads, groups, width) * scale
        for name in ("content_bias", "position_bias")
    )
    full = config.attention_type == "full"
    flow = keys - jax.lax.stop_gradient(keys)
    scores = jnp.einsum("bihgk,bjhk->bhgij", content, keys if full else nearest)
    if not full:
        through = jnp.einsum("bihgk,bjhk->bhgij", content, flow)
        scores = scores + jnp.where(tokens.exact[:, None, None], through, 0.0)
    apart = tokens.positions[:, :, None] - tokens.positions[:, None, :]
    table = sinusoids(jnp.arange(keys.shape[1]), config.hidden_size, config.sinusoid_base)
    rows = (table @ params["r_proj"]["kernel"]).reshape(-1, heads, width) * scale
    bias = jnp.einsum("bihgk,dhk->bhgid", position, rows)
    bias = jnp.take_along_axis(bias, jnp.maximum(apart, 0)[:, None, None], -1)
    near = apart >= 0 if full else (apart >= 0) & (apart <= tokens.window)
    return scores + jnp.where(near[:, None, None], bias, 0.0), apart


def project(config: Any, params: Any, x: Any):
    """Returns queries, `(batch, length, Hk, group, K)`, keys, values, and gate or None."""
    width, y = config.head_dim, norm(config, params.get("input_norm"), x)
    heads = params["k_proj"]["kernel"].shape[1] // width

    def part(name: str, *shape: int) -> Any:
        return (y @ params[name]["kernel"]).reshape(*x.shape[:2], *shape)

    query, keys = (
        rms(part(name, *shape), config.rms_norm_eps) * width**-0.25
        for name, shape in (("q_proj", (heads, -1, width)), ("k_proj", (heads, width)))
    )
    values = part("v_proj", heads, params["v_proj"]["kernel"].shape[1] // heads)
    if config.head_type not in GATED:
        return query, keys, values, None
    return query, keys, jax.nn.silu(values), jax.nn.silu(part("g_proj", -1))


def attend(config: Any, params: Any, codebook: Any, x: Any, tokens: TokenPlaces):
    """Returns the output of an attention, `(batch, length, D)`, and its arrays."""
    query, keys, values, gate = project(config, params, x)
    table, codes, errors = quantize(config, codebook, keys)
    nearest = jnp.stack([table[h][codes[:, :, h]] for h in range(keys.shape[2])], 2)
    scores, apart = scores_of(config, params, query, keys, nearest, tokens)
    allowed = tokens.visible
    if not config.use_compressive_cache and config.attention_type != "full":
        allowed = allowed & (apart <= tokens.window)
    weights = softmax(scores, allowed[:, None, None])
    mixed = mix(config, weights, values, tokens).reshape(*x.shape[:2], -1)
    mixed = mixed if gate is None else mixed * gate
    one_hot = jax.nn.one_hot(codes, table.shape[1]) * tokens.counted[..., None, None]
    sums, counts = jnp.einsum("bths,bthk->hsk", one_hot, keys), one_hot.sum((0, 1))
    module = Module(keys, codes, errors, values, table, sums, counts)
    return mixed @ params["o_proj"]["kernel"], module


def softmax(scores: Any, allowed: Any) -> Any:
    top = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, scores, -jnp.inf), -1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    # Mask before exp, too: masked scores could overflow, with NaN gradients.
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)


def mix(config: Any, weights: Any, values: Any, tokens: TokenPlaces) -> Any:
    mixed = jnp.einsum("bhgij,bjhv->bihgv", weights, values)
    if config.stop_gradient_cache and config.attention_type == "vq":
        near = jnp.where(tokens.exact[:, None, None], weights, 0.0)
        far = weights - near
        still = jax.lax.stop_gradient(values)
        mixed = jnp.einsum("bhgij,bjhv->bihgv", near, values)
        mixed = mixed + jnp.einsum("bhgij,bjhv->bihgv", far, still)
    return mixed


def feed_forward(config: Any, params: Any, x: Any) -> Any:
    y = norm(config, params.get("input_norm"), x)
    return jnp.maximum(y @ params["up_proj"]["kernel"], 0) ** 2 @ params["down_proj"]["kernel"]


def head(config: Any, params: Any, x: Any) -> Any:
    y = norm(config, params["model"].get("norm"), x) if config.final_norm else x
    tied = config.tie_word_embeddings
    kernel = params["model"]["embed_tokens"]["embedding"].T if tied else params["lm_head"]["kernel"]
    bias = params["lm_head_bias"] if config.head_bias else 0.0
    if config.scale_head_bias:
        return config.logit_scale * (y @ kernel + bias)
    return (config.logit_scale * y) @ kernel + bias


def run(
    config: Any,
    params: Any,
    codebook: Any,
    ids: Any,
    mask: Any = None,
    segments: Any = None,
    code_mask: Any = None,
    window: Any = None,
    block: Any = None,
) -> Result:
    """Runs the model on full rows. `window` and `block` may differ from the configuration."""
    mask = jnp.ones_like(ids) if mask is None else mask
    window = config.window_size if window is None else window
    block = config.block_size if block is None else block
    tokens = find_place(config, mask, segments, code_mask, window, block)
    model = params["model"]
    x = model["embed_tokens"]["embedding"][ids]
    if config.absolute_positions:
        table = sinusoids(tokens.positions, config.hidden_size, config.sinusoid_base)
        x = x + model["position_scale"] * table
    residuals, modules, commitment = [], [], 0.0
    for number in range(config.num_hidden_layers):
        layer = model["layers"][str(number)]
        for name in ("attention", "attention_2", "mlp"):
            if name not in layer:
                continue
            if name == "mlp":
                residual = feed_forward(config, layer[name], x)
            else:
                book = codebook["model"]["layers"][str(number)][name]["codebook"]
                residual, module = attend(config, layer[name], book, x, tokens)
                modules.append(module)
                commitment = commitment + (tokens.counted[..., None] * module.errors).sum()
            residuals.append(residual)
            x = x + residual
    return Result(head(config, params, x), commitment, residuals, x, modules)


def float64(tree: Any) -> Any:
    """Converts floating leaves to float64. Call it inside `jax.enable_x64`."""

    def wide(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        return jnp.asarray(leaf, jnp.float64 if leaf.dtype.kind == "f" else leaf.dtype)

    return jax.tree.map(wide, tree)


def evaluate(config: Any, params: Any, codebook: Any, ids: Any, **options: Any) -> Result:
    """Runs the model in float64. Returns NumPy arrays. See :func:`run` for the arguments."""
    with jax.enable_x64(True):
        arrays = float64(options)
        call = jax.jit(lambda p, c, i, call_options: run(config, p, c, i, **call_options))
        result = call(float64(params), float64(codebook), jnp.asarray(ids), arrays)
        return jax.tree.map(np.asarray, result)


def final_state(config: Any, module: Module, window: int | None = None) -> dict[str, Any]:
    """Returns the state after full rows. Heads precede tokens, and the window is sorted."""
    window = config.window_size if window is None else window
    batch, length, heads, _ = module.keys.shape
    nearest = np.stack([module.codebook[h][module.codes[:, :, h]] for h in range(heads)], 2)
    window_length, state = min(window, length), {}
    for name, part in {"key": nearest, "value": module.values, "code": module.codes}.items():
        fill = config.num_codes if name == "code" else 0
        row = np.full((batch, window, *part.shape[2:]), fill, part.dtype)
        row[:, window - window_length :] = part[:, length - window_length :]
        state[f"window_{name}"] = np.moveaxis(row, 2, 1)
    evicted = np.eye(config.num_codes)[module.codes[:, : length - window_length]]
    count = evicted.sum(1)
    sums = np.einsum("bths,bthv->bhsv", evicted, module.values[:, : length - window_length])
    state["cache_count"] = count
    state["cache_mean"] = sums / np.maximum(count, 1)[..., None]
    state["position"] = np.full((batch,), length, np.int32)
    return state
