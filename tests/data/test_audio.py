"""Audio files: reading parts at any sampling rate, and files that cannot be read."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hfseq.data import audio
from hfseq.errors import DataError, UsageError

soundfile = pytest.importorskip("soundfile")


def tones(rate, seconds, seed=0):
    """A few tones and some noise."""
    random, time = np.random.default_rng(seed), np.arange(round(rate * seconds)) / rate
    wave = sum(np.sin(2 * np.pi * hertz * time) for hertz in random.integers(100, 3000, 5))
    return (0.1 * wave + 0.01 * random.normal(size=time.shape)).astype(np.float32)


@pytest.mark.parametrize("rate", [16000, 8000, 44100, 48000, 11025])
def test_segments_match_the_full_audio_at_any_rate(rate, tmp_path):
    from scipy.signal import resample_poly

    wave = tones(rate, 2.3)
    soundfile.write(tmp_path / "a.wav", np.stack([wave, wave / 2], 1), rate, subtype="FLOAT")
    sound = audio.AudioFile(tmp_path / "a.wav")
    divisor = np.gcd(rate, 16000)
    expected = resample_poly(0.75 * wave, 16000 // divisor, rate // divisor)
    complete = sound.read()
    assert len(complete) == sound.length == len(expected) and abs(sound.seconds - 2.3) < 1e-3
    assert np.abs(complete - expected).max() < 1e-6
    for start, count in [(0, 100), (777, 5000), (sound.length - 50, 100), (sound.length, 5)]:
        assert (
            np.abs(sound.read(start, count) - complete[start : start + count]).max(initial=0) < 1e-6
        )
    if rate != 16000:
        with pytest.raises(audio.UnreadableError, match=f"{rate} Hz, not 16000 Hz"):
            audio.AudioFile(tmp_path / "a.wav", resample=False)


@pytest.mark.parametrize("ending", ["flac", "ogg", "mp3"])
def test_other_formats_and_bytes_are_read(ending, tmp_path):
    wave, path = tones(16000, 1.0), tmp_path / f"a.{ending}"
    soundfile.write(path, wave, 16000)
    expected = audio.AudioFile(path).read(2000, 8000)
    actual = audio.AudioFile(audio.MediaSource("it", path.read_bytes())).read(2000, 8000)
    assert np.array_equal(actual, expected)
    assert np.abs(expected - wave[2000:10000]).mean() < 0.02


def test_unreadable_audio_is_reported(tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros(0, np.float32), 16000)
    soundfile.write(tmp_path / "nan.wav", np.full(99, np.nan, np.float32), 16000, subtype="FLOAT")
    (tmp_path / "text.wav").write_text("this is not audio")
    (tmp_path / "zero.wav").write_bytes(b"")
    for name, message in [
        ("none", "it is empty"),
        ("zero", "it is empty"),
        ("absent", "the file does not exist"),
        ("text", "unsupported audio format"),
    ]:
        with pytest.raises(audio.UnreadableError, match=message):
            audio.AudioFile(tmp_path / f"{name}.wav")
    with pytest.raises(audio.UnreadableError, match="not finite"):
        audio.AudioFile(tmp_path / "nan.wav").read()


def test_folders_are_searched(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.wav", "b/a.FLAC", "b/notes.txt", "b/.hidden.wav"):
        (tmp_path / name).write_bytes(b"")
    actual = audio.find_audio([tmp_path, tmp_path / "b" / "notes.txt"])
    assert [name[len(str(tmp_path)) + 1 :] for name in actual] == [
        "b/a.FLAC",
        "z.wav",
        "b/notes.txt",
    ]
    with pytest.raises(DataError, match="no such file or directory"):
        audio.find_audio([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no audio files"):
        audio.find_audio([tmp_path / "empty"])


def test_a_column_of_datasets_is_not_decoded(tmp_path):
    datasets = pytest.importorskip("datasets")
    wave = tones(16000, 0.5)
    soundfile.write(tmp_path / "a.flac", wave, 16000)
    created = datasets.Dataset.from_dict({"audio": [str(tmp_path / "a.flac")]})
    column = audio.MediaColumn(created.cast_column("audio", datasets.Audio()), "audio", "here")
    assert len(column) == 1 and audio.AudioFile(column[0]).length == 8000


def test_windows_of_spectrograms_are_those_of_the_feature_extractor(tmp_path):
    from transformers import WhisperFeatureExtractor

    extractor, wave = WhisperFeatureExtractor(chunk_length=2), tones(16000, 3.0)
    soundfile.write(tmp_path / "a.wav", wave, 16000, subtype="FLOAT")
    created = audio.Spectrograms([audio.AudioFile(tmp_path / "a.wav")], extractor)
    assert created.shape == (1, 80, 300) and created.ends.tolist() == [300]
    options = {"truncation": False, "padding": "longest", "return_tensors": "np"}
    whole_file = extractor(wave, sampling_rate=16000, **options)["input_features"][0]
    for start, frames in ((0, 200), (100, 200), (250, 50), (299, 1)):
        actual = created.window(0, start, 200)
        assert actual.shape == (80, frames)
        np.testing.assert_allclose(actual, whole_file[:, start : start + 200], atol=2e-5)


def test_missing_soundfile_is_a_usage_error_with_the_command(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", np.zeros(99, np.float32), 16000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UsageError, match=r"pip install 'hfseq\[audio\]'"):
        audio.AudioFile(str(tmp_path / "a.wav"), 16000)
