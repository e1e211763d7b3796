"""Functions of Transformers 4 that convert between PyTorch models in memory and Flax parameters.

The functions are for programs that have a PyTorch model and a Flax model in memory, and import
these functions from Transformers 4's `modeling_flax_pytorch_utils`. Checkpoints need no conversion,
because `from_pretrained` and `save_pretrained` read and write PyTorch's format.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import errors, plugins
from hfseq.checkpoints import files, weights
from hfseq.nn import trees
from hfseq.plugins.registry import target_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


def convert_pytorch_state_dict_to_flax(
    pt_state_dict: Mapping[str, torch.Tensor | np.ndarray], flax_model: FlaxPreTrainedModel
) -> dict[str, Any]:
    """Converts a PyTorch state dict to the parameter tree of a Flax model.

    For models with batch norm the result is `{"params": ..., "batch_stats": ...}`, as in
    Transformers 4.

    Parameters that are missing in the state dict are also missing in the result. Unexpected tensors
    are ignored with a warning. The state dict of a model with a head can be converted for the base
    model, and vice versa.

    Args:
        pt_state_dict: PyTorch tensors or NumPy arrays by name.
        flax_model: The Flax model.

    Raises:
        WeightsError: The shapes of a tensor and its parameter differ. `WeightsError` is a subclass
            of `ValueError`.
    """
    arrays = {
        name: np.asarray(value) if isinstance(value, np.ndarray) else torch_to_numpy(value)
        for name, value in pt_state_dict.items()
    }
    tensors = {name: files.tensor_from_array(array) for name, array in arrays.items()}
    return _fill(tensors, flax_model, "the PyTorch state dict")


def torch_to_numpy(value: torch.Tensor) -> np.ndarray:
    """Converts a PyTorch tensor to NumPy. Supports bfloat16."""
    import ml_dtypes
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(dtype=torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def load_pytorch_checkpoint_in_flax_state_dict(
    flax_model: FlaxPreTrainedModel,
    pytorch_checkpoint_path: str | os.PathLike[str] | Sequence[str],
    is_sharded: bool = False,
    allow_missing_keys: bool = False,
) -> dict[str, Any]:
    """Reads `.bin` or `.safetensors` files as parameters of a Flax model.

    Args:
        flax_model: The Flax model.
        pytorch_checkpoint_path: A file, or several files with shards.
        is_sharded: Not used. Shards are recognized by the number of files.
        allow_missing_keys: Whether parameters may be missing.

    Raises:
        WeightsError: A parameter is missing, or a tensor has another shape.
    """
    source = pytorch_checkpoint_path
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    tensors: dict[str, weights.Tensor] = {}
    for path in paths:
        tensors |= files.open_file(os.fspath(path)).tensors
    params = _fill(tensors, flax_model, str(source))
    own_params = params["params"] if flax_model.params_include_collections else params
    missing = flax_model.required_params - trees.flatten(own_params).keys()
    if missing and not allow_missing_keys:
        names = ", ".join(sorted(map(trees.join, missing)))
        raise errors.WeightsError(
            f"{source} lacks parameters of {type(flax_model).__name__}: {names}. "
            "allow_missing_keys=True ignores this"
        )
    return params


def load_flax_checkpoint_in_pytorch_model(
    model: PreTrainedModel, flax_checkpoint_path: str | os.PathLike[str]
) -> PreTrainedModel:
    """Loads a `flax_model.msgpack` (or its index) into a PyTorch model in place, and returns it."""
    tensors = files.open_file(os.path.abspath(flax_checkpoint_path)).tensors
    flat = {tuple(name.split(".")): tensor.read(...) for name, tensor in tensors.items()}
    return load_flax_weights_in_pytorch_model(model, trees.unflatten(flat))


def load_flax_weights_in_pytorch_model(
    pt_model: PreTrainedModel, flax_state: Mapping[str, Any]
) -> PreTrainedModel:
    """Copies a Flax parameter tree into a PyTorch model in place, and returns the model.

    The parameters of a model with a head can be loaded into the base model, and vice versa.
    Half-precision leaves are cast to the dtype of the model. A warning lists the names that exist
    only in the tree or only in the model.

    Raises:
        WeightsError: A tensor has another shape.
    """
    import torch

    state_tree = trees.thaw(flax_state)
    # Models with batch norm have running statistics next to their parameters.
    collections = state_tree.values() if "params" in state_tree else [state_tree]
    flat = {path: leaf for tree in collections for path, leaf in trees.flatten(tree).items()}
    names = _names({path: np.shape(leaf) for path, leaf in flat.items()}, pt_model)
    torch_state = pt_model.state_dict()
    # Some classes use different names in memory and in files.
    memory_names = {names.resolve_name(name): name for name in torch_state}
    prefix = f"{getattr(pt_model, 'base_model_prefix', '')}."
    loaded, unexpected = {}, []
    for name, array in names.to_torch(flat).items():
        candidates = (name, name.removeprefix(prefix), prefix + name, memory_names.get(name, ""))
        matches = [n for n in candidates if n in torch_state]
        if not matches:
            unexpected.append(name)
            continue
        target = torch_state[matches[0]]
        if tuple(target.shape) != array.shape:
            raise errors.WeightsError(
                f"{name} has the shape {array.shape} in the Flax parameters and "
                f"{tuple(target.shape)} in {type(pt_model).__name__}. Create the PyTorch model "
                "with the configuration of the Flax parameters"
            )
        loaded[matches[0]] = torch.tensor(np.asarray(array, np.float32)).to(target.dtype)
    pt_model.load_state_dict(loaded, strict=False)
    pt_model.tie_weights()
    state, class_name = pt_model.state_dict(), type(pt_model).__name__
    # Tied parameters are not missing, because they share the storage of a loaded tensor.
    storages = {state[name].data_ptr() for name in loaded}
    tied = {name for name, tensor in state.items() if tensor.data_ptr() in storages}
    if unexpected:
        logger.warning(
            "Some weights of the Flax model were not used when initializing the PyTorch model "
            "%s: %s",
            class_name,
            sorted(unexpected),
        )
    # The counters of batch norm do not change the outputs.
    patterns = (*names.ignored, r"\.num_batches_tracked$")
    ignored = {name for name in torch_state if any(re.search(p, name) for p in patterns)}
    if missing := set(torch_state) - set(loaded) - tied - ignored:
        logger.warning(
            "Some weights of %s were not initialized from the Flax model and are newly "
            "initialized: %s",
            class_name,
            sorted(missing),
        )
    return pt_model


def _names(
    shapes: dict[trees.Path, tuple[int, ...]], pt_model: PreTrainedModel
) -> weights.WeightMap:
    """Returns the weight map for the Flax class that corresponds to a PyTorch model.

    If hfseq has no such class, the weight map only uses the general naming rules.
    """
    name = f"Flax{type(pt_model).__name__}"
    specs = [entry.target for entry in plugins.load().architectures.entries()]
    heads = [(spec, task) for spec in specs for task in spec.heads]
    found = [(spec, task) for spec, task in heads if target_name(spec.heads[task]) == name]
    if not found:
        return weights.WeightMap(shapes)
    spec, task = found[0]
    flax_class = spec.load_head(task)
    return weights.WeightMap(
        shapes,
        prefix=flax_class.base_model_prefix,
        ignored=flax_class.ignored_weights,
        templates=flax_class.weight_templates,
        synonyms=flax_class.weight_synonyms,
    )


def rename_key_and_reshape_tensor(
    pt_tuple_key: tuple[str, ...],
    pt_tensor: np.ndarray,
    random_flax_state_dict: Mapping[tuple[str, ...], Any],
    model_prefix: str,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Converts the name and layout of one PyTorch tensor to Flax.

    Args:
        pt_tuple_key: The parts of the PyTorch name.
        pt_tensor: The tensor.
        random_flax_state_dict: The parameters of an initialized model by path. They decide whether
            a PyTorch `weight` becomes a `scale`, an `embedding` or a `kernel`.
        model_prefix: The model's `base_model_prefix`.

    Returns:
        The Flax path and the tensor in Flax's layout. If no parameter matches, path and tensor are
        returned unchanged, except for the old names `gamma` and `beta`.
    """
    head = tuple(pt_tuple_key[:-1])
    old_names = {"gamma": "weight", "beta": "bias"}
    last = old_names.get(pt_tuple_key[-1], pt_tuple_key[-1])
    prefixes = (head, (model_prefix, *head), head[1:] if head[:1] == (model_prefix,) else head)
    for leaf in ("scale", "embedding", "weight", "kernel") if last == "weight" else (last,):
        for prefix in prefixes:
            if (*prefix, leaf) in random_flax_state_dict:
                axes = weights.torch_axes((leaf,), pt_tensor.ndim)
                return (*head, leaf), pt_tensor if axes is None else pt_tensor.transpose(axes)
    return (*head, last), pt_tensor


def _fill(
    tensors: dict[str, weights.Tensor], model: FlaxPreTrainedModel, source: str
) -> dict[str, Any]:
    names = model.file_map if model.params_include_collections else model.weight_map
    matched, report = names.match(tensors)
    weights.check_report(report, source, type(model).__name__, ignore_mismatched=False)
    if report.unexpected:
        logger.warning(
            "Some weights of %s were not used for %s: %s",
            source,
            type(model).__name__,
            sorted(report.unexpected),
        )
    missing = set(report.missing)
    flat = {
        path: np.asarray(names.read_param(matched, path))
        for path in names.shapes
        if path not in missing
    }
    if not model.params_include_collections:
        return trees.unflatten(flat)
    collection_of = {path: name for path, (name, _) in model._stored_paths().items()}
    return trees.unflatten(
        {(collection_of.get(path, "params"), *path): leaf for path, leaf in flat.items()}
    )
