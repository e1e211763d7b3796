"""Reads AWQ weights in the format "gemm".

A weight consists of 4-bit integers, with one scale and one zero point per group of inputs.
``qweight`` is int32 `(in, out / 8)`, ``qzeros`` is int32 `(in / group_size, out / 8)`, and
``scales`` is `(in / group_size, out)`. An int32 word contains eight integers, which are not in the
order of the outputs. The channel scales of AWQ are not stored, because they are part of the weights
of other layers.

Source: ``quantization/awq/utils/packing_utils.py`` in GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.gptq import check_groups, check_integer_settings
from hfseq.checkpoints.quantized.weights import QuantizedWeight, Region
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import WeightsError

PARTS = re.compile(r"(.*\.)(qweight|qzeros|scales)")
UNUSED = None
CODES = None
#: For each of eight consecutive outputs, the position of its integer in the int32 word.
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


def check(settings: Mapping[str, Any], location: str) -> None:
    """Raises `WeightsError` if the format or its options are not supported."""
    check_integer_settings(settings, location, (4,))
    name = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if settings.get("backend") == "llm-awq":
        name = "llm-awq"
    if name != "gemm":
        raise WeightsError(
            f"{location} is quantized with awq in the format '{name}', which hfseq does not read "
            "(supported: gemm)"
        )


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    weight.refuse_plain_weight()
    codes = weight.require("qweight", ("int32",))
    if len(codes.shape) != 2:
        raise weight.error(f"{weight.prefix}qweight has the shape {codes.shape}, not a matrix")
    in_size, out_size = codes.shape[0], 8 * codes.shape[1]
    group_size = check_groups(weight, in_size, settings.get("group_size", 128))
    source = f"4 bits and group_size {group_size}"
    num_groups = in_size // group_size
    scales = weight.require("scales", FLOAT_DTYPES, (num_groups, out_size), source)
    zeros = weight.require("qzeros", ("int32",), (num_groups, codes.shape[1]), source)

    def integers(tensor: Tensor, rows: slice, outputs: slice) -> np.ndarray:
        first = outputs.start // 8
        words = tensor.read((rows, slice(first, -(-outputs.stop // 8)))).view(np.uint32)
        flat = np.empty((len(words), 8 * words.shape[1]), np.float32)
        for output, position in enumerate(POSITIONS):
            flat[:, output::8] = (words >> np.uint32(4 * position)) & np.uint32(15)
        return flat[:, outputs.start - 8 * first : outputs.stop - 8 * first]

    def values(region: Region) -> np.ndarray:
        outputs, inputs = region
        rows = slice(inputs.start // group_size, -(-inputs.stop // group_size))
        groups = np.arange(inputs.start, inputs.stop) // group_size - rows.start
        product = integers(codes, inputs, outputs)
        product -= integers(zeros, rows, outputs)[groups]
        product *= scales.read((rows, outputs)).astype(np.float32)[groups]
        return product.T

    return weight.dequantized((out_size, in_size), values)
