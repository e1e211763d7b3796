"""ViT: the battery for both classes, its options, PyTorch names in memory, bad inputs."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys

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
from tests.support.models import close, trees_equal
from tests.support.parity import compare_files
from tests.support.tiers import battery
from tests.test_without_torch import BLOCKER, ROOT


@pytest.mark.parametrize(("head", "checks"), battery("vit", "ForImageClassification"))
def test_battery(head, checks):
    config = models.vit_config(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture("vit", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_without_biases_with_another_pooler_dropout_and_no_square():
    config = models.vit_config(
        qkv_bias=False,
        pooler_act="relu",
        pooler_output_size=20,
        image_size=[12, 8],
        patch_size=[4, 2],
        num_channels=1,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        hidden_act="gelu_new",
    )
    check_architecture("vit", config)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [FlaxViTModel, FlaxViTForImageClassification])
def test_names_in_files_and_in_memory_load_and_are_saved_as_they_were(cls, tmp_path, caplog):
    pytest.importorskip("torch")
    caplog.set_level(logging.WARNING, "hfseq")
    config = models.vit_config()
    model, theirs = compare_files(cls, config, tmp_path)
    inside = theirs.state_dict()
    assert any(".q_proj." in name for name in inside)
    assert trees_equal(hfseq.convert_pytorch_state_dict_to_flax(inside, model), model.params)
    fresh = hfseq.load_flax_weights_in_pytorch_model(type(theirs)(config), model.params)
    assert all(np.array_equal(fresh.state_dict()[name], inside[name]) for name in inside)
    assert not caplog.records


def test_a_base_loads_from_its_head_and_the_pooler_is_new(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    head = FlaxViTForImageClassification(models.vit_config(num_hidden_layers=1))
    head.save_pretrained(tmp_path)
    base = FlaxViTModel.from_pretrained(tmp_path)
    assert trees_equal({n: base.params[n] for n in head.params["vit"]}, head.params["vit"])
    assert "pooler.dense.kernel" in caplog.text and "newly initialized" in caplog.text
    auto = hfseq.FlaxAutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(auto, FlaxViTForImageClassification)


def test_attention_and_hidden_states_are_those_of_all_positions():
    model = FlaxViTModel(models.vit_config(), dtype=jnp.bfloat16)
    options = {"output_attentions": True, "output_hidden_states": True}
    output = jax.jit(functools.partial(model, **options))(models.images())
    assert [weights.shape for weights in output.attentions] == [(2, 4, 10, 10)] * 2
    assert len(output.hidden_states) == 3 and output.last_hidden_state.dtype == jnp.bfloat16


@pytest.mark.slow
def test_tuple_output_contains_requested_fields():
    """In Transformers 4 the output had no hidden states and attentions."""
    head = FlaxViTForImageClassification(models.vit_config())
    flags = {"output_attentions": True, "output_hidden_states": True}
    output = head(models.images(), return_dict=False, **flags)
    assert [len(part) for part in output] == [2, 3, 2]


def test_the_module_of_version_4_takes_channels_last():
    config = models.vit_config(num_hidden_layers=1)
    module, pixels = FlaxViTModule(config), models.images()
    variables = module.init({"params": jax.random.PRNGKey(0)}, pixels.transpose(0, 2, 3, 1))
    output = module.apply(variables, pixels.transpose(0, 2, 3, 1), deterministic=True)
    model = FlaxViTModel(config, _do_init=False)
    assert close(output[0], model(pixels, params=variables["params"])[0], 0)
    assert close(module.apply(variables, pixels.transpose(0, 2, 3, 1), True)[0], output[0], 0)
    bare = FlaxViTModule(config, dtype=jnp.float32, add_pooling_layer=False)
    result = bare.apply({"params": variables["params"]}, pixels.transpose(0, 2, 3, 1))
    assert result.pooler_output is None and close(result[0], output[0], 0)
    with pytest.raises(UsageError, match=r"\(batch, 3, 12, 12\)"):
        module.apply(variables, pixels)


READ = """
import numpy as np
from PIL import Image
from transformers import {kind}ImageProcessor

noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
processor = {kind}ImageProcessor(size={size}, crop_size={{"height": 12, "width": 12}})
given = processor([noise, noise], return_tensors="np")
import hfseq
from tests.support import models

model = getattr(hfseq, "{model}")(models.{config}())
output = model(**given)
print(given["pixel_values"].shape, np.isfinite(output.pooler_output).all(), "torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor_name", "size", "model", "config"),
    [
        ("ViT", '{"height": 12, "width": 12}', "FlaxViTModel", "vit_config"),
        ("CLIP", '{"shortest_edge": 12}', "FlaxCLIPVisionModel", "clip_vision_model_config"),
    ],
)
def test_image_processors_work_without_torch(processor_name, size, model, config):
    pytest.importorskip("PIL")
    code = BLOCKER + READ.format(kind=processor_name, size=size, model=model, config=config)
    path = os.pathsep.join((str(ROOT), str(ROOT / "plugins")))
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.stdout.split("\n")[-2:] == ["(2, 3, 12, 12) True False", ""], result.stderr
