"""Reads weights in the formats of compressed-tensors, which LLM Compressor and others write.

``config_groups`` contains groups of modules. Each group has a scheme, which lists its modules as
names, as regular expressions ("re:...") or as names of PyTorch classes such as "Linear". A group,
or the configuration as a whole, has one of these formats:

- "pack-quantized": ``weight_packed`` is int32 and contains the rows of the weight as integers of 1
  to 8 bits. ``weight_shape`` is the shape of the weight. The integers are stored with an offset of
  `2 ** (bits - 1)`. Asymmetric schemes pack ``weight_zero_point`` along the outputs.
- "int-quantized", "float-quantized", "naive-quantized": ``weight`` is int8 or float8_e4m3fn.
- "mxfp8-quantized": ``weight`` is float8_e4m3fn, with one power of two per 32 inputs.
- "nvfp4-pack-quantized", "mxfp4-pack-quantized": ``weight_packed`` is uint8 with two FP4 codes per
  byte. NVFP4 scales are divided by ``weight_global_scale``. MXFP4 scales are powers of two.

Depending on the strategy of the scheme, ``weight_scale`` has one scale per tensor, output channel,
group of inputs, or block.

Source: the package ``compressors`` in compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hfseq.checkpoints.quantized.weights import (
    FP4_VALUES,
    QuantizedWeight,
    ReadRegion,
    Region,
    ceil_divide,
    expand_blocks,
    read_region,
    split_bytes,
    unpack_bits,
)
from hfseq.checkpoints.weights import FLOAT_DTYPES, Tensor
from hfseq.errors import WeightsError

PARTS = re.compile(
    r"(.*\.)(weight_packed|weight_scale|weight_shape|weight_zero_point|weight_g_idx"
    r"|weight_global_scale)"
)
#: Scales of activations and of the key-value cache, which have no effect on the weights.
UNUSED = re.compile(
    r"\.(input_(scale|zero_point|global_scale|g_idx)|output_(scale|zero_point)"
    r"|[kvq]_(scale|zero_point))$"
)
CODES = re.compile(r"(.*\.)(weight)")
CODE_DTYPES = ("int8", "float8_e4m3fn")

DENSE, MIXED = "dense", "mixed-precision"
#: For each format that does not pack the weights, the allowed dtypes of ``weight``.
PLAIN_FORMATS = {
    "int-quantized": ("int8",),
    "float-quantized": ("float8_e4m3fn",),
    "naive-quantized": ("int8", "float8_e4m3fn"),
    "mxfp8-quantized": ("float8_e4m3fn",),
}
PACKED_FORMATS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS = (*PLAIN_FORMATS, *PACKED_FORMATS)
SCALE_DTYPES = (*FLOAT_DTYPES, "float8_e4m3fn", "float8_e8m0fnu", "uint8")


def check(settings: Mapping[str, Any], location: str) -> None:
    """Raises `WeightsError` if a format or an option is not supported."""
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if not schemes or not all(isinstance(scheme, Mapping) for scheme in schemes):
        raise WeightsError(
            f"the quantization_config of {location} has no valid config_groups, which "
            "compressed-tensors requires"
        )
    names = [settings.get("format"), *(scheme.get("format") for scheme in schemes)]
    for name in filter(None, names):
        if name not in (*FORMATS, DENSE, MIXED):
            raise WeightsError(
                f"{location} is quantized with compressed-tensors in the format '{name}', which "
                f"hfseq does not read (supported: {', '.join(FORMATS)})"
            )
    sparsity = (settings.get("sparsity_config") or {}).get("format")
    if sparsity not in (None, DENSE):
        raise WeightsError(
            f"{location} is compressed with the sparsity format '{sparsity}', which hfseq does not "
            f"read (supported: {DENSE})"
        )
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise WeightsError(
            f"the quantization_config of {location} has a transform_config, which hfseq does not "
            "support, because it transforms activations"
        )


def find_scheme(settings: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Returns the scheme of a module, or `None` if no scheme applies to it.

    A scheme that lists the name of the module takes precedence over one with a matching regular
    expression, which takes precedence over one that lists a class. hfseq does not know the class of
    the module, so it assumes that the first scheme that lists a class applies.
    """
    fallback = None
    exact, matched = None, None
    for scheme in settings["config_groups"].values():
        for target in scheme.get("targets") or ():
            if target == module:
                exact = exact or scheme
            elif target.startswith("re:"):
                if re.match(target.removeprefix("re:"), module):
                    matched = matched or scheme
            elif "." not in target:
                fallback = fallback or scheme
    return exact or matched or fallback


def read(weight: QuantizedWeight, settings: Mapping[str, Any]) -> Tensor:
    """Returns the dequantized weight."""
    module = weight.prefix.removesuffix(".")
    scheme = find_scheme(settings, module)
    if scheme is None or not isinstance(scheme.get("weights"), Mapping):
        raise weight.error(
            f"no group in the config_groups of the quantization_config quantizes {module}"
        )
    options = scheme["weights"]
    name = scheme.get("format") or settings.get("format")
    if name in PLAIN_FORMATS:
        tensor = weight.require("weight", PLAIN_FORMATS[name])
        shape, codes = tensor.shape, read_region(tensor)
        if len(shape) != 2:
            raise weight.error(f"it has the shape {shape}, but quantized weights are matrices")
    elif name == "pack-quantized":
        shape, codes = _packed_integers(weight, options)
    elif name in PACKED_FORMATS:
        shape, codes = _packed_fp4(weight)
    else:
        raise weight.error(
            f"config_groups in the configuration selects the format {name!r}, which is not "
            f"supported (supported: {', '.join(FORMATS)})"
        )
    blocks = _block_sizes(weight, options, shape)
    grid = tuple(ceil_divide(size, block) for size, block in zip(shape, blocks, strict=True))
    scales = _grid(weight, "weight_scale", SCALE_DTYPES, grid, options)
    zeros = _zero_points(weight, options, name, grid)
    divisor = None
    if name == "nvfp4-pack-quantized":
        divisor = weight.require("weight_global_scale", ("float32",))
        if divisor.shape not in ((), (1,)):
            raise weight.error(
                f"{weight.prefix}weight_global_scale has the shape {divisor.shape}, but must "
                "contain one number"
            )
    group_of_input = None
    if "weight_g_idx" in weight.tensors:
        group_of_input = weight.require("weight_g_idx", ("int32", "int64"), (shape[1],))

    def expand(read_grid: ReadRegion, region: Region) -> np.ndarray:
        if group_of_input is None:
            return expand_blocks(read_grid, blocks, region)
        groups = group_of_input.read((region[1],)).astype(np.int64)
        if len(groups) and not 0 <= groups.min() <= groups.max() < grid[1]:
            raise weight.error(
                f"{weight.prefix}weight_g_idx contains the groups {groups.min()} to "
                f"{groups.max()}, but there are {grid[1]} groups"
            )
        columns = slice(0, grid[1])
        return expand_blocks(read_grid, (blocks[0], 1), (region[0], columns))[:, groups]

    def values(region: Region) -> np.ndarray:
        scale = expand(scales, region)
        if divisor is not None:
            scale = scale / divisor.read(...).reshape(())
        numbers = codes(region).astype(np.float32)
        if zeros is not None:
            numbers -= expand(zeros, region)
        return numbers * scale

    return weight.dequantized(shape, values)


def _block_sizes(
    weight: QuantizedWeight, options: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the number of outputs and the number of inputs that share one scale."""
    group_size, block = options.get("group_size"), options.get("block_structure")
    strategy = options.get("strategy")
    if strategy is None:
        strategy = "group" if group_size and group_size > 0 else "tensor"
        strategy = "channel" if group_size == -1 else strategy
    out_size, in_size = (max(1, size) for size in shape)
    if strategy == "tensor":
        return out_size, in_size
    if strategy == "channel":
        return 1, in_size
    if strategy in ("group", "tensor_group"):
        if not isinstance(group_size, int) or group_size < 1:
            raise weight.error(
                f"the group_size of its scheme is {group_size!r}, but must be a positive number"
            )
        if in_size % group_size:
            raise weight.error(
                f"its {in_size} input features are not a multiple of group_size {group_size}"
            )
        return 1, group_size
    if strategy == "block" and isinstance(block, list | tuple) and len(block) == 2:
        return max(1, int(block[0])), max(1, int(block[1]))
    raise weight.error(
        f"its scheme has the strategy {strategy!r} (supported: tensor, channel, group, "
        "tensor_group, and block with a block_structure)"
    )


def _packed_integers(
    weight: QuantizedWeight, options: Mapping[str, Any]
) -> tuple[tuple[int, ...], ReadRegion]:
    """Returns the shape of a "pack-quantized" weight, and a function that reads its integers."""
    weight.refuse_plain_weight()
    bits = options.get("num_bits", 8)
    if options.get("type", "int") != "int" or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise weight.error(
            f"its scheme has {bits!r} bits of type {options.get('type', 'int')!r}, but "
            "pack-quantized weights are integers of 1 to 8 bits"
        )
    packed = weight.require("weight_packed", ("int32",))
    stored_shape = weight.require("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(int(size) for size in stored_shape.read(...))
    words = (shape[0], ceil_divide(shape[1] * bits, 32))
    weight.require("weight_packed", shape=words, source=f"the shape {shape} and {bits} bits")

    def codes(region: Region) -> np.ndarray:
        return unpack_bits(packed.read, bits, region).astype(np.float32) - 2 ** (bits - 1)

    return shape, codes


def _packed_fp4(weight: QuantizedWeight) -> tuple[tuple[int, ...], ReadRegion]:
    """Returns the shape of a packed FP4 weight, and a function that reads its values."""
    weight.refuse_plain_weight()
    packed = weight.require("weight_packed", ("uint8",))
    if len(packed.shape) != 2:
        raise weight.error(
            f"{weight.prefix}weight_packed has the shape {packed.shape}, but must be a matrix"
        )

    def codes(region: Region) -> np.ndarray:
        rows, columns = region
        first = columns.start // 2
        stored_bytes = packed.read((rows, slice(first, ceil_divide(columns.stop, 2))))
        nibbles = split_bytes(stored_bytes, 4)[:, columns.start - 2 * first :]
        return FP4_VALUES.take(nibbles[:, : columns.stop - columns.start])

    return (packed.shape[0], 2 * packed.shape[1]), codes


def _grid(
    weight: QuantizedWeight,
    part: str,
    dtypes: tuple[str, ...],
    grid: tuple[int, ...],
    options: Mapping[str, Any],
) -> ReadRegion:
    """Returns a function that reads scales or zero points, as a matrix with one value per block."""
    tensor = weight.require(part, dtypes)
    shapes: list[tuple[int, ...]] = [grid]
    if grid[1] == 1:
        shapes += [grid[:1]] + ([()] if grid[0] == 1 else [])
    if tensor.shape not in shapes:
        described = {name: options.get(name) for name in ("strategy", "group_size")}
        raise weight.error(
            f"{weight.prefix}{part} has the shape {tensor.shape} instead of {grid}, which follows "
            f"from the options {described}"
        )
    if tensor.shape == grid:
        return read_region(tensor)
    return lambda region: tensor.read(...).reshape(grid)[region]


def _zero_points(
    weight: QuantizedWeight, options: Mapping[str, Any], name: str, grid: tuple[int, ...]
) -> ReadRegion | None:
    """Returns a function that reads the zero points, or `None` for a symmetric scheme."""
    if "weight_zero_point" not in weight.tensors and options.get("symmetric", True):
        return None
    if name != "pack-quantized" or options.get("strategy") == "tensor":
        return _grid(
            weight, "weight_zero_point", ("int8", "float8_e4m3fn", *FLOAT_DTYPES), grid, options
        )
    bits = options.get("num_bits", 8)
    packed_shape = (ceil_divide(grid[0] * bits, 32), grid[1])
    if weight.require("weight_zero_point").dtype == "int8":  # some programs do not pack them
        return _grid(weight, "weight_zero_point", ("int8",), grid, options)
    packed = weight.require("weight_zero_point", ("int32",), packed_shape, f"{bits} bits")

    def zeros(region: Region) -> np.ndarray:
        integers = unpack_bits(read_region(packed, transposed=True), bits, region[::-1]).T
        return integers.astype(np.float32) - 2 ** (bits - 1)

    return zeros
