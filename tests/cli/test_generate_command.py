"""``hfseq generate``: prompts, generated texts, and wrong options before the model is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import hfseq
from hfseq import cli
from hfseq.errors import UsageError
from hfseq.pipelines.generation import MAX_NEW_TOKENS, TextGeneration
from tests.support import models
from tests.support.translators import save_tiny_t5

PROMPT = "the law of every land"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A tiny random GPT-2 with its tokenizer."""
    from hfseq.data.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("writers") / "gpt2"
    texts = [f"{PROMPT} is read by all who live there, blåbær {i}" for i in range(30)]
    tokenizer = train_tokenizer([texts], "gpt2", None, 300, folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = models.gpt2_config(vocab_size=len(tokenizer), n_layer=1, initializer_range=0.4, **ids)
    hfseq.FlaxGPT2LMHeadModel(config, seed=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("writers") / "t5"
    save_tiny_t5(folder)
    return folder


@pytest.fixture(scope="module")
def writer(gpt2) -> TextGeneration:
    return hfseq.pipeline("text-generation", str(gpt2))


def run(folder: Path, *arguments: str) -> int:
    return cli.main(["generate", str(folder), *arguments])


def test_continuation_matches_generate(gpt2, writer, capsys):
    assert run(gpt2, PROMPT, "--max_new_tokens", "6") == 0
    out = capsys.readouterr().out
    ids = writer.tokenizer(PROMPT, return_tensors="np")["input_ids"]
    expected = np.asarray(writer.model.generate(ids, max_new_tokens=6).sequences)[0, ids.shape[1] :]
    assert out == PROMPT + writer.tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert run(gpt2, PROMPT, "--max_new_tokens", "6", "--continuation_only") == 0
    assert PROMPT + capsys.readouterr().out == out


def test_streaming_prints_the_same_text_piece_by_piece(gpt2, writer, capsys):
    assert run(gpt2, PROMPT, "--max_new_tokens", "6", "--no-stream") == 0
    full_text = capsys.readouterr().out
    assert run(gpt2, PROMPT, "--max_new_tokens", "6", "--stream") == 0
    assert capsys.readouterr().out == full_text
    pieces = list(writer.stream_text(PROMPT, max_new_tokens=6))
    assert len(pieces) > 1 and PROMPT + "".join(pieces) + "\n" == full_text


def test_half_a_character_is_not_printed(writer, monkeypatch):
    ids = writer.tokenizer("blåbær ø")["input_ids"]
    monkeypatch.setattr(
        writer.model, "stream_generate", lambda **_: (np.array([i]) for i in ids), raising=False
    )
    pieces = list(writer.stream_text(PROMPT))
    assert "".join(pieces) == "blåbær ø" and not any("\ufffd" in piece for piece in pieces)


def test_one_prompt_streams_on_a_terminal(gpt2, capsys, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        TextGeneration, "stream_text", lambda self, p, **o: prompts.append(p) or iter(["!"])
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(gpt2, PROMPT, "--max_new_tokens", "2") == 0
    assert prompts == [PROMPT] and capsys.readouterr().out == f"{PROMPT}!\n"


def test_json_has_an_object_for_each_prompt(gpt2, capsys):
    flags = ["--do_sample", "--seed", "5", "--num_return_sequences", "3", "--max_new_tokens", "5"]
    assert run(gpt2, PROMPT, "blåbær", "--json", *flags) == 0
    first = capsys.readouterr().out
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["prompt"] for row in rows] == [PROMPT, "blåbær"]
    assert all(len(row["sequences"]) == 3 for row in rows)
    assert all(sequence["tokens"] <= 5 for row in rows for sequence in row["sequences"])
    assert "blåbær" in first
    assert run(gpt2, PROMPT, "blåbær", "--json", *flags) == 0
    assert capsys.readouterr().out == first
    flags[2] = "6"
    assert run(gpt2, PROMPT, "blåbær", "--json", *flags) == 0
    assert capsys.readouterr().out != first


def test_prompts_come_from_a_file_or_from_standard_input(gpt2, tmp_path, capsys, monkeypatch):
    lines = tmp_path / "prompts.txt"
    lines.write_text("the law\n\nevery land\n", encoding="utf-8")
    short = ["--max_new_tokens", "2", "--json"]
    assert run(gpt2, "--input_file", str(lines), *short) == 0
    rows = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["the law", "every land"]
    assert run(gpt2, "--input_file", str(lines), "--whole_input", *short) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "the law\n\nevery land"

    with lines.open("rb") as file:
        monkeypatch.setattr(
            sys, "stdin", type("In", (), {"fileno": file.fileno, "isatty": lambda: False})
        )
        assert run(gpt2, *short) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_texts_are_written_to_a_file(gpt2, tmp_path, capsys):
    output = tmp_path / "texts.txt"
    short = [PROMPT, "--max_new_tokens", "2"]
    assert run(gpt2, *short, "--output_file", str(output)) == 0
    assert capsys.readouterr().out == ""
    assert run(gpt2, *short) == 0
    assert capsys.readouterr().out == output.read_text(encoding="utf-8")
    assert run(gpt2, *short, "--output_file", str(output), "--stream") == 2
    assert "--output_file" in capsys.readouterr().err


@pytest.mark.slow
def test_an_encoder_decoder_answers(t5, capsys):
    assert run(t5, "the cat", "a dog", "--max_new_tokens", "8") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "== 1 ==" and out[2] == "== 2 ==" and "the cat" not in out[1]


def test_generation_stops_at_the_last_position(writer):
    (output,) = writer(PROMPT, return_details=True)
    length = len(writer.tokenizer(PROMPT)["input_ids"])
    assert output["ended"] or output["num_tokens"] == min(MAX_NEW_TOKENS, 40 - length)
    for answer in (writer, writer.stream_text):
        with pytest.raises(UsageError, match="tokens exceed the model's 40 positions"):
            list(answer(" ".join([PROMPT] * 40)))


def test_an_empty_prompt_begins_with_the_start_token(writer):
    ((row,),) = writer.encode([""], {})
    assert row.ids == [writer.tokenizer.bos_token_id]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["x", "--temperature", "0.5"], "--temperature requires --do_sample"),
        (["x", "--num_return_sequences", "2"], "--num_return_sequences 2 requires --do_sample"),
        (["x", "--num_beams", "0"], "--num_beams 0 must be at least 1"),
        (["x", "--input_file", "f"], "either PROMPT, or --input_file"),
        (["x", "y", "--stream"], "--stream requires one prompt"),
        (["x", "--stream", "--json"], "--stream requires one prompt"),
        (["--input_file", "nowhere"], "--input_file nowhere: No such file"),
        (["x", "--do_sample", "--top_p", "7"], "top_p"),
    ],
)
def test_options_that_cannot_work_are_named(gpt2, flags, message, capsys):
    assert run(gpt2, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_input_that_is_not_text_is_named(gpt2, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(b"good\nb\xffd\n")
    assert run(gpt2, "--input_file", str(tmp_path / "bad")) == 2
    assert "bad:2: invalid UTF-8" in capsys.readouterr().err
    (tmp_path / "empty").write_bytes(b"\n")
    assert run(gpt2, "--input_file", str(tmp_path / "empty")) == 2
    assert "no prompt" in capsys.readouterr().err


def test_a_model_that_does_not_write_is_named(tmp_path, capsys):
    hfseq.FlaxBertModel(models.bert_config()).save_pretrained(tmp_path / "bert")
    assert run(tmp_path / "bert", "x") == 2
    assert "contains BertModel, which has no head ForCausalLM" in capsys.readouterr().err
    assert run(tmp_path / "nowhere", "x") == 1
    assert "nowhere' does not exist" in capsys.readouterr().err
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, "model_type": "roberto"}))
    assert run(tmp_path / "bert", "x") == 2
    assert "did you mean 'roberta'" in capsys.readouterr().err
