"""Dequantized weights equal those of the libraries that wrote them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.checkpoints.files import open_file
from hfseq.checkpoints.quantized import dequantize
from tests.real.checkpoints import DownloadError, download

LIBRARIES = ("bitsandbytes==0.50.2", "compressed-tensors==0.20.0", "loguru==0.7.3")

#: Quantizes a matrix with each scheme. Writes the stored tensors, the settings, and the matrix that
#: the library dequantizes.
PROGRAM = """
import json, sys
import torch
from bitsandbytes import functional
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

torch.manual_seed(0)
WEIGHT = torch.randn(96, 192)
settings, expected = {}, {}

def add(name, tensors, dequantized, options):
    parts = {f"m.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(parts, f"{sys.argv[1]}/{name}.safetensors")
    settings[name], expected[name] = options, dequantized.float().contiguous()

def bnb4(name, **options):
    codes, state = functional.quantize_4bit(WEIGHT, **options)
    tensors = {f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}
    dequantized = functional.dequantize_4bit(codes, state)
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    add(name, {"weight": codes, **tensors}, dequantized, method)

bnb4("nf4", quant_type="nf4", compress_statistics=True)
bnb4("nf4-plain", quant_type="nf4", compress_statistics=False)
bnb4("nf4-bfloat16", quant_type="nf4", quant_storage=torch.bfloat16)
bnb4("fp4", quant_type="fp4", compress_statistics=True)
codes, maxima, _ = functional.int8_vectorwise_quant(WEIGHT.half())
dequantized = functional.int8_vectorwise_dequant(codes, maxima)
method = {"quant_method": "bitsandbytes", "load_in_8bit": True}
add("int8", {"weight": codes, "SCB": maxima}, dequantized, method)

def compressed(format_name, strategy, bits=4, type="int", symmetric=True, size=None, top=None):
    arguments = {"strategy": strategy, "num_bits": bits, "type": type, "symmetric": symmetric}
    arguments |= {"block_structure": size} if strategy == "block" else {"group_size": size}
    options = QuantizationArgs(**arguments)
    rows, columns = {
        "tensor": (96, 192),
        "channel": (1, 192),
        "group": (1, size),
        "block": size,
    }[strategy]
    padded = torch.nn.functional.pad(WEIGHT, (0, -192 % columns, 0, -96 % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero = calculate_qparams(low, high, options)
    if top:
        scale = 2 ** torch.ceil(torch.log2(torch.maximum(high, -low) / top))
    scheme = QuantizationScheme(targets=["Linear"], weights=options, format=format_name)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    state = {"weight": WEIGHT.clone(), "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    weights = json.loads(options.model_dump_json())
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": groups}
    dequantized = compressor.decompress(dict(stored), scheme)["weight"]
    name = f"{format_name}-{bits}-{strategy}-{symmetric}"
    add(name, stored, dequantized, method)

for bits in (2, 3, 4, 5, 8):
    for symmetric in (True, False):
        compressed("pack-quantized", "group", bits, symmetric=symmetric, size=32)
        compressed("pack-quantized", "channel", bits, symmetric=symmetric)
compressed("int-quantized", "channel", 8)
compressed("int-quantized", "channel", 8, symmetric=False)
compressed("int-quantized", "tensor", 8)
compressed("naive-quantized", "channel", 8)
compressed("float-quantized", "tensor", 8, "float")
compressed("float-quantized", "channel", 8, "float")
compressed("float-quantized", "block", 8, "float", size=[40, 80])
compressed("mxfp4-pack-quantized", "group", 4, "float", size=32, top=6)
compressed("mxfp8-quantized", "group", 8, "float", size=32, top=448)

save_file(expected, f"{sys.argv[1]}/expected.safetensors")
with open(f"{sys.argv[1]}/settings.json", "w") as file:
    json.dump(settings, file)
"""


@pytest.mark.network
@pytest.mark.slow
def test_bitsandbytes_and_compressed_tensors(tmp_path):
    pytest.importorskip("torch")
    try:
        packages = [str(download(requirement)) for requirement in LIBRARIES]
    except DownloadError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(packages)}
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], check=True, env=environment)
    settings = json.loads(Path(tmp_path, "settings.json").read_text())
    expected = load_file(tmp_path / "expected.safetensors")
    assert len(settings) == len(expected) == 34
    for name, options in settings.items():
        tensors = open_file(str(tmp_path / f"{name}.safetensors")).tensors
        result = dequantize(tensors, {"quantization_config": options}, name, "float32")
        values = result["m.weight"].read(...)
        tolerance = 2e-3 if name == "int8" else 1e-6  # the library returns float16 for int8
        assert np.abs(values - expected[name]).max() <= tolerance * np.abs(expected[name]).max()


@pytest.mark.slow
def test_transformers_mxfp4_and_fp8(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)

    def read(method, **tensors):
        parts = {f"m.{name}": tensor for name, tensor in tensors.items()}
        save_file(parts, tmp_path / "model.safetensors")
        opened = open_file(str(tmp_path / "model.safetensors")).tensors
        result = dequantize(opened, {"quantization_config": method}, "model", "float32")
        (tensor,) = result.values()
        return tensor.read(...)

    blocks = torch.randint(0, 256, (3, 20, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 20, 4), dtype=torch.uint8)
    values = read({"quant_method": "mxfp4"}, gate_up_proj_blocks=blocks, gate_up_proj_scales=scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(values, expected.numpy())
    codes = torch.randn(96, 192).to(torch.float8_e4m3fn)
    # Transformers infers the block size correctly if it divides the shape.
    method = {"quant_method": "fp8", "weight_block_size": [32, 48]}
    for scales in (torch.rand(3, 4), torch.randint(110, 130, (3, 4), dtype=torch.uint8)):
        values = read(method, weight=codes, weight_scale_inv=scales)
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        np.testing.assert_array_equal(values, expected.numpy())
