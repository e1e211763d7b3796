"""Reads the MXFP4 weights of gpt-oss, which are FP4 codes with one power of two per 32 values.

``X_blocks`` is uint8 `(experts, out, in / 32, 16)`. Each byte contains two codes, with the first
code in the low bits. ``X_scales`` is uint8 `(experts, out, in / 32)`. A stored scale `s` means the
factor `2 ** (s - 127)`. The dequantized weight ``X`` is `(experts, in, out)`.

Source: ``integrations/mxfp4.py`` in Transformers, and the OCP Microscaling Formats specification,
version 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.weights import (
    FP4_VALUES,
    QuantizedWeight,
    Region,
    exponent_values,
    split_bytes,
)
from hfseq.checkpoints.weights import Tensor

PARTS = re.compile(r"(.+)(_blocks|_scales)")
UNUSED = None
CODES = None
GROUP_SIZE = 32


def check(settings: Mapping[str, Any], location: str) -> None:
    """Does nothing, because the format has no options that affect the weights."""


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    weight.refuse_plain_weight()
    blocks = weight.require("_blocks", ("uint8",))
    if len(blocks.shape) < 3 or blocks.shape[-1] != GROUP_SIZE // 2:
        raise weight.error(
            f"{weight.prefix}_blocks has the shape {blocks.shape}, but the last axis of MXFP4 "
            f"blocks has {GROUP_SIZE // 2} bytes"
        )
    scales = weight.require("_scales", ("uint8",), blocks.shape[:-1], "the shape of the blocks")
    *lead, out_size, num_groups = scales.shape

    def values(region: Region) -> np.ndarray:
        *outer, inputs, outputs = region
        first = inputs.start // GROUP_SIZE
        groups = slice(first, -(-inputs.stop // GROUP_SIZE))
        part = (*outer, outputs, groups)
        codes = split_bytes(blocks.read((*part, slice(0, GROUP_SIZE // 2))), 4)
        dequantized = FP4_VALUES.take(codes) * exponent_values(scales.read(part))[..., None]
        start = inputs.start - first * GROUP_SIZE
        flat = dequantized.reshape(*dequantized.shape[:-2], -1)
        return flat[..., start : start + inputs.stop - inputs.start].swapaxes(-1, -2)

    return weight.dequantized((*lead, num_groups * GROUP_SIZE, out_size), values)
