"""Checks of model inputs, shared by model calls, ``generate`` and pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError

#: The inputs that each mask can belong to. A mask has one entry per token or audio sample.
MASKED_INPUTS = {
    "attention_mask": ("input_ids", "input_values"),
    "decoder_attention_mask": ("decoder_input_ids",),
}


def is_token_input(name: str) -> bool:
    """Returns whether an argument contains one number per token.

    These are token IDs, token type IDs, position IDs and masks.
    """
    return name.endswith(("_ids", "_mask"))


def as_array(name: str, value: Any) -> Any:
    """Converts a model input to a NumPy or JAX array.

    A flat list of token values or audio samples is one example. It becomes a batch of size 1.
    Arrays of PyTorch and of other libraries become NumPy arrays.

    Args:
        name: Name of the model's argument, which determines the expected values.
        value: The array, or nested lists of numbers.

    Raises:
        UsageError: The value is text, its sequences have different lengths, or IDs are not
            integers.
    """
    if isinstance(value, str | bytes) or isinstance(value, list | tuple) and _contains_text(value):
        raise UsageError(f"{name} must be an array of numbers, not text: call the tokenizer first")
    array = value
    if isinstance(value, list | tuple):
        if any(isinstance(item, jax.Array) for item in value):
            array = jnp.stack([jnp.asarray(item) for item in value])
        else:
            try:
                array = np.asarray(value)
            except ValueError:
                processor = (
                    "feature_extractor(audio" if name == "input_values" else "tokenizer(texts"
                )
                raise UsageError(
                    f"{name} has rows of different lengths: pad them ({processor}, padding=True, "
                    'return_tensors="np")) and pass the attention_mask too'
                ) from None
        if array.ndim == 1 and (is_token_input(name) or name == "input_values"):
            array = array[None]
    elif not isinstance(value, jax.Array | np.ndarray) and hasattr(value, "__array__"):
        detach = getattr(value, "detach", None)  # a tensor of PyTorch
        array = np.asarray(value if detach is None else detach().cpu())
    dtype = getattr(array, "dtype", None)
    if name.endswith("_ids") and dtype is not None and not jnp.issubdtype(dtype, jnp.integer):
        if np.size(array) and not _is_boolean(dtype):
            raise UsageError(f"{name} has the dtype {dtype}, but IDs must be integers")
    return array


def check_masks(arrays: Mapping[str, Any]) -> None:
    """Checks that each mask has the shape of the input that it belongs to.

    A mask with more axes than the input, such as `(batch, queries, keys)`, is not checked.

    Args:
        arrays: The inputs by name.

    Raises:
        UsageError: A mask and its input have different shapes. The message contains both shapes.
    """
    for mask_name, names in MASKED_INPUTS.items():
        mask = arrays.get(mask_name)
        for name in names:
            tokens = arrays.get(name)
            if mask is None or tokens is None or np.ndim(mask) > np.ndim(tokens):
                continue
            if np.shape(mask) != np.shape(tokens):
                raise UsageError(
                    f"{mask_name} has the shape {np.shape(mask)}, but {name} has the shape "
                    f"{np.shape(tokens)}: pass the mask that the tokenizer returned with the tokens"
                )


def _contains_text(values: Sequence[Any]) -> bool:
    first = values[0] if values else None
    return isinstance(first, str | bytes) or (
        isinstance(first, list | tuple) and bool(first) and isinstance(first[0], str | bytes)
    )


def _is_boolean(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.bool_))
