"""The flags of the scripts for speech: those of the old one, and commands as documented."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hfseq.training.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
OBJECTIVES = {
    "run_wav2vec2_pretrain_flax.py": "wav2vec2",
    "run_speech_recognition_ctc_flax.py": "ctc",
}
# The flags of Transformers' research project jax-projects/wav2vec2, beside those of all scripts.
REFERENCE = """
    --output_dir ./wav2vec2-base-robust --num_train_epochs 5 --per_device_train_batch_size 32
    --per_device_eval_batch_size 32 --learning_rate 5e-4 --weight_decay 0.01 --warmup_steps 2000
    --model_name_or_path ./wav2vec2-base-robust --dataset_name librispeech_asr
    --dataset_config_name clean --train_split_name train.100
    --validation_split_name validation --speech_file_column file --preprocessing_num_workers 4
    --max_duration_in_seconds 10.0 --adam_beta1 0.9 --adam_beta2 0.98 --pad_to_multiple_of 16384
    --validation_split_percentage 5 --overwrite_cache --freeze_feature_extractor False
    --verbose_logging --max_gumbel_temperature 2 --min_gumbel_temperature 0.1
    --gumbel_temperature_decay 0.999995 --dtype float32 --cache_dir ./cache --gradient_checkpointing
    --logging_steps 50 --push_to_hub
"""


def test_the_flags_of_the_old_script_parse():
    found = parse(shlex.split(REFERENCE), objective="wav2vec2")
    assert found.data.audio_column_name == "file" and found.data.train_split_name == "train.100"
    assert found.data.pad_to_multiple_of == 16384 and not found.data.freeze_feature_extractor


@pytest.mark.parametrize("script", OBJECTIVES)
def test_commands_parse_as_they_are_documented(script):
    page = ROOT / "docs" / "speech_pretraining.md"
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(rf"python scripts/{script} (.*)", text)
    assert commands
    for command in commands:
        parse(shlex.split(command), objective=OBJECTIVES[script])
