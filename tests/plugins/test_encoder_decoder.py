"""Composite encoder-decoders: the battery, PyTorch's files, generation, invalid pairs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq.testing.case import Case
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.parity import compare_files
from tests.support.tiers import CHECKS, first
from tests.support.torch_counterparts import torch_counterpart

KINDS = {
    "encoder-decoder": "EncoderDecoder",
    "vision-encoder-decoder": "VisionEncoderDecoder",
    "speech-encoder-decoder": "SpeechEncoderDecoder",
}
#: Model type, encoder, decoder, and the options of both.
PAIRS = {
    "bert-bert": ("encoder-decoder", "bert", "bert", {}, {}),
    "bert-gpt2": ("encoder-decoder", "bert", "gpt2", {"hidden_size": 24}, {}),
    "roberta-roberta": ("encoder-decoder", "roberta", "roberta", {}, {"hidden_size": 24}),
    "bert-bart": ("encoder-decoder", "bert", "bart", {"hidden_size": 24}, {}),
    "vit-gpt2": ("vision-encoder-decoder", "vit", "gpt2", {"hidden_size": 24}, {}),
    "vit-bert": ("vision-encoder-decoder", "vit", "bert", {}, {}),
    "dinov2-gpt2": ("vision-encoder-decoder", "dinov2", "gpt2", {}, {}),
    "wav2vec2-gpt2": ("speech-encoder-decoder", "wav2vec2", "gpt2", {"hidden_size": 24}, {}),
    "wav2vec2-bart": ("speech-encoder-decoder", "wav2vec2", "bart", {"add_adapter": True}, {}),
}
TOKENS = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}


def pair(name, **changes):
    """Returns the model type and the configuration of a pair."""
    import transformers

    variant, encoder, decoder, encoders, decoders = PAIRS[name]
    first, other = (
        getattr(models, f"{part}_config")(**{**options, **changes})
        for part, options in ((encoder, encoders), (decoder, decoders))
    )
    make = getattr(transformers, f"{KINDS[variant]}Config").from_encoder_decoder_configs
    return variant, make(first, other, **TOKENS)


@pytest.mark.parametrize(
    ("name", "checks"),
    first([("vit-gpt2", CHECKS), *((name, None) for name in PAIRS)], ("vit-gpt2", CHECKS)),
)
def test_battery(name, checks):
    variant, config = pair(name)
    if checks:
        config.encoder.num_hidden_layers = config.decoder.n_layer = 1
    zero = (
        r"(key|k_proj)/bias$",
        r"^encoder/pooler/",
        r"c_attn/bias$",
        "mask(ed_spec_embed|_token)",
    )
    counted = {"cached_decoding": "it counts places from 0, RoBERTa's begin behind its padding"}
    sound = Case.audio_inputs(np.random.default_rng(5)) if "speech" in variant else {}
    check_architecture(
        variant,
        config,
        checks=checks,
        zero_gradients=zero,
        skip=counted if "roberta" in name else None,
        inputs={name.replace("input_values", "inputs"): value for name, value in sound.items()},
    )


def model_of(name, **changes):
    variant, config = pair(name, **changes)
    model = getattr(hfseq, f"Flax{KINDS[variant]}Model")(config)
    random = np.random.default_rng(3)
    model.params = jax.tree.map(
        lambda leaf: leaf + 0.2 * random.normal(size=leaf.shape).astype(np.float32), model.params
    )
    return model


def encoder_inputs(model, rows=3, seed=0):
    """Returns encoder inputs, with padding if the encoder supports it."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": models.images(rows, seed=seed)}
    if model.main_input_name == "inputs":
        mask = (np.arange(90) < [[90], [60], [75]][:rows]).astype(np.int32)
        return {"inputs": models.waveforms(rows, seed=seed) * mask, "attention_mask": mask}
    mask = (np.arange(12) < [[12], [7], [9]][:rows]).astype(np.int32)
    pad = model.config.encoder.pad_token_id or 0
    return {"input_ids": np.where(mask, models.ids(rows, seed=seed), pad), "attention_mask": mask}


def as_torch(inputs):
    import torch

    kinds = {np.dtype("float64"): torch.float32}
    return {n: torch.tensor(v, dtype=kinds.get(v.dtype)) for n, v in inputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", PAIRS)
def test_generation_matches_pytorch_token_for_token(name, search, tmp_path):
    model = model_of(name)
    theirs = torch_counterpart(model, tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, **search}
    for seed in range(4):
        inputs = encoder_inputs(model, seed=seed)
        actual = np.asarray(model.generate(**inputs, **options).sequences)
        right = theirs.generate(**as_torch(inputs), **options).numpy()
        assert np.array_equal(actual[:, : right.shape[1]], right), seed
        assert (actual[:, right.shape[1] :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_files_of_pytorch_load_and_are_saved_as_they_were(name, tmp_path, caplog):
    pytest.importorskip("torch")
    variant, config = pair(name)
    model, theirs = compare_files(getattr(hfseq, f"Flax{KINDS[variant]}Model"), config, tmp_path)
    assert not caplog.records
    inputs = encoder_inputs(model)
    ids = models.ids(3, 6)
    right = theirs(**as_torch(inputs), decoder_input_ids=as_torch({"": ids})[""].long())
    assert close(model(**inputs, decoder_input_ids=ids).logits, right.logits.detach(), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert-bert", "bert-gpt2", "bert-bart", "vit-gpt2", "wav2vec2-bart"]
)
def test_two_checkpoints_become_one_model(name, tmp_path):
    variant, encoder, decoder, encoders, decoders = PAIRS[name]
    cls = getattr(hfseq, f"Flax{KINDS[variant]}Model")
    parts = {}
    for side, part, options, auto in (
        ("encoder", encoder, encoders, hfseq.FlaxAutoModel),
        ("decoder", decoder, decoders, hfseq.FlaxAutoModelForCausalLM),
    ):
        config = getattr(models, f"{part}_config")(**options)
        parts[side] = auto.from_config(config)
        parts[side].save_pretrained(tmp_path / side)
    model = cls.from_encoder_decoder_pretrained(
        tmp_path / "encoder", tmp_path / "decoder", decoder_start_token_id=1, pad_token_id=0
    )
    assert trees_equal(model.params["encoder"], parts["encoder"].params)
    ours, theirs = (
        {path: leaf for path, leaf in trees.flatten(tree).items()}
        for tree in (model.params["decoder"], parts["decoder"].params)
    )
    new = ours.keys() - theirs.keys()
    assert theirs.keys() <= ours.keys()
    assert all("cross" in "/".join(path) for path in new)
    assert all(np.array_equal(ours[path], theirs[path]) for path in theirs)
    assert model.generate(**encoder_inputs(model), max_new_tokens=4, decoder_start_token_id=1)
    from_models = cls.from_encoder_decoder_pretrained(
        encoder_model=parts["encoder"], decoder_model=model_part(model), seed=3
    )
    assert trees_equal(from_models.params["decoder"], model.params["decoder"])


def model_part(model):
    """Returns the decoder of a pair with its parameters."""
    part = type(model.parts["decoder"])(model.config.decoder)
    part.params = model.params["decoder"]
    return part


@pytest.mark.parametrize(
    ("variant", "encoder", "decoder", "message"),
    [
        ("VisionEncoderDecoder", "bert", "gpt2", "encoder .* pixel_values, .* 'bert' is input_ids"),
        (
            "SpeechEncoderDecoder",
            "vit",
            "gpt2",
            "encoder .* input_values, .* 'vit' is pixel_values",
        ),
        ("EncoderDecoder", "bart", "gpt2", "'bart' is an encoder-decoder"),
        (
            "EncoderDecoder",
            "bert",
            "llama",
            "'llama' has no cross-attention.*add_cross_attention=True",
        ),
        ("VisionEncoderDecoder", "vit", "vit", "has no 'ForCausalLM'"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(variant, encoder, decoder, message):
    import transformers

    first, other = (getattr(models, f"{part}_config")() for part in (encoder, decoder))
    make = getattr(transformers, f"{variant}Config").from_encoder_decoder_configs
    with pytest.raises(UsageError, match=message) as error:
        getattr(hfseq, f"Flax{variant}Model")(make(first, other), _do_init=False)
    assert "\n" not in str(error.value)
