"""Reads quantized checkpoints, and dequantizes their weights while they are loaded.

The key ``quantization_config`` of config.json contains the quantization method and its options.
There is one module per method, with the interface of `Method`. Dequantized weights are ordinary
tensors, so no other code of hfseq depends on the method.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hfseq.checkpoints.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
)
from hfseq.checkpoints.quantized.weights import QuantizedWeight
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("hfseq.checkpoints.quantized")


class Method(Protocol):
    """The interface of the modules of this package that each support one quantization method.

    Attributes:
        PARTS: Regular expression for the names of tensors that only quantized weights have, such as
            scales. The first group is the prefix that all tensors of the weight have in common, and
            the second group is the remaining part of the name.
        CODES: Regular expression, with the same groups, for the name of the integers or FP8 values
            if they have the name of the original weight. `None` if the method uses other names.
        UNUSED: Regular expression for the names of tensors that have no effect on the weights.
    """

    PARTS: re.Pattern[str]
    CODES: re.Pattern[str] | None
    UNUSED: re.Pattern[str] | None

    def check(self, settings: Mapping[str, Any], location: str) -> None:
        """Raises `WeightsError` if the options are not supported."""

    def read(self, weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
        """Returns the dequantized weight, whose values are computed when they are read."""


#: The modules of the supported methods. The keys are values of ``quant_method``.
METHODS: Mapping[str, Any] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}

#: Matches the names of tensors that only quantized checkpoints have, such as packed weights, scales
#: and codebooks.
QUANTIZED_TENSORS = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|scales|zeros|weight_(packed|scale(_inv|_2)?|scales|shape|"
    r"zero_point|format|g_idx)|input_(scale|zero_point|global_scale)|weight_global_scale|absmax|"
    r"nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|SCB|codes|codebooks|W_q|"
    r"_data|_scale|\w+_proj_(blocks|scales|scale_inv))$"
)


def quantization_settings(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the ``quantization_config`` of a configuration, or `None` without this key.

    Raises:
        WeightsError: The ``quantization_config`` does not contain the method.
    """
    if isinstance(config, Mapping):
        stored, name = config.get("quantization_config"), config.get("_name_or_path")
    else:
        stored = getattr(config, "quantization_config", None)
        name = getattr(config, "name_or_path", None)
    if stored is None:
        return None
    settings = dict(stored) if isinstance(stored, Mapping) else dict(stored.to_dict())
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # old checkpoints do not name the method; as in Transformers
    if method is None:
        raise WeightsError(
            f"the quantization_config in the config.json of {name or 'this model'} has no "
            f"quant_method. Add one of {', '.join(METHODS)}"
        )
    return {**settings, "quant_method": str(getattr(method, "value", method))}


def check_method(
    config: PreTrainedConfig | Mapping[str, Any], location: str
) -> dict[str, Any] | None:
    """Checks that hfseq can read the quantized weights that a configuration describes.

    This check does not need the weights, so it runs before they are downloaded.

    Args:
        config: The configuration, or the content of config.json.
        location: Directory or Hub name, for messages.

    Returns:
        The quantization settings, or `None` if the configuration has none.

    Raises:
        WeightsError: The method or its options are not supported. The message names them.
    """
    settings = quantization_settings(config)
    if settings is None:
        return None
    name = settings["quant_method"]
    if name not in METHODS:
        raise WeightsError(
            f"{location} is quantized with '{name}', which hfseq does not read (supported: "
            f"{', '.join(METHODS)}). Use the checkpoint from which it was quantized, or dequantize "
            "it with Transformers: model.dequantize().save_pretrained(...)"
        )
    METHODS[name].check(settings, location)
    return settings


def dequantize(
    tensors: Mapping[str, Tensor],
    config: PreTrainedConfig | Mapping[str, Any],
    location: str,
    dtype: str | None = None,
) -> dict[str, Tensor]:
    """Replaces the tensors of quantized weights with the dequantized weights.

    Weights are dequantized when they are read. Reading a part of a weight dequantizes only this
    part.

    Args:
        tensors: The tensors of a checkpoint by name.
        config: The configuration of the checkpoint, or the content of config.json.
        location: Path of the weight file, for messages.
        dtype: The dtype of the dequantized weights. Default: the dtype in the configuration, or
            bfloat16.

    Returns:
        The tensors of the dequantized checkpoint by name. If the checkpoint contains no quantized
        weights, these are the original tensors.

    Raises:
        WeightsError: The method is not supported, the tensors of a quantized weight are missing or
            do not match the settings, or the checkpoint contains tensors of a different method.
    """
    settings = check_method(config, location)
    if settings is None:
        return dict(tensors)
    name = settings["quant_method"]
    method = METHODS[name]
    if dtype is None:
        stored_dtype = (
            config.get("dtype", config.get("torch_dtype"))
            if isinstance(config, Mapping)
            else getattr(config, "dtype", None)
        )
        dtype = str(stored_dtype).removeprefix("torch.")
        dtype = dtype if dtype in FLOAT_DTYPES else "bfloat16"
    weights: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for tensor_name, tensor in tensors.items():
        if method.UNUSED is not None and method.UNUSED.search(tensor_name):
            continue
        match = method.PARTS.fullmatch(tensor_name)
        if match is None and method.CODES is not None and tensor.dtype in method.CODE_DTYPES:
            match = method.CODES.fullmatch(tensor_name)
        if match is None:
            plain[tensor_name] = tensor
        else:
            weights.setdefault(match[1], {})[match[2]] = tensor
    dequantized = {}
    for prefix, parts in weights.items():
        own_part = "weight" if prefix.endswith(".") else ""
        weight_name = f"{prefix}{own_part}"
        if weight_name in plain:
            parts[own_part] = plain.pop(weight_name)
        weight = QuantizedWeight(weight_name, prefix, parts, name, location, dtype)
        dequantized[weight_name] = method.read(weight, settings)
    other = [
        tensor_name
        for tensor_name, tensor in plain.items()
        if QUANTIZED_TENSORS.search(tensor_name)
        or tensor_name.endswith(".weight")
        and tensor.dtype not in FLOAT_DTYPES
    ]
    if other:
        raise WeightsError(
            f"{location} is quantized with {name} according to its config.json, but contains "
            f"tensors that do not belong to this method: {_examples(other)}"
        )
    if not dequantized:
        logger.info(
            "%s has a quantization_config (%s), but its weights are not quantized", location, name
        )
    else:
        logger.info(
            "dequantizing %d weights of %s from %s to %s", len(dequantized), location, name, dtype
        )
    return plain | dequantized


#: Settings that are kept in ``dequantized_from`` after the weights of a model were dequantized.
_RECORDED = (
    *("quant_method", "bits", "group_size", "format", "checkpoint_format", "version"),
    *("weight_block_size", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
)


def dequantized_config(config: PreTrainedConfig, source: str) -> PreTrainedConfig:
    """Returns the configuration of a dequantized model.

    The configuration has the attribute ``dequantized_from`` instead of ``quantization_config``.

    Args:
        config: The configuration of the quantized checkpoint, which is not modified.
        source: Directory or Hub name of the checkpoint.
    """
    stored = quantization_settings(config)
    config = copy.copy(config)
    if stored is not None:
        config.dequantized_from = _origin(stored, source)
        del config.quantization_config
    return config


def record_dequantization(config_dict: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """Replaces ``quantization_config`` in a config.json with ``dequantized_from``.

    This also applies to sub-configurations.

    Args:
        config_dict: The content of config.json.
        source: Directory or Hub name of the quantized checkpoint, or `None` if it is unknown.
    """
    result = {
        name: record_dequantization(value, source)
        if isinstance(value, Mapping) and "model_type" in value
        else value
        for name, value in config_dict.items()
        if name != "quantization_config"
    }
    stored = quantization_settings(config_dict)
    return result if stored is None else result | {"dequantized_from": _origin(stored, source)}


def _origin(settings: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """Returns the value of ``dequantized_from``.

    If the source is a local directory, the value contains only its name and not its path.
    """
    values = {name: settings[name] for name in _RECORDED if settings.get(name) is not None}
    if source:
        values["model"] = Path(source).resolve().name if Path(source).exists() else source
    return values


def describe_origin(config: PreTrainedConfig) -> str:
    """Describes how the checkpoint of a model was quantized. Returns an empty string if it was not.

    Args:
        config: The configuration of the dequantized model or of the quantized checkpoint.
    """
    values = getattr(config, "dequantized_from", None)
    if values is None:
        stored = quantization_settings(config)
        values = {} if stored is None else _origin(stored, None)
    details = (f"{name} {values[name]}" for name in _RECORDED[1:] if name in values)
    return ", ".join(filter(None, [values.get("quant_method"), *details]))


def raise_unknown(names: Sequence[str], location: str) -> None:
    """Raises `WeightsError` for quantized tensors that no ``quantization_config`` describes."""
    raise WeightsError(
        f"{location} is quantized with an unknown method: it contains quantized tensors "
        f"({_examples(names)}), but its config.json has no quantization_config. Copy the "
        "quantization_config from the config.json of the original checkpoint"
    )


def _examples(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if names[2:] else "")
