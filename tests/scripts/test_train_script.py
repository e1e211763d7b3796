"""scripts/train.py: any registered objective, a stranger's too, with the flags of its data."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from hfseq.data.arguments import CausalArguments, DataArguments, TextArguments, option
from hfseq.errors import UsageError
from hfseq.objectives.base import Objective
from hfseq.training import script
from hfseq.training.arguments import parse_with_objective
from tests.support import plugin_files

project = plugin_files.project
OBJECTIVE = """
@hookimpl
def register_objectives(register):
    register("counting", "tests.scripts.test_train_script:Counting")
"""


@dataclass
class CountingArguments(TextArguments):
    """What to count."""

    unit_of_count: str = option("words", "What to count.")


class Counting(Objective):
    name = "counting"
    data_arguments = CountingArguments


def test_the_flags_are_those_of_the_objective(project):
    name, arguments = parse_with_objective(["--objective", "clm", "--output_dir=x", "--append_eos"])
    assert name == "clm" and type(arguments.data) is CausalArguments and arguments.data.append_eos
    assert arguments.command.endswith("--output_dir=x --append_eos --objective clm")
    file = str(plugin_files.write(project / "mine.py", OBJECTIVE))
    flags = ["--plugin", file, "--output_dir", "x", "--unit_of_count", "lines"]
    name, arguments = parse_with_objective([*flags, "--objective", "counting"])
    assert name == "counting" and arguments.data.unit_of_count == "lines"
    assert arguments.training.plugin == [file]
    assert Objective.data_arguments is DataArguments


def test_an_objective_that_is_missing_or_unknown_is_an_error_that_lists_them():
    with pytest.raises(UsageError, match="--objective NAME, one of mlm, clm"):
        parse_with_objective(["--output_dir", "x"])
    with pytest.raises(UsageError, match="--objective: unknown objective 'clmm'.* mean 'clm'"):
        parse_with_objective(["--output_dir", "x", "--objective", "clmm"])


def test_help_needs_no_objective(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_with_objective(["--help"])
    assert ended.value.code == 0
    assert "--objective NAME" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_third_party_objective_trains(project):
    from hfseq.data.tokenizers import train_tokenizer

    (project / "corpus.txt").write_text("en lov om norsk\nlov om en lov\n" * 8, encoding="utf-8")
    train_tokenizer(["en lov om norsk"], "bert", "bpe", 270, project / "tokenizer")
    tiny = "hidden_size=8,num_hidden_layers=1,num_attention_heads=1,intermediate_size=8"
    flags = [
        *(
            "--objective",
            "copying",
            "--plugin",
            str(plugin_files.write_documented_plugin("register_objectives")),
        ),
        *("--output_dir", "copier", "--model_type", "bert", "--tokenizer_name", "tokenizer"),
        *("--config_overrides", tiny, "--train_file", "corpus.txt", "--data_cache_dir", "cache"),
        *("--do_train", "--do_eval", "--max_seq_length", "16", "--global_batch_size", "16"),
        *("--max_steps", "12", "--learning_rate", "0.1", "--warmup_steps", "0"),
        *("--logging_steps", "1", "--report_to", "jsonl", "--validation_split_percentage", "20"),
        *("--compilation_cache_dir", "none", "--card_samples", "0"),
    ]
    assert script.train(None, flags) == 0
    lines = (project / "copier" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train_loss"] for line in lines if "train_loss" in line]
    assert losses[-1] < losses[0] / 2
    assert json.loads((project / "copier" / "eval_results.json").read_text())["eval_loss"] < 3
