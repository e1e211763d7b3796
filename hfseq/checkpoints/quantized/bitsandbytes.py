"""Reads weights of bitsandbytes in 4 bits (NF4 and FP4) and 8 bits (LLM.int8).

The 4-bit codes of a weight ``X`` form one sequence. Each byte contains two codes, with the first
code in the high bits. The tensor ``X`` may have any dtype, because only its bytes are used.
``X.quant_map`` contains the values of the 16 codes, and ``X.absmax`` contains one scale per block
of the sequence. ``X.quant_state.bitsandbytes__nf4`` (or ``__fp4``) is JSON text with the shape and
the block size. With nested quantization, the scales are quantized too: ``X.absmax`` contains 8-bit
codes, which have their own map, scales and offset.

An 8-bit weight ``X`` is int8 `(out, in)`, and ``SCB`` contains the absolute maximum of each row.

Source: ``functional.py`` in bitsandbytes 0.50.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.weights import (
    QuantizedWeight,
    Region,
    ceil_divide,
    expand_blocks,
    split_bytes,
)
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import parse_json

STATE = "weight.quant_state.bitsandbytes__"
PARTS = re.compile(
    r"(.*\.)(weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map"
    r"|quant_state\.bitsandbytes__\w+)|SCB|weight_format)"
)
UNUSED = None
CODES = re.compile(r"(.*\.)(weight)")
CODE_DTYPES = ("int8", "uint8")
#: The value of ``weight_format`` for int8 weights in row-major order. Other values are layouts of
#: old GPU kernels.
ROW_MAJOR = 0


def check(settings: Mapping[str, Any], location: str) -> None:
    """Does nothing, because the tensors of a weight describe its format."""


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    is_int8 = weight.require("weight").dtype == "int8" or "SCB" in weight.tensors
    return _read_int8(weight) if is_int8 else _read_4bit(weight)


def _read_int8(weight: QuantizedWeight) -> Tensor:
    codes = weight.require("weight", ("int8",))
    if len(codes.shape) != 2:
        raise weight.error(f"it has the shape {codes.shape}, but int8 weights are matrices")
    maxima = weight.require("SCB", FLOAT_DTYPES, codes.shape[:1], "the shape of the weight")
    layout = weight.tensors.get("weight_format")

    def values(region: Region) -> np.ndarray:
        number = ROW_MAJOR if layout is None else int(layout.read(...).reshape(-1)[0])
        if number != ROW_MAJOR:
            raise weight.error(
                f"{weight.prefix}weight_format is {number}, which is a layout of old GPU kernels "
                f"(supported: {ROW_MAJOR}). Load and save the model with a newer version of "
                "bitsandbytes"
            )
        scales = maxima.read((region[0],)).astype(np.float32) / np.float32(127)
        return codes.read(region).astype(np.float32) * scales[:, None]

    return weight.dequantized(codes.shape, values)


def _read_4bit(weight: QuantizedWeight) -> Tensor:
    states = [part for part in weight.tensors if part.startswith(STATE)]
    if not states:
        weight.require(f"{STATE}nf4")
    (state_part,) = states[:1]
    if state_part.removeprefix(STATE) not in ("nf4", "fp4"):
        raise weight.error(
            f"its quantization type is '{state_part.removeprefix(STATE)}' (supported: nf4, fp4)"
        )
    state = _parse_state(weight, state_part)
    shape, block_size = tuple(state["shape"]), state["blocksize"]
    count = math.prod(shape)
    packed = weight.require("weight")
    item_size = np.dtype(packed.dtype).itemsize
    num_bytes = math.prod(packed.shape) * item_size
    if num_bytes != ceil_divide(count, 2):
        raise weight.error(
            f"it has {num_bytes} bytes instead of {ceil_divide(count, 2)}, which follows from the "
            f"shape {shape} in {weight.prefix}{state_part}"
        )
    code_values = weight.require("weight.quant_map", ("float32",), (16,))
    num_blocks = ceil_divide(count, block_size)
    source = f"the shape {shape} and the block size {block_size}"
    is_nested = "nested_blocksize" in state
    dtypes = ("uint8",) if is_nested else FLOAT_DTYPES
    maxima = weight.require("weight.absmax", dtypes, (num_blocks,), source)
    if is_nested:
        nested_size = state["nested_blocksize"]
        nested_values = weight.require("weight.nested_quant_map", ("float32",), (256,))
        nested_shape = (ceil_divide(num_blocks, nested_size),)
        nested_maxima = weight.require("weight.nested_absmax", FLOAT_DTYPES, nested_shape, source)

    def scales(blocks: slice) -> np.ndarray:
        stored = maxima.read((blocks,))
        if not is_nested:
            return stored.astype(np.float32)
        groups = slice(blocks.start // nested_size, ceil_divide(blocks.stop, nested_size))
        group_of_block = np.arange(blocks.start, blocks.stop) // nested_size - groups.start
        factors = nested_maxima.read((groups,)).astype(np.float32)[group_of_block]
        return nested_values.read(...)[stored] * factors + np.float32(state["nested_offset"])

    def codes(start: int, stop: int) -> np.ndarray:
        """Returns the codes from `start` to `stop` in the sequence."""
        first, last = start // (2 * item_size), ceil_divide(stop, 2 * item_size)
        if packed.shape[:1] == (math.prod(packed.shape),):  # (n,) or (n, 1)
            stored = packed.read((slice(first, last), *[slice(0, 1)] * (len(packed.shape) - 1)))
        else:  # (1, n)
            stored = packed.read(...).reshape(-1)[first:last]
        stored_bytes = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
        nibbles = split_bytes(stored_bytes, 4, high_first=True)
        return nibbles[start - 2 * item_size * first :][: stop - start]

    def values(region: Region) -> np.ndarray:
        row_size = math.prod(shape[1:])
        start, stop = region[0].start * row_size, region[0].stop * row_size
        flat = code_values.read(...).take(codes(start, stop))
        flat *= expand_blocks(lambda part: scales(part[0]), (block_size,), (slice(start, stop),))
        rows = flat.reshape(region[0].stop - region[0].start, *shape[1:])
        return rows[(slice(None), *region[1:])]

    return weight.dequantized(shape, values)


def _parse_state(weight: QuantizedWeight, part: str) -> dict[str, Any]:
    """Reads and validates the JSON text with the shape and the block sizes."""
    name = f"{weight.prefix}{part}"
    stored = weight.require(part, ("uint8",))
    try:
        state = parse_json(stored.read(...).tobytes())
        shape = [int(size) for size in state["shape"]]
        sizes = [int(state["blocksize"]), int(state.get("nested_blocksize", 1))]
        float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise weight.error(
            f"{name} is not a quantization state ({type(error).__name__}: {error})"
        ) from error
    if not shape or min(shape) < 0 or min(sizes) < 1:
        raise weight.error(
            f"{name} contains the shape {shape} and the block sizes {sizes}, which are not valid"
        )
    if "nested_blocksize" in state and "nested_offset" not in state:
        raise weight.error(f"{name} contains nested_blocksize, but not the required nested_offset")
    return state
