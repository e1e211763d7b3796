"""Image classification runs, from folders to a directory that PyTorch loads."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from hfseq.errors import DataError, UsageError
from tests.support.images import draw_digits, write_bad_images
from tests.training.conftest import check_resume, check_two_devices, losses, make_runner

pytest.importorskip("PIL")
SIZES = (
    "hidden_size=48,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,"
    "patch_size=8,initializer_range=0.1,hidden_dropout_prob=0.0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    draw_digits(path / "train", 60)
    draw_digits(path / "validation", 10, seed=1)
    return path


@pytest.fixture
def classify(folder, tmp_path):
    return make_runner(
        "image_classification",
        tmp_path,
        model_type="vit",
        config_overrides=SIZES,
        train_dir=folder / "train",
        validation_dir=folder / "validation",
        image_size=32,
        augment=False,
        decode_workers=0,
        global_batch_size=24,
        learning_rate=3e-3,
        max_steps=4,
    )


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(classify, folder):
    loop = classify(max_steps=300, logging_steps=50, warmup_steps=10, decode_workers=2)
    assert loop.metrics["eval_accuracy"] > 0.9 and losses(loop.folder)[300] < 0.3
    assert "eval_left_out" not in loop.metrics
    card = (loop.folder / "README.md").read_text()
    assert "image-classification" in card and "AutoImageProcessor" in card
    config = json.loads((loop.folder / "config.json").read_text())
    assert config["id2label"] == {str(n): str(n) for n in range(4)} and config["image_size"] == 32
    pytest.importorskip("torch")
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained(loop.folder, backend="pil")
    model = AutoModelForImageClassification.from_pretrained(loop.folder)
    right = 0
    for name in "0123":
        for number in range(10):
            image = Image.open(folder / "validation" / name / f"{number}.png").convert("RGB")
            logits = model(**processor(image, return_tensors="pt")).logits[0]
            right += model.config.id2label[int(logits.argmax())] == name
    assert right / 40 == pytest.approx(loop.metrics["eval_accuracy"])


@pytest.mark.slow
def test_resume_is_bit_exact(classify):
    uninterrupted, resumed = check_resume(classify, augment=True, save_steps=2, max_steps=5)
    assert uninterrupted.metrics["eval_loss"] == resumed.metrics["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["vit", "resnet"])
def test_two_devices_take_the_steps_of_one(model_type, classify, tmp_path):
    changes = {"augment": True}
    if model_type == "resnet":
        from tests.support import models

        models.resnet_config().save_pretrained(tmp_path / "config")
        changes = {"model_type": None, "config_overrides": None}
        changes |= {"config_name": tmp_path / "config"}
    single, two = check_two_devices(classify, **changes)
    assert single.metrics["eval_loss"] == pytest.approx(two.metrics["eval_loss"], rel=1e-4)


def test_unreadable_images_are_skipped_and_counted(classify, tmp_path, caplog):
    draw_digits(tmp_path / "data", 3)
    problems = write_bad_images(tmp_path / "data" / "1")
    caplog.set_level(logging.WARNING, "hfseq")
    data = {"train_dir": tmp_path / "data", "validation_dir": tmp_path / "data"}
    loop = classify(
        **data,
        global_batch_size=18,
        max_steps=1,
        config_overrides=SIZES.replace("num_hidden_layers=2", "num_hidden_layers=1"),
    )
    assert loop.metrics["eval_left_out"] == len(problems)
    assert np.isfinite(loop.metrics["eval_loss"]) and loop.metrics["eval_accuracy"] <= 1
    messages = [record.getMessage() for record in caplog.records if "skipped in" in record.message]
    assert len([line for line in messages if "train" in line]) == 5
    assert all("\n" not in line for line in messages)


def test_mismatches_are_reported_before_training(classify, folder, tmp_path):
    with pytest.raises(UsageError, match="'bert' has no class ForImageClassification"):
        classify(model_type="bert", config_overrides=None)
    model_folder = tmp_path / "model"
    from hfseq import FlaxViTForImageClassification
    from tests.support import models

    FlaxViTForImageClassification(models.vit_config(num_hidden_layers=1)).save_pretrained(
        model_folder
    )
    small = {"model_type": None, "config_overrides": None, "model_name_or_path": model_folder}
    with pytest.raises(UsageError, match="has no image processor"):
        classify(**small)
    from transformers import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(model_folder)
    with pytest.raises(UsageError, match=r"images of shape \(3, 12, 12\).*--image_size 12"):
        classify(**small, image_size=None, ignore_mismatched_sizes=True)
    with pytest.raises(UsageError, match="1 channels, but images have 3"):
        classify(config_overrides=f"{SIZES},num_channels=1")
    with pytest.raises(DataError, match="the label '9' is not one of the model's classes"):
        draw_digits(tmp_path / "more", 1)
        (tmp_path / "more" / "3").rename(tmp_path / "more" / "9")
        classify(validation_dir=tmp_path / "more")


@pytest.mark.slow
def test_predictions_of_unlabeled_images_are_written(classify, folder, tmp_path):
    trained = classify(max_steps=2)
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(5):
        (flat / f"{number}.png").write_bytes(
            (folder / "validation" / "2" / f"{number}.png").read_bytes()
        )
    predictions = classify(
        "guesses",
        train_dir=None,
        validation_dir=None,
        test_dir=flat,
        do_predict=True,
        model_type=None,
        config_overrides=None,
        model_name_or_path=trained.folder,
        max_steps=None,
    )
    lines = (predictions.folder / "test_results.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 6
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1", "2", "3"}
