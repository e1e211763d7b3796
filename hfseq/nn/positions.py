"""Position IDs, relative position biases, and rotary position embeddings (Su et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError, did_you_mean
from hfseq.nn.interpolation import resize_matrix

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def positions_after_padding(input_ids: jax.Array, pad_token_id: int) -> jax.Array:
    """Returns the position IDs of RoBERTa.

    Tokens that are not padding are numbered from `pad_token_id + 1`. Padding gets `pad_token_id`.
    """
    real = (input_ids != pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=-1) * real + pad_token_id


def positions_from_mask(attention_mask: jax.Array) -> jax.Array:
    """Numbers the visible tokens of each sequence from 0. Padding gets position 0.

    If the position embedding matrix of a model begins with reserved rows, the model adds the number
    of these rows (2 in OPT).

    Args:
        attention_mask: `(batch, length)`, nonzero for real tokens. Padding may be on either side.
    """
    real = (attention_mask != 0).astype(jnp.int32)
    return (jnp.cumsum(real, axis=-1) - 1) * real


def gather_positions(hidden_states: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Selects the hidden states from which an output head computes its logits.

    The batch is divided into groups of equal size, and the same number of positions is selected in
    each group. If each data shard is a group, the devices do not have to communicate.

    Args:
        hidden_states: `(batch, length, features)`.
        positions: The selected positions, `(groups, k)`, where `k` is their number per group. A
            position is an index into the flattened rows of the group. `None` selects all hidden
            states.

    Returns:
        The selected hidden states, `(groups, k, features)`, or `hidden_states` itself.
    """
    if positions is None:
        return hidden_states
    grouped = hidden_states.reshape(positions.shape[0], -1, hidden_states.shape[-1])
    return jnp.take_along_axis(grouped, positions[..., None], axis=1)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """Returns position IDs that start at 0 in every document of a packed row.

    Args:
        segment_ids: Number of the document of each token, `(batch, length)`.
    """
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return columns - jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slope of each head's linear bias, `(heads,)` (ALiBi; Press et al., 2021).

    The bias of a key is its position times the slope. Let `n` be the largest power of two that is
    not larger than `heads`. The slopes of the first `n` heads are the powers 1, 2, 3, ... of
    `2 ** (-8 / n)`. The other heads use the powers 1, 3, 5, ... of `2 ** (-4 / n)`.
    """
    even = 2 ** math.floor(math.log2(heads))
    base, finer = 2.0 ** -(8 / even), 2.0 ** -(4 / even)
    slopes = [base**k for k in range(1, even + 1)]
    slopes += [finer ** (2 * k + 1) for k in range(heads - even)]
    return np.asarray(slopes, np.float32)


def relative_position_bias(
    table: jax.Array,
    queries: int,
    keys: int,
    start: int | jax.Array = 0,
    *,
    bidirectional: bool,
    max_distance: int,
) -> jax.Array:
    """Returns T5's relative position bias (Raffel et al., 2020, section 2.1).

    The bias depends on the distance between query and key. Each small distance has its own bucket.
    Larger distances share buckets on a logarithmic scale, and all distances from `max_distance` on
    share the last bucket.

    Args:
        table: The bias of each bucket for each attention head, `(buckets, heads)`.
        queries: Number of queries.
        keys: Number of keys, at positions 0, 1, ...
        start: Position of the first query.
        bidirectional: Whether one half of the buckets is for keys after the query. Otherwise the
            distance of these keys counts as 0.
        max_distance: The smallest distance in the last bucket.

    Returns:
        A bias `(1, heads, queries, keys)` on the attention scores.
    """
    # The bias is constant on each diagonal of the matrix of queries and keys, so one lookup per
    # diagonal is enough. From one query to the next, the looked-up values are shifted by one key.
    # The shift is computed by reshaping rows that are one element too long, because indexing has a
    # slow gradient, a scatter.
    distances = jnp.arange(queries + keys) - (queries - 1) - start
    half = table.shape[0] // 2 if bidirectional else table.shape[0]
    distance = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    # Compute the bucket of every distance with NumPy, which rounds like PyTorch.
    exact, table_distances = half // 2, np.arange(max_distance + 1)
    octaves = np.log(np.maximum(table_distances, 1).astype(np.float32) / np.float32(exact))
    octaves /= np.float32(math.log(max_distance / exact))
    far_bucket = np.minimum(exact + (octaves * np.float32(half - exact)).astype(np.int32), half - 1)
    bucket_of = np.where(table_distances < exact, table_distances, far_bucket).astype(np.int32)
    buckets = jnp.asarray(bucket_of)[jnp.minimum(distance, max_distance)]
    if bidirectional:
        buckets = buckets + jnp.where(distances > 0, half, 0)
    heads, width = table.shape[1], queries + keys
    diagonals = jnp.take(table, buckets, axis=0).T[:, None]
    rows = jnp.broadcast_to(diagonals, (heads, queries, width)).reshape(heads, queries * width)
    shifted = rows[:, : queries * (width - 1)].reshape(heads, queries, width - 1)
    return shifted[None, :, :, queries - 1 :]


def resize_grid(table: jax.Array, size: tuple[int, int], method: str = "cubic") -> jax.Array:
    """Resizes a grid of vectors, such as position embeddings of image patches, in float32.

    Args:
        table: The vectors, `(height, width, features)`. They are returned unchanged if the size is
            already `size`.
        size: New height and width.
        method: "cubic" (with a = -0.75, whereas `jax.image.resize` uses -0.5) or "linear", without
            antialiasing.
    """
    if table.shape[:2] == size:
        return table
    down, across = (
        jnp.asarray(resize_matrix(old_size, new_size, method), jnp.float32)
        for old_size, new_size in zip(table.shape[:2], size, strict=True)
    )
    x = jnp.einsum("ih,hwf,jw->ijf", down, table.astype(jnp.float32), across, precision="highest")
    return x.astype(table.dtype)


#: Supported values of `rope_type`. All except "default" change the frequencies for sequences that
#: are longer than the training sequences.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: Cosines and sines, float32 `(batch, length, 1, rotated features / 2)` each.
Angles = tuple[jax.Array, jax.Array]


class Rotary:
    """Rotary position embeddings as described by a configuration.

    Sequences may have any length, because cosines and sines are computed for the positions of each
    call and not in advance.

    Args:
        config: A configuration with `rope_parameters` (Transformers 5), or `rope_theta` and
            `rope_scaling` (Transformers 4).
        head_dim: Number of features per head that are rotated. If a model rotates only a part of
            each head, pass the size of this part, because `partial_rotary_factor` of the
            configuration is not read.
        layer_type: The type of layer, such as "sliding_attention", if `rope_parameters` has one
            entry per type.

    Raises:
        UsageError: The `rope_type` is unknown, or its parameters are missing or invalid.
    """

    def __init__(
        self, config: PreTrainedConfig, head_dim: int, layer_type: str | None = None
    ) -> None:
        self.rope = rope_parameters(config, layer_type)
        self.max_positions: int = config.max_position_embeddings
        self.width = head_dim
        rope_type = self.rope["rope_type"]
        if rope_type not in ROPE_TYPES:
            raise UsageError(
                f"unknown rope_type '{rope_type}' in the configuration"
                f"{did_you_mean(rope_type, ROPE_TYPES)} (known: {', '.join(ROPE_TYPES)})"
            )
        try:
            with np.errstate(all="ignore"):
                self.frequencies, self.scale = inverse_frequencies(
                    self.rope, self.width, self.max_positions
                )
                self.long_frequencies, _ = inverse_frequencies(
                    self.rope, self.width, self.max_positions, long=True
                )
        except KeyError as error:
            raise UsageError(
                f"rope_type '{rope_type}' needs {error.args[0]} in the configuration's "
                f"rope_parameters, which contain {', '.join(self.rope)}"
            ) from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UsageError(f"{self._description} are invalid: {error}") from None
        for frequencies in (self.frequencies, self.long_frequencies):
            if (
                frequencies.shape != (self.width // 2,)
                or not np.isfinite([*frequencies, self.scale]).all()
            ):
                raise UsageError(
                    f"{self._description} give the frequencies {frequencies}, but a head with "
                    f"{self.width} rotary features needs {self.width // 2} finite frequencies"
                )

    @property
    def _description(self) -> str:
        return f"the configuration's rope_parameters {self.rope}"

    def __call__(self, positions: jax.Array) -> Angles:
        """Returns the cosines and sines of `positions`, `(batch, length)`."""
        frequencies: Any = self.frequencies
        rope_type = self.rope["rope_type"]
        if rope_type == "dynamic":
            # The frequencies depend on the longest sequence of the batch, as in PyTorch.
            length = jnp.maximum(positions.max() + 1, self.max_positions).astype(jnp.float32)
            factor, width = self.rope["factor"], self.width
            stretch = factor * length / self.max_positions - (factor - 1)
            theta = self.rope["rope_theta"] * stretch ** (width / (width - 2))
            frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        elif rope_type == "longrope":
            trained = self.rope["original_max_position_embeddings"]
            frequencies = jnp.where(
                positions.max() + 1 > trained, self.long_frequencies, frequencies
            )
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.scale, jnp.sin(angles) * self.scale


def rotate(x: jax.Array, angles: Angles, *, interleaved: bool = False) -> jax.Array:
    """Rotates the features of each head, computed in float32.

    Args:
        x: `(batch, length, heads, head_dim)`. Features beyond the rotated ones do not change.
        angles: Cosines and sines from `Rotary`.
        interleaved: Whether feature `i` is paired with its neighbor (GPT-J, RoFormer) instead of
            feature `i + rotated_dim / 2` (Llama).

    Returns:
        The rotated heads in the dtype of `x`.
    """
    cos, sin = angles
    width = 2 * cos.shape[-1]
    rotated, unrotated = x[..., :width].astype(jnp.float32), x[..., width:]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(pairs, -1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pairs, -1)
    rotated = rotated.astype(x.dtype)
    return rotated if unrotated.shape[-1] == 0 else jnp.concatenate([rotated, unrotated], -1)


def rope_parameters(config: PreTrainedConfig, layer_type: str | None = None) -> dict[str, Any]:
    """Returns the RoPE parameters of a configuration in the format of Transformers 5.

    They contain `rope_type`, `rope_theta`, and the parameters that this `rope_type` needs.
    """
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = dict(parameters.get(layer_type, parameters) if layer_type else parameters)
    if not rope:
        rope = dict(getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        trained_length = getattr(config, "original_max_position_embeddings", None)
        rope.setdefault(
            "original_max_position_embeddings", trained_length or config.max_position_embeddings
        )
    return rope


def inverse_frequencies(
    rope: Mapping[str, Any], width: int, max_positions: int, *, long: bool = False
) -> tuple[np.ndarray, float]:
    """Returns the inverse frequencies of rotary embeddings.

    Args:
        rope: The RoPE parameters.
        width: Number of rotated features.
        max_positions: The model's `max_position_embeddings`.
        long: For "longrope", whether to return the frequencies for sequences that are longer than
            `original_max_position_embeddings`.

    Returns:
        The angle of each pair of features at position 1, `(width / 2,)`, and the factor by which
        cosines and sines are multiplied. For "dynamic", the frequencies are valid for sequences of
        at most `max_positions` tokens.
    """
    rope_type, theta = rope["rope_type"], rope["rope_theta"]
    plain = theta ** (-np.arange(0, width, 2) / width)
    if rope_type == "linear":
        return (plain / rope["factor"]).astype(np.float32), 1.0
    if rope_type == "llama3":
        trained_length, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = trained_length * plain / (2 * math.pi)  # number of rotations in trained_length
        keep_share = np.clip((turns - low) / (high - low), 0, 1)
        return (plain * ((1 - keep_share) / factor + keep_share)).astype(np.float32), 1.0
    if rope_type == "yarn":
        return _yarn(rope, plain, width, max_positions)
    if rope_type == "longrope":
        trained_length = rope["original_max_position_embeddings"]
        factor = rope.get("factor") or max_positions / trained_length
        scale = rope.get("attention_factor")
        if scale is None:
            scale = (
                1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_length))
            )
        stretch = np.asarray(rope["long_factor" if long else "short_factor"])
        return (plain / stretch).astype(np.float32), scale
    if rope_type == "dynamic":
        rope["factor"]  # noqa: B018 (raises KeyError now, not at the first long sequence)
    return plain.astype(np.float32), 1.0


def _yarn(
    rope: Mapping[str, Any], plain: np.ndarray, width: int, max_positions: int
) -> tuple[np.ndarray, float]:
    """Returns the result of `inverse_frequencies` for YaRN (Peng et al., 2023).

    Low frequencies are divided by `factor`, and high frequencies do not change. In between, the
    result is a linear combination of the divided and the unchanged frequency.
    """
    trained_length = rope["original_max_position_embeddings"]
    factor = rope["factor"] or max_positions / trained_length

    def pair(turns: float) -> float:
        """Returns the index of the feature pair that rotates `turns` times in `trained_length`."""
        return (
            width
            * math.log(trained_length / (turns * 2 * math.pi))
            / (2 * math.log(rope["rope_theta"]))
        )

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0, 1)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    scale = rope.get("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = (
            magnitude(mscale) / magnitude(mscale_all_dim)
            if mscale and mscale_all_dim
            else magnitude(1)
        )
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), scale
