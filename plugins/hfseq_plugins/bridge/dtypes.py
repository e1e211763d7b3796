"""Converts data types and arrays between PyTorch and jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

#: The jax data type for each PyTorch data type. 64-bit types become 32-bit types, because jax
#: disables 64-bit types by default.
JAX_DTYPES = {
    torch.float32: jnp.dtype("float32"),
    torch.float64: jnp.dtype("float32"),
    torch.float16: jnp.dtype("float16"),
    torch.bfloat16: jnp.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: jnp.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: jnp.dtype(ml_dtypes.float8_e5m2),
    torch.int64: jnp.dtype("int32"),
    torch.int32: jnp.dtype("int32"),
    torch.int16: jnp.dtype("int16"),
    torch.int8: jnp.dtype("int8"),
    torch.uint8: jnp.dtype("uint8"),
    torch.bool: jnp.dtype("bool"),
    torch.complex64: jnp.dtype("complex64"),
    torch.complex128: jnp.dtype("complex64"),
}
#: The PyTorch data type for each jax data type. int32 becomes int64, because PyTorch's indices and
#: the results of its integer operators are int64.
TORCH_DTYPES = {
    jax_dtype: torch_dtype
    for torch_dtype, jax_dtype in JAX_DTYPES.items()
    if torch_dtype not in (torch.float64, torch.complex128, torch.int32)
} | {jnp.dtype("uint32"): torch.int64}

_INT32 = np.iinfo(np.int32)


def jax_dtype(dtype: torch.dtype | None) -> jnp.dtype | None:
    """Returns the jax data type for a PyTorch data type. 64-bit types become 32-bit types."""
    return None if dtype is None else JAX_DTYPES[dtype]


def numpy_array(tensor: torch.Tensor) -> np.ndarray:
    """Converts a PyTorch tensor to a NumPy array with a data type that jax supports.

    Integers outside of the range of int32 become the nearest int32. Models use such integers only
    as limits, for which the nearest int32 has the same effect.
    """
    with no_dispatch():  # the operators below must run in PyTorch, even in a trace of a model
        return _numpy_array(tensor.detach())


def _numpy_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    dtype = JAX_DTYPES[tensor.dtype]
    if tensor.dtype == torch.int64:
        return np.clip(tensor.numpy(), _INT32.min, _INT32.max).astype(np.int32)
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().copy().view(dtype)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.contiguous().view(torch.uint8).numpy().copy().view(dtype)
    return np.asarray(tensor.numpy()).astype(dtype)


def torch_tensor(array: np.ndarray | jax.Array) -> torch.Tensor:
    """Converts an array to a PyTorch tensor. int32 becomes int64, which embeddings expect."""
    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    tensor = torch.from_numpy(np.array(array, copy=True))
    return tensor.long() if tensor.dtype == torch.int32 else tensor
