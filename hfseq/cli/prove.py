"""``hfseq prove``: does every program that opens a model directory compute what hfseq does?

Each program that is installed opens the directory in a process of its own (:mod:`consumers`), so
that hfseq stays free of them, and what it returns for the same inputs is compared.
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

#: What opens a directory: the functions of consumers.py, which imports NumPy.
CONSUMER_NAMES = ("torch", "peft", "sentence-transformers", "ctranslate2", "onnx", "llama.cpp")
#: How far float32 on both sides may be apart, of the largest number.
TOLERANCE = 1e-4
#: Whose defect a difference is, and what to change, by consumer and model type.
KNOWN_DIFFERENCES = {
    **{
        ("ctranslate2", kind): "CTranslate2 4.8 reads config.rope_theta, which Transformers 5 "
        "lacks, and takes 10000 for it: convert with Transformers 4"
        for kind in ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
    },
}
INPUT_LENGTH = 12


def add_prove(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq prove``."""
    parser.add_argument("model", metavar="DIR", help="directory of a saved model or adapter")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="FILE",
        help="another interpreter whose Transformers opens it, too (repeatable)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONSUMER_NAMES,
        metavar="NAME",
        help=f"some of {', '.join(CONSUMER_NAMES)}",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="X", help="seconds for each (600)"
    )
    add_json(parser)


def run_prove(arguments: argparse.Namespace) -> int:
    """Compare and print; exit code 1 where something differs."""
    use_cpu()
    plugins.load(arguments.plugin)
    for python in arguments.python:
        if not os.access(os.path.expanduser(python), os.X_OK):
            raise UsageError(f"--python {python}: there is no such interpreter")
    found = prove(
        arguments.model,
        arguments.only or CONSUMER_NAMES,
        arguments.python,
        arguments.timeout,
    )
    if arguments.json:
        print_json(found)
    else:
        rows = [["", "difference", "result"]]
        for one in found["consumers"]:
            apart = one.get("difference")
            rows.append([one["name"], "" if apart is None else f"{apart:.1e}", one["status"]])
        lines = format_table(rows)
        print(f"{found['model_class']}: {found['output']} {tuple(found['shape'])}, hfseq")
        for line, one in zip(lines, [None, *found["consumers"]], strict=True):
            colour = {"equal": "green", "differs": "red"}.get((one or {}).get("status", ""), "")
            note = (one or {}).get("detail", "")
            print((colorize(line, colour) if colour else line) + (f"  {note}" if note else ""))
    return 1 if any(one["status"] == "differs" for one in found["consumers"]) else 0


def prove(
    folder: str, names: tuple[str, ...], pythons: list[str], timeout: float
) -> dict[str, Any]:
    """Return what every consumer makes of the model in ``folder``."""
    import numpy as np

    if not Path(folder).is_dir():
        raise CheckpointError(f"'{folder}' is no directory: give one that a model was saved to")
    model = load_model(folder)
    inputs: dict[str, Any] = make_inputs(model)
    output = model(**inputs)
    name = next(
        key
        for key in ("logits", "logits_per_image", "start_logits", "last_hidden_state")
        if output.get(key) is not None
    )
    right = np.asarray(output[name], np.float32)
    tasks: list[tuple[str, str, str]] = [(name, name, sys.executable) for name in names]
    tasks += [(f"torch, {python}", "torch", os.path.expanduser(python)) for python in pythons]
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "inputs.npz"
        arrays: dict[str, Any] = {**inputs, f"output:{name}": right}
        np.savez(file, **arrays)
        for shown, consumer, python in tasks:
            told = _ask(python, consumer, folder, file, timeout, model.torch_class_name())
            if told["status"] == "compared":
                equal = told["difference"] <= TOLERANCE
                told["status"] = "equal" if equal else "differs"
            if told["status"] == "differs":
                remedy = KNOWN_DIFFERENCES.get((consumer, model.config.model_type))
                told["detail"] = remedy or told.get("detail", "not known of this program")
            made.append({"name": shown, **told})
    return {
        "model_class": model.torch_class_name(),
        "model_type": model.config.model_type,
        "output": name,
        "shape": list(right.shape),
        "consumers": made,
    }


def _ask(
    python: str, consumer: str, folder: str, file: Path, timeout: float, model_class: str
) -> dict[str, Any]:
    """Return what one consumer says, in a process of its own."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables = {**os.environ, **quiet, "HFSEQ_PROVE_CLASS": model_class}
    # Its text, since Python would look for modules beside a file.
    program = Path(__file__).with_name("consumers.py").read_text(encoding="utf-8")
    command = [python, "-c", program, consumer, os.path.abspath(folder), str(file)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=variables,
            check=False,
            cwd=file.parent,
        )
    except subprocess.TimeoutExpired:
        return {"status": "refused", "detail": f"not done in {timeout:g} seconds"}
    lines = done.stdout.strip().splitlines()
    try:
        told: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines() or ["nothing"]
        return {"status": "refused", "detail": f"exit code {done.returncode}: {said[-1][:200]}"}
    return told


def load_model(folder: str) -> FlaxPreTrainedModel:
    """Load the model by the class that the directory names; an adapter with its base."""
    from hfseq.checkpoints.config import read_config
    from hfseq.modeling import lora
    from hfseq.modeling.auto import find_class

    adapter = lora.find_adapter(folder, {})
    place, task = (folder, None) if adapter is None else (adapter.base, adapter.head)
    return find_class(read_config(place), place, task=task).from_pretrained(folder)


def make_inputs(model: FlaxPreTrainedModel) -> dict[str, np.ndarray]:
    """Return inputs of two rows, the second padded where the model is no decoder."""
    import numpy as np

    random, config = np.random.default_rng(0), model.config
    given: dict[str, Any] = {}
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
        given |= {"input_ids": ids, "attention_mask": mask}
    if model.has_input("pixel_values"):
        shape = model.image_shape() or (3, 64, 64)
        given["pixel_values"] = random.normal(size=(2, *shape)).astype(np.float32)
    if model.has_input("input_features"):
        frames = 2 * config.max_source_positions
        given["input_features"] = random.normal(size=(2, config.num_mel_bins, frames)).astype(
            np.float32
        )
    if model.has_input("input_values") or model.has_input("inputs"):
        name = "input_values" if model.has_input("input_values") else "inputs"
        given[name] = random.normal(size=(2, 4000)).astype(np.float32)
    if model.has_input("decoder_input_ids"):
        words = model.vocab_size("decoder_input_ids") or 100
        given["decoder_input_ids"] = random.integers(
            min(5, words - 1), words, (2, INPUT_LENGTH)
        ).astype(np.int32)
    return given
