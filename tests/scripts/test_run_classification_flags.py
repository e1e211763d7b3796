"""The flags of the classification script: those of the old one, and commands as documented."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.data.arguments import OBJECTIVES
from hfseq.errors import UsageError
from hfseq.training.arguments import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_classification_flax.py"

# Transformers 4.57, examples/flax/text-classification/README.md, as it was printed.
REFERENCE = """
python run_flax_glue.py \
  --model_name_or_path google-bert/bert-base-cased \
  --task_name ${TASK_NAME} \
  --max_seq_length 128 \
  --learning_rate 2e-5 \
  --num_train_epochs 3 \
  --per_device_train_batch_size 4 \
  --eval_steps 100 \
  --output_dir ./$TASK_NAME/ \
  --push_to_hub
"""
# What its own arguments were, beside those that every script of ours has.
V4 = ("task_name", "dataset_name", "dataset_config_name", "train_file", "validation_file",
      "test_file", "text_column_name", "label_column_name", "overwrite_cache", "max_seq_length",
      "max_train_samples", "max_eval_samples", "max_predict_samples")  # fmt: skip


def read(*argv):
    return parse(["--output_dir", "out", *argv], objective="classification").data


def test_the_command_of_the_old_guide_parses_unchanged():
    command = REFERENCE.replace("${TASK_NAME}", "mrpc").replace("$TASK_NAME", "mrpc")
    found = parse(shlex.split(command)[2:], objective="classification")
    assert found.data.task_name == "mrpc" and found.data.dataset_name == "nyu-mll/glue"
    assert found.training.do_train and found.training.do_eval and found.training.push_to_hub
    assert found.training.eval_strategy == "steps" and found.data.max_seq_length == 128


def test_every_flag_of_the_v4_script_exists():
    known = {field.name for field in dataclasses.fields(OBJECTIVES["classification"])}
    assert set(V4) <= known


def test_old_column_flags_are_aliases():
    found = read("--train_file", "a.csv", "--text_column_name", "body", "--label_column_name", "y")
    assert (found.sentence1_column, found.label_column) == ("body", "y")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--no_quoting"], False),
        (["--quoting", "True"], True),
        ([], None),
    ],
)
def test_quoting_is_configurable(argv, expected):
    assert read("--train_file", "a.csv", *argv).quoting is expected


@pytest.mark.slow
def test_a_mistake_ends_with_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output_dir", str(tmp_path), "--task_name", "colla"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one of cola" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_missing_data_is_an_error():
    with pytest.raises(UsageError, match="no data: give --task_name"):
        from hfseq.data.classification import load_examples

        load_examples(read())
