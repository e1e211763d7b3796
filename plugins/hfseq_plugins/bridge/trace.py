"""Runs PyTorch's forward pass of a module on jax arrays."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from hfseq import nn
from hfseq.errors import WeightsError
from hfseq_plugins.bridge import replacements, state
from hfseq_plugins.bridge.dispatch import BridgeMode
from hfseq_plugins.bridge.dtypes import JAX_DTYPES, torch_tensor
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.tensor import (
    JaxTensor,
    as_arrays,
    as_tensors,
    from_array,
    from_constant,
    inner_scope,
)

logger = logging.getLogger("hfseq")

#: A function that computes the output of a submodule with one input.
Layer = Callable[[jax.Array], jax.Array]
#: A function that converts an output object of Transformers, given its class and its entries.
MakeOutput = Callable[[type, dict[str, Any]], Any]


def call(
    module: torch.nn.Module,
    tensors: Mapping[str, jax.Array],
    inputs: Mapping[str, Any],
    *,
    train: bool = False,
    rng: jax.Array | nn.Keys | None = None,
    gradient_checkpointing: bool = False,
    segment_ids: jax.Array | None = None,
    layers: Mapping[str, Layer] | None = None,
    function: Callable[..., Any] | None = None,
    make_output: MakeOutput | None = None,
) -> tuple[Any, dict[str, jax.Array]]:
    """Runs PyTorch's forward pass of a module on jax arrays.

    The function is pure and can be transformed by `jax.jit`, `jax.grad` and `jax.vmap`. It should
    be called under `jax.jit`, because each call runs PyTorch's Python code. The module is not
    changed, and several threads can use it at the same time.

    Args:
        module: A module from `modules.build`.
        tensors: Parameters and buffers by name, as in `module.named_parameters()` and
            `module.named_buffers()`, in PyTorch's layout. For tied parameters, one of the names is
            sufficient. Buffers that are missing have the values that the module computed for them.
        inputs: Arguments of `module.forward` by name. jax arrays are inputs of the compiled
            program. NumPy arrays and PyTorch tensors are constants of the program, so Python code
            may depend on their values. The sizes of images are an example. All other values are
            passed unchanged.
        train: Whether the module is in training mode.
        rng: The PRNG key, or the `hfseq.nn.Keys`, of dropout and other random operators. With
            `None`, an error is raised if the code reads a random number.
        gradient_checkpointing: Whether to rematerialize each layer that Transformers can
            checkpoint.
        segment_ids: Number of the packed document of each token, `(batch, length)`. Self-attention
            does not cross documents if Transformers' mask functions build its masks.
        layers: Functions that replace the forward pass of submodules, by the path of the submodule.
            For example, an hfseq layer with an adapter can replace a linear layer.
        function: The function to run, which is called as `function(module, **inputs)`. Default: the
            forward pass of the module.
        make_output: Function that converts each output object of Transformers, given its class and
            its entries by name. Default: the output object becomes a dictionary.

    Returns:
        The outputs, as nested dictionaries and tuples of jax arrays, without entries that are
        `None`. The second value contains the buffers that the call changed, by name. The statistics
        of batch normalization are an example.

    Raises:
        UnsupportedModel: jax cannot trace the PyTorch code.
        WeightsError: A parameter is missing, or has the wrong shape.
    """
    clone = _clone(module, tensors)
    for part in clone.modules():
        part.training = train
        if type(part).__name__ in replacements.FORWARDS:
            forward = replacements.FORWARDS[type(part).__name__]
            part.forward = functools.partial(forward, part)
        if gradient_checkpointing and isinstance(part, GradientCheckpointingLayer):
            part.forward = functools.partial(_recompute, part.forward)
    for path, layer in (layers or {}).items():
        clone.get_submodule(path).forward = functools.partial(_compute_layer, layer)
    keys = nn.make_keys(rng)
    versions = {name: buffer.node.version for name, buffer in _jax_buffers(clone).items()}
    state.enter(state.TraceState(keys=keys, train=train, segment_ids=segment_ids))
    numpy_state = _numpy_state() if train else None
    arguments = {name: _input(value) for name, value in inputs.items()}
    try:
        with torch.enable_grad(), BridgeMode():
            outputs = function(clone, **arguments) if function else clone(**arguments)
            result = _outputs(outputs, make_output)
    finally:
        state.leave()
    if train and numpy_state != _numpy_state():
        raise UnsupportedModel(
            "it draws random numbers with NumPy, which would be the same in every step of the "
            "compiled program",
            operator="numpy.random",
            solution="Disable the augmentation that draws them in the configuration, for example "
            "with apply_spec_augment=False",
        )
    written = [
        name
        for name, parameter in clone.named_parameters()
        if isinstance(parameter, JaxTensor) and parameter.node.version
    ]
    if train and written:
        logger.warning(
            "PyTorch's code of %s changes the parameters %s in its forward pass. The outputs and "
            "the gradients use the new values, but the stored parameters keep the old ones",
            type(module).__name__,
            ", ".join(written[:5]) + (f" and {len(written) - 5} more" if written[5:] else ""),
        )
    changed = {
        name: buffer.array
        for name, buffer in _jax_buffers(clone).items()
        if buffer.node.version != versions.get(name, 0)
    }
    return result, changed


def _numpy_state() -> tuple[int, int]:
    """Returns parts of the state of NumPy's global generator that change with each draw."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(state, dict)
    return int(state["state"]["pos"]), int(state["state"]["key"][0])


def _jax_buffers(module: torch.nn.Module) -> dict[str, JaxTensor]:
    return {name: b for name, b in module.named_buffers() if isinstance(b, JaxTensor)}


def _input(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return from_array(value)
    if isinstance(value, np.ndarray):
        return from_constant(torch_tensor(value))
    if isinstance(value, torch.Tensor):
        return from_constant(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_input(entry) for entry in value)
    return value


def _clone(module: torch.nn.Module, tensors: Mapping[str, jax.Array]) -> torch.nn.Module:
    """Copies a module and replaces its tensors by tensors that hold the given jax arrays.

    The module must be copied because its code may store traced arrays in attributes, and these must
    not be used after the trace.
    """
    memo: dict[int, Any] = {}
    missing = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in tensors:
            memo[id(parameter)] = _checked(name, tensors[name], parameter)
    for name, parameter in module.named_parameters():
        if id(parameter) not in memo:
            if parameter.is_meta:
                missing.append(name)
            else:
                memo[id(parameter)] = from_constant(parameter.detach())
    if missing:
        raise WeightsError(
            f"{len(missing)} parameters of {type(module).__name__} are missing: "
            f"{', '.join(missing[:5])}"
        )
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in tensors:
            memo[id(buffer)] = _checked(name, tensors[name], buffer)
        elif id(buffer) not in memo:
            memo[id(buffer)] = from_constant(buffer.detach().clone())
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(module, memo)


def _checked(name: str, array: jax.Array, tensor: torch.Tensor) -> JaxTensor:
    if tuple(array.shape) != tuple(tensor.shape):
        raise WeightsError(
            f"{name} has the shape {tuple(array.shape)}, but the model expects "
            f"{tuple(tensor.shape)}"
        )
    array = jnp.asarray(array)
    dtype = tensor.dtype if JAX_DTYPES.get(tensor.dtype) == array.dtype else None
    return from_array(array, dtype)


def _outputs(outputs: Any, make_output: MakeOutput | None) -> Any:
    """Converts the outputs of PyTorch code to nested dictionaries and tuples of jax arrays."""
    if isinstance(outputs, torch.Tensor):
        return as_arrays(outputs)
    if isinstance(outputs, Mapping):
        entries = {name: _outputs(value, make_output) for name, value in outputs.items()}
        entries = {name: value for name, value in entries.items() if value is not None}
        return make_output(type(outputs), entries) if make_output else entries
    if isinstance(outputs, list | tuple):
        return tuple(_outputs(value, make_output) for value in outputs)
    if isinstance(outputs, bool | int | float):
        return outputs
    return None


def _compute_layer(layer: Layer, inputs: torch.Tensor) -> torch.Tensor:
    return from_array(layer(as_arrays(inputs)))


def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the forward pass of a layer in `jax.checkpoint`.

    If the layer changes tensors that were created outside of it, such as buffers, their new values
    are additional results of the checkpointed function.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    written: list[Any] = []
    structure: Any = None

    def pure(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        nonlocal structure
        with inner_scope() as writes:
            values = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                tensor = leaves[place]
                values[place] = from_array(array, tensor.dtype)
                if hasattr(tensor, "visible"):
                    values[place].visible = tensor.visible
            layer_args, layer_kwargs = tree_unflatten(values, spec)
            result_leaves, result_spec = tree_flatten(forward(*layer_args, **layer_kwargs))
            tensors = [leaf for leaf in result_leaves if isinstance(leaf, torch.Tensor)]
            structure = (result_leaves, result_spec, [tensor.dtype for tensor in tensors])
            results = [as_arrays(tensor) for tensor in tensors]
            nodes = list(writes)
            values_after = [node.value for node in nodes]
        for node in nodes:
            node.value = writes[node]
        written[:] = nodes
        return results, values_after

    arrays = [as_arrays(leaves[place]) for place in places]
    results, values_after = jax.checkpoint(pure)(arrays)
    for node, value in zip(written, values_after, strict=True):
        node.write(value)
    result_leaves, result_spec, dtypes = structure
    tensors = iter([from_array(x, dtype) for x, dtype in zip(results, dtypes, strict=True)])
    return tree_unflatten(
        [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in result_leaves],
        result_spec,
    )


__all__ = ["Layer", "as_arrays", "as_tensors", "call"]
