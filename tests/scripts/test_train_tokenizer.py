import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

from hfseq.cli import tokenizer as train_tokenizer


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()
    words = "en lov om å bygge språkmodeller for alle som leser og skriver".split()
    lines = (" ".join(words[i % 7 : i % 5 + 6]) for i in range(300))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    return tmp_path / "corpus.txt"


def run(corpus, output, *flags, model_type="roberta"):
    argv = ["--train_file", str(corpus), "--output_dir", str(output), "--model_type", model_type]
    return train_tokenizer.main([*argv, *flags])


@pytest.mark.parametrize(
    "family", ["roberta", "bart", "gpt2", "bert", "t5", "marian", "blenderbot"]
)
def test_the_directory_serves_auto_tokenizer_and_auto_config(corpus, tmp_path, family):
    from transformers import AutoConfig, AutoTokenizer

    output = tmp_path / "out"
    flags = ("--vocab_size", "300", "--config_name", family)
    assert run(corpus, output, *flags, model_type=family) == 0
    tokenizer, config = AutoTokenizer.from_pretrained(output), AutoConfig.from_pretrained(output)
    assert config.model_type == family
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    starts = {"t5": tokenizer.pad_token_id, "marian": tokenizer.pad_token_id}
    starts |= {"bart": tokenizer.eos_token_id, "blenderbot": tokenizer.bos_token_id}
    if config.is_encoder_decoder:
        assert config.decoder_start_token_id == starts[family]


def test_values_of_the_config_can_be_overridden(corpus, tmp_path):
    flags = ("--vocab_size", "280", "--config_overrides", "hidden_size=64,hidden_act=relu")
    assert run(corpus, tmp_path / "out", *flags) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["hidden_act"]) == (64, "relu")
    assert (config["model_type"], config["vocab_size"]) == ("roberta", 280)


def test_without_a_config_name_no_config_is_written(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "out", "--vocab_size", "5000") == 0
    assert not (tmp_path / "out" / "config.json").exists()
    assert "requested 5000 tokens" in capsys.readouterr().out


def test_a_vocabulary_of_bytes_needs_no_text_and_gets_its_config(tmp_path, capsys):
    argv = ["--model_type", "vq_transformer", "--vocabulary", "bytes", "--output_dir"]
    flags = ("--config_name", "vq_transformer", "--config_overrides", "hidden_size=64")
    assert train_tokenizer.main([*argv, str(tmp_path), *flags]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["pad_token_id"], config["eos_token_id"]) == (259, 0, 1)
    shown = capsys.readouterr().out
    assert "259 tokens" in shown and "were asked for" not in shown
    assert train_tokenizer.main([*argv, str(tmp_path / "x"), "--algorithm", "bpe"]) == 2
    assert "--vocabulary bytes and --algorithm bpe disagree" in capsys.readouterr().err


def test_a_bpe_is_trained_on_one_raw_text(corpus, tmp_path):
    from transformers import AutoTokenizer

    raw = corpus.rename(tmp_path / "enwik8")
    flags = ("--sample_by", "raw", "--vocab_size", "300")
    assert run(raw, tmp_path / "out", *flags, model_type="vq_transformer") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "en lov om\nå bygge \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and len(tokenizer) > 259


def test_existing_tokenizer_is_kept_unless_overwritten(corpus, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(corpus, output, "--vocab_size", "300") == 0
    before = (output / "tokenizer.json").read_bytes()
    assert run(corpus, output, "--vocab_size", "290") == 2
    assert "already has a tokenizer; add --overwrite" in capsys.readouterr().err
    assert (output / "tokenizer.json").read_bytes() == before
    assert run(corpus, output, "--vocab_size", "290", "--overwrite") == 0
    assert (output / "tokenizer.json").read_bytes() != before


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--algorithm", "bbpe"), 2, "algorithm 'bbpe'"),
        (("--vocab_size", "10"), 2, "--vocab_size 10 is too small"),
        (
            ("--config_overrides", "hidden_size"),
            2,
            "--config_overrides hidden_size: use name=value",
        ),
        (("--vocab_size", "300", "--config_overrides", "hiden=3"), 2, "roberta has no hiden"),
        (("--vocab_size", "300", "--config_name", "./nowhere"), 2, "--config_name ./nowhere"),
        (("--text_column_name", "body"), 1, "--text_column_name body"),
        (("--mlm_probability", "7"), 2, "--mlm_probability 7"),
    ],
)
def test_mistakes_end_with_one_line_and_their_exit_code(
    corpus, tmp_path, capsys, flags, code, message
):
    assert run(corpus, tmp_path / "out", *flags) == code
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and "Traceback" not in error


def test_a_stream_trains_the_same_tokenizer(corpus, tmp_path):
    assert run(corpus, tmp_path / "a", "--vocab_size", "300") == 0
    assert run(corpus, tmp_path / "b", "--vocab_size", "300", "--streaming") == 0
    a, b = ((tmp_path / name / "tokenizer.json").read_text() for name in "ab")
    assert a == b


def test_help_runs_as_a_command_and_shows_the_example():
    command = [sys.executable, "scripts/train_tokenizer.py", "--help"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0
    assert "--vocab_size" in result.stdout and "hfseq train" in result.stdout
