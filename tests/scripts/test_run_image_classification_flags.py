"""The flags of the script for pictures: those of the old one, and commands as documented."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from hfseq.data.arguments import OBJECTIVES
from hfseq.training.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "docs/image_classification.md": "image_classification",
    "docs/image_text.md": "image_text",
    "docs/captioning.md": "image_to_text",
    "docs/speech_recognition.md": "speech_recognition",
}

SCRIPTS = {
    "image_classification": "run_image_classification_flax.py",
    "image_text": "run_clip_flax.py",
    "image_to_text": "run_image_captioning_flax.py",
    "speech_recognition": "run_speech_recognition_flax.py",
}

# Transformers 4.56, examples/flax/vision/README.md, as it was printed.
REFERENCE = """
python run_image_classification.py \
    --output_dir ./vit-base-patch16-imagenette \
    --model_name_or_path google/vit-base-patch16-224-in21k \
    --train_dir="imagenette2/train" \
    --validation_dir="imagenette2/val" \
    --num_train_epochs 5 \
    --learning_rate 1e-3 \
    --per_device_train_batch_size 128 --per_device_eval_batch_size 128 \
    --overwrite_output_dir \
    --preprocessing_num_workers 32 \
    --push_to_hub
"""
# What its own arguments of data were.
V4 = (
    "train_dir",
    "validation_dir",
    "image_size",
    "max_train_samples",
    "max_eval_samples",
    "overwrite_cache",
    "preprocessing_num_workers",
)

# examples/flax/image-captioning/README.md, likewise.
CAPTIONING = """
python run_image_captioning_flax.py \
    --output_dir ./image-captioning-training-results \
    --model_name_or_path model \
    --dataset_name ydshieh/coco_dataset_script \
    --dataset_config_name=2017 \
    --data_dir data \
    --image_column image_path \
    --caption_column caption \
    --do_train --do_eval --predict_with_generate \
    --num_train_epochs 1 \
    --eval_steps 500 \
    --learning_rate 3e-5 --warmup_steps 0 \
    --per_device_train_batch_size 32 \
    --per_device_eval_batch_size 32 \
    --overwrite_output_dir \
    --max_target_length 32 \
    --num_beams 8 \
    --preprocessing_num_workers 16 \
    --logging_steps 10 \
    --block_size 16384 \
    --push_to_hub
"""


# examples/flax/speech-recognition/README.md, likewise.
SPEECH = """
python run_flax_speech_recognition_seq2seq.py \
    --model_name_or_path openai/whisper-small \
    --dataset_name mozilla-foundation/common_voice_13_0 \
    --dataset_config_name hi \
    --language hindi \
    --train_split_name train+validation \
    --eval_split_name test \
    --output_dir ./whisper-small-hi-flax \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --num_train_epochs 10 \
    --learning_rate 1e-4 \
    --warmup_steps 500 \
    --logging_steps 25 \
    --generation_max_length 40 \
    --preprocessing_num_workers 32 \
    --dataloader_num_workers 32 \
    --max_duration_in_seconds 30 \
    --text_column_name sentence \
    --overwrite_output_dir \
    --do_train \
    --do_eval \
    --predict_with_generate \
    --push_to_hub
"""  # and --use_auth_token, which is rejected: tokens must not be flags


def test_the_command_of_the_old_guide_of_speech_parses_unchanged():
    found = parse(shlex.split(SPEECH)[2:], objective="speech_recognition")
    assert found.data.language == "hindi" and found.data.text_column_name == "sentence"
    assert found.data.validation_split_name == "test"
    assert found.data.train_split_name == "train+validation"


def test_the_command_of_the_old_guide_of_captions_parses_unchanged():
    found = parse(shlex.split(CAPTIONING)[2:], objective="image_to_text")
    assert found.data.num_beams == 8 and found.data.row_length == 32
    assert found.data.data_dir == "data" and found.data.predict_with_generate


def test_the_command_of_the_old_guide_parses_unchanged():
    found = parse(shlex.split(REFERENCE)[2:], objective="image_classification")
    assert found.data.train_dir == "imagenette2/train" and found.data.augment
    assert found.training.do_train and found.training.do_eval and found.training.push_to_hub


def test_every_flag_of_the_v4_script_exists():
    known = {field.name for field in dataclasses.fields(OBJECTIVES["image_classification"])}
    assert set(V4) <= known


@pytest.mark.parametrize("place", PLACES)
def test_commands_parse_as_they_are_documented(place):
    text = (ROOT / place).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(rf"python scripts/{SCRIPTS[PLACES[place]]} (.*)", text)
    assert commands
    for command in commands:
        parse(shlex.split(command), objective=PLACES[place])
