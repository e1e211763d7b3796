"""Transformers 4's functions between PyTorch models in memory and Flax parameters.

Checkpoints need none of them: ``from_pretrained`` and ``save_pretrained`` read and write PyTorch's
format. They serve programs that hold both models, under the module name that such programs import.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import errors
from hfseq.checkpoints import files, weights
from hfseq.nn import trees

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


def convert_pytorch_state_dict_to_flax(
    pt_state_dict: Mapping[str, torch.Tensor | np.ndarray], flax_model: FlaxPreTrainedModel
) -> dict[str, Any]:
    """Return the parameter tree of ``flax_model`` filled from a PyTorch state dict.

    Tensors may be PyTorch's or NumPy's. What the state dict lacks is left out of the tree; what the
    model does not know is dropped with a warning. A head's checkpoint fits its base, and the other
    way round.

    **Raises:** :class:`~hfseq.errors.WeightsError` (a ValueError) for tensors of other shapes.
    """
    arrays = {
        name: np.asarray(value) if isinstance(value, np.ndarray) else files.torch_to_numpy(value)
        for name, value in pt_state_dict.items()
    }
    tensors = {name: files.tensor_from_array(array) for name, array in arrays.items()}
    return _fill(tensors, flax_model, "the PyTorch state dict")


def load_pytorch_checkpoint_in_flax_state_dict(
    flax_model: FlaxPreTrainedModel,
    pytorch_checkpoint_path: str | os.PathLike[str] | Sequence[str],
    is_sharded: bool = False,
    allow_missing_keys: bool = False,
) -> dict[str, Any]:
    """Read a ``.bin`` or ``.safetensors`` file (or its shards) as parameters of ``flax_model``.

    ``allow_missing_keys=False`` raises WeightsError where a parameter is not in the file.
    """
    given = pytorch_checkpoint_path
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    tensors: dict[str, weights.Tensor] = {}
    for path in paths:
        tensors |= files.open_file(os.fspath(path)).tensors
    params = _fill(tensors, flax_model, str(given))
    missing = flax_model.required_params - trees.flatten(params).keys()
    if missing and not allow_missing_keys:
        names = ", ".join(sorted(map(trees.join, missing)))
        raise errors.WeightsError(
            f"{given} lacks parameters of {type(flax_model).__name__}: {names}; "
            "allow_missing_keys=True leaves them out"
        )
    return params


def load_flax_checkpoint_in_pytorch_model(
    model: PreTrainedModel, flax_checkpoint_path: str | os.PathLike[str]
) -> PreTrainedModel:
    """Load a ``flax_model.msgpack`` (or its index) into a PyTorch model in place; returns it."""
    tensors = files.open_file(os.path.abspath(flax_checkpoint_path)).tensors
    flat = {tuple(name.split(".")): tensor.read(...) for name, tensor in tensors.items()}
    return load_flax_weights_in_pytorch_model(model, trees.unflatten(flat))


def load_flax_weights_in_pytorch_model(
    pt_model: PreTrainedModel, flax_state: Mapping[str, Any]
) -> PreTrainedModel:
    """Copy a Flax parameter tree into a PyTorch model in place; returns the model.

    A head's parameters fit its base, and the other way round. Half-precision leaves arrive in the
    model's own type. Names that fit on one side only are warned about together.
    """
    import torch

    flat = trees.flatten(trees.thaw(flax_state))
    names = _names({path: np.shape(leaf) for path, leaf in flat.items()}, pt_model)
    wanted = pt_model.state_dict()
    # Some classes have other names in memory than in files.
    inside = {names.resolve_name(name): name for name in wanted}
    prefix = f"{getattr(pt_model, 'base_model_prefix', '')}."
    loaded, unexpected = {}, []
    for name, array in names.to_torch(flat).items():
        known = (name, name.removeprefix(prefix), prefix + name, inside.get(name, ""))
        found = [n for n in known if n in wanted]
        if not found:
            unexpected.append(name)
            continue
        target = wanted[found[0]]
        if tuple(target.shape) != array.shape:
            raise errors.WeightsError(
                f"{name} is {array.shape} in the Flax parameters and {tuple(target.shape)} in "
                f"{type(pt_model).__name__}: use the configuration that belongs to these weights"
            )
        loaded[found[0]] = torch.tensor(np.asarray(array, np.float32)).to(target.dtype)
    pt_model.load_state_dict(loaded, strict=False)
    pt_model.tie_weights()
    state, kind = pt_model.state_dict(), type(pt_model).__name__
    # Names whose storage belongs to a tensor that was loaded under another name are not missing.
    storages = {state[name].data_ptr() for name in loaded}
    tied = {name for name, tensor in state.items() if tensor.data_ptr() in storages}
    if unexpected:
        logger.warning(
            "Some weights of the Flax model were not used when initializing the PyTorch model "
            "%s: %s",
            kind,
            sorted(unexpected),
        )
    if missing := set(wanted) - set(loaded) - tied:
        logger.warning(
            "Some weights of %s were not initialized from the Flax model and are newly "
            "initialized: %s",
            kind,
            sorted(missing),
        )
    return pt_model


def _names(
    shapes: dict[trees.Path, tuple[int, ...]], pt_model: PreTrainedModel
) -> weights.WeightMap:
    """Return the names of parameters as the Flax class of PyTorch's has them, if there is one."""
    import hfseq

    kind = getattr(hfseq, f"Flax{type(pt_model).__name__}", None)
    if kind is None:
        return weights.WeightMap(shapes)
    return weights.WeightMap(shapes, prefix=kind.base_model_prefix, synonyms=kind.weight_synonyms)


def rename_key_and_reshape_tensor(
    pt_tuple_key: tuple[str, ...],
    pt_tensor: np.ndarray,
    random_flax_state_dict: Mapping[tuple[str, ...], Any],
    model_prefix: str,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the Flax path of a PyTorch tensor, and the tensor in Flax's layout.

    ``random_flax_state_dict`` is the flat tree of a freshly made model, which tells a norm's
    ``scale`` from an ``embedding`` and a ``kernel``. A path that is not in it is returned as it is.
    """
    head = tuple(pt_tuple_key[:-1])
    old = {"gamma": "weight", "beta": "bias"}
    last = old.get(pt_tuple_key[-1], pt_tuple_key[-1])
    starts = (head, (model_prefix, *head), head[1:] if head[:1] == (model_prefix,) else head)
    for leaf in ("scale", "embedding", "weight", "kernel") if last == "weight" else (last,):
        for start in starts:
            if (*start, leaf) in random_flax_state_dict:
                axes = weights.torch_axes((leaf,), pt_tensor.ndim)
                return (*head, leaf), pt_tensor if axes is None else pt_tensor.transpose(axes)
    return (*head, last), pt_tensor


def _fill(
    tensors: dict[str, weights.Tensor], model: FlaxPreTrainedModel, source: str
) -> dict[str, Any]:
    names = model.weight_map
    found, report = names.match(tensors)
    weights.check_report(report, source, type(model).__name__, ignore_mismatched=False)
    if report.unexpected:
        logger.warning(
            "Some weights of %s were not used for %s: %s",
            source,
            type(model).__name__,
            sorted(report.unexpected),
        )
    absent = set(report.missing)
    paths = [path for path in names.shapes if path not in absent]
    return trees.unflatten({path: np.asarray(names.read_param(found, path)) for path in paths})
