"""Builds PyTorch modules of Transformers without weights."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import torch
import transformers

from hfseq_plugins.bridge import registries
from hfseq_plugins.bridge.dtypes import numpy_array


def build(config: transformers.PreTrainedConfig, class_name: str) -> torch.nn.Module:
    """Builds a PyTorch model without allocating its parameters.

    Parameters are on the meta device, so they have no values. Buffers that the module computes from
    its configuration, such as rotary tables, have values. Attention and experts are computed by the
    functions that `hfseq_plugins.bridge.registries` registers, so the module can only run in
    `trace.call`.

    Args:
        config: The configuration. The module uses a copy of it.
        class_name: Name of a model class of Transformers, such as `BertForMaskedLM`.

    Returns:
        The module, in evaluation mode.
    """
    registries.register()
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        model_class = _model_class(config, class_name)
    config = copy.deepcopy(config)
    with torch.device("meta"):
        module = model_class._from_config(config)
    module.eval()
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    for part in module.modules():
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    module.initialize_weights()  # computes the buffers only
    registries.select(module)
    return module


def _model_class(config: transformers.PreTrainedConfig, class_name: str) -> Any:
    """Finds a model class of Transformers, even if the package does not export it."""
    package = type(config).__module__.rpartition(".")[0]
    import importlib
    import pkgutil

    for entry in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if entry.name.startswith("modeling_"):
            model_class = getattr(
                importlib.import_module(f"{package}.{entry.name}"), class_name, None
            )
            if model_class is not None:
                return model_class
    raise AttributeError(f"Transformers has no class {class_name}")


def buffers(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Returns the values of a module's buffers by name.

    Examples are rotary tables, which are computed from the configuration, and the initial
    statistics of batch normalization.

    Args:
        module: A module from `build`.
    """
    return {
        name: numpy_array(buffer)
        for name, buffer in module.named_buffers()
        if buffer is not None and not buffer.is_meta
    }


def input_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns the names of the inputs of a module's forward pass."""
    return tuple(inspect.signature(module.forward).parameters)
