import dataclasses

import pytest

from hfseq.data.arguments import CausalArguments, DataArguments
from hfseq.errors import UsageError


def parse(*argv):
    from transformers import HfArgumentParser

    return HfArgumentParser(DataArguments).parse_args_into_dataclasses(list(argv))[0]


def test_defaults_are_those_of_version_4():
    arguments = parse()
    assert arguments.validation_split_percentage == 5
    assert arguments.mlm_probability == 0.15
    assert arguments.max_seq_length is None
    assert not (arguments.line_by_line or arguments.pad_to_max_length or arguments.overwrite_cache)


def test_files_are_accepted_repeatedly_or_as_a_list():
    assert parse("--train_file=a.txt").train_file == ["a.txt"]
    assert parse("--train_file", "a.txt", "b.txt").train_file == ["a.txt", "b.txt"]


def test_every_flag_has_help():
    for field in dataclasses.fields(DataArguments):
        assert field.metadata["help"].strip()


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({"validation_split_percentage": 100}, "--validation_split_percentage 100"),
        ({"mlm_probability": 0.0}, "--mlm_probability 0.0"),
        ({"sample_by": "word"}, "--sample_by word"),
        ({"max_seq_length": 0}, "--max_seq_length 0"),
        ({"max_train_samples": -1}, "--max_train_samples -1"),
        ({"dataset_name": "d", "train_file": ["f.txt"]}, "--dataset_name and --train_file"),
        ({"streaming": True, "train_ref_file": "r"}, "--streaming"),
    ],
)
def test_impossible_values_are_usage_errors_that_name_the_flag(flags, options):
    with pytest.raises(UsageError, match=options):
        DataArguments(**flags)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({"train_file": ["a.npy"], "streaming": True}, "arrays .* drop --streaming"),
        ({"validation_file": ["a.NPZ"], "line_by_line": True}, "and --line_by_line"),
        ({"train_file": ["a.npy"], "append_eos": True}, "--append_eos appends .* each document"),
        ({"train_file": ["a"], "sample_by": "raw", "append_eos": True}, "--append_eos appends"),
    ],
)
def test_raw_data_rejects_document_flags(flags, options):
    with pytest.raises(UsageError, match=options):
        CausalArguments(**flags)


def test_all_problems_are_reported_at_once():
    with pytest.raises(UsageError, match="mlm_probability.*sample_by"):
        DataArguments(mlm_probability=2.0, sample_by="x")


def test_cache_directory_is_the_flag_then_the_environment_then_home(monkeypatch):
    monkeypatch.setenv("HFSEQ_CACHE", "/from/environment")
    assert str(DataArguments(data_cache_dir="/flag").cache_directory) == "/flag"
    assert str(DataArguments().cache_directory) == "/from/environment"
    monkeypatch.delenv("HFSEQ_CACHE")
    assert DataArguments().cache_directory.parts[-2:] == (".cache", "hfseq")
