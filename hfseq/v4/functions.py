"""Module-level functions of Transformers 4's Flax modules, which some programs import.

The functions have the names, arguments and results of Transformers 4.57. hfseq itself does not use
them. `FUNCTIONS` lists the functions of each module of Transformers 4, because different modules
define different functions of the same name.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import remat
from flax.traverse_util import flatten_dict
from jax.typing import ArrayLike, DTypeLike
from transformers.utils import copy_func

from hfseq.checkpoints.files import parse_size
from hfseq.modeling import FlaxPreTrainedModel, auto
from hfseq.modeling.pytorch_utils import load_pytorch_checkpoint_in_flax_state_dict
from hfseq.nn.positions import alibi_slopes, positions_after_padding, positions_from_mask
from hfseq.plugins.registry import target_name


def quick_gelu(x: jax.Array) -> jax.Array:
    """Returns the approximation of GELU that CLIP uses."""
    return x * jax.nn.sigmoid(1.702 * x)


def identity(x: Any, **kwargs: Any) -> Any:
    """Returns the first argument."""
    return x


def ones_with_scale(
    key: jax.Array, shape: Sequence[int], scale: float, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Initializes LayerScale: returns an array in which every value is `scale`."""
    return jnp.full(shape, scale, dtype)


# -- Files and documentation


def flax_shard_checkpoint(
    params: Mapping[str, Any], max_shard_size: int | str = "10GB"
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Splits parameters into shards, in the order of the tree.

    Args:
        params: The parameter tree.
        max_shard_size: Maximum size of a shard, in bytes or as a string such as `"10GB"`. A larger
            array has its own shard.

    Returns:
        The arrays of each file by name, with `/` between the parts of names, and the content of the
        index file, or `None` if there is only one file.
    """
    limit, size, total = parse_size(max_shard_size), 0, 0
    parts: list[dict[str, Any]] = [{}]
    for name, array in flatten_dict(params, sep="/").items():
        array_size = array.size * array.dtype.itemsize
        if size + array_size > limit:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array_size
        total += array_size
    if len(parts) == 1:
        return {"flax_model.msgpack": parts[0]}, None
    names = [f"flax_model-{n + 1:05d}-of-{len(parts):05d}.msgpack" for n in range(len(parts))]
    files = dict(zip(names, parts, strict=True))
    weight_map = {name: file for file, part in files.items() for name in part}
    return files, {"metadata": {"total_size": total}, "weight_map": weight_map}


def convert_pytorch_sharded_state_dict_to_flax(
    shard_filenames: Sequence[str], flax_model: FlaxPreTrainedModel
) -> dict[str, Any]:
    """Reads the shards of a PyTorch checkpoint as parameters of a Flax model.

    Args:
        shard_filenames: Paths of the `.bin` or `.safetensors` files.
        flax_model: The Flax model.
    """
    return load_pytorch_checkpoint_in_flax_state_dict(
        flax_model, shard_filenames, is_sharded=True, allow_missing_keys=True
    )


def overwrite_call_docstring(model_class: type, docstring: str) -> None:
    """Replaces the docstring of a model class's `__call__`, without changing its base class."""
    call = copy_func(model_class.__call__)
    call.__doc__ = docstring
    setattr(model_class, "__call__", call)  # noqa: B010


def append_call_sample_docstring(model_class: type, *args: Any, **kwargs: Any) -> None:
    """Does nothing. Transformers 4 added an example of a PyTorch or Flax call to the docstring."""


def append_replace_return_docstrings(model_class: type, *args: Any, **kwargs: Any) -> None:
    """Does nothing. Transformers 4 described the output class in the docstring."""


def mapping_names(mapping_name: str) -> OrderedDict[str, str]:
    """Returns a constant such as `FLAX_MODEL_MAPPING_NAMES`: class names by model type."""
    mapping = getattr(auto, mapping_name.removesuffix("_NAMES"))
    return OrderedDict(
        (spec.model_type, target_name(spec.heads[mapping.task])) for spec in mapping.specs()
    )


# -- Positions


def create_position_ids_from_input_ids(input_ids: jax.Array, padding_idx: int) -> jax.Array:
    """Returns RoBERTa's position IDs, int32 of the same shape. Padding gets `padding_idx`."""
    return positions_after_padding(jnp.asarray(input_ids), padding_idx)


def get_angles(pos: ArrayLike, i: ArrayLike, d_model: int) -> np.ndarray:
    """Returns the angle of each position `pos` and feature `i` of sinusoidal embeddings."""
    return np.asarray(pos) / np.power(10000.0, 2 * (np.asarray(i) // 2) / d_model)


def _angles(length: int, width: int) -> np.ndarray:
    return get_angles(np.arange(length)[:, None], np.arange(width)[None], width)


def positional_encoding(position: int, d_model: int) -> jax.Array:
    """Returns DistilBERT's sinusoids, `(1, position, d_model)`. Sines and cosines alternate."""
    angles = _angles(position, d_model)
    odd = np.arange(d_model) % 2 == 1
    return jnp.asarray(np.where(odd, np.cos(angles), np.sin(angles))[None], jnp.float32)


def _sines_then_cosines(n_pos: int, dim: int) -> jax.Array:
    """Returns the sinusoids of Marian, PEGASUS and RoFormer, `(n_pos, dim)`. Sines come first."""
    angles = _angles(n_pos, dim)
    parts = (np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2]))
    return jnp.asarray(np.concatenate(parts, axis=1), jnp.float32)


def _xglm_sinusoids(n_pos: int, dim: int, padding_idx: int | None = 1) -> jax.Array:
    """Returns XGLM's sinusoids, `(n_pos, dim)`. The row `padding_idx` is zero."""
    half = dim // 2
    frequencies = np.exp(np.arange(half) * -(math.log(10000) / (half - 1)))
    angles = np.arange(n_pos)[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    if padding_idx is not None:
        table[padding_idx] = 0
    return jnp.asarray(table, jnp.float32)


def _rotary_angles(length: int, dim: int) -> np.ndarray:
    frequencies = 1.0 / (10000 ** (np.arange(0, dim, 2)[: dim // 2] / dim))
    return np.outer(np.arange(length), frequencies).astype(np.float32)


def _rotary_table(num_pos: int, dim: int) -> jax.Array:
    """Returns Llama's sines and cosines, `(num_pos, 1, 2 * dim)`, as in Transformers 4.

    Like the original, it keeps at most `num_pos` features.
    """
    angles = np.tile(_rotary_angles(num_pos, dim), 2)[:, None]
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)[..., :num_pos])


def _gptj_table(num_pos: int, dim: int) -> jax.Array:
    """Returns GPT-J's sines and cosines, `(num_pos, dim)`."""
    angles = _rotary_angles(num_pos, dim)
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1))


def rotate_half(tensor: jax.Array) -> jax.Array:
    """Returns the second half of the features with a negative sign, then the first half."""
    half = tensor.shape[-1] // 2
    return jnp.concatenate([-tensor[..., half:], tensor[..., :half]], axis=-1)


def _rotate(tensor: jax.Array, sin_pos: jax.Array, cos_pos: jax.Array) -> jax.Array:
    """Applies Llama's rotary embedding. Sines and cosines broadcast to `tensor`."""
    return tensor * cos_pos + rotate_half(tensor) * sin_pos


def rotate_every_two(tensor: jax.Array) -> jax.Array:
    """Maps each pair of features `(x, y)` to `(-y, x)`."""
    pairs = jnp.stack([-tensor[..., 1::2], tensor[..., ::2]], axis=-1)
    return pairs.reshape(tensor.shape)


def _rotate_pairs(tensor: jax.Array, sincos: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies GPT-J's rotary embedding to `(batch, length, heads, features)`.

    Args:
        tensor: Queries or keys.
        sincos: Sines and cosines, each `(batch, length, features / 2)`.
    """
    sin, cos = (jnp.repeat(part[:, :, None, :], 2, axis=3) for part in sincos)
    return tensor * cos + rotate_every_two(tensor) * sin


def build_alibi_tensor(
    attention_mask: jax.Array, num_heads: int, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Returns Bloom's linear biases, `(batch, num_heads, 1, length)`.

    Unlike Transformers 4, it supports numbers of heads that are not a power of two.
    """
    positions = positions_from_mask(jnp.asarray(attention_mask))[:, None, None, :]
    return jnp.asarray(alibi_slopes(num_heads)[None, :, None, None] * positions, dtype)


def relative_position_index_init(window_size: tuple[int, int]) -> jax.Array:
    """Returns BEiT's index of the bias of each query and key, `(patches + 1, patches + 1)`."""
    height, width = window_size
    rows, columns = (axis.ravel() for axis in np.indices(window_size))
    down, across = (axis[:, None] - axis[None] for axis in (rows, columns))
    distances = (2 * height - 1) * (2 * width - 1)
    index = np.empty((rows.size + 1, rows.size + 1), np.int32)
    index[1:, 1:] = (down + height - 1) * (2 * width - 1) + across + width - 1
    index[0], index[:, 0], index[0, 0] = distances, distances + 1, distances + 2
    return jnp.asarray(index)


# -- Blocks of LongT5


def _pad_to_multiple(x: jax.Array, block_len: int, axis: int, pad_value: int = 0) -> jax.Array:
    """Pads an axis to a multiple of `block_len`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block_len)
    return jnp.pad(x, widths, constant_values=pad_value)


def _split_into_blocks(x: jax.Array, block_len: int, axis: int) -> jax.Array:
    """Splits an axis into blocks of `block_len`. The last block is padded with zeros."""
    padded = _pad_to_multiple(x, block_len, axis)
    shape = padded.shape
    return padded.reshape(*shape[:axis], -1, block_len, *shape[axis + 1 :])


def _concatenate_3_blocks(
    x: jax.Array, block_axis: int, sequence_axis: int, pad_value: int = 0
) -> jax.Array:
    """Returns each block together with the blocks before and after it."""
    widths = [(0, 0)] * x.ndim
    widths[block_axis] = (1, 1)
    padded, count = jnp.pad(x, widths, constant_values=pad_value), x.shape[block_axis]
    shifted = [
        jax.lax.slice_in_dim(padded, start, start + count, axis=block_axis) for start in range(3)
    ]
    return jnp.concatenate(shifted, axis=sequence_axis)


def _make_3block_relative_position_ids(block_len: int) -> jax.Array:
    """Returns the distance from each query of a block to three blocks of keys."""
    return jnp.arange(3 * block_len)[None] - jnp.arange(block_len, 2 * block_len)[:, None]


def _mask_local_attention_mask(local_attention_mask: jax.Array, block_len: int) -> jax.Array:
    """Removes keys from a mask that are `block_len` or more tokens away from the query."""
    near = jnp.abs(_make_3block_relative_position_ids(block_len)) < block_len
    return jnp.logical_and(local_attention_mask, near[None, None])


def _get_local_attention_mask(attention_mask: jax.Array, block_len: int) -> jax.Array:
    """Returns the mask of local attention, `(batch, 1, blocks, block_len, 3 * block_len)`."""
    queries = _split_into_blocks(jnp.asarray(attention_mask), block_len, axis=1)
    keys = _concatenate_3_blocks(queries, block_axis=1, sequence_axis=2)
    mask = jnp.logical_and(queries[..., :, None], keys[..., None, :])
    return _mask_local_attention_mask(mask, block_len)[:, None]


def _make_global_fixed_block_ids(
    attention_mask: jax.Array, global_block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Assigns tokens to blocks of `global_block_size` tokens.

    Tokens after the last full block belong to this block. Padding belongs to block -1.

    Returns:
        The block of each token, `(batch, length)`, and a mask of the existing blocks,
        `(batch, length // global_block_size)`.
    """
    mask, size = jnp.asarray(attention_mask) != 0, global_block_size
    columns = jnp.arange(mask.shape[1])
    full_blocks = (mask & (columns % size == size - 1)).sum(-1, keepdims=True)
    ids = jnp.where(mask, jnp.minimum(columns // size, full_blocks - 1), -1)
    exists = jnp.arange(mask.shape[1] // size)[None] <= ids.max(-1, keepdims=True)
    return ids, exists.astype(jnp.int32)


def _make_side_relative_position_ids(
    attention_mask: jax.Array, global_block_size: int
) -> jax.Array:
    """Returns the distance from each token's block to each block."""
    ids, exists = _make_global_fixed_block_ids(attention_mask, global_block_size)
    return jnp.arange(exists.shape[-1]) - ids[..., None]


def _create_global_aggregates(
    hidden_states: jax.Array, block_ids: jax.Array, global_seq_len: int
) -> jax.Array:
    """Returns the sum of the hidden states of each block, `(batch, global_seq_len, hidden)`."""
    blocks = jax.nn.one_hot(block_ids, global_seq_len)
    return jnp.einsum("...td,...tg->...gd", hidden_states, blocks)


def _by_name(*functions: Callable[..., Any]) -> dict[str, Any]:
    return {function.__name__: function for function in functions}


_REMAT = {"remat": remat}
_ROBERTA = _REMAT | _by_name(create_position_ids_from_input_ids)
_SINUSOIDS = {"create_sinusoidal_positions": _sines_then_cosines}
_ROTARY = _by_name(rotate_half) | {
    "create_sinusoidal_positions": _rotary_table,
    "apply_rotary_pos_emb": _rotate,
}

#: Functions by the last part of the name of their module in Transformers 4.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "modeling_flax_pytorch_utils": _by_name(convert_pytorch_sharded_state_dict_to_flax),
    "modeling_flax_utils": _by_name(
        quick_gelu,
        flax_shard_checkpoint,
        overwrite_call_docstring,
        append_call_sample_docstring,
        append_replace_return_docstrings,
    ),
    "modeling_flax_beit": _by_name(relative_position_index_init, ones_with_scale),
    "modeling_flax_bert": _REMAT,
    "modeling_flax_big_bird": _REMAT,
    "modeling_flax_bloom": _by_name(build_alibi_tensor),
    "modeling_flax_dinov2": _by_name(ones_with_scale),
    "modeling_flax_distilbert": _by_name(get_angles, positional_encoding),
    "modeling_flax_electra": _REMAT | _by_name(identity),
    "modeling_flax_gemma": _ROTARY,
    "modeling_flax_gptj": _by_name(rotate_every_two)
    | {"create_sinusoidal_positions": _gptj_table, "apply_rotary_pos_emb": _rotate_pairs},
    "modeling_flax_llama": _ROTARY,
    "modeling_flax_longt5": _REMAT
    | _by_name(
        _pad_to_multiple,
        _split_into_blocks,
        _concatenate_3_blocks,
        _make_3block_relative_position_ids,
        _mask_local_attention_mask,
        _get_local_attention_mask,
        _make_global_fixed_block_ids,
        _make_side_relative_position_ids,
        _create_global_aggregates,
    ),
    "modeling_flax_marian": _SINUSOIDS,
    "modeling_flax_mistral": _ROTARY,
    "modeling_flax_pegasus": _SINUSOIDS,
    "modeling_flax_roberta": _ROBERTA,
    "modeling_flax_roberta_prelayernorm": _ROBERTA,
    "modeling_flax_roformer": _SINUSOIDS,
    "modeling_flax_t5": _REMAT,
    "modeling_flax_whisper": _REMAT,
    "modeling_flax_xglm": {"create_sinusoidal_positions": _xglm_sinusoids},
    "modeling_flax_xlm_roberta": _ROBERTA,
}
