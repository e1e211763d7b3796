"""The flags of the scripts: those of Transformers 4, argument files, mistakes, secrets."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq import cli
from hfseq.data.arguments import OBJECTIVES
from hfseq.errors import UsageError
from hfseq.training.arguments import (
    Arguments,
    ModelArguments,
    ProcessArguments,
    TrainingArguments,
    parse,
)
from tests.scripts.v4_flags import CHANGED, GUIDES, OWN_FLAGS, V4

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_mlm_flax.py"
PARTS = (ModelArguments, TrainingArguments, ProcessArguments)


def values(arguments: Arguments) -> dict:
    parts = (arguments.model, arguments.data, arguments.training)
    return {k: v for part in parts for k, v in dataclasses.asdict(part).items()}


#: Flags without a default that take integers.
INTEGERS = {
    *("eval_steps", "max_seq_length", "block_size", "max_train_samples", "max_eval_samples"),
    *("max_predict_samples", "max_source_length", "max_target_length", "val_max_target_length"),
    "preprocessing_num_workers",
}


@pytest.mark.parametrize("objective", V4)
def test_flags_of_v4_have_their_defaults(objective):
    defaults = values(parse(["--output_dir", "out"], objective=objective))
    if objective == "question_answering" and defaults["max_seq_length"] is None:
        from hfseq.objectives.question_answering import QuestionAnswering

        defaults["max_seq_length"] = QuestionAnswering.default_length
    for flag, value in V4[objective].items():
        assert defaults[flag] == CHANGED.get(flag, value), flag


def test_dtype_left_out_is_still_float32():
    assert parse(["--output_dir", "out"]).model.recipe == V4["mlm"]["dtype"]


@pytest.mark.parametrize("objective", V4)
def test_flags_of_v4_take_values_in_the_old_spelling(objective):
    for number, (flag, default) in enumerate(V4[objective].items()):
        if isinstance(default, bool):
            text, expected = str(not default), not default
        elif isinstance(default, float):
            text, expected = ("2.5", 2.5) if default > 1 else ("0.25", 0.25)
        elif isinstance(default, int) or flag in INTEGERS:
            text, expected = "7", 7
        else:
            text = expected = "bfloat16" if flag == "dtype" else "something"
        argv = [f"--{flag}", text] if number % 2 else [f"--{flag}={text}"]
        value = values(parse(["--output_dir", "out", *argv], objective=objective))[flag]
        assert value == ([expected] if isinstance(value, list) else expected), flag


@pytest.mark.parametrize("flag", [name for name, default in V4["mlm"].items() if default is False])
def test_a_switch_of_v4_needs_no_value(flag):
    assert values(parse(["--output_dir", "out", f"--{flag}"]))[flag] is True


@pytest.mark.parametrize("objective", OWN_FLAGS)
def test_every_flag_of_the_v4_script_exists(objective):
    known = {field.name for field in dataclasses.fields(OBJECTIVES[objective])}
    assert set(OWN_FLAGS[objective]) <= known


@pytest.mark.parametrize(
    ("given", "trains", "evaluates"),
    [
        ([], True, True),
        (["--do_train"], True, False),
        (["--do_eval"], False, True),
        (["--do_train", "--do_eval"], True, True),
    ],
)
def test_only_the_named_actions_run(given, trains, evaluates):
    training = parse(["--output_dir", "out", *given]).training
    assert (training.do_train, training.do_eval) == (trains, evaluates)


#: Values after parsing the command of a guide. v4 evaluated every eval_steps without a strategy.
PARSED = {
    "mlm": {
        "learning_rate": 3e-4, "adam_beta2": 0.98, "num_train_epochs": 18, "eval_steps": 2500,
        "eval_strategy": "steps", "overwrite_output_dir": True, "do_eval": True,
        "push_to_hub": True, "dataset_config_name": "nob_Latn", "do_train": True,
    },
    "clm": {
        "block_size": 512, "learning_rate": 5e-3, "num_train_epochs": 20.0,
        "eval_strategy": "steps", "overwrite_output_dir": True, "push_to_hub": True,
    },
    "span_mlm": {
        "max_seq_length": 512, "optim": "adafactor", "num_train_epochs": 3.0, "do_train": True,
        "eval_strategy": "steps", "overwrite_output_dir": True, "push_to_hub": True,
    },
    "denoising": {
        "max_seq_length": 1024, "model_type": None, "mlm_probability": 0.3, "do_train": True,
        "eval_strategy": "steps", "overwrite_output_dir": True, "push_to_hub": True,
    },
    "classification": {
        "task_name": "mrpc", "dataset_name": "nyu-mll/glue", "do_train": True, "do_eval": True,
        "push_to_hub": True, "eval_strategy": "steps", "max_seq_length": 128,
    },
    "image_classification": {
        "train_dir": "imagenette2/train", "augment": True, "do_train": True, "do_eval": True,
        "push_to_hub": True,
    },
    "image_to_text": {"num_beams": 8, "data_dir": "data", "predict_with_generate": True},
    "speech_recognition": {
        "language": "hindi", "text_column_name": "sentence", "validation_split_name": "test",
        "train_split_name": "train+validation",
    },
    "wav2vec2": {
        "audio_column_name": "file", "train_split_name": "train.100",
        "pad_to_multiple_of": 16384, "freeze_feature_extractor": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("objective", GUIDES)
def test_the_command_of_the_old_guide_parses_unchanged(objective):
    arguments = parse(shlex.split(GUIDES[objective])[2:], objective=objective)
    assert PARSED[objective].items() <= values(arguments).items()
    assert objective != "image_to_text" or arguments.data.row_length == 32


@pytest.mark.parametrize("part", [*PARTS, *OBJECTIVES.values()])
def test_every_flag_has_a_help_text(part):
    for field in dataclasses.fields(part):
        assert len(field.metadata.get("help", "")) > 5, field.name


# -- argument files --------------------------------------------------------------------------------

FILE = {
    "output_dir": "out",
    "learning_rate": 3.0e-4,
    "train_file": ["a.txt", "b.txt"],
    "report_to": "jsonl",
    "overwrite_output_dir": True,
    "use_fast_tokenizer": False,
    "max_steps": -1,
    "run_name": None,
}
YAML = """
output_dir: out
learning_rate: 3e-4   # YAML 1.1 reads this as a string
train_file: [a.txt, b.txt]
report_to: jsonl
overwrite_output_dir: true
use_fast_tokenizer: false
max_steps: -1
run_name:
"""


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json"])
def test_a_file_of_arguments_with_overrides_after_it(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps(FILE) if name.endswith("json") else YAML)
    found = values(parse([str(path), "--learning_rate", "1e-3", "--seed=7"]))
    assert found["learning_rate"] == 1e-3 and found["seed"] == 7
    assert found["train_file"] == ["a.txt", "b.txt"] and found["report_to"] == ["jsonl"]
    assert found["overwrite_output_dir"] is True and found["use_fast_tokenizer"] is False
    assert found["max_steps"] == -1 and found["run_name"] is None
    assert values(parse([str(path)]))["learning_rate"] == 3e-4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "learning_rat: 1", "'learning_rat'; did you mean 'learning_rate'?"),
        ("a.json", '{"max_seq_len": 1, "seed": 1}', "'max_seq_len': use --max_seq_length 1"),
        ("a.yaml", "- 1\n- 2", "must map argument names to values"),
        ("a.json", "{", "is not valid json"),
        ("a.yaml", "a: [", "is not valid yaml"),
        ("a.yaml", "seed: 1\nmax_steps: 2\nseed: 3", "duplicate key 'seed'"),
        ("a.json", '{"seed": 1, "seed": 3}', "duplicate key 'seed'"),
        ("a.yaml", "output_dir: x\nlearning_rate: fast", None),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, name, text, message, capsys):
    path = tmp_path / name
    path.write_text(text)
    if message is None:  # found by argparse, which ends the program itself
        with pytest.raises(SystemExit) as stop:
            parse([str(path)])
        printed = capsys.readouterr().err
        assert stop.value.code == 2 and "invalid float value: 'fast'" in printed
        assert str(path) in printed
        return
    with pytest.raises(UsageError) as error:
        parse([str(path)])
    assert message in str(error.value) and str(path) in str(error.value)


def test_evaluation_by_steps_uses_the_logging_interval_as_in_transformers():
    flags = ["--output_dir", "x", "--eval_strategy", "steps", "--logging_steps", "7"]
    assert parse(flags).training.eval_steps == 7
    assert parse([*flags, "--eval_steps", "3"]).training.eval_steps == 3


def test_a_file_that_is_absent_is_named():
    with pytest.raises(UsageError, match="cannot read the argument file nowhere.yaml"):
        parse(["nowhere.yaml"])


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--output_dir is required"),
        (["--output_dir", "out", "--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--output_dir", "out", "--do_train", "stray.txt", "words"], "stray.txt"),
        (["--output_dir", "out", "--max_seq_length", "0"], "--max_seq_length 0"),
    ],
)
def test_wrong_usage_has_exit_code_2(argv, message, capsys):
    try:
        code = cli.main(["train", "mlm", *argv])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and message in capsys.readouterr().err


def test_wrong_usage_of_a_script_ends_with_exit_code_2_and_without_a_traceback():
    command = [sys.executable, str(SCRIPT), "--output_dir", "out", "--learning_rats=1"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert "--learning_rats; did you mean '--learn" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--save_strategy", "daily"], "--save_strategy daily: expected one of no, steps, epoch"),
        (["--save_steps", "0", "--warmup_ratio", "2"], "--save_steps 0"),
        (["--save_steps", "0", "--warmup_ratio", "2"], "--warmup_ratio 2"),
        (["--dtype", "bfloat16", "--precision", "float32"], "--dtype bfloat16 and --precision"),
        (["--device", "npu"], "--device npu: expected one of"),
        (["--on_non_finite", "pray"], "--on_non_finite pray: expected one of stop, skip"),
        (["--num_train_epochs", "0"], "--num_train_epochs"),
        (["--eval_strategy", "step"], "expected one of no, steps, epoch; did you mean 'steps'?"),
        (["--learning_rate", "nan"], "--learning_rate nan: expected 0 or more"),
        (["--dtype", "bf16"], "use --precision for recipes); did you mean 'bfloat16'?"),
    ],
)
def test_invalid_value_error_names_the_allowed_values(argv, message):
    with pytest.raises(UsageError) as error:
        parse(["--output_dir", "out", *argv])
    assert message in str(error.value)


def test_help_imports_neither_jax_nor_torch():
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(SCRIPT)!r}, '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "print('loaded', *sorted({'jax', 'flax', 'torch', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"
    assert "--mlm_probability" in done.stdout and "run_mlm_flax.py --output_dir" in done.stdout


# -- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--token", "--hub_token", "--hub-token", "--use_auth_token"])
@pytest.mark.parametrize("objective", ["mlm", "question_answering"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_token_is_not_a_flag(flag, objective, joined):
    given = [f"{flag}=hf_secret"] if joined else [flag, "hf_secret"]
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        parse(["--output_dir", "out", *given, "--seed", "3"], objective=objective)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["token", "hub_token"])
def test_a_token_does_not_belong_in_a_file_of_arguments(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: out\n{name}: hf_secret\n")
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        parse([str(path)])
    assert "hf_secret" not in str(caught.value)


def test_tokens_are_redacted_in_the_command():
    token = "hf_" + "planted" * 5
    arguments = parse(["--output_dir", "hf_corpus", "--run_name", token])
    assert arguments.command.endswith("--output_dir hf_corpus --run_name <token>")


def test_the_command_can_be_pasted_into_a_shell():
    given = ["--output_dir", "my run", "--train_file", "shards/*.txt"]
    assert shlex.split(parse(given).command)[2:] == given
