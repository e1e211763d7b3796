"""Flags of single objectives, and the commands of the documentation."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.data.arguments import OBJECTIVES
from hfseq.errors import UsageError
from hfseq.training.arguments import ModelArguments, TrainingArguments, flag_names, parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "run_clm_flax.py": "clm",
    "run_t5_mlm_flax.py": "span_mlm",
    "run_bart_dlm_flax.py": "denoising",
}


def read(objective, *argv):
    return parse(["--output_dir", "out", *argv], objective=objective)


@pytest.mark.parametrize(
    ("objective", "argv", "message"),
    [
        ("clm", ["--block_size", "1"], "--block_size 1: expected at least 2"),
        (
            "clm",
            ["--block_size", "64", "--max_seq_length", "32"],
            "--block_size 64 and --max_seq_length 32 disagree",
        ),
        (
            "clm",
            ["--word_perplexity", "--line_by_line"],
            "--word_perplexity and --bits_per_byte require",
        ),
        ("clm", ["--mlm_probability", "0.2"], "unknown flag --mlm_probability"),
        (
            "span_mlm",
            ["--mlm_probability", "1"],
            "--mlm_probability 1.0: expected a number between",
        ),
        ("span_mlm", ["--mean_noise_span_length", "0.5"], "--mean_noise_span_length 0.5"),
        ("denoising", ["--permute_sentence_ratio", "2"], "--permute_sentence_ratio 2.0"),
        ("denoising", ["--poisson_lambda", "0"], "--poisson_lambda 0.0"),
        ("denoising", ["--poison_lambda", "3"], "did you mean '--poisson_lambda'"),
    ],
)
def test_invalid_value_error_names_the_allowed_values(objective, argv, message):
    with pytest.raises(UsageError) as error:
        read(objective, *argv)
    assert message in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_defaults_of_the_script_and_imports_nothing_heavy(script):
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(ROOT / 'scripts' / script)!r}, '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "print('loaded', *sorted({'jax', 'flax', 'torch', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"
    for field in dataclasses.fields(OBJECTIVES[SCRIPTS[script]]):
        assert f"--{field.name}" in done.stdout
        if isinstance(field.default, float):
            text = re.sub(r"\s+", " ", done.stdout.split(f"--{field.name} ")[1])
            assert text.split("(default: ")[1].startswith(f"{field.default})")


def test_noise_flags_belong_to_their_objective():
    shared = flag_names((ModelArguments, TrainingArguments))
    for objective, part in OBJECTIVES.items():
        assert not flag_names((part,)) & shared, objective


# -- commands of the documentation

PAGES = [
    ("image_classification", "run_image_classification_flax.py", "image_classification.md"),
    ("image_text", "run_clip_flax.py", "image_text.md"),
    ("image_to_text", "run_image_captioning_flax.py", "captioning.md"),
    ("speech_recognition", "run_speech_recognition_flax.py", "speech_recognition.md"),
    ("wav2vec2", "run_wav2vec2_pretrain_flax.py", "speech_pretraining.md"),
    ("ctc", "run_speech_recognition_ctc_flax.py", "speech_pretraining.md"),
    ("token_classification", "run_ner_flax.py", "token_classification.md"),
    ("question_answering", "run_qa_flax.py", "question_answering.md"),
    ("summarization", "run_summarization_flax.py", "summarization.md"),
]


@pytest.mark.parametrize(("objective", "script", "page"), PAGES)
def test_commands_parse_as_they_are_documented(objective, script, page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(rf"python scripts/{script} (.*)", text)
    assert commands
    for command in commands:
        parse(shlex.split(command), objective=objective)


# -- classification


def test_old_column_flags_are_aliases():
    columns = ["--text_column_name", "body", "--label_column_name", "y"]
    data = read("classification", "--train_file", "a.csv", *columns).data
    assert (data.sentence1_column, data.label_column) == ("body", "y")


@pytest.mark.parametrize(
    ("argv", "expected"), [(["--no_quoting"], False), (["--quoting", "True"], True), ([], None)]
)
def test_quoting_is_configurable(argv, expected):
    assert read("classification", "--train_file", "a.csv", *argv).data.quoting is expected


@pytest.mark.slow
def test_a_mistake_ends_with_one_line_and_exit_code_2(tmp_path):
    script = ROOT / "scripts" / "run_classification_flax.py"
    command = [sys.executable, str(script), "--output_dir", str(tmp_path), "--task_name", "colla"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one of cola" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_missing_data_is_an_error():
    from hfseq.data.classification import load_examples

    with pytest.raises(UsageError, match="no data: give --task_name"):
        load_examples(read("classification").data)
