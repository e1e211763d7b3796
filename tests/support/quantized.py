"""Quantized checkpoints for tests, written by packers that are independent of the readers.

Each packer quantizes a matrix `(out, in)` and returns its stored tensors by name, relative to the
module, together with the exact values that they stand for. The values are computed from the
unpacked codes.
"""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def words_of(codes, bits):
    """Packs each row of a matrix of integers into int32 words, lowest bits first."""
    rows = []
    for row in codes.tolist():
        number = sum(int(code) << (bits * at) for at, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(number >> (32 * at)) & 0xFFFFFFFF for at in range(count)])
    return np.array(rows, np.uint32).reshape(len(codes), -1).view(np.int32)


def integers(weight, bits, group, rng):
    """Returns codes, zeros and float16 scales of an asymmetric quantization of groups."""
    out_size, in_size = weight.shape
    grouped = weight.reshape(out_size, in_size // group, group)
    scales = (np.ptp(grouped, axis=2) / (2**bits - 1)).astype(np.float16)
    zeros = rng.integers(1, 2**bits, scales.shape)
    codes = np.rint(grouped / scales[..., None].astype(np.float32)) + zeros[..., None]
    return np.clip(codes, 0, 2**bits - 1).astype(int), zeros, scales


def gptq(weight, rng, bits=4, group=32, act_order=False, version="gptq"):
    codes, zeros, scales = integers(weight, bits, group, rng)
    values = (codes - zeros[..., None]) * scales[..., None].astype(np.float32)
    codes, values = codes.reshape(weight.shape), values.reshape(weight.shape)
    group_of_input = np.arange(weight.shape[1]) // group
    if act_order:
        order = rng.permutation(weight.shape[1])
        codes, values, group_of_input = codes[:, order], values[:, order], group_of_input[order]
    tensors = {
        "qweight": words_of(codes, bits).T,
        "qzeros": words_of(zeros.T - (version == "gptq"), bits),
        "scales": scales.T,
        "g_idx": group_of_input.astype(np.int32),
    }
    return tensors, values.astype(np.float32)


def awq(weight, rng, group=32):
    codes, zeros, scales = integers(weight, 4, group, rng)
    values = (codes - zeros[..., None]) * scales[..., None].astype(np.float32)
    order = np.arange(weight.shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    tensors = {
        "qweight": words_of(codes.reshape(weight.shape).T[:, order], 4),
        "qzeros": words_of(zeros.T[:, order], 4),
        "scales": scales.T,
    }
    return tensors, values.reshape(weight.shape).astype(np.float32)


def fp8(weight, rng, block=(48, 40), powers=False, name="weight_scale_inv"):
    rows, columns = block or weight.shape
    codes = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    values = np.zeros(weight.shape, np.float32)
    starts = [
        range(0, size, step) for size, step in zip(weight.shape, (rows, columns), strict=True)
    ]
    scales = np.zeros([len(part) for part in starts], np.float32)
    for i, top in enumerate(starts[0]):
        for j, left in enumerate(starts[1]):
            part = np.s_[top : top + rows, left : left + columns]
            scale = np.float32(np.abs(weight[part]).max() / 448)
            scale = np.float32(2.0 ** np.ceil(np.log2(scale))) if powers else scale
            scales[i, j] = scale
            codes[part] = (weight[part] / scale).astype(ml_dtypes.float8_e4m3fn)
            values[part] = codes[part].astype(np.float32) * scale
    if powers:
        scales = (np.log2(scales) + 127).astype(np.uint8)
    return {"weight": codes, name: scales if block else scales.reshape(())}, values


def fp4_codes(weight, rng):
    """Returns random FP4 codes and their values."""
    codes = rng.integers(0, 16, weight.shape)
    return codes, np.array(FP4, np.float32)[codes]


def nvfp4(weight, rng):
    codes, numbers = fp4_codes(weight, rng)
    scales = rng.uniform(1, 400, (len(weight), weight.shape[1] // 16))
    scales = scales.astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(3000)
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": scales,
        "weight_global_scale": np.array([factor]),
        "input_global_scale": np.ones(1, np.float32),
    }
    return tensors, numbers * np.repeat(scales.astype(np.float32) / factor, 16, axis=1)


def mxfp4_packed(weight, rng):
    codes, numbers = fp4_codes(weight, rng)
    exponents = rng.integers(115, 125, (len(weight), weight.shape[1] // 32))
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": exponents.astype(np.uint8),
    }
    return tensors, numbers * np.repeat(2.0 ** (exponents - 127), 32, axis=1).astype(np.float32)


def mxfp4_experts(shape, rng):
    """Returns the tensors of experts, and their values `(experts, in, out)`."""
    codes, numbers = fp4_codes(np.zeros(shape), rng)
    exponents = rng.integers(110, 130, (*shape[:2], shape[2] // 32))
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    values = numbers * np.repeat(2.0 ** (exponents - 127), 32, axis=2).astype(np.float32)
    tensors = {
        "_blocks": blocks.reshape(*shape[:2], -1, 16),
        "_scales": exponents.astype(np.uint8),
    }
    return tensors, values.transpose(0, 2, 1)


def packed(weight, rng, bits=4, group=32, symmetric=True, act_order=False):
    """pack-quantized of compressed-tensors. `group=None` is one scale per output."""
    out_size, in_size = weight.shape
    group = group or in_size
    offset = 2 ** (bits - 1)
    codes, zeros, scales = integers(weight, bits, group, rng)
    zeros = np.full_like(zeros, offset) if symmetric else zeros
    values = (codes - zeros[..., None]) * scales[..., None].astype(np.float32)
    codes, values = codes.reshape(weight.shape), values.reshape(weight.shape)
    tensors = {"weight_shape": np.array(weight.shape, np.int64), "weight_scale": scales}
    if act_order:
        order = rng.permutation(in_size)
        codes, values = codes[:, order], values[:, order]
        tensors["weight_g_idx"] = (order // group).astype(np.int32)
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros.T, bits).T
    return tensors | {"weight_packed": words_of(codes, bits)}, values.astype(np.float32)


def int8_rows(weight, rng, symmetric=True):
    """int-quantized of compressed-tensors, with one scale per output."""
    scales = (np.abs(weight).max(1, keepdims=True) / 100).astype(np.float32)
    codes = np.rint(weight / scales).astype(np.int8)
    zeros = rng.integers(-20, 20, scales.shape).astype(np.int8) * (not symmetric)
    tensors = {"weight": codes, "weight_scale": scales.astype(ml_dtypes.bfloat16)}
    if not symmetric:
        tensors["weight_zero_point"] = zeros
    scales = tensors["weight_scale"].astype(np.float32)
    return tensors, (codes.astype(np.float32) - zeros) * scales


def bnb4(weight, rng, quant_type="nf4", nested=True, block=64):
    flat = weight.reshape(-1)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    codes = rng.integers(0, 16, flat.size)
    state = {
        "quant_type": quant_type,
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": weight.shape,
    }
    num_blocks = -(-flat.size // block)
    tensors = {"weight.quant_map": table}
    if nested:
        levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        codes_of_scales = rng.integers(0, 256, num_blocks).astype(np.uint8)
        maxima = rng.uniform(0.5, 1, -(-num_blocks // 256)).astype(np.float32)
        scales = levels[codes_of_scales] * np.repeat(maxima, 256)[:num_blocks] + np.float32(0.125)
        tensors |= {
            "weight.absmax": codes_of_scales,
            "weight.nested_absmax": maxima,
            "weight.nested_quant_map": levels,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
    else:
        scales = rng.uniform(0.5, 1, num_blocks).astype(np.float32)
        tensors["weight.absmax"] = scales
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors |= {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"weight.quant_state.bitsandbytes__{quant_type}": text,
    }
    values = table[codes] * np.repeat(scales, block)[: flat.size]
    return tensors, values.reshape(weight.shape)


def bnb8(weight, rng):
    maxima = np.abs(weight).max(1).astype(np.float32)
    codes = np.rint(weight / maxima[:, None] * 127).astype(np.int8)
    tensors = {"weight": codes, "SCB": maxima, "weight_format": np.array(0, np.uint8)}
    return tensors, codes.astype(np.float32) * (maxima / 127)[:, None]


def compressed(format_name, **weights):
    """Returns the settings of compressed-tensors with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}

#: Settings, packer and arguments of the packer, by name of the test case.
SCHEMES = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq, {}),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        gptq,
        {"act_order": True},
    ),
    "gptq-v2-8bit": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
        gptq,
        {"bits": 8, "version": "gptq_v2"},
    ),
    "gptq-3bit": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, gptq, {"bits": 3}),
    "gptq-2bit": ({"quant_method": "gptq", "bits": 2, "group_size": 32}, gptq, {"bits": 2}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, {}),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8, {}),
    "fp8-powers": (
        {"quant_method": "fp8", "weight_block_size": [48, 40], "scale_fmt": "ue8m0"},
        fp8,
        {"powers": True},
    ),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8, {"block": None}),
    "pack-quantized": (compressed("pack-quantized", **INT4), packed, {}),
    "pack-quantized-act-order": (
        compressed("pack-quantized", **INT4, actorder="group"),
        packed,
        {"act_order": True},
    ),
    "pack-quantized-zeros": (
        compressed("pack-quantized", **INT4, symmetric=False),
        packed,
        {"symmetric": False},
    ),
    "pack-quantized-3bit": (
        compressed("pack-quantized", **INT8 | {"num_bits": 3, "symmetric": False}),
        packed,
        {"bits": 3, "group": None, "symmetric": False},
    ),
    "int-quantized": (compressed("int-quantized", **INT8), int8_rows, {}),
    "int-quantized-zeros": (
        compressed("int-quantized", **INT8, symmetric=False),
        int8_rows,
        {"symmetric": False},
    ),
    "float-quantized": (
        compressed("float-quantized", **FP8),
        fp8,
        {"block": None, "name": "weight_scale"},
    ),
    "float-quantized-blocks": (
        compressed("float-quantized", **FP8 | {"strategy": "block", "block_structure": [48, 40]}),
        fp8,
        {"name": "weight_scale"},
    ),
    "naive-quantized": (compressed("naive-quantized", **INT8), int8_rows, {}),
    "mxfp8-quantized": (
        compressed("mxfp8-quantized", **FP8 | {"strategy": "group", "group_size": 32}),
        fp8,
        {"block": (1, 32), "powers": True, "name": "weight_scale"},
    ),
    "nvfp4-pack-quantized": (
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        nvfp4,
        {},
    ),
    "mxfp4-pack-quantized": (
        compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
        mxfp4_packed,
        {},
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb4, {}),
    "fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        bnb4,
        {"quant_type": "fp4", "nested": False},
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8, {}),
}


def quantize_directory(source, destination, scheme):
    """Copies a model directory, with the weights of its linear layers quantized.

    Returns:
        The float32 values of the quantized weights, by name.
    """
    settings, pack, options = SCHEMES[scheme]
    rng = np.random.default_rng(0)
    shutil.copytree(source, destination)
    tensors, values = {}, {}
    for name, array in load_file(Path(source, "model.safetensors")).items():
        module = name.removesuffix("weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = array
            continue
        parts, exact = pack(array.astype(np.float32), rng, **options)
        values[name] = np.ascontiguousarray(exact)
        tensors |= {f"{module}{part}": np.ascontiguousarray(part_) for part, part_ in parts.items()}
    save_file(tensors, Path(destination, "model.safetensors"), {"format": "pt"})
    config = json.loads(Path(source, "config.json").read_text())
    config |= {"quantization_config": settings, "dtype": "bfloat16"}
    Path(destination, "config.json").write_text(json.dumps(config))
    return values
