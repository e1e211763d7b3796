"""ViT: the battery for both classes, its options, PyTorch's names in memory, bad inputs."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.vit.modeling import (
    FlaxViTForImageClassification,
    FlaxViTModel,
    FlaxViTModule,
)
from tests.support import models
from tests.support.models import close, same
from tests.support.tiers import CHECKS, first

ONE = [("ForImageClassification", CHECKS)]


@pytest.mark.parametrize(
    ("head", "checks"), first([*ONE, ("Model", None), ("ForImageClassification", None)], *ONE)
)
def test_battery(head, checks):
    config = models.vit_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture("vit", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_without_biases_with_another_pooler_dropout_and_no_square():
    config = models.vit_config(
        qkv_bias=False, pooler_act="relu", pooler_output_size=20, image_size=[12, 8],
        patch_size=[4, 2], num_channels=1, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1, hidden_act="gelu_new",
    )  # fmt: skip
    check_architecture("vit", config)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [FlaxViTModel, FlaxViTForImageClassification])
def test_names_in_files_and_in_memory_load_and_are_saved_as_they_were(cls, tmp_path, caplog):
    pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file

    caplog.set_level(logging.WARNING, "hfseq")
    config = models.vit_config()
    theirs = getattr(transformers, cls.__name__.removeprefix("Flax"))(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = cls.from_pretrained(tmp_path / "theirs")
    inside = theirs.state_dict()
    assert any(".q_proj." in name for name in inside)
    assert same(hfseq.convert_pytorch_state_dict_to_flax(inside, model), model.params)
    fresh = hfseq.load_flax_weights_in_pytorch_model(type(theirs)(config), model.params)
    assert all(np.array_equal(fresh.state_dict()[name], inside[name]) for name in inside)
    model.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not caplog.records


def test_a_base_loads_from_its_head_and_the_pooler_is_new(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    head = FlaxViTForImageClassification(models.vit_config(num_hidden_layers=1))
    head.save_pretrained(tmp_path)
    base = FlaxViTModel.from_pretrained(tmp_path)
    assert same({n: base.params[n] for n in head.params["vit"]}, head.params["vit"])
    assert "pooler.dense.kernel" in caplog.text and "newly initialized" in caplog.text
    auto = hfseq.FlaxAutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(auto, FlaxViTForImageClassification)


def test_attention_and_hidden_states_are_those_of_all_places():
    model = FlaxViTModel(models.vit_config(), dtype=jnp.bfloat16)
    output = model(models.pictures(), output_attentions=True, output_hidden_states=True)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 10, 10)] * 2
    assert len(output.hidden_states) == 3 and output.last_hidden_state.dtype == jnp.bfloat16


def test_the_module_of_version_4_takes_channels_last():
    config = models.vit_config(num_hidden_layers=1)
    module, pixels = FlaxViTModule(config), models.pictures()
    variables = module.init({"params": jax.random.PRNGKey(0)}, pixels.transpose(0, 2, 3, 1))
    output = module.apply(variables, pixels.transpose(0, 2, 3, 1), deterministic=True)
    model = FlaxViTModel(config, _do_init=False)
    assert close(output[0], model(pixels, params=variables["params"])[0], 0)
    with pytest.raises(UsageError, match="takes .batch, 3, 12, 12."):
        module.apply(variables, pixels)


@pytest.mark.parametrize("shape", [(2, 12, 12, 3), (2, 3, 12, 16)])
def test_pictures_that_do_not_fit_are_refused(shape):
    model = FlaxViTModel(models.vit_config(), _do_init=False)
    with pytest.raises(UsageError, match=r"FlaxViTModel takes \(batch, 3, 12, 12\)"):
        model(np.zeros(shape, np.float32), params={})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "CLIP"])
def test_image_processors_make_what_the_models_take(kind):
    """They need Pillow, and no PyTorch."""
    image = pytest.importorskip("PIL.Image")
    import transformers

    size = {"height": 12, "width": 12} if kind == "ViT" else {"shortest_edge": 12}
    more = {} if kind == "ViT" else {"crop_size": {"height": 12, "width": 12}}
    module = f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}"
    import importlib

    processor = getattr(importlib.import_module(module), f"{kind}ImageProcessorPil")
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    given = processor(size=size, **more)([image.fromarray(noise)] * 2, return_tensors="np")
    assert given["pixel_values"].shape == (2, 3, 12, 12)
    cls, config = {
        "ViT": (FlaxViTModel, models.vit_config()),
        "CLIP": (hfseq.FlaxCLIPVisionModel, models.clip_vision_model_config()),
    }[kind]
    assert np.isfinite(cls(config)(**given).pooler_output).all()
    assert transformers.__version__
