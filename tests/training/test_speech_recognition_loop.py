"""Runs of Whisper on speech with text."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from tests.support.audio import write_bad_audio
from tests.support.models import whisper_config
from tests.training.conftest import check_resume, check_two_devices, make_runner
from tests.training.test_ctc_loop import write_table

pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Words of tones, and a Whisper for one second of audio with its processors."""
    from transformers import AutoTokenizer, WhisperFeatureExtractor

    from hfseq import FlaxWhisperForConditionalGeneration
    from hfseq.data.tokenizers import train_tokenizer

    path = tmp_path_factory.mktemp("spoken")
    write_table(path, "train", 64)
    write_table(path, "validation", 8, seed=1)
    model = path / "whisper"
    train_tokenizer(["a b c d"] * 9, "gpt2", vocab_size=300, output_dir=model, min_frequency=9)
    words = AutoTokenizer.from_pretrained(model)
    tokens = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "decoder_start_token_id": words.bos_token_id,
        "pad_token_id": words.eos_token_id,
    }
    sizes = {
        "vocab_size": len(words),
        "max_source_positions": 50,
        "max_target_positions": 24,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    FlaxWhisperForConditionalGeneration(whisper_config(**sizes, **tokens)).save_pretrained(model)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(model)
    return path


@pytest.fixture
def listen(folder, tmp_path):
    return make_runner(
        "speech_recognition",
        tmp_path,
        model_name_or_path=folder / "whisper",
        train_file=folder / "train.csv",
        validation_file=folder / "validation.csv",
        chars_to_ignore="!",
        decode_workers=0,
        max_label_length=12,
        global_batch_size=8,
        per_device_eval_batch_size=4,
        learning_rate=2e-3,
        max_steps=3,
        generation_batch_size=8,
    )


@pytest.mark.slow
def test_the_loss_is_that_of_pytorch(listen, folder):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from hfseq.data.audio import AudioFile

    loop = listen(max_steps=1, learning_rate=0.0, predict_with_generate=False)
    theirs = WhisperForConditionalGeneration.from_pretrained(folder / "whisper").eval()
    words = AutoTokenizer.from_pretrained(folder / "whisper")
    extractor = WhisperFeatureExtractor.from_pretrained(folder / "whisper")
    rows = [line.split(",") for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    ids = [[*words(text.lower()[:-1])["input_ids"], words.eos_token_id] for _, text in rows]
    labels = torch.tensor([row + [-100] * (12 - len(row)) for row in ids])
    sounds = [AudioFile(folder / name).read() for name, _ in rows]
    features = extractor(sounds, sampling_rate=16000, return_tensors="pt")["input_features"]
    with torch.no_grad():
        expected = theirs(features, labels=labels).loss.item()
    assert loop.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_step_skips_broken_audio(listen, tmp_path, caplog):
    rows = write_table(tmp_path, "mixed", 6)
    problems = write_bad_audio(tmp_path / "bad")
    del problems["short.wav"]
    rows += [f"bad/{name},A\n" for name in problems]
    rows += ["mixed/000.wav," + "ab" * 60 + "\n"]
    (tmp_path / "mixed.csv").write_text("audio,text\n" + "".join(rows))
    loop = listen(max_steps=1, validation_file=tmp_path / "mixed.csv")
    assert loop.metrics["eval_left_out"] == len(problems) + 1
    assert np.isfinite(loop.metrics["eval_loss"]) and loop.metrics["eval_wer"] > 0
    assert any("tokens exceed the limit of 12" in text for text in caplog.messages)


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(listen, folder):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from hfseq.data.audio import AudioFile

    loop = listen(max_steps=1200, logging_steps=200, warmup_steps=50, learning_rate=2e-3)
    assert loop.metrics["eval_cer"] < 0.1
    theirs = WhisperForConditionalGeneration.from_pretrained(loop.folder).eval()
    words = AutoTokenizer.from_pretrained(loop.folder)
    extractor = WhisperFeatureExtractor.from_pretrained(loop.folder)
    rows = [line.split(",") for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    sounds = [AudioFile(folder / name).read() for name, _ in rows]
    features = extractor(sounds, sampling_rate=16000, return_tensors="pt")["input_features"]
    with torch.no_grad():
        transcripts = words.batch_decode(theirs.generate(features), skip_special_tokens=True)
    right = sum(
        transcript == text.lower()[:-1]
        for transcript, (_, text) in zip(transcripts, rows, strict=True)
    )
    assert right >= 5


@pytest.mark.slow
def test_two_devices_have_the_losses_of_one(listen):
    check_two_devices(listen)


@pytest.mark.slow
def test_resume_is_bit_exact(listen):
    check_resume(listen, save_steps=2, max_steps=4, predict_with_generate=False)


def test_untrainable_data_is_rejected(listen, folder):
    with pytest.raises(UsageError, match="directories contain no transcripts: use tables"):
        listen(train_file=None, train_dir=folder / "train")
    with pytest.raises(UsageError, match="no model: .*--model_name_or_path .*Whisper"):
        listen(model_name_or_path=None, model_type="whisper")
    (folder / "silent.csv").write_text("audio,words\ntrain/000.wav,a\n")
    with pytest.raises(Exception, match="silent.csv has no column 'text'.* audio, words"):
        listen(train_file=folder / "silent.csv")
