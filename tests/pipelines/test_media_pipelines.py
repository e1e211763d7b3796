"""Pipelines for images and audio compared with those of Transformers 5."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import transformers

import hfseq
from hfseq.errors import CheckpointError, UsageError
from tests.pipelines.test_tasks import check_equal
from tests.support.task_models import save_media_models

pytest.importorskip("PIL")
soundfile = pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models with random weights and their processors, images and audio files."""
    root = tmp_path_factory.mktemp("media")
    save_media_models(root)
    return root


def ours(folder: Path, task: str, name: str, inputs, options, **arguments):
    return hfseq.pipeline(task, str(folder / name), batch_size=3, **arguments)(inputs, **options)


CASES = [
    ("image-classification", "vit", ["0.png"], {}),
    ("image-classification", "vit", ["0.png", "1.png", "2.png", "3.png"], {"top_k": 2}),
    ("image-classification", "vit", ["0.png"], {"function_to_apply": "sigmoid"}),
    ("image-feature-extraction", "features", ["0.png"], {}),
    ("image-feature-extraction", "features", ["1.png", "2.png"], {"pool": True}),
    ("zero-shot-image-classification", "clip", ["0.png", "1.png"],
     {"candidate_labels": ["river", "law", "a small company"]}),
    ("automatic-speech-recognition", "ctc", ["0.wav"], {}),
    ("automatic-speech-recognition", "ctc", ["4.wav"], {"return_timestamps": "char"}),
    ("automatic-speech-recognition", "ctc", ["4.wav"], {"return_timestamps": "word"}),
    ("automatic-speech-recognition", "ctc-group", ["0.wav", "1.wav"], {}),
    ("automatic-speech-recognition", "ctc-group", ["4.wav"],
     {"chunk_length_s": 0.6, "return_timestamps": "char"}),
    ("automatic-speech-recognition", "ctc", ["4.wav"],
     {"chunk_length_s": 0.5, "stride_length_s": 0.1}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # theirs
def test_answers_are_those_of_transformers(folder):
    pytest.importorskip("torch")
    pipelines = functools.cache(lambda *names: hfseq.pipeline(*names, batch_size=3))
    their_pipelines = functools.cache(transformers.pipeline)
    for task, name, files, options in CASES:
        inputs = [str(folder / file) for file in files]
        if task == "automatic-speech-recognition":  # theirs needs ffmpeg for files
            inputs = [soundfile.read(file, dtype="float32")[0] for file in inputs]
        inputs = inputs if len(inputs) > 1 else inputs[0]
        theirs = their_pipelines(task, str(folder / name))(inputs, **options)
        theirs = json.loads(json.dumps(theirs, default=float))
        mine = json.loads(json.dumps(pipelines(task, str(folder / name))(inputs, **options)))
        check_equal(mine, theirs, f"{task}, {name}, {options}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("number", [0, 4], ids=["short", "long"])
@pytest.mark.parametrize("timestamps", [None, True, "word"])
def test_transcripts_are_those_of_transformers(folder, number, timestamps):
    """Timestamps of segments differ: theirs depend on windows of 30 seconds."""
    pytest.importorskip("torch")
    if number and not timestamps:
        pytest.skip("Transformers requires timestamps for long audio")
    task, whisper = "automatic-speech-recognition", str(folder / "whisper")
    samples = soundfile.read(folder / f"{number}.wav", dtype="float32")[0]
    options = {"generate_kwargs": {"language": "en", "max_new_tokens": 10}}
    if timestamps:
        options["return_timestamps"] = timestamps
    theirs = transformers.pipeline(task, whisper)(samples, **options)
    mine = hfseq.pipeline(task, whisper)(samples, **options)
    assert mine["text"] == theirs["text"] != ""
    if timestamps:
        assert "".join(chunk["text"] for chunk in mine["chunks"]) == mine["text"]
        times = [time for chunk in mine["chunks"] for time in chunk["timestamp"]]
        assert times == sorted(times) and times[-1] <= len(samples) / 16000
    if timestamps == "word":  # of several windows, theirs joins the first and last words
        expected = [time for chunk in theirs["chunks"] for time in chunk["timestamp"]]
        assert all(np.abs(np.subtract(times, time)).min() < 0.021 for time in expected)
        assert number or [chunk["text"] for chunk in mine["chunks"]] == [
            chunk["text"] for chunk in theirs["chunks"]
        ]


def test_images_and_audio_are_accepted_in_every_form(folder):
    from PIL import Image

    classify = hfseq.pipeline("image-classification", str(folder / "vit"), top_k=1)
    file = folder / "0.png"
    expected = classify(str(file))
    pixels = np.asarray(Image.open(file))
    forms = [file, file.read_bytes(), Image.open(file), pixels, {"path": str(file)}]
    assert [classify(form) for form in forms] == [expected] * len(forms)
    check_equal(list(classify(iter(forms))), [expected] * len(forms))

    class Files:  # such as KeyDataset, which has no __iter__
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> str:
            if index >= len(self):
                raise IndexError(index)
            return str(file)

    check_equal(list(classify(Files())), [expected] * 2)
    transcribe = hfseq.pipeline(None, str(folder / "ctc"))
    file = folder / "1.wav"
    samples, rate = soundfile.read(file, dtype="float32")
    forms = [file, file.read_bytes(), samples, {"raw": samples, "sampling_rate": rate}]
    forms.append({"array": np.stack([samples, samples]), "sampling_rate": rate})
    assert [transcribe(form) for form in forms] == [transcribe(str(file))] * len(forms)
    half = {"array": samples[::2], "sampling_rate": 8000}
    assert transcribe(half)["text"]
    with pytest.raises(UsageError, match="8000 Hz, not 16000 Hz"):
        transcribe(half, resample=False)


@pytest.mark.parametrize(
    ("task", "name", "inputs", "options", "message"),
    [
        ("image-classification", "vit", ["0.png", "broken.png"], {}, "input 2: unsupported image"),
        ("image-classification", "vit", ["none.png"], {}, "input 1: "),
        ("image-classification", "vit", [5], {}, "input 1: it must be a path, a URL"),
        ("image-classification", "features", ["0.png"], {}, "has no head ForImageClassification"),
        ("image-feature-extraction", "ctc", ["0.png"], {}, "does not read images"),
        ("zero-shot-image-classification", "clip", ["0.png"], {}, "candidate_labels is required"),
        ("zero-shot-image-classification", "features", ["0.png"], {}, "compare images with texts"),
        ("automatic-speech-recognition", "ctc", ["broken.wav"], {}, "unsupported audio format"),
        ("automatic-speech-recognition", "ctc", [{"array": [0.0]}], {}, "sampling_rate"),
        ("automatic-speech-recognition", "ctc", ["0.wav"], {"return_timestamps": True}, "'char'"),
        ("automatic-speech-recognition", "whisper", ["0.wav"], {"return_timestamps": "char"},
         "return_timestamps='char'"),
        ("automatic-speech-recognition", "whisper", ["0.wav"], {"chunk_length_s": 5}, "CTC"),
        ("image-to-text", "vit", ["0.png"], {}, "vit"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_named(folder, task, name, inputs, options, message):
    inputs = [str(folder / item) if isinstance(item, str) else item for item in inputs]
    with pytest.raises((UsageError, CheckpointError), match=message):
        ours(folder, task, name, inputs, options)


def test_an_error_of_a_generator_follows_the_answers_before_it(folder):
    def files():
        yield str(folder / "0.png")
        raise OSError("the disk is gone")

    classify = hfseq.pipeline("image-classification", str(folder / "vit"), batch_size=1)
    answers = classify(files())
    assert next(answers)
    with pytest.raises(OSError, match="the disk is gone"):
        next(answers)
    assert classify([]) == []


def test_devices_are_named_as_in_transformers(folder):
    import jax

    name = str(folder / "vit")
    for device in ("cpu", -1, 0, "cpu:1", jax.devices()[1]):
        classify = hfseq.pipeline("image-classification", name, device=device)
        assert classify(str(folder / "0.png"))
        assert classify.device.platform == "cpu"
    assert classify.device == jax.devices()[1]
    for device in ("cuda:0", 99, "tpu"):
        with pytest.raises(UsageError, match=f"device {device!r} does not exist"):
            hfseq.pipeline("image-classification", name, device=device)
    assert "task='image-classification', model=FlaxViTForImageClassification" in repr(classify)


def test_tasks_are_those_of_the_class_of_the_checkpoint(folder):
    tasks = {"vit": "image-classification", "whisper": "automatic-speech-recognition"}
    for name, task in tasks.items():
        assert hfseq.pipeline(model=str(folder / name)).task == task
    with pytest.raises(UsageError, match="ViTModel does not define a task"):
        hfseq.pipeline(model=str(folder / "features"))
    with pytest.raises(UsageError, match="model= is required"):
        hfseq.pipeline("fill-mask")
