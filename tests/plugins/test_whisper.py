"""Whisper: the battery for all classes, options, generation, invalid inputs."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from hfseq_plugins.whisper.alignment import first_columns, token_times
from hfseq_plugins.whisper.decoding import WindowDecoder
from hfseq_plugins.whisper.modeling import (
    FlaxWhisperForAudioClassification,
    FlaxWhisperForConditionalGeneration,
    FlaxWhisperModel,
    FlaxWhisperModule,
)
from tests.support.models import close, ids, spectrograms, whisper_config
from tests.support.tiers import battery

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
#: The positions of the encoder are a parameter that is not trained.
FROZEN = (*ZERO_GRADIENTS, r"encoder/embed_positions/embedding$")


def check(config, **options):
    check_architecture("whisper", config, zero_gradients=FROZEN, **options)


@pytest.mark.parametrize(("head", "checks"), battery("whisper", "ForSpeechSeq2Seq"))
def test_battery(head, checks):
    check(whisper_config(**(SHALLOW if checks else {})), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForSpeechSeq2Seq", {"tie_word_embeddings": False, "scale_embedding": True}),
        (
            "ForSpeechSeq2Seq",
            {"activation_function": "relu", "dropout": 0.1, "encoder_layerdrop": 0.2},
        ),
        ("ForAudioClassification", {"use_weighted_layer_sum": True}),
    ],
    ids=["untied", "dropout", "weighted"],
)
def test_battery_of_options(head, changes):
    check(whisper_config(**changes), heads=[head])


# -- generation ------------------------------------------------------------------------------------

#: The vocabulary: text tokens below 40, then prompt tokens, and 16 timestamps at the end.
ENTRIES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 40, "<|de|>": 41, "<|fr|>": 42},
    "task_to_id": {"transcribe": 43, "translate": 44},
    "no_timestamps_token_id": 47,
    "prev_sot_token_id": 45,
    "max_initial_timestamp_index": 6,
}


def make_model(seed=0, **changes):
    """Returns a model whose text depends on the audio and ends early for some rows."""
    model = FlaxWhisperForConditionalGeneration(
        whisper_config(**{"init_std": 0.4, **changes}), seed=seed
    )
    for name, value in ENTRIES.items():
        setattr(model.generation_config, name, value)
    return model


def twin(model, folder):
    """Returns the PyTorch model with the same weights, including the encoder's positions."""
    pytest.importorskip("torch")
    from transformers import WhisperForConditionalGeneration

    model.save_pretrained(folder)
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    for name, value in ENTRIES.items():
        setattr(theirs.generation_config, name, copy.deepcopy(value))
    return theirs


def before_eos(tokens, prompt):
    """Returns the new tokens before EOS, as lists."""
    rows = np.asarray(tokens)[:, prompt:].tolist()
    return [row[: row.index(2)] if 2 in row else row for row in rows]


def without_padding(actual):
    return [[token for token in row if token != 1] for row in actual.tolist()]


ASKED = {
    "nothing": {},
    "language": {"language": "german"},
    "languages": {"language": ["en", "<|de|>", "French"]},
    "translate": {"language": "fr", "task": "translate"},
    "task": {"task": "transcribe"},
    "suppressed": {
        "language": "en",
        "suppress_tokens": [5, 9, 47],
        "begin_suppress_tokens": [2, 7],
    },
    "prompted": {"language": "en", "prompt_ids": [45, 8, 9, 10]},
}


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", ASKED)
def test_generation_matches_pytorch(case, beams, tmp_path):
    torch = pytest.importorskip("torch")
    model, options = make_model(), {**ASKED[case], "num_beams": beams, "max_new_tokens": 12}
    theirs, audio = twin(model, tmp_path), spectrograms(3)
    original_config = model.generation_config.to_dict()
    for timestamps in (False, True):
        actual = model.generate(audio, return_timestamps=timestamps, **options).sequences
        inputs = {
            n: torch.tensor(v) if n == "prompt_ids" else copy.deepcopy(v)
            for n, v in options.items()
        }
        expected = theirs.generate(
            torch.tensor(audio),
            return_timestamps=timestamps,
            force_unique_generate_call=True,
            **inputs,
        )
        width = expected.shape[1]
        assert np.asarray(actual)[:, :width].tolist() == expected.tolist()
    assert model.generation_config.to_dict() == original_config


@pytest.mark.slow
def test_a_trained_model_writes_words_and_times_as_pytorch_does(tmp_path):
    import optax

    torch = pytest.importorskip("torch")
    model, random = make_model(init_std=0.05), np.random.default_rng(1)
    audio, words = spectrograms(6), random.integers(5, 40, (6, 4))
    heads = {  # start, language, task, then two words at a time with or without timestamps
        True: [[3, 40, 43, 48, *w[:2], 52, 52, *w[2:], 55, 2] for w in words],
        False: [[3, 40, 43, 47, *w, 2] for w in words],
    }
    rows = np.array(heads[True] + [row + [1] * (12 - len(row)) for row in heads[False]])
    audio_twice, prompts = np.concatenate([audio, audio]), rows[:, :-1]
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model(audio_twice, decoder_input_ids=prompts, params=params).logits
            each = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
            return (each * (rows[:, 1:] != 1)).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    params, state = model.params, optimizer.init(model.params)
    for _ in range(300):
        params, state, value = step(params, state)
    assert value < 0.08  # ln 2 per row: the model cannot know the mode
    model.params = params
    theirs = twin(model, tmp_path)
    for beams in (1, 3):
        for timed in heads:
            options = {"language": "en", "max_new_tokens": 12, "num_beams": beams}
            options["return_timestamps"] = timed
            actual = np.asarray(model.generate(audio, **options).sequences)
            expected = theirs.generate(
                torch.tensor(audio), force_unique_generate_call=True, **options
            )
            assert actual[:, : expected.shape[1]].tolist() == expected.tolist()
            text = [[t for t in row if 5 <= t < 40] for row in actual.tolist()]
            assert text == words.tolist()
            if timed:
                assert [[t for t in row if t >= 48] for row in actual.tolist()] == [
                    [48, 52, 52, 55]
                ] * 6
    options = {"language": "en", "return_segments": True, "return_timestamps": True}
    actual = model.generate(audio, **options)
    expected = theirs.generate(torch.tensor(audio), **options)
    assert rounded_segments(actual.segments) == rounded_segments(expected["segments"])
    assert [len(row) for row in actual.segments] == [2] * 6


def rounded_segments(segments):
    def one(s):
        start, end = (round(float(s[name]), 4) for name in ("start", "end"))
        return start, end, np.asarray(s["tokens"]).tolist()

    return [list(map(one, row)) for row in segments]


LONG = {
    "plain": {},
    "conditioned": {"condition_on_prev_tokens": True},
    "prompted": {"condition_on_prev_tokens": True, "prompt_ids": [45, 8, 9, 10]},
    "prompt alone": {"prompt_ids": [45, 8, 9, 10]},
    "beams": {"num_beams": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", LONG)
def test_long_audio_windows_match_pytorch(case, seed, tmp_path):
    torch = pytest.importorskip("torch")
    model, audio = make_model(seed), spectrograms(2, 130, seed)
    theirs, lengths = twin(model, tmp_path), np.array([130, 97])
    mask = (np.arange(130) < lengths[:, None]).astype(np.int32)
    options = {"language": "en", "max_new_tokens": 12, **LONG[case]}
    progress = []
    actual = model.generate(
        audio,
        attention_mask=mask,
        monitor_progress=lambda p: progress.append(p.tolist()),
        **options,
    )
    if "prompt_ids" in options:
        options["prompt_ids"] = torch.tensor(options["prompt_ids"])
    expected = theirs.generate(
        torch.tensor(audio),
        attention_mask=torch.tensor(mask),
        return_segments=True,
        return_timestamps=True,
        **options,
    )
    assert rounded_segments(actual.segments) == rounded_segments(expected["segments"])
    assert actual.sequences.tolist() == expected["sequences"].tolist()
    assert progress[0] == [[0, 130], [0, 97]] and progress[-1][0][0] >= 130 and len(progress) > 6


@pytest.mark.slow
def test_short_audio_returns_segments(tmp_path):
    torch = pytest.importorskip("torch")
    model, audio = make_model(2), spectrograms(2, 14)
    options = {"language": "en", "max_new_tokens": 20, "return_segments": True}
    theirs = twin(model, tmp_path).generate(torch.tensor(audio), return_timestamps=True, **options)
    actual = model.generate(audio, **options)
    assert rounded_segments(actual.segments) == rounded_segments(theirs["segments"])
    with pytest.raises(UsageError, match="return_timestamps=True"):
        model.generate(spectrograms(1, 30), return_timestamps=False, **options)


HEADS = [[0, 1], [1, 0], [1, 3]]
#: At such a temperature, sampling selects the most probable token, as greedy search does.
COLD = 1e-4
#: Options, and whether a second temperature and skipped windows are expected.
FALLBACK = {
    "times": ({"return_token_timestamps": True}, False, False),
    "times of beams": ({"return_token_timestamps": True, "num_beams": 3}, False, False),
    "improbable": ({"temperature": (0.0, COLD), "logprob_threshold": -0.8}, True, False),
    "repetitive": ({"temperature": (0.0, COLD), "compression_ratio_threshold": 0.8}, True, False),
    "silent": (
        {"temperature": (0.0, COLD), "logprob_threshold": 0.0, "no_speech_threshold": 0.001},
        True,
        True,
    ),
    "improbable beams": (
        {"temperature": (0.0, COLD), "logprob_threshold": -0.5, "num_beams": 3},
        True,
        False,
    ),
    "prompted": (
        {
            "temperature": (0.0, COLD),
            "logprob_threshold": -0.8,
            "condition_on_prev_tokens": True,
            "prompt_ids": [45, 8, 9, 10],
            "prompt_condition_type": "all-segments",
        },
        True,
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FALLBACK)
def test_fallback_and_times_match_pytorch(case, tmp_path, monkeypatch):
    """Compares tokens, segments, times, and the values and decisions for each temperature."""
    torch = pytest.importorskip("torch")
    options, has_fallback, has_silence = FALLBACK[case]
    frames, changes = (160, {"max_source_positions": 50}) if "times" in case else (100, {})
    if "num_beams" in options and has_fallback:
        # After the first fallback, PyTorch uses greedy search for all windows, so compare one.
        frames = 20
    model, audio = make_model(3, **changes), spectrograms(1, frames, 3)
    theirs = twin(model, tmp_path)
    decisions: list[tuple] = []
    decide = type(theirs)._need_fallback

    def record(self, tokens, outputs, index, processors, config, vocab_size, temperature):
        result = decide(self, tokens, outputs, index, processors, config, vocab_size, temperature)
        ratio = self._retrieve_compression_ratio(tokens, vocab_size)
        logprob = np.nan
        if config.logprob_threshold is not None:
            scores = outputs[index]["scores"]
            logprob = self._retrieve_avg_logprobs(scores, tokens, temperature)
        decisions.append((*result, temperature or 0.0, ratio, float(logprob)))
        return result

    monkeypatch.setattr(type(theirs), "_need_fallback", record)
    actual_decisions: list[tuple] = []
    decode = WindowDecoder._decode_once

    def record_windows(self, *arguments):
        windows = decode(self, *arguments)
        actual_decisions.extend(
            (
                *(self.fallback.fails(window), window.is_silent, window.temperature or 0.0),
                *(window.compression_ratio, window.average_logprob),
            )
            for window in windows
        )
        return windows

    monkeypatch.setattr(WindowDecoder, "_decode_once", record_windows)
    shared = {
        **{"language": "en", "max_new_tokens": 12, "suppress_tokens": [1]},
        **{"return_timestamps": True, "return_segments": True},
    }
    for each in (model, theirs):
        each.generation_config.alignment_heads = copy.deepcopy(HEADS)
    mask = np.ones((1, audio.shape[2]), np.int32)
    actual = model.generate(audio, attention_mask=mask, **shared, **options)
    if "prompt_ids" in options:
        options = {**options, "prompt_ids": torch.tensor(options["prompt_ids"])}
    expected = theirs.generate(
        torch.tensor(audio), attention_mask=torch.tensor(mask), **shared, **options
    )
    assert rounded_segments(actual.segments) == rounded_segments(expected["segments"])
    assert actual.sequences.tolist() == expected["sequences"].tolist()
    np.testing.assert_allclose(actual_decisions, decisions, atol=2e-3)
    assert any(decision[0] for decision in decisions) == has_fallback
    assert any(decision[1] for decision in decisions) == has_silence
    if "return_token_timestamps" in options:
        for mine, other in zip(actual.segments[0], expected["segments"][0], strict=True):
            times = other["token_timestamps"].numpy()
            np.testing.assert_allclose(mine["token_timestamps"], times, atol=1e-5)
        assert np.ptp(actual.token_timestamps) > 0.5


def test_only_failed_windows_are_decoded_again_with_the_same_programs(monkeypatch):
    model = make_model(encoder_layers=1, decoder_layers=1)
    audio = spectrograms(2)
    batches: list[tuple] = []
    decode = WindowDecoder._decode_once

    def record(self, states, arguments, temperature):
        windows = decode(self, states, arguments, temperature)
        batches.append((temperature, len(states), [window.average_logprob for window in windows]))
        return windows

    monkeypatch.setattr(WindowDecoder, "_decode_once", record)
    text = {"language": "en", "max_new_tokens": 8, "suppress_tokens": [*range(40, 64)]}
    model.generate(audio, temperature=(0.0, 0.2), logprob_threshold=-9.0, **text)
    ((_, _, logprobs),) = batches
    thresholds = {"logprob_threshold": float(np.mean(logprobs))}
    batches.clear()
    model.generate(audio, temperature=(0.0, 0.2, 0.4), **thresholds, **text)
    assert [(temperature, rows) for temperature, rows, _ in batches][:2] == [(0.0, 2), (0.2, 1)]
    # A generation configuration has the same effect as arguments.
    for name, value in {"temperature": [0.6, 0.8], "logprob_threshold": 0.0}.items():
        setattr(model.generation_config, name, value)
    batches.clear()
    output = model.generate(audio[:1], **text)
    assert [(temperature, rows) for temperature, rows, _ in batches] == [(0.6, 1), (0.8, 1)]
    assert output.languages == ["en"] and output.empty_windows == [[]]
    programs = model._generation_programs
    sampling = [program for (name, *_), program in programs.items() if name == "temperature"]
    assert [program._cache_size() for program in sampling] == [1]


def test_dynamic_time_warping_follows_the_attention():
    random = np.random.default_rng(0)
    costs = random.normal(size=(4, 6))

    def cheapest(i, j):
        """Returns the cost of the cheapest path from entry (i, j), and its first columns."""
        if (i, j) == (3, 5):
            return costs[i, j], {i: j}
        steps = [(i + di, j + dj) for di, dj in ((1, 1), (1, 0), (0, 1))]
        paths = [cheapest(*step) for step in steps if step[0] < 4 and step[1] < 6]
        cost, first = min(paths, key=lambda path: path[0])
        return costs[i, j] + cost, {**first, i: j}

    assert first_columns(costs).tolist() == [cheapest(0, 0)[1][row] for row in range(4)]
    weights = np.full((2, 3, 60), 0.001) + random.uniform(0, 1e-4, (2, 3, 60))
    for token, start in enumerate((0, 20, 45)):
        weights[:, token, start : start + 15] = 0.05
    times = token_times(weights, 7, 0.02)
    assert np.abs(times - [0.0, 0.4, 0.9, 0.9]).max() < 0.15 and times.tolist() == sorted(times)
    assert token_times(weights[:, :1], 7, 0.02).tolist() == [0.0, 0.0]
    assert token_times(weights[:, :0], 7, 0.02).tolist() == [0.0]


def test_forced_tokens_and_conflicting_options():
    model = make_model(encoder_layers=1, decoder_layers=1)
    audio, original_config = spectrograms(2), model.generation_config.to_dict()

    def begin(length, **options):
        actual = model.generate(audio, max_new_tokens=2, **options).sequences
        return np.asarray(actual)[:, :length].tolist()

    assert begin(4, language="German", task="translate") == [[3, 41, 44, 47]] * 2
    assert begin(3, language=["fr", "en"], return_timestamps=True) == [[3, 42, 43], [3, 40, 43]]
    forced = [(1, 41), (2, 44), (3, 47)]
    assert begin(4, forced_decoder_ids=forced) == [[3, 41, 44, 47]] * 2
    # English-only models force only the token for "no timestamps".
    assert begin(3, forced_decoder_ids=[(1, 47)], lang_to_id={}, task_to_id={})[0][:2] == [3, 47]
    languages = np.asarray(model.detect_language(audio))
    assert set(languages) <= {40, 41, 42} and begin(2) == [[3, token] for token in languages]
    jitted = jax.jit(lambda x: model.generate(x, max_new_tokens=2).sequences)(audio)
    assert np.asarray(jitted)[:, :3].tolist() == begin(3)
    assert model.generation_config.to_dict() == original_config
    for options, message in [
        ({"language": "germann"}, "no language 'germann'.*did you mean.*german"),
        ({"language": "spanish"}, "no language 'spanish'.*known: en, de, fr"),
        ({"language": ["en"] * 3}, "3 languages for 2 rows"),
        ({"task": "sing"}, "no task 'sing'.*transcribe, translate"),
        ({"language": "en", "is_multilingual": False}, "is_multilingual=True"),
        ({"forced_decoder_ids": [(2, 44)]}, "forced_decoder_ids=.*must be 1, 2"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": (0.0, -1.0)}, "temperature=.*-1.0.* not negative"),
        ({"logprob_threshold": "low"}, "logprob_threshold='low'"),
        ({"no_speech_threshold": 0.6}, "no_speech_threshold=0.6 requires logprob_threshold"),
        ({"return_token_timestamps": True}, "needs alignment_heads"),
        ({"prompt_condition_type": "last"}, "prompt_condition_type='last'.*all-segments"),
        ({"prompt_condition_type": "all-segments"}, "requires condition_on_prev_tokens=True"),
        ({"prompt_ids": [[45, 8]]}, r"prompt_ids must be .* shape \(1, 2\)"),
        (
            {"num_beams": 2, "num_return_sequences": 2, "return_segments": True},
            "num_return_sequences=2 is not possible",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            model.generate(audio, **options)
    with pytest.raises(UsageError, match="batch of one"):
        model.generate(audio[0])
    with pytest.raises(UsageError, match="not possible under jax.jit"):
        jax.jit(lambda x: model.generate(x, temperature=(0.0, 1.0)).sequences)(audio)
    hidden = model.encode(audio)
    with pytest.raises(UsageError, match="input_features instead of encoder_outputs"):
        model.generate(encoder_outputs=hidden, return_segments=True)
    with pytest.raises(UsageError, match="attention_mask"):
        model.generate(spectrograms(2, 30))
    before_eos = FlaxWhisperForConditionalGeneration(model.config, _do_init=False)
    with pytest.raises(UsageError, match="no lang_to_id"):
        before_eos.generate(audio, language="en", params=model.params)
    with pytest.raises(UsageError, match="no_timestamps_token_id"):
        before_eos.generate(audio, return_timestamps=True, params=model.params)


# -- Transformers 4 --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_layers_are_summed_by_weights_that_are_learnt(scale, tmp_path):
    """Transformers 4 stacked the fields of an output and had no weights to load."""
    torch = pytest.importorskip("torch")
    from transformers import WhisperForAudioClassification

    model = FlaxWhisperForAudioClassification(whisper_config(use_weighted_layer_sum=True))
    weights = np.asarray([0.0, 3.0, -2.0], np.float32) * scale
    model.params = {**model.params, "layer_weights": weights}
    model.save_pretrained(tmp_path)
    theirs = WhisperForAudioClassification.from_pretrained(tmp_path).eval()
    assert theirs.layer_weights.tolist() == weights.tolist()
    expected = theirs(torch.tensor(spectrograms())).logits.detach()
    output = model(spectrograms(), output_hidden_states=True)
    assert close(output.logits, expected) and len(output.hidden_states) == 3
    assert model(spectrograms()).hidden_states is None


@pytest.mark.slow
def test_v4_module_accepts_other_audio_lengths():
    config = whisper_config(encoder_layers=1, decoder_layers=1)
    module, audio, tokens = FlaxWhisperModule(config), spectrograms(), ids(2, 5)
    variables = module.init(jax.random.PRNGKey(0), audio, tokens)
    model = FlaxWhisperModel(config, _do_init=False)
    inputs = {"input_features": audio, "decoder_input_ids": tokens}
    expected = model(**inputs, params=variables["params"])
    assert close(module.apply(variables, **inputs)[0], expected[0], 0)
    for shape in [(1, 8, 18), (1, 9, 20)]:
        with pytest.raises(UsageError, match=r"expects \(batch, 8, 20\).*feature extractor"):
            model.encode(np.zeros(shape), params=variables["params"])
    with pytest.raises(UsageError, match="41 tokens per sequence.*max_target_positions"):
        model(audio, ids(2, 41), params=variables["params"])
