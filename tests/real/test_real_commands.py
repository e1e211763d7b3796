"""The commands of hfseq with pretrained checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hfseq
from hfseq import cli
from tests.real.checkpoints import CHECKPOINTS

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_inspect_finds_no_problem_but_the_missing_pooler(checkpoint, name, capsys):
    code = cli.main(["inspect", str(checkpoint(name)), "--values", "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]
    has_pooler = name != "paraphrase-minilm"
    assert (code, len(problems)) == ((0, 0) if has_pooler else (1, 2))
    assert all("pooler" in problem for problem in problems)


@pytest.mark.parametrize("form", ["safetensors", "msgpack"])
def test_convert_keeps_the_embeddings_of_a_sentence_transformer(checkpoint, form, tmp_path):
    folder, out = checkpoint("minilm"), tmp_path / "converted"
    assert cli.main(["convert", str(folder), str(out), "--to", form]) == 0
    texts = ["How old is the law?", "Fish live in the river."]
    expected = hfseq.FlaxAutoModel.from_pretrained(folder).encode(texts)
    np.testing.assert_array_equal(hfseq.FlaxAutoModel.from_pretrained(out).encode(texts), expected)


def test_embed_writes_the_vectors_of_encode(checkpoint, tmp_path, capsys):
    folder, texts = checkpoint("minilm"), ["How old is the law?", "Fish live in the river."]
    source, out = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("\n".join(texts))
    command = ["embed", str(folder), "--input_file", str(source), "--output_file", str(out)]
    assert cli.main(command) == 0
    expected = hfseq.FlaxAutoModel.from_pretrained(folder).encode(texts)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-6)


def test_fill_mask_writes_words(checkpoint, capsys):
    text = "Paris is the capital of <mask>."
    assert cli.main(["fill-mask", str(checkpoint("splade")), text]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "city"


def test_transcribe_writes_text_and_subtitles(checkpoint, speak, capsys):
    folder = str(checkpoint("whisper-tiny.en"))
    audio = str(speak("The cat sat on the mat, and the dog looked out of the window."))
    assert cli.main(["transcribe", folder, audio]) == 0
    text = capsys.readouterr().out
    assert "dog looked out of the window" in text
    assert cli.main(["transcribe", folder, audio, "--output_format", "srt"]) == 0
    number, times, subtitle = capsys.readouterr().out.strip().splitlines()
    assert (number, times[:17]) == ("1", "00:00:00,000 --> ") and subtitle in text


def test_transcribe_detects_the_language(checkpoint, speak, capsys):
    folder = str(checkpoint("whisper-base"))
    audio = str(speak("Buenos días. Hoy vamos a hablar de la historia de la ciudad.", "es"))
    assert cli.main(["transcribe", folder, audio, "--json"]) == 0
    assert "Buenos" in json.loads(capsys.readouterr().out)["text"]
    assert cli.main(["transcribe", folder, audio, "--task", "translate"]) == 0
    assert "Good morning" in capsys.readouterr().out
