"""SigLIP and SigLIP 2: the battery for the full models and their halves, and bad inputs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from hfseq_plugins.siglip.modeling import FlaxSiglipModel, FlaxSiglipVisionModel
from hfseq_plugins.siglip2.modeling import FlaxSiglip2Model, FlaxSiglip2VisionModel
from tests.support import models
from tests.support.models import close, ids, patches
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import tensors, torch_counterpart

NAMES = [
    f"{name}{part}"
    for name in ("siglip", "siglip2")
    for part in ("", "_text_model", "_vision_model")
]
# The processors of SigLIP always pad texts to the same length.
PADDING = {"padding": "the text is pooled at its last position, also if it is padding"}
QUICK = [("siglip", "Model", CHECKS), ("siglip2", "Model", CHECKS)]


@pytest.mark.parametrize(
    ("name", "head", "checks"),
    first([*QUICK, *((name, head, None) for name in NAMES for head in heads(name))], *QUICK),
)
def test_battery(name, head, checks):
    config = getattr(models, f"{name}_config")(**({"num_hidden_layers": 1} if checks else {}))
    has_patches = name in ("siglip2", "siglip2_vision_model")
    # Images are classified by the mean of their patches, so the pooling head has no gradient.
    unused = (r"vision_model/head/",) if head == "ForImageClassification" else ()
    check_architecture(
        name,
        config,
        heads=[head],
        checks=checks,
        inputs=patches() if has_patches else None,
        zero_gradients=(*ZERO_GRADIENTS, *unused),
        skip={} if head == "ForImageClassification" else PADDING,
    )


def test_image_encoder_without_a_head_has_no_pooled_output():
    config = models.siglip_vision_model_config(vision_use_head=False, num_hidden_layers=1)
    model = FlaxSiglipVisionModel(config, _do_init=False)
    shapes = jax.eval_shape(
        lambda params: dict(model(models.images(), params=params)), model.abstract_params
    )
    assert {name: value.shape for name, value in shapes.items()} == {
        "last_hidden_state": (2, 9, 32)
    }


def test_features_are_the_embeddings_before_normalization():
    model = FlaxSiglipModel(models.siglip_config(num_hidden_layers=1))

    @jax.jit
    def compute(tokens, pixels):
        output = dict(model(tokens, pixels))
        del output["text_model_output"], output["vision_model_output"]
        return output, model.get_image_features(pixels), model.get_text_features(tokens)

    output, *features = compute(ids(2, 6), models.images(3))
    images, texts = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in features)
    assert close(output["image_embeds"], images) and close(output["text_embeds"], texts)
    assert output["logits_per_image"].shape == (3, 2)


@pytest.mark.slow
def test_parts_load_files_of_the_full_model(tmp_path):
    full = FlaxSiglip2Model(models.siglip2_config(num_hidden_layers=1))
    full.save_pretrained(tmp_path)
    vision = hfseq.FlaxSiglip2VisionModel.from_pretrained(
        tmp_path, config=full.config.vision_config
    )
    assert close(vision(**patches()).pooler_output, full.get_image_features(**patches()))
    text = hfseq.FlaxSiglip2TextModel.from_pretrained(tmp_path, config=full.config.text_config)
    assert close(text(ids(2, 6)).pooler_output, full.get_text_features(ids(2, 6)))


@pytest.mark.slow
def test_positions_of_wide_images_equal_pytorch(tmp_path):
    model = FlaxSiglip2VisionModel(models.siglip2_vision_model_config(num_patches=16))
    shapes = np.array([[2, 15], [5, 6], [7, 2]])
    mask = (np.arange(30) < shapes.prod(-1, keepdims=True)).astype(np.int32)
    pixels = np.random.default_rng(0).normal(size=(3, 30, 12)).astype(np.float32)
    theirs = torch_counterpart(model, tmp_path)
    inputs = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    expected = theirs(**tensors(**inputs)).pooler_output.detach()
    assert close(model(**inputs).pooler_output, expected)


def test_embeddings_of_different_sizes_are_refused():
    config = models.siglip_config()
    config.text_config.projection_size = 24
    with pytest.raises(UsageError, match=r"projection_size=24.*hidden_size=48"):
        FlaxSiglipModel(config, _do_init=False)


def test_patches_that_are_not_a_grid_are_refused():
    config = models.siglip2_vision_model_config(num_patches=10)
    with pytest.raises(UsageError, match="num_patches=10"):
        FlaxSiglip2VisionModel(config, _do_init=False)


def test_images_that_are_not_cut_into_patches_are_refused():
    config = models.siglip2_vision_model_config(num_hidden_layers=1)
    model = FlaxSiglip2VisionModel(config, _do_init=False)
    inputs = patches() | {"pixel_values": models.images(8)}
    with pytest.raises(UsageError, match=r"\(batch, patches, 12\).*2 x 2"):
        jax.eval_shape(lambda params: model(**inputs, params=params), model.abstract_params)
