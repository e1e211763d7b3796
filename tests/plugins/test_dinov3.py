"""DINOv3: the battery, images of other sizes, masked patches, and augmented coordinates."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS, jit
from hfseq_plugins.dinov3_vit.modeling import FlaxDINOv3ViTModel
from tests.support.models import close, dinov3_vit_config, images
from tests.support.tiers import battery
from tests.support.torch_counterparts import tensors, torch_counterpart

# The mask token is only used if the caller masks patches.
UNUSED = (*ZERO_GRADIENTS, r"mask_token$")
PLAIN = {"use_gated_mlp": False, "num_register_tokens": 0, "query_bias": False, "key_bias": False}


@pytest.mark.parametrize(("head", "checks"), battery("dinov3_vit", "Model"))
def test_battery(head, checks):
    config = dinov3_vit_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture("dinov3_vit", config, heads=[head], checks=checks, zero_gradients=UNUSED)


@pytest.mark.slow
def test_battery_of_a_plain_model():
    config = dinov3_vit_config(
        **PLAIN, value_bias=False, proj_bias=False, mlp_bias=False, drop_path_rate=0.5
    )
    check_architecture("dinov3_vit", config, zero_gradients=UNUSED)


@pytest.mark.slow
def test_images_of_another_size_with_masked_patches_equal_pytorch(tmp_path):
    model = FlaxDINOv3ViTModel(dinov3_vit_config())
    pixels = images(2, (3, 8, 20))
    mask = np.arange(20).reshape(2, 10) % 3 == 0
    theirs = torch_counterpart(model, tmp_path)
    inputs = tensors(pixel_values=pixels)
    import torch

    expected = theirs(**inputs, bool_masked_pos=torch.from_numpy(mask))
    output = model(pixels, bool_masked_pos=mask)
    assert close(output.last_hidden_state, expected.last_hidden_state.detach())
    assert close(output.pooler_output, expected.pooler_output.detach())


def test_training_moves_the_coordinates_of_all_images_alike():
    config = dinov3_vit_config(num_hidden_layers=1, pos_embed_shift=0.5, pos_embed_jitter=1.5)
    model = FlaxDINOv3ViTModel(config)
    pixels = np.repeat(images(1), 2, 0)
    step = jit(lambda key: model(pixels, train=True, dropout_rng=key).last_hidden_state)
    train = [step(jax.random.key(seed)) for seed in (0, 0, 1)]
    assert close(train[0], train[1], 0) and close(train[0][0], train[0][1])
    plain = jit(lambda: model(pixels).last_hidden_state)()
    assert not close(train[0], train[2]) and not close(train[0], plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_attention_heads": 16}, "multiple of 4"), ({"hidden_act": "x"}, "unknown activation")],
)
def test_unsupported_configurations_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        FlaxDINOv3ViTModel(dinov3_vit_config(**changes), _do_init=False)


def test_mask_of_another_shape_is_refused():
    model = FlaxDINOv3ViTModel(dinov3_vit_config(num_hidden_layers=1))
    with pytest.raises(UsageError, match=r"bool_masked_pos has shape \(2, 3\)"):
        model(images(), bool_masked_pos=np.ones((2, 3), bool))
