"""Flags of the guides in docs/references.md are accepted, or answered with hfseq's flag."""

from __future__ import annotations

import argparse
import functools
import re

import pytest

from hfseq import cli
from hfseq.cli import models, tokenizer
from hfseq.data.arguments import OBJECTIVES, DataArguments
from hfseq.errors import UsageError
from hfseq.training.arguments import (
    ModelArguments,
    ProcessArguments,
    TrainingArguments,
    make_parser,
    parse,
    parse_values,
)
from hfseq.training.flag_names import GUIDE_FLAGS, resolve_flags
from tests.support import guides

# The command of hfseq that each section of the page is about.
SECTIONS = {
    "Flax: the WMT example": "translation",
    "Transformer Engine: the JAX encoder": "classification",
    "Transformer-VQ": "clm",
    "Translate AI": "translation",
}
OTHER_PROGRAMS = re.compile(r"^(?!--|.*\.py\b)|^numactl|--accelerator-type")


@functools.cache
def parser_of(command: str) -> argparse.ArgumentParser:
    if command in OBJECTIVES:
        return make_parser(
            (ModelArguments, OBJECTIVES[command], TrainingArguments, ProcessArguments)
        )
    if command == "tokenizer":
        return make_parser((tokenizer.TokenizerArguments, DataArguments))
    if command == "run_bert_flax.py":
        command = "fill-mask"  # which has the flag --precision, too
    if command == "translate.py":
        parser = argparse.ArgumentParser()
        models.add_translate(parser, aliases=True)
        return parser
    commands = next(a for a in cli.build_parser()._actions if a.choices)
    return commands.choices[command]


def commands_of_the_guides() -> list[tuple[str, list[str]]]:
    """Return pairs of the command of hfseq and the flags of the guide."""
    found = [(command.objective or command.script, command.flags) for command in guides.COMMANDS]
    for section in re.split(r"(?m)^## ", guides.PAGE.read_text(encoding="utf-8"))[1:]:
        title = section.partition("\n")[0]
        for row in re.findall(r"(?m)^\| (.*?) \| ", section) if title in SECTIONS else ():
            for code in re.findall(r"`([^`]*)`", row):
                if not OTHER_PROGRAMS.search(code):
                    name = "translate.py" if "translate.py" in code else SECTIONS[title]
                    found.append((name, code.split()))
    return found


def test_every_flag_of_a_guide_is_accepted_or_answered_with_flags_that_exist():
    answered = set()
    for command, words in commands_of_the_guides():
        parser = parser_of(command)
        for position, word in enumerate(words):
            if not word.startswith("--"):
                continue
            name = word.partition("=")[0]
            value = [w for w in words[position + 1 : position + 2] if not w.startswith("--")]
            try:
                resolve_flags([word, *value], parser)
            except UsageError as error:
                hint = str(error).partition(f"unknown flag {name}: ")[2]
                named = re.findall(r"--[a-z]\w*", hint)
                assert named and set(named) <= parser._option_string_actions.keys(), str(error)
                answered.add(name)
    assert len(answered) > 40 and {"--use-fp8", "--mode", "--config", "--workdir"} <= answered


def test_a_guide_s_flag_is_never_answered_with_another_flag_of_similar_spelling():
    for command in (*OBJECTIVES, "tokenizer", "translate", "generate", "combine"):
        parser = parser_of(command)
        for name in GUIDE_FLAGS:
            try:
                (resolved,) = resolve_flags([f"--{name}"], parser)
                assert resolved.replace("-", "_").startswith(f"__{name}"), (command, resolved)
            except UsageError as error:
                assert "did you mean" not in str(error) and "ambiguous" not in str(error)


@pytest.mark.parametrize(
    ("objective", "word", "hint"),
    [
        ("translation", "--mixed-precision=bf16", "use --precision bfloat16"),
        ("translation", "--num-layers=2", "encoder_layers=2,decoder_layers=2"),
        ("mlm", "--num-layers=2", "num_hidden_layers=2"),
        ("clm", "--seq-len=2", "use --block_size 2"),
        ("mlm", "--seq-len=2", "use --max_seq_length 2"),
        ("classification", "--use-fp8", "use --precision fp8_delayed"),
        ("clm", "--config.use_fp8=False", "omit it"),
        ("clm", "--config.seed=3", "use --seed 3"),
        ("clm", "--mode=train_vocab", "hfseq tokenizer --model_type vq_transformer"),
        ("clm", "--mode=train", "use --do_train"),
        ("clm", "--mode=validation", "use --do_eval --validation_file"),
        ("clm", "--mode=test", "use --do_predict --test_file"),
        ("clm", "--multihost=True", "use --distributed"),
        ("clm", "--eval-iters=10", "use --max_eval_batches 10"),
        ("clm", "--config.lerning_rate=1", "did you mean '--learning_rate'?"),
        ("clm", "--save=1", "ambiguous flag --save: use one of --save_strategy, --save_steps"),
    ],
)
def test_hints_have_the_value_and_need_no_output_directory(objective, word, hint):
    with pytest.raises(UsageError) as error:
        parse([word], objective=objective)
    assert hint in str(error.value) and "is required" not in str(error.value)
    listed = [flag.replace("-", "_") for flag in re.findall(r"--[a-z][\w-]*", str(error.value))]
    assert len(listed) == len(set(listed)), "a flag is listed in one spelling"


def test_abbreviations_and_dashes_are_the_flag():
    words = ["--output-d", "x", "--per_device_tr=4", "--no_augm", "--", "--use-fp8"]
    expected = ["--output_dir", "x", "--per_device_train_batch_size=4", "--no_augment"]
    parser = parser_of("image_classification")
    assert resolve_flags(words, parser)[:4] == expected
    assert resolve_flags(words, parser)[4:] == ["--", "--use-fp8"]
    assert resolve_flags(["--no-str"], parser_of("generate")) == ["--no-stream"]
    assert resolve_flags(["-- a text"], parser_of("generate")) == ["-- a text"]
    assert resolve_flags(["--english_query=a"], parser_of("translate.py")) == ["--english-query=a"]


def test_hints_are_given_for_files_of_flags_and_by_the_commands(capsys):
    with pytest.raises(UsageError, match="'use_fp8': use --precision fp8_delayed"):
        parse_values({"use_fp8": True}, "clm")
    assert cli.main(["translate", "m", "--seq-len", "5", "--nonsense", "--beams", "2"]) == 2
    printed = capsys.readouterr().err
    for part in ("--seq-len: use --max_source_length 5", "--nonsense\n", "mean '--num_beams'?"):
        assert part in printed
    assert cli.main(["plan", "--use-fp8"]) == 2, "without the flags that are required"
    assert "use --precision fp8_delayed" in capsys.readouterr().err
