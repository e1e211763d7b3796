"""Dual encoders: the battery, pairs of families, composition from parts, invalid pairs."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.vision_text_dual_encoder.modeling import (
    FlaxVisionTextDualEncoderModel,
    FlaxVisionTextDualEncoderModule,
)
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.tiers import CHECKS, first
from tests.support.torch_counterparts import tensors, torch_counterpart

NAME = "vision-text-dual-encoder"
#: Families of image encoder and text encoder, and the configurations of their parts.
PAIRS = [
    ("vit", "bert"),
    ("clip_vision_model", "clip_text_model"),
    ("dinov2", "roberta"),
    ("beit", "xlm_roberta"),
]


def config_of(vision, text, **changes):
    from transformers import VisionTextDualEncoderConfig

    sides = (getattr(models, f"{side}_config")(**changes) for side in (vision, text))
    return VisionTextDualEncoderConfig.from_vision_text_configs(*sides, projection_dim=24)


@pytest.mark.parametrize("checks", first([CHECKS, None], CHECKS))
def test_battery(checks):
    config = models.vision_text_dual_encoder_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture(NAME, config, checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS[1:], ids="-".join)
def test_battery_of_other_pairs(pair):
    checks = [*CHECKS, "scan_layers", "gradient_checkpointing", "devices"]
    zero = ("mask_token", "pooler_dense")
    check_architecture(NAME, config_of(*pair), checks=checks, zero_gradients=zero)


def save_models(folder, *names, **changes):
    """Saves both encoders and returns the models and their folders."""
    paths = []
    for name in names:
        variant = {"xlm_roberta": "xlm-roberta"}.get(name, name)
        spec = hfseq.plugins.load().architectures.get(variant)
        model = spec.load_head("Model")(getattr(models, f"{name}_config")(**changes), seed=3)
        model.save_pretrained(folder / name)
        paths.append((folder / name, model))
    return paths


@pytest.mark.parametrize(("vision", "text"), first(PAIRS, PAIRS[0]))
def test_parts_are_pasted_and_the_projections_are_new(vision, text, tmp_path, caplog):
    pair = vision, text
    caplog.set_level(logging.WARNING, "hfseq")
    (vision, pictures), (text, texts) = save_models(tmp_path, *pair, num_hidden_layers=1)
    model = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(
        vision, text, projection_dim=20, seed=1
    )
    assert "newly initialized" in caplog.text and len(caplog.records) == 1
    assert trees_equal(model.params["vision_model"], pictures.params)
    assert trees_equal(model.params["text_model"], texts.params)
    assert model.params["text_projection"]["kernel"].shape == (texts.config.hidden_size, 20)
    assert close(model.params["logit_scale"], 2.6592)
    from_models = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(
        vision_model=pictures, text_model=texts, projection_dim=20, seed=1
    )
    assert trees_equal(from_models.params, model.params)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_checkpoints_load_in_both_directions(pair, tmp_path, caplog):
    pytest.importorskip("torch")
    from transformers import VisionTextDualEncoderModel

    caplog.set_level(logging.WARNING, "hfseq")
    config = config_of(*pair)
    theirs = VisionTextDualEncoderModel(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = FlaxVisionTextDualEncoderModel.from_pretrained(tmp_path / "theirs")
    tokens, pixels = 5 + models.ids(3) % 18, models.images(2)
    inputs = tensors(input_ids=tokens, pixel_values=pixels)
    right = theirs(**inputs).logits_per_text.detach()
    assert close(model(tokens, pixels).logits_per_text, right)
    assert close(
        torch_counterpart(model, tmp_path / "ours")(**inputs).logits_per_text.detach(), right
    )
    actual = hfseq.convert_pytorch_state_dict_to_flax(theirs.state_dict(), model)
    assert trees_equal(actual, model.params) and not caplog.records
    again = FlaxVisionTextDualEncoderModel.from_pretrained(tmp_path / "ours")
    assert trees_equal(again.params, model.params)
    assert isinstance(hfseq.FlaxAutoModel.from_pretrained(tmp_path / "ours"), type(model))


@pytest.mark.slow
def test_clip_tower_loads_from_the_full_checkpoint(tmp_path):
    """Transformers 4 could only use the image encoder of a CLIP checkpoint."""
    clip_model = hfseq.FlaxCLIPModel(models.clip_config(num_hidden_layers=1))
    clip_model.save_pretrained(tmp_path)
    make = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained
    model = make(tmp_path, tmp_path, projection_dim=24)
    for side in ("vision_model", "text_model"):
        assert trees_equal(model.params[side], {side: clip_model.params[side]})
    bert = hfseq.FlaxBertModel(models.bert_config(num_hidden_layers=1))
    mixed = make(tmp_path, text_model=bert, projection_dim=24, _do_init=False)
    assert trees_equal(
        mixed[1]["vision_model"], {"vision_model": clip_model.params["vision_model"]}
    )
    with pytest.raises(ValueError, match="_do_init=False"):
        mixed[0].params  # noqa: B018


@pytest.mark.slow
def test_features_are_those_of_pytorch(tmp_path):
    """Transformers 4 expected images with channels last here, and channels first elsewhere."""
    model = FlaxVisionTextDualEncoderModel(models.vision_text_dual_encoder_config())
    tokens, pixels = models.ids(3), models.images(2)
    theirs, types = torch_counterpart(model, tmp_path), np.arange(12)[None].repeat(3, 0) % 2
    inputs = tensors(input_ids=tokens, pixel_values=pixels, token_type_ids=types)
    right = theirs.get_text_features(inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
    texts = model.get_text_features(tokens, token_type_ids=types)
    assert close(texts, right.pooler_output.detach())
    assert not close(texts, model.get_text_features(tokens))
    right = theirs.get_image_features(inputs["pixel_values"]).pooler_output.detach()
    assert close(model.get_image_features(pixels), right)
    output = model(tokens, pixels, output_hidden_states=True, return_dict=False)
    assert isinstance(output[4], tuple) and output[0].shape == (2, 3)


@pytest.mark.slow
def test_the_module_of_version_4_takes_channels_last():
    config = models.vision_text_dual_encoder_config(num_hidden_layers=1)
    module = FlaxVisionTextDualEncoderModule(config)
    variables = module.init(jax.random.key(0))
    tokens, pixels = models.ids(), models.images()
    actual = module.apply(variables, tokens, pixels.transpose(0, 2, 3, 1))
    model = FlaxVisionTextDualEncoderModel(config, _do_init=False)
    assert model.input_shape == ((1, 1), (1, 12, 12, 3))
    expected = model(tokens, pixels, params=variables["params"])
    assert close(actual.logits_per_text, expected.logits_per_text, 0)


def test_pairs_that_do_not_fit_are_refused():
    from transformers import VisionTextDualEncoderConfig

    config = config_of("vit", "gpt2")
    model = FlaxVisionTextDualEncoderModel(config, _do_init=False)
    with pytest.raises(UsageError, match="text_config .*without pooling.*pooler_output"):
        jax.eval_shape(
            lambda params: model(models.ids(), models.images(), params=params),
            model.params_shape_tree,
        )
    with pytest.raises(ValueError, match="`text_model_name_or_path` has to be defined"):
        FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(
            vision_model=hfseq.FlaxViTModel(models.vit_config(num_hidden_layers=1))
        )
    pair = FlaxVisionTextDualEncoderModel(config_of("vit", "bert"), _do_init=False)
    with pytest.raises(UsageError, match=r"\(batch, 3, 12, 12\): resize them to 12 x 12"):
        pair(models.ids(), np.zeros((2, 3, 16, 16), np.float32), params={})
    with pytest.raises(UsageError, match="outside of the model's vocabulary"):
        pair(np.full((1, 3), 1000), models.images(1), params={})
    assert VisionTextDualEncoderConfig.model_type == NAME


def test_image_sizes_follow_the_encoder():
    model = FlaxVisionTextDualEncoderModel(config_of("dinov2", "bert"), _do_init=False)
    shapes = jax.eval_shape(
        lambda params: model(models.ids(), models.images(2, (3, 20, 8)), params=params),
        model.params_shape_tree,
    )
    assert shapes.logits_per_image.shape == (2, 2)
