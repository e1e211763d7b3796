"""The flags of the causal, T5 and BART scripts: those of the old ones, and their own defaults."""

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
from tests.scripts.test_run_mlm_flags import CHANGED, values
from tests.scripts.test_run_mlm_flags import V4 as MLM

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "run_clm_flax.py": "clm",
    "run_t5_mlm_flax.py": "span_mlm",
    "run_bart_dlm_flax.py": "denoising",
}

# Transformers 4.56, examples/flax/language-modeling: what each script has instead of, or beside,
# the flags of run_mlm_flax.py, with its defaults.
_NOT = {"gradient_checkpointing", "pad_to_max_length", "line_by_line", "mlm_probability"}
_SHARED = {name: default for name, default in MLM.items() if name not in _NOT}
_REFERENCES = ("train_ref_file", "validation_ref_file", "max_seq_length")
V4 = {
    "clm": {name: default for name, default in _SHARED.items() if name not in _REFERENCES}
    | {
        "block_size": None,
        "keep_linebreaks": True,
        "max_train_samples": None,
        "max_eval_samples": None,
    },
    "span_mlm": _SHARED | {"mlm_probability": 0.15, "mean_noise_span_length": 3.0},
    "denoising": _SHARED
    | {"mlm_probability": 0.3, "permute_sentence_ratio": 1.0, "poisson_lambda": 3.0},
}
FLAGS = [(objective, flag) for objective, flags in V4.items() for flag in flags]

# The commands of the Flax language-modeling guide as they were printed, their corpus aside.
REFERENCES = {
    "clm": """
python run_clm_flax.py \
    --output_dir="./norwegian-gpt2" \
    --model_type="gpt2" \
    --config_name="./norwegian-gpt2" \
    --tokenizer_name="./norwegian-gpt2" \
    --dataset_name="HuggingFaceFW/fineweb-2" \
    --dataset_config_name="nob_Latn" \
    --do_train --do_eval \
    --block_size="512" \
    --per_device_train_batch_size="64" \
    --per_device_eval_batch_size="64" \
    --learning_rate="5e-3" --warmup_steps="1000" \
    --adam_beta1="0.9" --adam_beta2="0.98" --weight_decay="0.01" \
    --overwrite_output_dir \
    --num_train_epochs="20" \
    --logging_steps="500" \
    --save_steps="2500" \
    --eval_steps="2500" \
    --push_to_hub
""",
    "span_mlm": """
python run_t5_mlm_flax.py \
	--output_dir="./norwegian-t5-base" \
	--model_type="t5" \
	--config_name="./norwegian-t5-base" \
	--tokenizer_name="./norwegian-t5-base" \
	--dataset_name="HuggingFaceFW/fineweb-2" \
	--dataset_config_name="nob_Latn" \
	--max_seq_length="512" \
	--per_device_train_batch_size="32" \
	--per_device_eval_batch_size="32" \
	--adafactor \
	--learning_rate="0.005" \
	--weight_decay="0.001" \
	--warmup_steps="2000" \
	--overwrite_output_dir \
	--logging_steps="500" \
	--save_steps="10000" \
	--eval_steps="2500" \
	--push_to_hub
""",
    "denoising": """
python run_bart_dlm_flax.py \
    --output_dir="./norwegian-bart-base" \
    --config_name="./norwegian-bart-base" \
    --tokenizer_name="./norwegian-bart-base" \
    --dataset_name="HuggingFaceFW/fineweb-2" \
    --dataset_config_name="nob_Latn" \
    --max_seq_length="1024" \
    --per_device_train_batch_size="32" \
    --per_device_eval_batch_size="32" \
    --learning_rate="1e-4" \
    --warmup_steps="2000" \
    --overwrite_output_dir \
    --logging_steps="500" \
    --save_steps="2000" \
    --eval_steps="2000" \
    --push_to_hub
""",
}


def read(objective, *argv):
    return parse(["--output_dir", "out", *argv], objective=objective)


@pytest.mark.parametrize(("objective", "flag"), FLAGS)
def test_a_flag_of_v4_has_its_default(objective, flag):
    expected = CHANGED[flag][0] if flag in CHANGED else V4[objective][flag]
    assert values(read(objective))[flag] == expected


@pytest.mark.parametrize(("objective", "flag"), FLAGS)
def test_a_flag_of_v4_takes_a_value_in_the_old_spelling(objective, flag):
    default = V4[objective][flag]
    if isinstance(default, bool):
        given, expected = str(not default), not default
    elif isinstance(default, float):
        given, expected = ("2.5", 2.5) if default > 1 else ("0.25", 0.25)
    elif isinstance(default, int) or flag in (
        *("eval_steps", "max_seq_length", "block_size", "max_train_samples", "max_eval_samples"),
        "preprocessing_num_workers",
    ):
        given, expected = "7", 7
    else:
        given = expected = "bfloat16" if flag == "dtype" else "something"
    found = values(read(objective, f"--{flag}={given}"))[flag]
    assert found == ([expected] if isinstance(found, list) else expected)


@pytest.mark.parametrize("objective", REFERENCES)
def test_the_command_of_the_old_guide_parses_unchanged(objective):
    found = values(parse(shlex.split(REFERENCES[objective])[2:], objective=objective))
    assert found["overwrite_output_dir"] and found["push_to_hub"] and found["do_train"]
    assert found["eval_strategy"] == "steps" and found["dataset_config_name"] == "nob_Latn"
    expected = {
        "clm": {"block_size": 512, "learning_rate": 5e-3, "num_train_epochs": 20.0},
        "span_mlm": {"max_seq_length": 512, "optim": "adafactor", "num_train_epochs": 3.0},
        "denoising": {"max_seq_length": 1024, "model_type": None, "mlm_probability": 0.3},
    }
    assert expected[objective].items() <= found.items()


@pytest.mark.parametrize("objective", V4)
def test_every_flag_has_a_help_text(objective):
    for field in dataclasses.fields(OBJECTIVES[objective]):
        assert len(field.metadata.get("help", "")) > 5, field.name


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
