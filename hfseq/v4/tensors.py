"""JAX arrays in Transformers' tokenizers and processors.

As in Transformers 4, tokenizers decode JAX arrays, and tokenizers and processors return JAX arrays
for `return_tensors="jax"`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from hfseq.errors import UsageError

GENERIC = "transformers.utils.generic"

#: Modules and classes of batches, whose values `return_tensors` converts.
BATCHES = {
    "transformers.tokenization_utils_base": "BatchEncoding",
    "transformers.feature_extraction_utils": "BatchFeature",
}


def read_jax(module: ModuleType) -> None:
    """Allows tokenizers to decode JAX arrays like NumPy arrays."""
    original = getattr(module, "_get_frameworks_and_test_func", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def frameworks(value: Any) -> Any:
        is_jax = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
        return {"np": lambda _: True} if is_jax else original(value)

    module._get_frameworks_and_test_func = frameworks  # type: ignore[attr-defined]


def return_jax(module: ModuleType) -> None:
    """Adds `return_tensors="jax"` to the batches of a module in `BATCHES`."""
    batch_class = getattr(module, BATCHES[module.__name__])
    original = batch_class.convert_to_tensors
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def convert_to_tensors(batch: Any, tensor_type: Any = None, *args: Any, **kwargs: Any) -> Any:
        if tensor_type != "jax":
            return original(batch, tensor_type, *args, **kwargs)
        import jax.numpy as jnp
        import numpy as np

        original(batch, "np", *args, **kwargs)
        for name, value in batch.items():
            if not isinstance(value, np.ndarray):
                continue
            if value.dtype == object:
                raise UsageError(
                    f'return_tensors="jax": the rows of {name} have different lengths. Use '
                    "padding=True, and truncation=True with max_length"
                )
            if value.dtype.kind in "biuf":
                batch[name] = jnp.asarray(value)
        return batch

    batch_class.convert_to_tensors = convert_to_tensors
