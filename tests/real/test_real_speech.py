"""Whisper with pretrained weights hears what PyTorch hears: tokens, times and languages."""

from __future__ import annotations

import functools
import json
import shutil
import zlib

import numpy as np
import pytest

import hfseq
from hfseq.data.audio import AudioFile
from tests.support.models import close

pytestmark = [pytest.mark.network, pytest.mark.slow]

SENTENCE = "The cat sat on the mat, and the dog looked out of the window. It was a cold morning."
#: The start of "Pride and Prejudice" (Jane Austen, 1813): 50 seconds, two windows.
NOVEL = """
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be
in want of a wife. However little known the feelings or views of such a man may be on his first
entering a neighbourhood, this truth is so well fixed in the minds of the surrounding families, that
he is considered the rightful property of some one or other of their daughters. My dear Mr. Bennet,
said his lady to him one day, have you heard that Netherfield Park is let at last? Mr. Bennet
replied that he had not. But it is, returned she; for Mrs. Long has just been here, and she told me
all about it. Mr. Bennet made no answer. Do you not want to know who has taken it? cried his wife
impatiently. You want to tell me, and I have no objection to hearing it. This was invitation enough.
"""
SPANISH = "Buenos días. Hoy vamos a hablar de la historia de la ciudad y de sus habitantes."
GERMAN = "Guten Morgen. Heute sprechen wir über die Geschichte der Stadt und ihrer Bewohner."
#: Numbers that make whisper-tiny.en repeat itself until the end of the window.
NUMBERS = " ".join("20 8 88 8 18 80 28 8 8 82 8 18 8 8 80 8 8".split() * 4)


class Pair:
    """A model of hfseq and the model of PyTorch with the same weights."""

    def __init__(self, folder):
        from transformers import (
            AutoTokenizer,
            WhisperFeatureExtractor,
            WhisperForConditionalGeneration,
        )

        self.ours = hfseq.FlaxAutoModelForSpeechSeq2Seq.from_pretrained(folder)
        self.theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def features(self, *files, long=False):
        """Returns the inputs of `generate`."""
        options = {"truncation": False, "padding": "longest"} if long else {}
        samples = [AudioFile(file).read() for file in files]
        return dict(
            self.extractor(
                samples,
                sampling_rate=16000,
                return_tensors="np",
                return_attention_mask=True,
                **options,
            )
        )

    def generate(self, features, torch_options=(), **options):
        """Returns the outputs of both models."""
        import torch

        torch.manual_seed(0)
        inputs = {name: torch.from_numpy(value) for name, value in features.items()}
        if "prompt_ids" in options:
            inputs["prompt_ids"] = torch.from_numpy(options["prompt_ids"])
        return self.ours.generate(**{**features, **options}), self.theirs.generate(
            **{**options, **inputs, **dict(torch_options)}
        )

    def assert_equal_tokens(self, features, **options):
        """Asserts that short audio has the same tokens, and returns the texts."""
        # PyTorch returns the prompt only with this option.
        torch_options = {"force_unique_generate_call": True}
        actual, expected = self.generate(features, torch_options, **options)
        actual, width = np.asarray(actual.sequences), expected.shape[1]
        assert actual[:, :width].tolist() == expected.tolist()
        assert (actual[:, width:] == self.ours.generation_config.pad_token_id).all()
        return self.tokenizer.batch_decode(actual, skip_special_tokens=True)

    def assert_equal_segments(self, features, **options):
        """Asserts that segments have the same times and tokens, and returns those of a row."""
        options = {"return_timestamps": True, "return_segments": True, **options}
        actual, expected = self.generate(features, **options)
        assert rounded(actual.segments) == rounded(expected["segments"])
        return rounded(actual.segments)[0]

    def text(self, segments):
        tokens = [token for _, _, tokens in segments for token in tokens]
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def rounded(segments):
    def row(segment):
        start, end = (round(float(segment[name]), 3) for name in ("start", "end"))
        return start, end, np.asarray(segment["tokens"]).tolist()

    return [list(map(row, segments_of_row)) for segments_of_row in segments]


@pytest.fixture(scope="module")
def pair(checkpoint):
    return functools.cache(lambda name: Pair(checkpoint(name)))


@pytest.fixture(scope="module")
def tiny(pair):
    return pair("whisper-tiny.en")


@pytest.fixture(scope="module")
def base(pair):
    return pair("whisper-base")


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_states_and_logits_equal_pytorch(pair, speak, name):
    import torch

    models = pair(name)
    features = models.features(speak(SENTENCE))["input_features"]
    ids = np.asarray([models.tokenizer(SENTENCE).input_ids])
    actual = models.ours(features, decoder_input_ids=ids, output_hidden_states=True)
    with torch.no_grad():
        expected = models.theirs(
            torch.from_numpy(features),
            decoder_input_ids=torch.from_numpy(ids),
            output_hidden_states=True,
        )
    # Layers with activations of up to 500 amplify rounding errors.
    for side in ("encoder_hidden_states", "decoder_hidden_states"):
        for ours, states in zip(actual[side], expected[side], strict=True):
            assert close(ours, states.numpy(), 5e-5)
    assert close(actual.logits, expected.logits.numpy())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"return_timestamps": True},
        {"return_timestamps": True, "num_beams": 3},
    ],
    ids=["greedy", "beams", "timestamps", "beams and timestamps"],
)
def test_tokens_of_short_audio_equal_pytorch(tiny, speak, options):
    features = tiny.features(speak(SENTENCE), speak("Good morning to all of you.", "en-gb", 140))
    del features["attention_mask"]
    first, second = tiny.assert_equal_tokens(features, **options)
    assert "the dog looked out of the window" in first and "morning" in second


def test_tokens_after_a_prompt_equal_pytorch(tiny, speak):
    prompt = tiny.tokenizer.get_prompt_ids("Mr. Bennet of Netherfield Park.", return_tensors="np")
    features = tiny.features(speak("Mr. Bennet lives close to Netherfield Park."))
    del features["attention_mask"]
    (text,) = tiny.assert_equal_tokens(features, prompt_ids=prompt)
    assert "Netherfield" in text


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"condition_on_prev_tokens": True}],
    ids=["greedy", "beams", "conditioned on the previous text"],
)
def test_segments_of_long_audio_equal_pytorch(tiny, speak, options):
    features = tiny.features(speak(NOVEL), long=True)
    assert features["input_features"].shape[2] > 4500
    text = tiny.text(tiny.assert_equal_segments(features, **options))
    assert "a single man in possession of a good fortune" in text
    assert "I have no objection to hearing it" in text


def test_a_batch_of_long_and_short_audio_equals_pytorch(tiny, speak):
    features = tiny.features(speak(NOVEL), speak(SENTENCE), long=True)
    tiny.assert_equal_segments(features)


@pytest.mark.parametrize("timestamps", [True, "word"], ids=["segments", "words"])
def test_the_pipeline_returns_the_chunks_of_transformers(checkpoint, speak, timestamps):
    import transformers

    folder, audio = str(checkpoint("whisper-tiny.en")), AudioFile(speak(NOVEL)).read()
    options = {"return_timestamps": timestamps, "generate_kwargs": {"num_beams": 1}}
    task = "automatic-speech-recognition"
    actual = hfseq.pipeline(task, folder)(audio, **options)
    expected = transformers.pipeline(task, folder)(audio.copy(), **options)
    assert actual["text"] == expected["text"]
    rows = [
        [
            (chunk["text"], *(round(float(time), 2) for time in chunk["timestamp"]))
            for chunk in chunks
        ]
        for chunks in (actual["chunks"], expected["chunks"])
    ]
    assert rows[0] == rows[1]


# -- whisper-base, which is multilingual -----------------------------------------------------------

SPEECH = {"en": (SENTENCE, "en-us"), "es": (SPANISH, "es"), "de": (GERMAN, "de")}


@pytest.fixture(scope="module")
def spoken_languages(base, speak):
    features = base.features(*(speak(text, voice) for text, voice in SPEECH.values()))
    return {"input_features": features["input_features"]}


def test_languages_are_detected_as_by_pytorch(base, spoken_languages):
    import torch

    ours = base.ours.detect_language(spoken_languages["input_features"])
    theirs = base.theirs.detect_language(torch.from_numpy(spoken_languages["input_features"]))
    assert np.asarray(ours).tolist() == theirs.tolist()
    names = {token: name for name, token in base.ours.generation_config.lang_to_id.items()}
    assert [names[int(token)] for token in ours] == [f"<|{name}|>" for name in SPEECH]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"task": "transcribe", "return_timestamps": True},
        {"task": "translate"},
        {"language": ["english", "spanish", "de"]},
        {"language": "de", "num_beams": 2},
    ],
    ids=["detected", "timestamps", "translate", "languages", "one language, beams"],
)
def test_tokens_of_several_languages_equal_pytorch(base, spoken_languages, options):
    texts = base.assert_equal_tokens(spoken_languages, max_new_tokens=40, **options)
    if options.get("task") == "translate":
        assert "Good morning" in texts[1] and "Good morning" in texts[2]
    elif "num_beams" not in options:
        assert "the window" in texts[0] and "Buenos" in texts[1] and "Guten Morgen" in texts[2]


# -- fallback to higher temperatures ---------------------------------------------------------------

#: So close to zero that sampling selects the most likely token.
ALMOST_ZERO = 1e-4
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def test_thresholds_that_hold_change_nothing(tiny, speak):
    options = {"compression_ratio_threshold": 2.4, "logprob_threshold": -1.0}
    features = tiny.features(speak(NOVEL), long=True)
    with_fallback = tiny.assert_equal_segments(
        features, temperature=TEMPERATURES, no_speech_threshold=0.6, **options
    )
    assert with_fallback == tiny.assert_equal_segments(features)


@pytest.mark.parametrize(
    "threshold",
    [{"compression_ratio_threshold": 0.1}, {"logprob_threshold": 0.0}],
    ids=lambda threshold: next(iter(threshold)),
)
def test_windows_that_miss_a_threshold_are_decoded_again(tiny, speak, threshold):
    """All windows miss the threshold, so beam search is replaced by sampling."""
    features = tiny.features(speak(NOVEL), long=True)
    options = {"num_beams": 3, "max_new_tokens": 60}
    beams = tiny.assert_equal_segments(features, temperature=(0.0,), **threshold, **options)
    sampled = tiny.assert_equal_segments(
        features, temperature=(0.0, ALMOST_ZERO), **threshold, **options
    )
    greedy = tiny.assert_equal_segments(features, max_new_tokens=60)
    assert sampled == greedy != beams


def test_windows_without_speech_are_skipped(tiny, speak):
    speech = AudioFile(speak(SENTENCE)).read()
    noise = 0.01 * np.random.default_rng(0).normal(size=35 * 16000).astype(np.float32)
    features = dict(
        tiny.extractor(
            np.concatenate([noise, speech]),
            sampling_rate=16000,
            return_tensors="np",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
    )
    options = {"logprob_threshold": 0.0, "no_speech_threshold": 0.8, "max_new_tokens": 60}
    segments = tiny.assert_equal_segments(features, temperature=(0.0,), **options)
    assert segments[0][0] >= 30 and "the dog looked out of the window" in tiny.text(segments)


def test_fallback_ends_repetitions(tiny, speak):
    features = tiny.features(speak(NUMBERS))
    options = {"return_timestamps": True, "return_segments": True, "max_new_tokens": 200}
    thresholds = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0}
    repeated = tiny.ours.generate(**features, **options)
    fallback = tiny.ours.generate(**features, temperature=TEMPERATURES, **thresholds, **options)
    ratios = [compression_ratio(output.sequences[0]) for output in (repeated, fallback)]
    assert ratios[0] > 8 and ratios[0] > 1.5 * ratios[1]


def compression_ratio(tokens):
    content = np.asarray(tokens, np.uint16).tobytes()
    return len(content) / len(zlib.compress(content))


# -- checkpoints that are fine-tuned ---------------------------------------------------------------


def test_transcripts_without_forced_decoder_ids_are_not_empty(checkpoint, speak, tmp_path):
    """Recipes for fine-tuning remove `forced_decoder_ids`, which select the task."""
    folder = tmp_path / "whisper"
    shutil.copytree(checkpoint("whisper-base"), folder)
    path = folder / "generation_config.json"
    options = json.loads(path.read_text())
    del options["forced_decoder_ids"]
    path.write_text(json.dumps(options))
    pipeline = hfseq.pipeline("automatic-speech-recognition", str(folder))
    assert "Buenos" in pipeline(str(speak(SPANISH, "es")), generate_kwargs={"num_beams": 1})["text"]
