"""Transcription of files: windows, subtitles, broken files, bounded memory, and the command."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

import hfseq
from hfseq.cli import main
from hfseq.data.audio import AudioFile
from hfseq.pipelines.speech import to_srt
from tests.data.test_audio import tones
from tests.plugins.test_whisper import ENTRIES
from tests.support.models import whisper_config
from tests.support.task_models import save_whisper

soundfile = pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Whisper with windows of one second, which generates words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperFeatureExtractor

    from hfseq_plugins.whisper.modeling import FlaxWhisperForConditionalGeneration

    folder = tmp_path_factory.mktemp("whisper")
    config = whisper_config(init_std=0.4, max_source_positions=50)
    model = FlaxWhisperForConditionalGeneration(config)
    # A generation configuration derived from the model's lacks the speech entries, as in PyTorch.
    tokens = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 1}
    model.generation_config = GenerationConfig(**tokens, **ENTRIES)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w2", pad_token="w1", unk_token="w0"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    for number, seconds in enumerate((2.6, 0.7, 1.9)):
        soundfile.write(folder / f"{number}.wav", tones(16000, seconds, number), 16000)
    (folder / "3.wav").write_bytes(b"no sound")
    return folder


def test_subtitles():
    chunks = [
        {"text": " Hello", "timestamp": (0, 1.5)},
        {"text": "", "timestamp": (2, 3)},
        {"text": " there", "timestamp": (3661.5, 3662.25)},
    ]
    assert to_srt(chunks) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello\n\n2\n01:01:01,500 --> 01:01:02,250\nthere\n"
    )


@pytest.mark.slow
def test_transcripts_do_not_depend_on_the_batch(checkpoint, files):
    names = [str(files / f"{number}.wav") for number in range(4)]
    observed: list[float] = []
    options = {"language": "en", "max_new_tokens": 12, "return_timestamps": True}
    transcribe = hfseq.pipeline("automatic-speech-recognition", str(checkpoint), **options)
    together = list(transcribe.stream(names, 4, {**options, "on_progress": observed.append}))
    assert together == list(transcribe.stream(names, 1, options))
    assert "unsupported audio format" in together[3].error and together[3].output is None
    assert sum(observed) == pytest.approx(2.6 + 0.7 + 1.9, abs=0.05) and len(observed) > 2
    for answer, seconds in zip(together, (2.6, 0.7, 1.9), strict=False):
        times = [time for chunk in answer.output["chunks"] for time in chunk["timestamp"]]
        assert answer.output["text"] and times == sorted(times) and times[-1] <= seconds


@pytest.mark.slow
def test_the_command_writes_each_format_and_counts_broken_files(checkpoint, files, tmp_path, capfd):
    message = [
        "transcribe",
        str(checkpoint),
        str(files),
        "--language",
        "de",
        "--max_new_tokens",
        "9",
    ]
    for ending in ("txt", "srt", "json"):
        output = ["--output_format", ending, "--output_dir", str(tmp_path)]
        assert main([*message, *output]) == 1
        errors = capfd.readouterr().err
        assert "3.wav: unsupported audio format" in errors
        assert "1 of 4 files could not be transcribed" in errors
        assert sorted(p.stem for p in tmp_path.glob(f"*.{ending}")) == ["0", "1", "2"]
    assert "-->" in (tmp_path / "0.srt").read_text()
    record = json.loads((tmp_path / "0.json").read_text())
    assert record["text"] and record["segments"][0].keys() == {"start", "end", "text"}
    assert (tmp_path / "0.txt").read_text() == record["text"] + "\n"
    assert main([*message, "--json"]) == 1
    printed = capfd.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines()]
    output = ["--output_file", str(tmp_path / "all.jsonl")]
    assert main([*message, "--json", *output]) == 1 and not capfd.readouterr().out
    assert (tmp_path / "all.jsonl").read_text(encoding="utf-8") == printed
    assert main([*message, *output, "--output_dir", str(tmp_path)]) == 2
    assert main([*message, "--no_speech_threshold", "0.6"]) == 2
    assert "logprob_threshold" in capfd.readouterr().err
    assert main([*message, "--prompt", "w8"]) == 2 and "--prompt" in capfd.readouterr().err
    assert lines[0] == record | {"file": lines[0]["file"]} and "error" in lines[3]
    assert main(["transcribe", str(checkpoint), str(tmp_path / "gone.wav")]) == 1
    assert "no such file or directory" in capfd.readouterr().err


@pytest.mark.slow
def test_the_command_decodes_again_and_writes_words(tmp_path, capfd):
    from hfseq_plugins.whisper.decoding import WindowDecoder

    save_whisper(tmp_path / "model")
    soundfile.write(tmp_path / "tones.wav", tones(16000, 2.6, 0), 16000)
    soundfile.write(tmp_path / "silence.wav", np.zeros(32000), 16000)
    files = [str(tmp_path / "tones.wav"), str(tmp_path / "silence.wav")]
    command, options = ["transcribe", str(tmp_path / "model")], ["--json", "--max_new_tokens", "10"]
    prompts, temperatures = [], []
    decode = WindowDecoder._decode_once

    def record(self, states, arguments, temperature):
        prompts.append(arguments["decoder_input_ids"][0].tolist())
        temperatures.append(temperature)
        return decode(self, states, arguments, temperature)

    words = ["--return_timestamps", "word", "--temperature", "0", "0.5", "--logprob_threshold", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowDecoder, "_decode_once", record)
        assert main([*command, files[0], *options, *words]) == 0
    assert set(temperatures) == {0.0, 0.5}
    assert all(prompt[2:] == [ENTRIES["task_to_id"]["transcribe"]] for prompt in prompts)
    output = json.loads(capfd.readouterr().out)
    assert "segments" not in output and len(output["words"]) > 1
    starts = [word["start"] for word in output["words"]]
    assert starts == sorted(starts)

    path = tmp_path / "model" / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "suppress_tokens": [*range(2), *range(3, 40)]}))
    assert main([*command, *files, *options]) == 0
    captured = capfd.readouterr()
    assert [json.loads(line)["text"] for line in captured.out.splitlines()] == ["", ""]
    assert "tones.wav: no text for" in captured.err
    assert "silence.wav" not in captured.err


@pytest.mark.slow
def test_an_hour_is_read_in_bounded_memory(tmp_path):
    with soundfile.SoundFile(tmp_path / "hour.wav", "w", 8000, 1) as file:
        for minute in range(60):
            file.write(tones(8000, 60, minute))
    sound = AudioFile(tmp_path / "hour.wav")
    tracemalloc.start()
    loudest = max(np.abs(sound.read(start * 480000, 480000)).max() for start in range(120))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sound.length == 57600000 and loudest > 0
    assert peak < 6e7  # where the hour has 2.3e8 bytes
