"""Contrastive runs on images with captions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hfseq.errors import UsageError
from tests.support.images import draw_digits, write_bad_images
from tests.training.conftest import check_resume, check_two_devices, losses, make_runner

pytest.importorskip("PIL")
NAMES = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Digits with captions, and a pair of small encoders with tokenizer and image processor."""
    from transformers import AutoTokenizer, BertConfig, ViTConfig, ViTImageProcessorPil

    from hfseq import FlaxBertModel, FlaxVisionTextDualEncoderModel, FlaxViTModel
    from hfseq.data.tokenizers import train_tokenizer

    path = tmp_path_factory.mktemp("captioned")
    texts = [f"the number {name}" for name in NAMES]
    tables = {"train": 24, "validation": 3}
    for seed, (split, count) in enumerate(tables.items()):
        draw_digits(path / split, count, seed)
        rows = [
            {"image_path": f"{split}/{n}/{i}.png", "captions": [texts[n]]}
            for i in range(count)
            for n in range(4)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (path / f"{split}.jsonl").write_text(lines)
    train_tokenizer(texts, "bert", vocab_size=200, output_dir=path / "pair", min_frequency=1)
    words = len(AutoTokenizer.from_pretrained(path / "pair"))
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    model = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(
        vision_model=FlaxViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)),
        text_model=FlaxBertModel(BertConfig(vocab_size=words, **sizes)),
        projection_dim=16,
    )
    model.save_pretrained(path / "pair")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path / "pair")
    return path


@pytest.fixture
def contrast(folder, tmp_path):
    return make_runner(
        "image_text",
        tmp_path,
        model_name_or_path=folder / "pair",
        train_file=folder / "train.jsonl",
        validation_file=folder / "validation.jsonl",
        image_column="image_path",
        max_seq_length=8,
        augment=False,
        decode_workers=0,
        global_batch_size=8,
        per_device_eval_batch_size=4,
        learning_rate=2e-3,
        max_steps=3,
    )


def test_step_skips_broken_images(contrast, folder, tmp_path):
    write_bad_images(folder / "bad")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()][:6]
    rows += [
        {"image_path": f"bad/{name}", "captions": ["the number two", "two"]}
        for name in ("text.png", "deep.png")
    ]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {"train_file": folder / "mixed.jsonl", "validation_file": folder / "mixed.jsonl"}
    loop = contrast(max_steps=1, **mixed, per_device_eval_batch_size=10)
    assert loop.metrics["eval_left_out"] == 4 and np.isfinite(loop.metrics["eval_loss"])
    assert loop.metrics["eval_loss"] < 2 * np.log(6)


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(contrast):
    loop = contrast(max_steps=300, logging_steps=50, learning_rate=1e-3, warmup_steps=20)
    # The digits alternate in the table, so the four rows of an evaluation batch all differ.
    assert loop.metrics["eval_accuracy"] > 0.9
    train_losses = losses(loop.folder)
    assert train_losses[300] < 0.6 * train_losses[1]
    pytest.importorskip("torch")
    from transformers import AutoImageProcessor, AutoTokenizer, VisionTextDualEncoderModel

    assert VisionTextDualEncoderModel.from_pretrained(loop.folder).config.projection_dim == 16
    assert AutoImageProcessor.from_pretrained(loop.folder, backend="pil").size["height"] == 32
    assert AutoTokenizer.from_pretrained(loop.folder)("the number two")["input_ids"]


@pytest.mark.slow
def test_the_loss_is_over_the_batch_of_all_devices(contrast):
    # Adam amplifies rounding errors of zero gradients, such as those of key biases.
    check_two_devices(contrast, optim="sgd", learning_rate=0.1)


@pytest.mark.slow
def test_resume_is_bit_exact(contrast):
    check_resume(contrast, augment=True, save_steps=2, max_steps=4)


def test_invalid_pairs_are_rejected(contrast, folder, tmp_path):
    with pytest.raises(UsageError, match="directories contain classes but no captions"):
        contrast(train_file=None, train_dir=folder / "train")
    with pytest.raises(UsageError, match="no model: .*--model_name_or_path"):
        contrast(model_name_or_path=None, model_type="clip")


@pytest.mark.slow
def test_clip_script_combines_checkpoints_and_resumes(tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessorPil

    import hfseq
    from hfseq.data.tokenizers import train_tokenizer
    from tests.support.models import bert_config, vit_config

    hfseq.FlaxViTModel(vit_config()).save_pretrained(tmp_path / "eyes")
    size = vit_config().image_size
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(tmp_path / "eyes")
    train_tokenizer(["red", "green", "blue"], "bert", vocab_size=60, output_dir=tmp_path / "words")
    words = bert_config(vocab_size=60)
    hfseq.FlaxBertModel(words).save_pretrained(tmp_path / "words")
    rows = []
    for number, name in enumerate(("red", "green", "blue") * 4):
        colour = tuple(200 * (name == encoder_name) for encoder_name in ("red", "green", "blue"))
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{number}.png")
        rows.append(json.dumps({"image": f"{number}.png", "caption": name}) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(rows))
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable, str(root / "scripts" / "run_clip_flax.py"), "--output_dir", "pairs",
        "--train_file", "train.jsonl", "--max_seq_length", "8", "--do_train",
        "--per_device_train_batch_size", "4", "--max_steps", "2", "--text_model_name_or_path",
        "words", "--report_to", "jsonl",
    ]  # fmt: skip
    extra_flags = ["--vision_model_name_or_path", "eyes"]
    alone, process, again = (
        subprocess.run(
            [*command, *extra], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for extra in ([], extra_flags, [*extra_flags, "--max_steps", "3"])
    )
    assert (
        alone.returncode == 2
        and "--vision_model_name_or_path and --text_model_name_or_path" in alone.stderr
    )
    assert process.returncode == 0, process.stderr
    assert again.returncode == 0 and "resumed from step 2" in again.stderr + again.stdout
    assert (tmp_path / "pairs-start" / "preprocessor_config.json").exists()
    hfseq.FlaxVisionTextDualEncoderModel.from_pretrained(tmp_path / "pairs")
