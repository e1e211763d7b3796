"""DINOv2: the battery for both classes, images of any size, layer scale, masked patches."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.dinov2.modeling import (
    FlaxDinov2ForImageClassification,
    FlaxDinov2Model,
    FlaxDinov2Module,
)
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.parity import compare_files
from tests.support.tiers import battery
from tests.support.torch_counterparts import tensors, torch_counterpart

# The battery masks no patches.
HIDDEN = ("mask_token",)


@pytest.mark.parametrize(("head", "checks"), battery("dinov2", "ForImageClassification"))
def test_battery(head, checks):
    config = models.dinov2_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture("dinov2", config, heads=[head], checks=checks, zero_gradients=HIDDEN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": False, "use_mask_token": False, "num_channels": 1, "hidden_act": "gelu_new"},
        {"drop_path_rate": 0.2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ],
)
def test_battery_with_other_options(changes):
    check_architecture("dinov2", models.dinov2_config(**changes), zero_gradients=HIDDEN)


@pytest.mark.slow
def test_battery_with_the_gated_block():
    config = models.dinov2_config(use_swiglu_ffn=True, mlp_ratio=3, layerscale_value=0.5)
    two = "PyTorch has two tensors in memory where its files have one"
    skip = {"torch_tree": two, "torch_parity": two}
    check_architecture("dinov2", config, skip=skip, zero_gradients=HIDDEN)


@pytest.mark.slow
def test_the_gated_block_is_that_of_pytorch(tmp_path):
    config = models.dinov2_config(use_swiglu_ffn=True, mlp_ratio=3, layerscale_value=0.5)
    model = FlaxDinov2Model(config)
    theirs = torch_counterpart(model, tmp_path)
    output = theirs(**tensors(pixel_values=models.images())).last_hidden_state
    output.square().sum().backward()

    def loss(params):
        states = model(models.images(), params=params).last_hidden_state
        return jnp.square(states).sum(), states

    gradient, states = jax.grad(loss, has_aux=True)(model.params)
    assert close(states, output.detach())
    block, mlp = gradient["encoder"]["layer"]["0"]["mlp"], theirs.encoder.layer[0].mlp
    halves = [np.asarray(part.weight.grad.T) for part in (mlp.gate_proj, mlp.up_proj)]
    assert close(block["weights_in"]["kernel"], np.concatenate(halves, 1))
    assert close(block["weights_out"]["kernel"], mlp.down_proj.weight.grad.T)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 12), (20, 20), (8, 24), (14, 11), (4, 4), (36, 4)])
def test_images_of_any_size_match_pytorch(shape, tmp_path):
    """Transformers 4 interpolated positions with another cubic kernel and an offset."""
    model = FlaxDinov2Model(models.dinov2_config(initializer_range=1.0))
    pixels = models.images(2, (3, *shape))
    theirs = torch_counterpart(model, tmp_path)(**tensors(pixel_values=pixels))
    assert close(model(pixels).last_hidden_state, theirs.last_hidden_state.detach(), 3e-5)


@pytest.mark.slow
def test_scales_are_those_of_the_file(tmp_path):
    """Transformers 4 multiplied them by layerscale_value twice more."""
    model = FlaxDinov2Model(models.dinov2_config(layerscale_value=0.5, initializer_range=0.3))
    scale = model.params["encoder"]["layer"]["0"]["layer_scale1"]["lambda1"]
    assert close(scale, np.full(32, 0.5), 0)
    theirs = torch_counterpart(model, tmp_path)(**tensors(pixel_values=models.images()))
    assert close(model(models.images())[0], theirs[0].detach())


@pytest.mark.slow
def test_branches_are_dropped_while_training():
    """Transformers 4 did not."""
    model = FlaxDinov2Model(models.dinov2_config(drop_path_rate=0.5, initializer_range=0.3))
    pixels = np.repeat(models.images(1), 8, 0)
    rows = model(pixels, train=True, dropout_rng=jax.random.key(0)).pooler_output
    assert len(np.unique(np.asarray(rows).round(4), axis=0)) > 2
    with pytest.raises(UsageError, match="dropout_rng"):
        model(pixels, train=True)


@pytest.mark.slow
def test_masked_patches_match_pytorch(tmp_path):
    model = FlaxDinov2Model(models.dinov2_config())
    model.params["embeddings"]["mask_token"] += 1.0
    hide = np.arange(18).reshape(2, 9) % 3 == 0
    torch_inputs = tensors(pixel_values=models.images())
    import torch

    theirs = torch_counterpart(model, tmp_path)(**torch_inputs, bool_masked_pos=torch.tensor(hide))
    ours = model(models.images(), bool_masked_pos=hide)
    assert close(ours[0], theirs[0].detach()) and not close(ours[0], model(models.images())[0])
    with pytest.raises(UsageError, match="bool_masked_pos.*.2, 4.*.2, 9"):
        model(models.images(), bool_masked_pos=hide[:, :4])
    without = FlaxDinov2Model(models.dinov2_config(use_mask_token=False))
    with pytest.raises(UsageError, match="use_mask_token"):
        without(models.images(), bool_masked_pos=hide)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cls", [FlaxDinov2Model, FlaxDinov2ForImageClassification])
def test_files_of_fresh_models_of_pytorch_load_and_are_saved_as_they_were(
    cls, gated, tmp_path, caplog
):
    pytest.importorskip("torch")
    caplog.set_level(logging.WARNING, "hfseq")
    model, theirs = compare_files(cls, models.dinov2_config(use_swiglu_ffn=gated), tmp_path)
    if not gated:
        inside = theirs.state_dict()
        assert any(".q_proj." in name for name in inside)
        assert trees_equal(hfseq.convert_pytorch_state_dict_to_flax(inside, model), model.params)
    assert not caplog.records


@pytest.mark.slow
def test_the_module_of_version_4_takes_channels_last_and_any_size():
    config = models.dinov2_config(num_hidden_layers=1)
    module, pixels = FlaxDinov2Module(config), models.images(1, (3, 16, 8))
    variables = module.init({"params": jax.random.PRNGKey(0)}, jnp.zeros((1, 12, 12, 3)))
    output = module.apply(variables, pixels.transpose(0, 2, 3, 1), deterministic=True)
    assert output.last_hidden_state.shape == (1, 9, 32)
    model = FlaxDinov2Model(config, _do_init=False)
    assert close(output[1], model(pixels, params=variables["params"])[1], 0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 12, 12, 3), r"transpose\(0, 3, 1, 2\)"),
        ((2, 1, 12, 12), r"\(2, 1, 12, 12\).* 3 channels"),
        ((2, 3, 3, 12), r"\(2, 3, 3, 12\).*12 x 12"),
    ],
)
def test_images_of_wrong_shape_are_rejected(shape, message):
    model = FlaxDinov2Model(models.dinov2_config(), _do_init=False)
    with pytest.raises(UsageError, match=message):
        model(np.zeros(shape, np.float32), params={})
