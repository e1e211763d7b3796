"""Runs that train image captioning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from hfseq import FlaxVisionEncoderDecoderModel
from hfseq.errors import UsageError
from hfseq.objectives.metrics import rouge_scores
from tests.support.images import write_bad_images
from tests.support.models import close
from tests.support.stored_runs import STORED
from tests.training.conftest import check_resume, check_two_devices, make_runner

pytest.importorskip("PIL")
pytest.importorskip("rouge_score")
ROOT = Path(__file__).resolve().parents[2]
DATA = STORED / "data"


@pytest.fixture
def write_captions(tmp_path):
    return make_runner(
        "image_to_text",
        tmp_path,
        model_name_or_path=DATA / "writer",
        train_file=DATA / "captions.jsonl",
        validation_file=DATA / "captions.jsonl",
        max_target_length=8,
        augment=False,
        decode_workers=0,
        global_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=2e-3,
        max_steps=3,
        generation_batch_size=8,
    )


def test_step_generates_captions_and_skips_broken_images(write_captions, tmp_path):
    write_bad_images(tmp_path / "bad")
    rows = [json.loads(line) for line in (DATA / "captions.jsonl").read_text().splitlines()][:6]
    rows = [row | {"image": str(DATA / row["image"])} for row in rows]
    rows += [{"image": f"bad/{name}", "caption": "nothing"} for name in ("text.png", "deep.png")]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {"train_file": tmp_path / "mixed.jsonl", "validation_file": tmp_path / "mixed.jsonl"}
    loop = write_captions(max_steps=1, **mixed)
    assert loop.metrics["eval_left_out"] == 2 and 0 <= loop.metrics["eval_rouge1"] <= 100
    assert np.isfinite(loop.metrics["eval_loss"])


@pytest.mark.slow
def test_the_loss_is_that_of_pytorch(write_captions):
    torch = pytest.importorskip("torch")
    from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel

    loop = write_captions(max_steps=1, learning_rate=0.0, predict_with_generate=False)
    theirs = VisionEncoderDecoderModel.from_pretrained(DATA / "writer").eval()
    rows = [json.loads(line) for line in (DATA / "captions.jsonl").read_text().splitlines()]
    words = AutoTokenizer.from_pretrained(DATA / "writer")
    targets = [
        [*words(row["caption"], add_special_tokens=False)["input_ids"][:7], words.eos_token_id]
        for row in rows
    ]
    labels = torch.tensor([ids + [-100] * (8 - len(ids)) for ids in targets])
    from PIL import Image

    processor = AutoImageProcessor.from_pretrained(DATA / "writer", backend="pil")
    pixels = [
        processor(Image.open(DATA / row["image"]), return_tensors="np")["pixel_values"][0]
        for row in rows
    ]
    theirs.config.pad_token_id = words.pad_token_id
    with torch.no_grad():
        expected = theirs(torch.from_numpy(np.stack(pixels)), labels=labels).loss.item()
    assert loop.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(write_captions):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, VisionEncoderDecoderModel

    loop = write_captions(
        max_steps=150, learning_rate=2e-2, warmup_steps=10, logging_steps=50, max_target_length=14
    )
    assert loop.metrics["eval_rouge1"] > 95 and loop.metrics["eval_accuracy"] > 0.95
    pixels = np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)
    ours = FlaxVisionEncoderDecoderModel.from_pretrained(loop.folder)
    theirs = VisionEncoderDecoderModel.from_pretrained(loop.folder).eval()
    generated = np.asarray(ours.generate(pixels).sequences)
    with torch.no_grad():
        expected = theirs.generate(torch.from_numpy(pixels)).numpy()
    assert generated[0, : expected.shape[1]].tolist() == expected[0].tolist()
    assert AutoTokenizer.from_pretrained(loop.folder)("all dark")["input_ids"]


@pytest.mark.slow
def test_two_devices_have_the_losses_of_one(write_captions):
    check_two_devices(write_captions)


@pytest.mark.slow
def test_resume_is_bit_exact(write_captions):
    options = {"save_steps": 2, "max_steps": 4, "predict_with_generate": False}
    check_resume(write_captions, augment=True, **options)


def test_mismatched_inputs_are_rejected(write_captions):
    with pytest.raises(UsageError, match="directories contain classes but no captions"):
        write_captions(train_file=None, train_dir=DATA / "pictures")
    with pytest.raises(UsageError, match="create_model_from_encoder_decoder_models"):
        write_captions(model_name_or_path=None, model_type="vit")
    with pytest.raises(UsageError, match="'vision-text-dual-encoder'"):
        write_captions(model_name_or_path=DATA / "pair")
    with pytest.raises(UsageError, match=r"max_target_length 99 .* at most 16"):
        write_captions(max_target_length=99)


@pytest.mark.slow
def test_combine_creates_a_model_and_replaces_nothing(tmp_path):
    from transformers import AutoTokenizer, GPT2Config, ViTConfig, ViTImageProcessorPil

    from hfseq import FlaxGPT2LMHeadModel, FlaxViTModel

    words = AutoTokenizer.from_pretrained(DATA / "roberta")
    words.pad_token = None
    words.save_pretrained(tmp_path / "decoder")
    tokens = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    sizes = {"vocab_size": len(words), "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    decoder = FlaxGPT2LMHeadModel(GPT2Config(**sizes, **tokens), seed=2)
    decoder.save_pretrained(tmp_path / "decoder")
    encoder = FlaxViTModel(
        ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    )
    encoder.save_pretrained(tmp_path / "encoder")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "encoder")
    command = [
        sys.executable,
        ROOT / "scripts" / "create_model_from_encoder_decoder_models.py",
        f"--output_dir={tmp_path / 'both'}",
        f"--decoder_model_name_or_path={tmp_path / 'decoder'}",
        f"--encoder_model_name_or_path={tmp_path / 'encoder'}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    model = FlaxVisionEncoderDecoderModel.from_pretrained(tmp_path / "both")
    assert model.config.decoder_start_token_id == words.bos_token_id
    assert model.config.pad_token_id == model.config.eos_token_id == words.eos_token_id
    table = model.params["decoder"]["transformer"]["wte"]["embedding"]
    assert close(table, decoder.params["transformer"]["wte"]["embedding"], 0)
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params["encoder"], encoder.params))
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_rouge_is_that_of_words_and_the_best_reference_counts():
    scores = rouge_scores(
        ["the cat sat", "a dog"], [["the cat sat"], ["a bird flew", "one dog"]]
    ).values
    # 1, and for "a dog" and "one dog" one of two words on both sides.
    assert scores["rouge1"] == pytest.approx(75) and scores["rouge2"] == pytest.approx(50)
    assert scores["rougeL"] == pytest.approx(75)
