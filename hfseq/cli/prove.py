"""Command-line interface of ``hfseq prove``: compares other programs with hfseq.

Each installed program opens the model directory in a separate process
(:mod:`hfseq.cli.consumers`), so that hfseq does not import the program. The outputs of the program
and of hfseq for the same inputs are then compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.cli.convert import use_cpu
from hfseq.cli.text import add_json, colorize, format_table, print_json
from hfseq.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from hfseq.modeling import FlaxPreTrainedModel

EXAMPLES = """hfseq prove my-roberta
hfseq prove my-llama --python ~/transformers4/bin/python --only torch ctranslate2
hfseq prove my-adapter --json"""

#: The keys of `consumers.CONSUMERS`, which are repeated here because consumers.py imports NumPy.
CONSUMER_NAMES = (
    "torch",
    "accelerate",
    "peft",
    "sentence-transformers",
    "ctranslate2",
    "onnx",
    "llama.cpp",
    "vllm",
    "sglang",
)
#: Maximum difference of float32 outputs, relative to the largest output.
TOLERANCE = 1e-4
#: Causes of known differences and their workarounds, by consumer and model type.
KNOWN_DIFFERENCES = {
    **{
        ("ctranslate2", kind): "CTranslate2 4.8 reads config.rope_theta, which configurations in "
        "Transformers 5 lack, and falls back to 10000: convert with Transformers 4"
        for kind in ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
    },
}
INPUT_LENGTH = 12


def add_prove(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq prove``."""
    parser.add_argument("model", metavar="DIR", help="Directory of a saved model or adapter.")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="FILE",
        help="Additional Python interpreter. Its version of Transformers also opens the model "
        "(repeatable).",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONSUMER_NAMES,
        metavar="NAME",
        help=f"Programs to run, of {', '.join(CONSUMER_NAMES)}. Default: all.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="Time limit per program in seconds. Default: 600.",
    )
    add_json(parser)


def run_prove(arguments: argparse.Namespace) -> int:
    """Compares the programs and prints the results. Returns 1 if an output differs."""
    use_cpu()
    plugins.load(arguments.plugin)
    for python in arguments.python:
        if not os.access(os.path.expanduser(python), os.X_OK):
            raise UsageError(f"--python {python}: not an executable file")
    report = prove(
        arguments.model,
        arguments.only or CONSUMER_NAMES,
        arguments.python,
        arguments.timeout,
    )
    if arguments.json:
        print_json(report)
    else:
        rows = [["", "difference", "result"]]
        for result in report["consumers"]:
            difference = result.get("difference")
            rows.append(
                [
                    result["name"],
                    "" if difference is None else f"{difference:.1e}",
                    result["status"],
                ]
            )
        lines = format_table(rows)
        print(f"{report['model_class']}: {report['output']} {tuple(report['shape'])}, hfseq")
        for line, result in zip(lines, [None, *report["consumers"]], strict=True):
            colour = {"equal": "green", "differs": "red"}.get((result or {}).get("status", ""), "")
            note = (result or {}).get("detail", "")
            print((colorize(line, colour) if colour else line) + (f"  {note}" if note else ""))
    return 1 if any(result["status"] == "differs" for result in report["consumers"]) else 0


def prove(
    folder: str, names: tuple[str, ...], pythons: list[str], timeout: float
) -> dict[str, Any]:
    """Compares the outputs of other programs ("consumers") with those of hfseq.

    Args:
        folder: Directory of the saved model or adapter.
        names: Keys of `consumers.CONSUMERS`.
        pythons: Additional interpreters, in which the consumer ``torch`` runs too.
        timeout: Time limit per consumer in seconds.

    Returns:
        The report, as ``hfseq prove --json`` prints it.
    """
    import numpy as np

    if not Path(folder).is_dir():
        raise CheckpointError(
            f"'{folder}' is not a directory: use a directory that a model was saved to"
        )
    model = load_model(folder)
    inputs: dict[str, Any] = make_inputs(model)
    output = model(**inputs)
    name = next(
        key
        for key in ("logits", "logits_per_image", "start_logits", "last_hidden_state")
        if output.get(key) is not None
    )
    expected = np.asarray(output[name], np.float32)
    tasks: list[tuple[str, str, str]] = [(name, name, sys.executable) for name in names]
    tasks += [(f"torch, {python}", "torch", os.path.expanduser(python)) for python in pythons]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "inputs.npz"
        arrays: dict[str, Any] = {**inputs, f"output:{name}": expected}
        np.savez(file, **arrays)
        for label, consumer, python in tasks:
            result = _ask(python, consumer, folder, file, timeout, model.torch_class_name())
            if result["status"] == "compared":
                equal = result["difference"] <= TOLERANCE
                result["status"] = "equal" if equal else "differs"
            if result["status"] == "differs":
                remedy = KNOWN_DIFFERENCES.get((consumer, model.config.model_type))
                result["detail"] = remedy or result.get(
                    "detail", "this difference is not a known problem of the program"
                )
            results.append({"name": label, **result})
    return {
        "model_class": model.torch_class_name(),
        "model_type": model.config.model_type,
        "output": name,
        "shape": list(expected.shape),
        "consumers": results,
    }


def _ask(
    python: str, consumer: str, folder: str, file: Path, timeout: float, model_class: str
) -> dict[str, Any]:
    """Runs one consumer in a separate process and returns its result."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables = {**os.environ, **quiet, "HFSEQ_PROVE_CLASS": model_class}
    # Pass the source text: Python would add the directory of a file to the module search path.
    program = Path(__file__).with_name("consumers.py").read_text(encoding="utf-8")
    command = [python, "-c", program, consumer, os.path.abspath(folder), str(file)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=variables,
            check=False,
            cwd=file.parent,
        )
    except subprocess.TimeoutExpired:
        return {"status": "refused", "detail": f"no result within {timeout:g} seconds"}
    lines = process.stdout.strip().splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        errors = process.stderr.strip().splitlines() or ["no error message"]
        return {
            "status": "refused",
            "detail": f"exit code {process.returncode}: {errors[-1][:200]}",
        }
    return result


def load_model(folder: str) -> FlaxPreTrainedModel:
    """Loads the model, or an adapter with its base model, with the class that config.json names."""
    from hfseq.checkpoints.config import read_config
    from hfseq.modeling import lora
    from hfseq.modeling.auto import find_class

    adapter, location, download = lora.find_base(folder, {})
    task = None if adapter is None else adapter.head
    config = read_config(location, download)
    return find_class(config, location, task=task).from_pretrained(folder)


def make_inputs(model: FlaxPreTrainedModel) -> dict[str, np.ndarray]:
    """Returns a batch of two random examples.

    The text of the second example is padded unless the model is a decoder.
    """
    import numpy as np

    from hfseq.nn import height_and_width

    random, config = np.random.default_rng(0), model.config
    inputs: dict[str, Any] = {}
    if model.has_input("input_ids"):
        words = model.vocab_size() or 100
        ids = random.integers(min(5, words - 1), words, (2, INPUT_LENGTH)).astype(np.int32)
        mask = np.ones_like(ids)
        if not model.can_generate() or getattr(config, "is_encoder_decoder", False):
            mask[1, INPUT_LENGTH - 3 :] = 0
            pad = getattr(config, "pad_token_id", None)
            ids = np.where(mask, ids, 0 if pad is None else pad).astype(np.int32)
        end = getattr(model.text_config, "eos_token_id", None)
        if model.has_input("pixel_values") and isinstance(end, int):
            ids[:, -4] = min(max(end, 2), words - 1)
        inputs |= {"input_ids": ids, "attention_mask": mask}
    if model.has_input("spatial_shapes"):  # the image processor splits images into patches
        vision = getattr(config, "vision_config", config)
        height, width = height_and_width(vision.patch_size)
        features = vision.num_channels * height * width
        inputs |= {
            "pixel_values": random.normal(size=(2, 6, features)).astype(np.float32),
            "pixel_attention_mask": np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32),
            "spatial_shapes": np.array([[2, 3], [2, 2]], np.int32),
        }
    elif model.has_input("pixel_values"):
        shape = model.image_shape() or (3, 64, 64)
        inputs["pixel_values"] = random.normal(size=(2, *shape)).astype(np.float32)
    if model.has_input("input_features"):
        frames = 2 * config.max_source_positions
        inputs["input_features"] = random.normal(size=(2, config.num_mel_bins, frames)).astype(
            np.float32
        )
    if model.has_input("input_values") or model.has_input("inputs"):
        name = "input_values" if model.has_input("input_values") else "inputs"
        inputs[name] = random.normal(size=(2, 4000)).astype(np.float32)
    if model.has_input("decoder_input_ids"):
        words = model.vocab_size("decoder_input_ids") or 100
        inputs["decoder_input_ids"] = random.integers(
            min(5, words - 1), words, (2, INPUT_LENGTH)
        ).astype(np.int32)
    return inputs
