"""Positions: where tokens stand, biases by distance, and rotations (Su et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def positions_after_padding(input_ids: jax.Array, pad_token_id: int) -> jax.Array:
    """Number the tokens that are not padding from ``pad_token_id + 1`` (RoBERTa's rule)."""
    real = (input_ids != pad_token_id).astype(jnp.int32)
    return jnp.cumsum(real, axis=-1) * real + pad_token_id


def positions_from_mask(attention_mask: jax.Array) -> jax.Array:
    """Number the tokens of each row that may be seen from 0, padding on either side being 0.

    ``attention_mask`` is (batch, length), non-zero where a token stands. Families whose tables
    begin with rows for other purposes add their number (OPT: 2).
    """
    real = (attention_mask != 0).astype(jnp.int32)
    return (jnp.cumsum(real, axis=-1) - 1) * real


def gather_positions(hidden_states: jax.Array, positions: jax.Array | None) -> jax.Array:
    """Pick the hidden states that a head needs; ``None`` keeps all.

    ``hidden_states`` is (batch, length, features), ``positions`` (groups, k) indices into the
    flattened rows of each of ``groups`` equal parts of the batch; the result is (groups, k,
    features). One group a data shard keeps the gather on its own device.
    """
    if positions is None:
        return hidden_states
    grouped = hidden_states.reshape(positions.shape[0], -1, hidden_states.shape[-1])
    return jnp.take_along_axis(grouped, positions[..., None], axis=1)


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """Number the tokens of every document from 0; ``segment_ids`` is (batch, length)."""
    columns = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return columns - jax.lax.cummax(jnp.where(starts, columns, 0), axis=1)


def alibi_slopes(heads: int) -> np.ndarray:
    """Return how much each head's scores fall with distance, (heads,) (Press et al., 2021).

    Powers of one number for the largest power of two of heads, every other power of its root for
    the rest. The bias of a key is its position times the slope.
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
    """Return T5's bias (1, heads, queries, keys) on attention scores, by distance alone.

    ``table`` is (buckets, heads); the queries stand at ``start``, ``start + 1`` …, the keys at 0, 1
    …. Near distances have a bucket each, far ones share them logarithmically, all beyond
    ``max_distance`` the last (Raffel et al., 2020, section 2.1). ``bidirectional`` gives half of
    the buckets to keys after the query, which otherwise count as distance 0.
    """
    # The bias is constant on diagonals: one row of the table for each of them, then each query
    # reads them one place further on. This is done by reshaping rows that are one too long, since
    # the gradient of reading with indices is a slow scatter.
    distances = jnp.arange(queries + keys) - (queries - 1) - start
    half = table.shape[0] // 2 if bidirectional else table.shape[0]
    apart = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    # The bucket of every distance, by NumPy: rounded as PyTorch does.
    exact, known = half // 2, np.arange(max_distance + 1)
    octaves = np.log(np.maximum(known, 1).astype(np.float32) / np.float32(exact))
    octaves /= np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (octaves * np.float32(half - exact)).astype(np.int32), half - 1)
    bucket_of = np.where(known < exact, known, far).astype(np.int32)
    buckets = jnp.asarray(bucket_of)[jnp.minimum(apart, max_distance)]
    if bidirectional:
        buckets = buckets + jnp.where(distances > 0, half, 0)
    heads, width = table.shape[1], queries + keys
    diagonals = jnp.take(table, buckets, axis=0).T[:, None]
    rows = jnp.broadcast_to(diagonals, (heads, queries, width)).reshape(heads, queries * width)
    shifted = rows[:, : queries * (width - 1)].reshape(heads, queries, width - 1)
    return shifted[None, :, :, queries - 1 :]


def resampling(given: int, wanted: int, kind: str) -> np.ndarray:
    """Return the matrix (wanted, given) that stretches a row of numbers, as PyTorch does.

    ``kind`` is ``"cubic"`` (with a = -0.75, where ``jax.image.resize`` has -0.5) or ``"linear"``;
    the ends are repeated, corners are not aligned, and nothing is smoothed where numbers are left
    out.
    """
    places = (np.arange(wanted) + 0.5) * (given / wanted) - 0.5
    if kind == "linear":
        places = np.maximum(places, 0.0)
    first = np.floor(places).astype(int)
    after = places - first
    if kind == "linear":
        taps = {0: 1 - after, 1: after}
    else:
        taps = {-1: _far(after + 1), 0: _near(after), 1: _near(1 - after), 2: _far(2 - after)}
    matrix = np.zeros((wanted, given))
    for shift, weights in taps.items():
        np.add.at(matrix, (np.arange(wanted), np.clip(first + shift, 0, given - 1)), weights)
    return matrix.astype(np.float32)


_CUBIC = -0.75


def _near(x: np.ndarray) -> np.ndarray:
    """Keys' kernel (1981) at distances of at most 1."""
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _far(x: np.ndarray) -> np.ndarray:
    """The same at distances from 1 to 2."""
    return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC


def resize_grid(table: jax.Array, size: tuple[int, int], kind: str = "cubic") -> jax.Array:
    """Resize a grid of vectors (height, width, features) to ``size``, in float32.

    The same size is the same table. ``kind`` is that of :func:`resampling`.
    """
    if table.shape[:2] == size:
        return table
    down, across = (
        jnp.asarray(resampling(given, wanted, kind))
        for given, wanted in zip(table.shape[:2], size, strict=True)
    )
    x = jnp.einsum("ih,hwf,jw->ijf", down, table.astype(jnp.float32), across, precision="highest")
    return x.astype(table.dtype)


#: The kinds of ``rope_type``: how frequencies are stretched for rows longer than those of training.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: Cosines and sines, (batch, length, 1, rotated / 2) each, in float32.
Angles = tuple[jax.Array, jax.Array]


class Rotary:
    """The angles of positions, as a configuration describes them.

    **Arguments:** ``config`` has ``rope_parameters`` (Transformers 5), where ``layer_type`` names
    one of several, or ``rope_theta`` and ``rope_scaling`` (Transformers 4). ``head_dim`` numbers of
    a head are turned, or the first ``partial_rotary_factor`` of them. Rows may be of any length:
    nothing is tabulated.

    **Raises:** UsageError for an unknown ``rope_type``, and for parameters that it lacks or that
    give no angle for each pair.
    """

    def __init__(
        self, config: PreTrainedConfig, head_dim: int, layer_type: str | None = None
    ) -> None:
        self.rope = rope_parameters(config, layer_type)
        self.longest: int = config.max_position_embeddings
        self.width = int(head_dim * self.rope.get("partial_rotary_factor", 1.0))
        kind = self.rope["rope_type"]
        if kind not in ROPE_TYPES:
            raise UsageError(
                f"unknown rope_type '{kind}' in the configuration{did_you_mean(kind, ROPE_TYPES)} "
                f"(known: {', '.join(ROPE_TYPES)})"
            )
        try:
            with np.errstate(all="ignore"):
                self.frequencies, self.scale = inverse_frequencies(
                    self.rope, self.width, self.longest
                )
                self.long, _ = inverse_frequencies(self.rope, self.width, self.longest, long=True)
        except KeyError as error:
            raise UsageError(
                f"rope_type '{kind}' needs {error.args[0]} in the configuration's rope_parameters, "
                f"which have {', '.join(self.rope)}"
            ) from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UsageError(f"{self._told} give no angles: {error}") from None
        for made in (self.frequencies, self.long):
            if made.shape != (self.width // 2,) or not np.isfinite([*made, self.scale]).all():
                raise UsageError(
                    f"{self._told} give {made.size} frequencies for {self.width} numbers of a head "
                    f"that are turned in pairs: {made}"
                )

    @property
    def _told(self) -> str:
        return f"the configuration's rope_parameters {self.rope}"

    def __call__(self, positions: jax.Array) -> Angles:
        """Return cosines and sines of ``positions`` (batch, length)."""
        frequencies: Any = self.frequencies
        kind = self.rope["rope_type"]
        if kind == "dynamic":
            # By the longest row of the batch, as PyTorch has it.
            length = jnp.maximum(positions.max() + 1, self.longest).astype(jnp.float32)
            factor, width = self.rope["factor"], self.width
            stretch = factor * length / self.longest - (factor - 1)
            theta = self.rope["rope_theta"] * stretch ** (width / (width - 2))
            frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        elif kind == "longrope":
            trained = self.rope["original_max_position_embeddings"]
            frequencies = jnp.where(positions.max() + 1 > trained, self.long, frequencies)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.scale, jnp.sin(angles) * self.scale


def rotate(x: jax.Array, angles: Angles, *, interleaved: bool = False) -> jax.Array:
    """Turn the heads of ``x``, (batch, length, heads, head_dim), in float32; the type stays.

    A pair is a number and the one half of the turned width further on (Llama), or its neighbour
    (``interleaved``: GPT-J, RoFormer). Numbers beyond the turned width stay as they are.
    """
    cos, sin = angles
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].astype(jnp.float32), x[..., width:]
    if interleaved:
        one, two = turned[..., ::2], turned[..., 1::2]
    else:
        one, two = jnp.split(turned, 2, -1)
    pairs = one * cos - two * sin, two * cos + one * sin
    if interleaved:
        turned = jnp.stack(pairs, -1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(pairs, -1)
    turned = turned.astype(x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], -1)


def rope_parameters(config: PreTrainedConfig, layer_type: str | None = None) -> dict[str, Any]:
    """Return ``rope_type``, ``rope_theta`` and what else the kind needs, from either spelling."""
    given: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = dict(given.get(layer_type, given) if layer_type else given)
    if not rope:
        rope = dict(getattr(config, "rope_scaling", None) or {})
        partial = getattr(config, "partial_rotary_factor", None)
        rope |= {} if partial is None else {"partial_rotary_factor": partial}
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        trained = getattr(config, "original_max_position_embeddings", None)
        rope.setdefault(
            "original_max_position_embeddings", trained or config.max_position_embeddings
        )
    return rope


def inverse_frequencies(
    rope: Mapping[str, Any], width: int, longest: int, *, long: bool = False
) -> tuple[np.ndarray, float]:
    """Return the angle of each pair at position 1, (width / 2,), and what cosines are scaled by.

    ``longest`` is the model's ``max_position_embeddings``; ``long`` asks for longrope's factors for
    rows longer than those of its training. The frequencies of ``dynamic`` are those of short rows.
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    plain = theta ** (-np.arange(0, width, 2) / width)
    if kind == "linear":
        return (plain / rope["factor"]).astype(np.float32), 1.0
    if kind == "llama3":
        trained, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = trained * plain / (2 * math.pi)  # within the rows of training
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (plain * ((1 - kept) / factor + kept)).astype(np.float32), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, width, longest)
    if kind == "longrope":
        trained = rope["original_max_position_embeddings"]
        factor = rope.get("factor") or longest / trained
        scale = rope.get("attention_factor")
        if scale is None:
            scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        stretch = np.asarray(rope["long_factor" if long else "short_factor"])
        return (plain / stretch).astype(np.float32), scale
    if kind == "dynamic":
        rope["factor"]  # noqa: B018 (missing is told now, not at the first long row)
    return plain.astype(np.float32), 1.0


def _yarn(
    rope: Mapping[str, Any], plain: np.ndarray, width: int, longest: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023): slow pairs are stretched, fast ones kept, between them a ramp."""
    trained = rope["original_max_position_embeddings"]
    factor = rope["factor"] or longest / trained

    def pair(turns: float) -> float:
        """Which pair turns so often within the rows of training."""
        return (
            width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
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
        each, whole = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = magnitude(each) / magnitude(whole) if each and whole else magnitude(1)
    return (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32), scale
