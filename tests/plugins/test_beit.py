"""BEiT: the battery for every class, positions, image sizes, masked patches, checkpoints."""

from __future__ import annotations

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.nn.outputs import FlaxBeitModelOutputWithPooling
from hfseq.testing import check_architecture
from hfseq_plugins.beit.modeling import (
    FlaxBeitForImageClassification,
    FlaxBeitForMaskedImageModeling,
    FlaxBeitModel,
    FlaxBeitModule,
    relative_position_index,
)
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.parity import compare_files
from tests.support.tiers import battery
from tests.support.torch_counterparts import tensors, torch_counterpart

HEADS = ("Model", "ForImageClassification", "ForMaskedImageModeling")
# The battery masks no patches. With mean pooling, the pooler contains the norm.
HIDDEN = ("mask_token",)
SHARED = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
ABSOLUTE = {"use_relative_position_bias": False, "use_absolute_position_embeddings": True}


@pytest.mark.parametrize(("head", "checks"), battery("beit", "ForMaskedImageModeling"))
def test_battery(head, checks):
    config = models.beit_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture("beit", config, heads=[head], checks=checks, zero_gradients=HIDDEN)


@pytest.mark.slow
def test_battery_with_the_first_place_pooled_and_no_scales():
    changes = {**SHARED, "use_mean_pooling": False, "layer_scale_init_value": 0.0}
    config = models.beit_config(**changes)
    check_architecture("beit", config, heads=HEADS[:2], zero_gradients=HIDDEN)
    # PyTorch swaps the two norms of the third head when it reads its own checkpoints.
    check_architecture("beit", config, heads=HEADS[2:], zero_gradients=HIDDEN, torch=False)


@pytest.mark.slow
def test_both_norms_of_the_third_head_are_those_of_pytorch(tmp_path):
    pytest.importorskip("torch")
    from transformers import BeitForMaskedImageModeling

    config = models.beit_config(use_mean_pooling=False)
    model = shaken(FlaxBeitForMaskedImageModeling(config))
    theirs = hfseq.load_flax_weights_in_pytorch_model(
        BeitForMaskedImageModeling(config).eval(), model.params
    )
    output = theirs(**tensors(pixel_values=models.images()))
    assert close(model(models.images()).logits, output.logits.detach())
    theirs.save_pretrained(tmp_path)
    again = FlaxBeitForMaskedImageModeling.from_pretrained(tmp_path)
    assert trees_equal(again.params, model.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**ABSOLUTE, "use_mask_token": False, "num_channels": 1, "hidden_act": "gelu_new"},
        {**SHARED, "use_relative_position_bias": True, "use_absolute_position_embeddings": True},
        {"drop_path_rate": 0.3, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ],
)
def test_battery_with_other_positions_pooling_and_dropout(changes):
    check_architecture("beit", models.beit_config(**changes), zero_gradients=HIDDEN)


def test_rows_of_the_table_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    for grid in ((3, 3), (2, 5), (1, 1)):
        theirs = BeitRelativePositionBias.generate_relative_position_index(grid)
        assert torch.equal(torch.tensor(relative_position_index(grid)), theirs)


def shaken(model, seed=0):
    """Positions are initialized to zero, so the test sets other values."""
    random = np.random.default_rng(seed)
    model.params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(random.normal(size=leaf.shape) * 0.3, leaf.dtype),
        model.params,
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, SHARED, ABSOLUTE], ids=["own", "shared", "absolute"])
@pytest.mark.parametrize("shape", [(20, 20), (8, 24), (14, 11), (4, 4)])
def test_images_of_any_size_match_pytorch(shape, changes, tmp_path):
    """Transformers 4 could not load them."""
    model = shaken(FlaxBeitModel(models.beit_config(**changes)))
    pixels = models.images(2, (3, *shape))
    theirs = torch_counterpart(model, tmp_path)(**tensors(pixel_values=pixels))
    assert close(model(pixels).pooler_output, theirs.pooler_output.detach(), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [FlaxBeitModel, FlaxBeitForMaskedImageModeling])
def test_masked_patches_match_pytorch(cls, tmp_path):
    model = shaken(cls(models.beit_config()))
    hide = np.arange(18).reshape(2, 9) % 3 == 0
    import torch

    theirs = torch_counterpart(model, tmp_path)(
        **tensors(pixel_values=models.images()), bool_masked_pos=torch.tensor(hide)
    )
    assert close(model(models.images(), hide)[0], theirs[0].detach())
    assert close(model(models.images(), hide.astype(np.int32))[0], theirs[0].detach())
    with pytest.raises(UsageError, match="bool_masked_pos.*.2, 4.*.2, 9"):
        model(models.images(), hide[:, :4])


def test_pooled_output_class():
    model = FlaxBeitModel(models.beit_config(num_hidden_layers=1, drop_path_rate=0.1))
    options = {"output_attentions": True, "output_hidden_states": True}
    output = jax.jit(functools.partial(model, **options))(models.images())
    assert isinstance(output, FlaxBeitModelOutputWithPooling)
    assert len(output.hidden_states) == 2 and output.attentions[0].shape == (2, 4, 10, 10)
    with pytest.raises(UsageError, match="dropout_rng"):
        model(models.images(), train=True)
    assert FlaxBeitModule(model.config, add_pooling_layer=False).model.params_shape_tree


@pytest.mark.slow
def test_later_layers_are_dropped_more_often():
    """The first layer is never dropped, the last one at the configured rate."""
    config = models.beit_config(drop_path_rate=0.9, hidden_dropout_prob=0.0)
    model = shaken(FlaxBeitModel(config))
    pixels = np.repeat(models.images(1), 64, 0)
    output = model(
        pixels, train=True, dropout_rng=jax.random.key(0), output_hidden_states=True
    ).hidden_states
    moved = (current - previous for previous, current in itertools.pairwise(output))
    changed = [np.asarray(jnp.abs(change).max((1, 2)) > 1e-6) for change in moved]
    assert changed[0].all() and 0.05 < changed[1].mean() < 0.4  # one of two branches stays: 0.19
    scanned = FlaxBeitModel(config, _do_init=False, scan_layers=True)
    params = dict(model.params)
    params["encoder"] = {
        "layer": jax.tree.map(lambda *x: jnp.stack(x), *params["encoder"]["layer"].values())
    }
    again = scanned(pixels, params=params, train=True, dropout_rng=jax.random.key(0))
    first_pass = model(pixels, train=True, dropout_rng=jax.random.key(0))
    assert close(again[0], first_pass[0])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, SHARED, ABSOLUTE], ids=["own", "shared", "absolute"])
@pytest.mark.parametrize(
    "cls", [FlaxBeitModel, FlaxBeitForImageClassification, FlaxBeitForMaskedImageModeling]
)
def test_names_in_files_and_in_memory_load_and_are_saved_as_they_were(
    cls, changes, tmp_path, caplog
):
    pytest.importorskip("torch")
    caplog.set_level(logging.WARNING, "hfseq")
    model, theirs = compare_files(cls, models.beit_config(**changes), tmp_path)
    inside = theirs.state_dict()
    assert any(".q_proj." in name for name in inside)
    assert trees_equal(hfseq.convert_pytorch_state_dict_to_flax(inside, model), model.params)
    assert not caplog.records
