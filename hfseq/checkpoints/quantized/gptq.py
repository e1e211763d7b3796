"""Reads GPTQ weights.

A weight consists of integers of 2, 3, 4 or 8 bits, with one scale and one zero point per group of
inputs. ``qweight`` is int32 `(in * bits / 32, out)`. It contains the integers of each column one
after the other, starting with the lowest bits. ``qzeros`` is int32 `(groups, out * bits / 32)`, and
``scales`` is `(groups, out)`. ``g_idx`` `(in,)` is the index of the group of each input. The inputs
of a group are adjacent without ``g_idx``, but usually not with ``desc_act`` (act order).

The format "gptq" stores the zero points minus one. The format "gptq_v2" stores them unchanged.

Source: ``utils/model.py`` and ``nn_modules/qlinear`` in GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.weights import (
    QuantizedWeight,
    Region,
    read_region,
    unpack_bits,
)
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import WeightsError

PARTS = re.compile(r"(.*\.)(qweight|qzeros|scales|g_idx)")
UNUSED = None
CODES = None
BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


def check(settings: Mapping[str, Any], location: str) -> None:
    """Raises `WeightsError` if the format or its options are not supported."""
    check_integer_settings(settings, location, BITS)
    if (name := _format(settings)) not in FORMATS:
        raise WeightsError(
            f"{location} is quantized with gptq in the format '{name}', which hfseq does not read "
            f"(supported: {', '.join(FORMATS)})"
        )


def check_integer_settings(
    settings: Mapping[str, Any], location: str, supported_bits: tuple[int, ...]
) -> None:
    """Raises `WeightsError` if ``bits`` or ``group_size`` is not valid."""
    bits, group_size = settings.get("bits"), settings.get("group_size", 128)
    if bits not in supported_bits:
        raise WeightsError(
            f"{location} is quantized with {settings['quant_method']} to {bits!r} bits, which "
            f"hfseq does not read (supported: {', '.join(map(str, supported_bits))})"
        )
    if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise WeightsError(
            f"group_size in the quantization_config of {location} is {group_size!r}, but must be "
            "a positive integer, or -1 for one group that contains all inputs"
        )


def _format(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    weight.refuse_plain_weight()
    settings = _module_settings(settings, weight.prefix.rstrip("."))
    bits = settings["bits"]
    if bits not in BITS:
        raise weight.error(
            f"its number of bits is {bits!r} (supported: {', '.join(map(str, BITS))})"
        )
    codes = weight.require("qweight", ("int32",))
    scales = weight.require("scales", FLOAT_DTYPES)
    if len(codes.shape) != 2 or codes.shape[0] * 32 % bits:
        raise weight.error(
            f"{weight.prefix}qweight has the shape {codes.shape}, which is not a matrix of "
            f"{bits}-bit integers"
        )
    in_size, out_size = codes.shape[0] * 32 // bits, codes.shape[1]
    group_size = check_groups(weight, in_size, settings.get("group_size", 128))
    num_groups = -(-in_size // group_size)
    source = f"{bits} bits and group_size {group_size}"
    weight.require("scales", shape=(num_groups, out_size), source=source)
    zeros = weight.require("qzeros", ("int32",), (num_groups, out_size * bits // 32), source)
    group_of_input = None
    if "g_idx" in weight.tensors:
        group_of_input = weight.require("g_idx", ("int32", "int64"), (in_size,), source)
    elif settings.get("desc_act"):
        raise weight.error(
            f"the checkpoint does not contain {weight.prefix}g_idx, which desc_act requires"
        )
    # The format "gptq" subtracts 1 from all integers of a word at once, so that a borrow can change
    # the next integer. Adding the same number to the whole word restores all integers exactly.
    offset = np.int32(0)
    is_shifted = _format(settings) == "gptq"
    if is_shifted and 32 % bits == 0:
        offset = np.int32(sum(1 << position for position in range(0, 32, bits)))

    def read_zeros(groups: slice, outputs: slice) -> np.ndarray:
        """Returns the zero points as int32 `(groups, outputs)`."""
        read = lambda region: zeros.read(region) + offset  # noqa: E731
        zero = unpack_bits(read, bits, (groups, outputs)).astype(np.int32)
        if is_shifted and 32 % bits:
            zero = (zero + 1) & ((1 << bits) - 1)
        return zero

    def values(region: Region) -> np.ndarray:
        outputs, inputs = region
        groups = slice(inputs.start // group_size, -(-inputs.stop // group_size))
        index = np.arange(inputs.start, inputs.stop) // group_size - groups.start
        if group_of_input is not None:
            groups = slice(0, num_groups)
            index = group_of_input.read((inputs,)).astype(np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < num_groups:
            raise weight.error(
                f"{weight.prefix}g_idx contains the groups {index.min()} to {index.max()}, but "
                f"{weight.prefix}scales has {num_groups} groups"
            )
        scale = scales.read((groups, outputs)).astype(np.float32)
        zero = read_zeros(groups, outputs).astype(np.float32)
        product = unpack_columns(codes, bits, inputs, outputs).astype(np.float32)
        product -= zero[index]
        product *= scale[index]
        return product.T

    return weight.dequantized((out_size, in_size), values)


def unpack_columns(codes: Tensor, bits: int, inputs: slice, outputs: slice) -> np.ndarray:
    """Returns a part of a matrix of integers that is packed along its first axis.

    Args:
        codes: The int32 words, `(in * bits / 32, out)`.
        bits: Bits per integer.
        inputs: The rows of the matrix.
        outputs: The columns of the matrix.
    """
    if 32 % bits:  # an integer may extend over two words
        return unpack_bits(read_region(codes, transposed=True), bits, (outputs, inputs)).T
    count = 32 // bits
    first = inputs.start // count
    words = codes.read((slice(first, -(-inputs.stop // count)), outputs)).view(np.uint32)
    integers = np.empty((len(words), count, words.shape[1]), np.uint8)
    for position in range(count):
        integers[:, position] = (words >> np.uint32(bits * position)) & np.uint32((1 << bits) - 1)
    start = inputs.start - first * count
    return integers.reshape(-1, words.shape[1])[start : start + inputs.stop - inputs.start]


def check_groups(weight: QuantizedWeight, in_size: int, group_size: int) -> int:
    """Returns the number of inputs per group.

    Raises:
        WeightsError: The inputs cannot be divided into groups of this size.
    """
    if group_size == -1:
        return in_size
    if in_size % group_size:
        raise weight.error(
            f"its {in_size} input features are not a multiple of group_size {group_size}"
        )
    return group_size


def _module_settings(settings: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Returns the settings of a module.

    Settings in ``dynamic``, which maps regular expressions to settings, override the other ones.
    """
    for pattern, overrides in (settings.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:"), module) and isinstance(overrides, Mapping):
            return {**settings, **overrides}
    return settings
