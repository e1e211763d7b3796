"""The flags of the scripts for tasks of text: those of the old ones, and commands as documented."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hfseq.errors import UsageError
from hfseq.training.arguments import parse
from tests.scripts.test_run_mlm_flags import CHANGED as CHANGED_EVERYWHERE
from tests.scripts.test_run_mlm_flags import V4 as MLM
from tests.scripts.test_run_mlm_flags import values

ROOT = Path(__file__).resolve().parents[2]
OBJECTIVES = {
    "run_ner_flax.py": "token_classification",
    "run_qa_flax.py": "question_answering",
    "run_summarization_flax.py": "summarization",
}
GUIDES = {
    "run_ner_flax.py": "token_classification.md",
    "run_qa_flax.py": "question_answering.md",
    "run_summarization_flax.py": "summarization.md",
}

# Transformers 4.57, examples/flax: the flags of each script, with their defaults.
_LM = (
    "mlm_probability",
    "line_by_line",
    "train_ref_file",
    "validation_ref_file",
    "validation_split_percentage",
)
_SHARED = {name: default for name, default in MLM.items() if name not in _LM}
_TABLES = {
    "test_file": None,
    "max_train_samples": None,
    "max_eval_samples": None,
    "max_predict_samples": None,
}


def without(*names):
    return {name: default for name, default in _SHARED.items() if name not in names}


_GONE = ("gradient_checkpointing", "model_type", "use_fast_tokenizer")
V4 = {
    "token_classification": without(*_GONE, "dtype", "pad_to_max_length")
    | _TABLES
    | {"model_revision": "main", "task_name": "ner", "text_column_name": None,
       "label_column_name": None, "label_all_tokens": False, "return_entity_level_metrics": False},
    "question_answering": without(*_GONE)
    | _TABLES
    | {"do_predict": False, "model_revision": "main", "max_seq_length": 384,
       "version_2_with_negative": False, "null_score_diff_threshold": 0.0, "doc_stride": 128,
       "n_best_size": 20, "max_answer_length": 30},
    "summarization": without("max_seq_length", "pad_to_max_length")
    | _TABLES
    | {"do_predict": False, "label_smoothing_factor": 0.0, "text_column": None,
       "summary_column": None, "max_source_length": 1024, "max_target_length": 128,
       "val_max_target_length": None, "source_prefix": None, "predict_with_generate": False,
       "num_beams": 1},
}  # fmt: skip
# Lengths and the stride are those of version 4 where they fit; summaries are always judged.
CHANGED = {name: default for name, (default, _) in CHANGED_EVERYWHERE.items()} | {
    "doc_stride": None,
    "max_source_length": None,
    "max_target_length": None,
    "predict_with_generate": True,
}
FLAGS = [(objective, flag) for objective, flags in V4.items() for flag in flags]
WHOLE = (
    "eval_steps",
    "max_seq_length",
    "preprocessing_num_workers",
    "max_source_length",
    "max_target_length",
    "val_max_target_length",
    "max_train_samples",
    "max_eval_samples",
    "max_predict_samples",
    "doc_stride",
    "n_best_size",
)


def read(objective, *argv):
    return parse(["--output_dir", "out", *argv], objective=objective)


@pytest.mark.parametrize(("objective", "flag"), FLAGS)
def test_a_flag_of_v4_has_its_default(objective, flag):
    expected = CHANGED.get(flag, V4[objective][flag])
    found = values(read(objective))[flag]
    if (objective, flag) == ("question_answering", "max_seq_length"):
        from hfseq.objectives.question_answering import QuestionAnswering

        found = found or QuestionAnswering.default_length
    assert found == expected


@pytest.mark.parametrize(("objective", "flag"), FLAGS)
def test_a_flag_of_v4_takes_a_value_in_the_old_spelling(objective, flag):
    default = V4[objective][flag]
    if isinstance(default, bool):
        given, expected = str(not default), not default
    elif isinstance(default, float):
        given, expected = ("2.5", 2.5) if default > 1 else ("0.25", 0.25)
    elif isinstance(default, int) or flag in WHOLE:
        given, expected = "7", 7
    else:
        given = expected = "bfloat16" if flag == "dtype" else "something"
    found = values(read(objective, f"--{flag}={given}"))[flag]
    assert found == ([expected] if isinstance(found, list) else expected)


@pytest.mark.parametrize("objective", V4)
@pytest.mark.parametrize("flag", ["token", "hub_token", "use_auth_token"])
def test_token_flag_is_rejected_with_advice(objective, flag):
    with pytest.raises(UsageError, match="HF_TOKEN"):
        read(objective, f"--{flag}", "hf_x")


@pytest.mark.parametrize("script", OBJECTIVES)
def test_commands_parse_as_they_are_documented(script):
    text = (ROOT / "docs" / GUIDES[script]).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(rf"python scripts/{script} (.*)", text)
    assert commands
    for command in commands:
        parse(shlex.split(command), objective=OBJECTIVES[script])
