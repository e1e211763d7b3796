"""Whisper: the battery for every class, its options, how it writes, bad inputs."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from hfseq_plugins.whisper.modeling import (
    FlaxWhisperForAudioClassification,
    FlaxWhisperForConditionalGeneration,
    FlaxWhisperModel,
    FlaxWhisperModule,
)
from tests.support.models import close, ids, spectrograms, whisper_config
from tests.support.tiers import CHECKS, first

HEADS = ("Model", "ForSpeechSeq2Seq", "ForAudioClassification")
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
#: Places of the encoder are a parameter that nobody trains.
FROZEN = (*ZERO_GRADIENTS, r"encoder/embed_positions/embedding$")


def battery(config, **options):
    check_architecture("whisper", config, zero_gradients=FROZEN, **options)


@pytest.mark.parametrize(
    ("head", "checks"),
    first(
        [("ForSpeechSeq2Seq", CHECKS), *((h, None) for h in HEADS)], ("ForSpeechSeq2Seq", CHECKS)
    ),
)
def test_battery(head, checks):
    battery(whisper_config(**(SHALLOW if checks else {})), heads=[head], checks=checks)


def test_battery_covers_every_registered_head():
    assert {*HEADS} == {*plugins.load().architectures["whisper"].target.heads}


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
    battery(whisper_config(**changes), heads=[head])


# -- how it writes ---------------------------------------------------------------------------------

#: The vocabulary: text below 40, then the prompt's tokens, the last 16 are timestamps.
ENTRIES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 40, "<|de|>": 41, "<|fr|>": 42},
    "task_to_id": {"transcribe": 43, "translate": 44},
    "no_timestamps_token_id": 47,
    "prev_sot_token_id": 45,
    "max_initial_timestamp_index": 6,
}


def writer(seed=0, **changes):
    """A model whose text depends on what it hears, and that ends now and then."""
    model = FlaxWhisperForConditionalGeneration(
        whisper_config(**{"init_std": 0.4, **changes}), seed=seed
    )
    for name, value in ENTRIES.items():
        setattr(model.generation_config, name, value)
    return model


def twin(model, folder):
    """The PyTorch model of the same weights, its encoder's frozen places as saved."""
    pytest.importorskip("torch")
    from transformers import WhisperForConditionalGeneration

    model.save_pretrained(folder)
    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    for name, value in ENTRIES.items():
        setattr(theirs.generation_config, name, copy.deepcopy(value))
    return theirs


def bare(tokens, prompt):
    """New tokens up to the end, as lists."""
    rows = np.asarray(tokens)[:, prompt:].tolist()
    return [row[: row.index(2)] if 2 in row else row for row in rows]


def theirs_bare(found):
    return [[token for token in row if token != 1] for row in found.tolist()]


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
@pytest.mark.parametrize("asked", ASKED)
def test_writes_what_pytorch_writes(asked, beams, tmp_path):
    torch = pytest.importorskip("torch")
    model, options = writer(), {**ASKED[asked], "num_beams": beams, "max_new_tokens": 12}
    theirs, sound = twin(model, tmp_path), spectrograms(3)
    before = model.generation_config.to_dict()
    for timestamps in (False, True):
        found = model.generate(sound, return_timestamps=timestamps, **options).sequences
        given = {
            n: torch.tensor(v) if n == "prompt_ids" else copy.deepcopy(v)
            for n, v in options.items()
        }
        expected = theirs.generate(
            torch.tensor(sound),
            return_timestamps=timestamps,
            force_unique_generate_call=True,
            **given,
        )
        width = expected.shape[1]
        assert np.asarray(found)[:, :width].tolist() == expected.tolist()
    assert model.generation_config.to_dict() == before


@pytest.mark.slow
def test_a_trained_model_writes_words_and_times_as_pytorch_does(tmp_path):
    import optax

    torch = pytest.importorskip("torch")
    model, random = writer(init_std=0.05), np.random.default_rng(1)
    sound, words = spectrograms(6), random.integers(5, 40, (6, 4))
    heads = {  # start, language, task; then times around each two words, or none
        True: [[3, 40, 43, 48, *w[:2], 52, 52, *w[2:], 55, 2] for w in words],
        False: [[3, 40, 43, 47, *w, 2] for w in words],
    }
    rows = np.array(heads[True] + [row + [1] * (12 - len(row)) for row in heads[False]])
    heard, given = np.concatenate([sound, sound]), rows[:, :-1]
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model(heard, decoder_input_ids=given, params=params).logits
            each = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
            return (each * (rows[:, 1:] != 1)).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    params, state = model.params, optimizer.init(model.params)
    for _ in range(300):
        params, state, value = step(params, state)
    assert value < 0.08  # whether there are times is not known: ln 2 of each row
    model.params = params
    theirs = twin(model, tmp_path)
    for beams in (1, 3):
        for timed in heads:
            options = {"language": "en", "max_new_tokens": 12, "num_beams": beams}
            options["return_timestamps"] = timed
            found = np.asarray(model.generate(sound, **options).sequences)
            expected = theirs.generate(
                torch.tensor(sound), force_unique_generate_call=True, **options
            )
            assert found[:, : expected.shape[1]].tolist() == expected.tolist()
            text = [[t for t in row if 5 <= t < 40] for row in found.tolist()]
            assert text == words.tolist()
            if timed:
                assert [[t for t in row if t >= 48] for row in found.tolist()] == [
                    [48, 52, 52, 55]
                ] * 6
    options = {"language": "en", "return_segments": True, "return_timestamps": True}
    found, expected = (
        model.generate(sound, **options),
        theirs.generate(torch.tensor(sound), **options),
    )
    assert told(found.segments) == told(expected["segments"])
    assert [len(row) for row in found.segments] == [2] * 6


def told(segments):
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
@pytest.mark.parametrize("asked", LONG)
def test_reads_long_sound_by_windows_as_pytorch_does(asked, seed, tmp_path):
    torch = pytest.importorskip("torch")
    model, sound = writer(seed), spectrograms(2, 130, seed)
    theirs, lengths = twin(model, tmp_path), np.array([130, 97])
    mask = (np.arange(130) < lengths[:, None]).astype(np.int32)
    options = {"language": "en", "max_new_tokens": 12, **LONG[asked]}
    seen = []
    found = model.generate(
        sound, attention_mask=mask, monitor_progress=lambda p: seen.append(p.tolist()), **options
    )
    if "prompt_ids" in options:
        options["prompt_ids"] = torch.tensor(options["prompt_ids"])
    expected = theirs.generate(
        torch.tensor(sound),
        attention_mask=torch.tensor(mask),
        return_segments=True,
        return_timestamps=True,
        **options,
    )
    assert told(found.segments) == told(expected["segments"])
    assert found.sequences.tolist() == expected["sequences"].tolist()
    assert seen[0] == [[0, 130], [0, 97]] and seen[-1][0][0] >= 130 and len(seen) > 6


@pytest.mark.slow
def test_short_sound_is_cut_into_segments_too(tmp_path):
    torch = pytest.importorskip("torch")
    model, sound = writer(2), spectrograms(2, 14)
    options = {"language": "en", "max_new_tokens": 20, "return_segments": True}
    theirs = twin(model, tmp_path).generate(torch.tensor(sound), return_timestamps=True, **options)
    found = model.generate(sound, **options)
    assert told(found.segments) == told(theirs["segments"])
    with pytest.raises(UsageError, match="return_timestamps=True"):
        model.generate(sound, return_timestamps=False, **options)


def test_what_a_row_begins_with_and_what_it_may_not_be_told():
    model = writer(encoder_layers=1, decoder_layers=1)
    sound, before = spectrograms(2), model.generation_config.to_dict()

    def begin(length, **options):
        found = model.generate(sound, max_new_tokens=2, **options).sequences
        return np.asarray(found)[:, :length].tolist()

    assert begin(4, language="German", task="translate") == [[3, 41, 44, 47]] * 2
    assert begin(3, language=["fr", "en"], return_timestamps=True) == [[3, 42, 43], [3, 40, 43]]
    forced = [(1, 41), (2, 44), (3, 47)]
    assert begin(4, forced_decoder_ids=forced) == [[3, 41, 44, 47]] * 2
    heard = np.asarray(model.detect_language(sound))
    assert set(heard) <= {40, 41, 42} and begin(2) == [[3, token] for token in heard]
    jitted = jax.jit(lambda x: model.generate(x, max_new_tokens=2).sequences)(sound)
    assert np.asarray(jitted)[:, :3].tolist() == begin(3)
    assert model.generation_config.to_dict() == before
    for options, message in [
        ({"language": "germann"}, "no language 'germann'.*did you mean.*german"),
        ({"language": "spanish"}, "no language 'spanish'.*known: en, de, fr"),
        ({"language": ["en"] * 3}, "3 languages for 2 rows"),
        ({"task": "sing"}, "no task 'sing'.*transcribe, translate"),
        ({"language": "en", "is_multilingual": False}, "is_multilingual=True"),
        ({"forced_decoder_ids": [(2, 44)]}, "forced_decoder_ids=.*number 1, 2"),
    ]:
        with pytest.raises(UsageError, match=message):
            model.generate(sound, **options)
    with pytest.raises(UsageError, match="batch of one"):
        model.generate(sound[0])
    with pytest.raises(UsageError, match="attention_mask"):
        model.generate(spectrograms(2, 30))
    bare = FlaxWhisperForConditionalGeneration(model.config, _do_init=False)
    with pytest.raises(UsageError, match="no lang_to_id"):
        bare.generate(sound, language="en", params=model.params)
    with pytest.raises(UsageError, match="no_timestamps_token_id"):
        bare.generate(sound, return_timestamps=True, params=model.params)


# -- version 4 -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_layers_are_summed_by_weights_that_are_learnt(scale, tmp_path):
    """Version 4 stacked the fields of an output and had no weights to load."""
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
def test_the_module_of_version_4_and_a_sound_of_another_length():
    config = whisper_config(encoder_layers=1, decoder_layers=1)
    module, sound, tokens = FlaxWhisperModule(config), spectrograms(), ids(2, 5)
    variables = module.init(jax.random.PRNGKey(0), sound, tokens)
    model = FlaxWhisperModel(config, _do_init=False)
    given = {"input_features": sound, "decoder_input_ids": tokens}
    expected = model(**given, params=variables["params"])
    assert close(module.apply(variables, **given)[0], expected[0], 0)
    for shape in [(1, 8, 18), (1, 9, 20)]:
        with pytest.raises(UsageError, match=r"expects \(batch, 8, 20\).*feature extractor"):
            model.encode(np.zeros(shape), params=variables["params"])
    with pytest.raises(UsageError, match="41 tokens per row.*max_target_positions"):
        model(sound, ids(2, 41), params=variables["params"])
