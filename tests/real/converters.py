"""Converts weights of ONNX and CTranslate2 to directories in the format of Hugging Face."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# -- ONNX ------------------------------------------------------------------------------------------


def read_onnx(path: Path, onnx_package: Path) -> dict[str, np.ndarray]:
    """Returns the weights of an ONNX file, with the names and layouts of PyTorch.

    The exporter transposes the weights of linear layers and gives them numbers as names. Their
    names follow from the biases that are added to the products.

    Args:
        path: The ONNX file.
        onnx_package: The directory that contains the package `onnx`.
    """
    if str(onnx_package) not in sys.path:
        sys.path.append(str(onnx_package))
    import onnx.numpy_helper  # type: ignore[import-not-found]  # in the cache

    graph = onnx.load(path).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    consumers = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            (bias,) = (name for name in consumers[node.output[0]].input if name in weights)
            weights[f"{bias.removesuffix('bias')}weight"] = weights.pop(node.input[1]).T
    return weights


# -- CTranslate2 -----------------------------------------------------------------------------------

DTYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
#: Modules of Whisper in CTranslate2, and the modules of Transformers that they consist of.
WHISPER_MODULES = {
    "conv1": ["conv1"],
    "conv2": ["conv2"],
    "embeddings": ["embed_tokens"],
    "position_encodings": ["embed_positions"],
    "layer_norm": ["layer_norm"],
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}


def read_ctranslate2(content: bytes) -> dict[str, np.ndarray]:
    """Returns the variables of a model file of CTranslate2 (version 6 of the format)."""
    file = io.BytesIO(content)

    def read(layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))

    def read_text() -> str:
        return file.read(*read("H")).rstrip(b"\0").decode()

    (version,) = read("I")
    assert version == 6, f"version {version} of the format"
    read_text()  # the name of the specification
    _, count = read("II")
    variables = {}
    for _ in range(count):
        name, (rank,) = read_text(), read("B")
        shape, (dtype, size) = read(f"{rank}I"), read("BI")
        variables[name] = np.frombuffer(file.read(size), DTYPES[dtype]).reshape(shape)
    return variables


def whisper_weights(variables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights of Whisper with the names of Transformers, from those of CTranslate2."""
    weights = {}
    for name, value in variables.items():
        if value.ndim == 0 or name == "decoder/alignment_heads":
            continue
        match = re.fullmatch(r"(\w+?)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
        assert match, name
        side, layer, module, kind = match.groups()
        kind = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
        prefix = f"model.{side}." + (f"layers.{layer}." if layer else "")
        targets = WHISPER_MODULES[module]
        for target, part in zip(targets, np.split(value, len(targets)), strict=True):
            if target.endswith("k_proj") and kind == "bias":
                assert not part.any()  # Whisper's keys have no bias
            else:
                weights[f"{prefix}{target}.{kind}"] = part
    return weights


def convert_whisper(content: bytes, source: Path, folder: Path) -> None:
    """Converts Whisper from CTranslate2 to the files of OpenAI's repositories on the Hub.

    Args:
        content: The content of `model.bin`.
        source: The directory with CTranslate2's `config.json` and with `tokenizer.json`.
        folder: The directory to write to.
    """
    from transformers import WhisperConfig, WhisperFeatureExtractor

    variables = read_ctranslate2(content)
    weights = whisper_weights(variables)
    settings = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab_size, d_model = weights["model.decoder.embed_tokens.weight"].shape
    multilingual, eos = vocab_size > 51864, ids["<|endoftext|>"]
    sizes: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", sum(f"{side}.layers" in key and "fc1.bias" in key for key in weights)),
            ("attention_heads", int(variables[f"{side}/num_heads"])),
            ("ffn_dim", 4 * d_model),
        )
    }
    generation: dict[str, Any] = {
        "bos_token_id": eos,
        "pad_token_id": eos,
        "eos_token_id": eos,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
    }
    transcribe, no_timestamps = ids["<|transcribe|>"], ids["<|notimestamps|>"]
    forced = [[1, None], [2, transcribe]] if multilingual else [[1, no_timestamps]]
    config = WhisperConfig(vocab_size=vocab_size, d_model=d_model, **sizes, **generation)
    save(folder, config, "WhisperForConditionalGeneration", weights)
    generation |= {
        "alignment_heads": settings["alignment_heads"],
        "forced_decoder_ids": forced,
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": no_timestamps,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
    }
    if multilingual:
        languages = {token: id_ for token, id_ in ids.items() if id_ in settings["lang_ids"]}
        generation["lang_to_id"] = languages
        generation["task_to_id"] = {"transcribe": transcribe, "translate": ids["<|translate|>"]}
    write_json(folder / "generation_config.json", generation)
    WhisperFeatureExtractor().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = "<|endoftext|>"
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "WhisperTokenizer",
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end),
        },
    )


# -- writing ---------------------------------------------------------------------------------------


def save(folder: Path, config: Any, architecture: str, weights: Mapping[str, np.ndarray]) -> None:
    """Writes the configuration and the weights, in float32."""
    from safetensors.numpy import save_file

    config.architectures, config.dtype = [architecture], "float32"
    config.save_pretrained(folder)
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))
