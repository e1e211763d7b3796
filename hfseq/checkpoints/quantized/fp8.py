"""Reads FP8 weights with one scale per block, as in DeepSeek-V3 (``quant_method`` "fp8").

``X.weight`` is float8_e4m3fn `(out, in)`. ``X.weight_scale_inv`` has one scale per block of
``weight_block_size``. The blocks at the ends of the axes may be smaller. Despite its name, the
scale is not inverted: the weight is multiplied by it. Without ``weight_block_size``, there is one
scale per tensor or per output feature. The scales are floats or, with ``scale_fmt`` "ue8m0", powers
of two.

Source: ``integrations/finegrained_fp8.py`` in Transformers. That code infers the block size from
the number of scales, which is wrong if a dimension is not a multiple of the block size. This module
therefore uses the block size in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.weights import (
    QuantizedWeight,
    Region,
    ceil_divide,
    expand_blocks,
    read_region,
)
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import WeightsError

PARTS = re.compile(r"(.+)(_scale_inv|(?<=weight)_scale)")
#: Scales of activations and of the key-value cache, which have no effect on the weights.
UNUSED = re.compile(r"\.(activation_scale|input_scale|[kv]_scale|.*_activation_scale)$")
CODES = re.compile(r"(.+)()")
CODE_DTYPES = ("float8_e4m3fn", "float8_e5m2")
SCALE_DTYPES = (*FLOAT_DTYPES, "uint8", "float8_e8m0fnu")


def check(settings: Mapping[str, Any], location: str) -> None:
    """Raises `WeightsError` if the settings are not valid."""
    block = settings.get("weight_block_size")
    valid = (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )
    if block is not None and not valid:
        raise WeightsError(
            f"weight_block_size in the quantization_config of {location} is {block!r}, but must "
            "be a list of two positive integers"
        )


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    codes = weight.require("", CODE_DTYPES)
    part = "_scale" if "_scale" in weight.tensors else "_scale_inv"
    scales, shape = weight.require(part, SCALE_DTYPES), codes.shape
    if len(shape) < 2:
        raise weight.error(f"it has the shape {shape}, but FP8 weights have at least two axes")
    if settings.get("weight_block_size") is not None:
        blocks = (*[1] * (len(shape) - 2), *map(int, settings["weight_block_size"]))
        grid = tuple(ceil_divide(size, block) for size, block in zip(shape, blocks, strict=True))
        weight.require(part, shape=grid, source=f"weight_block_size {list(blocks[-2:])}")
        read_scales = read_region(scales)
    elif scales.shape in ((), (1,), (shape[0],), (shape[0], 1)):
        grid = (scales.shape or (1,))[:1] + (1,) * (len(shape) - 1)
        blocks = tuple(max(1, size // count) for size, count in zip(shape, grid, strict=True))
        read_scales = lambda region: scales.read(...).reshape(grid)[region]  # noqa: E731
    else:
        raise weight.error(
            f"{weight.prefix}{part} has the shape {scales.shape}, which requires a "
            "weight_block_size in the quantization_config. Without it, there must be one scale "
            f"per tensor or {shape[0]} scales"
        )

    def values(region: Region) -> np.ndarray:
        return codes.read(region).astype(np.float32) * expand_blocks(read_scales, blocks, region)

    return weight.dequantized(shape, values)
