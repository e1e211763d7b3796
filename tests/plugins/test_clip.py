"""CLIP: the battery for the full model and its halves, checkpoints, pooling, bad inputs."""

from __future__ import annotations

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.clip.modeling import (
    FlaxCLIPModel,
    FlaxCLIPTextModel,
    FlaxCLIPTextModelWithProjection,
    FlaxCLIPTextModule,
    FlaxCLIPTextPreTrainedModel,
    FlaxCLIPVisionModel,
)
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.tiers import CHECKS, first
from tests.support.torch_counterparts import tensors, torch_counterpart

HEADS = [
    ("clip_text_model", "Model"),
    ("clip_text_model", "WithProjection"),
    ("clip_vision_model", "Model"),
    ("clip", "Model"),
]
ONE = [("clip_text_model", "Model", CHECKS)]


@pytest.mark.parametrize(
    ("name", "head", "checks"), first([*ONE, *((*pair, None) for pair in HEADS)], *ONE)
)
def test_battery(name, head, checks):
    config = getattr(models, f"{name}_config")(**({"num_hidden_layers": 1} if checks else {}))
    check_architecture(name, config, heads=[head], checks=checks)


def test_battery_covers_every_registered_head():
    architectures = hfseq.plugins.load().architectures
    assert HEADS == [
        (name, head) for name in dict(HEADS) for head in architectures[name].target.heads
    ]


@pytest.mark.slow
def test_battery_with_the_old_end_and_dropout_and_another_activation():
    changes = {"attention_dropout": 0.1, "hidden_act": "gelu"}
    text = models.clip_text_model_config(eos_token_id=2, **changes)
    check_architecture("clip_text_model", text)
    check_architecture("clip", models.clip_config(eos_token_id=2, **changes))


@pytest.mark.slow
def test_battery_with_rectangular_images_and_other_channels():
    config = models.clip_vision_model_config(
        image_size=[12, 8], patch_size=[4, 2], num_channels=1, num_hidden_layers=1
    )
    # PyTorch supports only square position tables.
    check_architecture("clip_vision_model", config, torch=False)


@pytest.mark.slow
@pytest.mark.parametrize("end", [2, 5])
def test_a_text_is_pooled_at_its_first_end_as_in_pytorch(end, tmp_path):
    model = FlaxCLIPTextModel(models.clip_text_model_config(eos_token_id=end))
    tokens = np.array([[0, 9, 5, 23, 5, 1], [0, 23, 7, 23, 1, 1], [5, 2, 2, 8, 9, 5]], np.int32)
    output, theirs = model(tokens), torch_counterpart(model, tmp_path)(**tensors(input_ids=tokens))
    assert close(output.pooler_output, theirs.pooler_output.detach())
    end_positions = [3, 1, 4] if end == 2 else [2, 0, 0]
    assert np.array_equal(
        output.pooler_output, output.last_hidden_state[np.arange(3), end_positions]
    )


@pytest.mark.slow
def test_features_match_the_projections_before_normalization(tmp_path):
    model = FlaxCLIPModel(models.clip_config())
    tokens, pixels = models.ids(3) % 24, models.images(2)
    texts, pictures = model.get_text_features(tokens), model.get_image_features(pixels)
    assert texts.shape == (3, 24) and pictures.shape == (2, 24)
    output = model(tokens, pixels, output_hidden_states=True, output_attentions=True)
    assert output.logits_per_text.shape == (3, 2) and output.logits_per_image.shape == (2, 3)
    unit = np.asarray(texts) / np.linalg.norm(texts, axis=-1, keepdims=True)
    assert close(output.text_embeds, unit, 1e-6)
    theirs = torch_counterpart(model, tmp_path)
    torch_inputs = tensors(input_ids=tokens, pixel_values=pixels)
    assert close(output.logits_per_text, theirs(**torch_inputs).logits_per_text.detach())
    assert close(texts, theirs.get_text_features(torch_inputs["input_ids"]).pooler_output.detach())
    assert close(
        pictures, theirs.get_image_features(torch_inputs["pixel_values"]).pooler_output.detach()
    )
    # As in Transformers 4, the nested outputs are tuples if the output is one.
    assert len(output.text_model_output.hidden_states) == 3
    assert output.vision_model_output.attentions[0].shape == (2, 4, 10, 10)
    result = model(tokens, pixels, return_dict=False)
    assert isinstance(result[4], tuple) and close(result[4][0], output[4][0], 0)
    jitted = jax.jit(lambda params: model.get_image_features(pixels, params=params))
    assert close(jitted(model.params), pictures, 1e-6)


def test_logit_scale_is_initialized_from_the_config():
    params = FlaxCLIPModel(models.clip_config(num_hidden_layers=1)).params
    assert params["logit_scale"].shape == () and close(params["logit_scale"], 2.6592)


# -- checkpoints
# ------------------------------------------------------------------------------------


def rewritten(folder, change):
    """Renames the tensors of a file."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    renamed = {change(name): value for name, value in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})


@pytest.mark.parametrize("encoder", first(["text", "vision"], "text"))
def test_files_may_have_the_prefix_or_lack_it(encoder, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    cls = {"text": FlaxCLIPTextModel, "vision": FlaxCLIPVisionModel}[encoder]
    model = cls(getattr(models, f"clip_{encoder}_model_config")(num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    params_before = model.params
    rewritten(tmp_path, lambda name: name.removeprefix(f"{encoder}_model."))
    assert trees_equal(cls.from_pretrained(tmp_path).params, params_before)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "fresh"), [(FlaxCLIPTextModel, "text"), (FlaxCLIPVisionModel, "vision")]
)
def test_fresh_and_saved_again_models_of_pytorch_load(cls, fresh, tmp_path, caplog):
    torch = pytest.importorskip("torch")
    import transformers

    caplog.set_level(logging.WARNING, "hfseq")
    config = getattr(models, f"clip_{fresh}_model_config")()
    theirs = getattr(transformers, cls.__name__.removeprefix("Flax"))(config).eval()
    name = "input_ids" if fresh == "text" else "pixel_values"
    inputs = models.ids() % 24 if fresh == "text" else models.images()
    expected = theirs(**tensors(**{name: inputs})).last_hidden_state.detach()
    theirs.save_pretrained(tmp_path / "fresh")
    type(theirs).from_pretrained(tmp_path / "fresh").save_pretrained(tmp_path / "again")
    for folder in ("fresh", "again"):
        assert close(cls.from_pretrained(tmp_path / folder)(inputs)[0], expected)
    converted = hfseq.convert_pytorch_state_dict_to_flax(theirs.state_dict(), cls(config))
    assert close(cls(config)(inputs, params=converted)[0], expected)
    copied = hfseq.load_flax_weights_in_pytorch_model(type(theirs)(config), converted).state_dict()
    assert all(torch.equal(copied[name], value) for name, value in theirs.state_dict().items())
    assert not caplog.records


def test_towers_load_from_the_full_checkpoint(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    clip_model = FlaxCLIPModel(models.clip_config(num_hidden_layers=1))
    clip_model.save_pretrained(tmp_path)
    texts = FlaxCLIPTextModel.from_pretrained(tmp_path)
    assert trees_equal(texts.params, {"text_model": clip_model.params["text_model"]})
    pictures = FlaxCLIPVisionModel.from_pretrained(tmp_path)
    assert trees_equal(pictures.params, {"vision_model": clip_model.params["vision_model"]})
    projected = FlaxCLIPTextModelWithProjection.from_pretrained(tmp_path)
    assert trees_equal(projected.params["text_projection"], clip_model.params["text_projection"])
    assert texts.config.vocab_size == 24 and not caplog.records
    assert isinstance(hfseq.FlaxAutoModel.from_pretrained(tmp_path), FlaxCLIPModel)


@pytest.mark.parametrize(
    ("name", "config"),
    first([("text", "text"), ("t5", "t5"), ("projection", "text")], ("text", "text")),
)
def test_a_text_encoder_loads_as_maxdiffusion_loads_it(name, config, tmp_path):
    """From a subfolder, a PyTorch file, in bfloat16, with separate parameters."""
    cls = {
        "text": FlaxCLIPTextModel,
        "projection": FlaxCLIPTextModelWithProjection,
        "t5": hfseq.FlaxT5EncoderModel,
    }[name]
    tiny = models.t5_config() if config == "t5" else models.clip_text_model_config()
    saved_model = cls(tiny)
    saved_model.save_pretrained(tmp_path / "text_encoder")
    model, params = cls.from_pretrained(
        tmp_path, from_pt=True, subfolder="text_encoder", dtype=jnp.bfloat16, _do_init=False
    )
    assert isinstance(model, hfseq.FlaxPreTrainedModel) and isinstance(model, cls)
    assert isinstance(model, FlaxCLIPTextPreTrainedModel) == (config == "text")
    assert trees_equal(params, saved_model.params)
    tokens = jnp.asarray(models.ids() % 24)
    output = jax.jit(functools.partial(model, train=False))(tokens, params=params)
    assert output[0].dtype == jnp.bfloat16 and close(
        output[0], jax.jit(saved_model)(tokens)[0], 0.05
    )
    half = model.to_bf16(params)
    encode = jax.jit(lambda params, ids: model(ids, params=params)[0])
    assert encode(half, tokens).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="_do_init=False"):
        model.params  # noqa: B018


@pytest.mark.slow
def test_v4_modules_accept_v4_arguments():
    config = models.clip_text_model_config(num_hidden_layers=1)
    module = FlaxCLIPTextModule(config, dtype=jnp.float32)
    tokens = jnp.asarray(models.ids() % 24)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    variables = module.init(jax.random.PRNGKey(0), tokens, jnp.ones_like(tokens), positions)
    output = module.apply(variables, tokens, jnp.ones_like(tokens), positions)
    model = FlaxCLIPTextModel(config, _do_init=False)
    assert close(output[0], model(tokens, params=variables["params"])[0], 0)
    # deterministic, output_attentions, output_hidden_states, return_dict
    flags = (True, True, False, False)
    result = module.apply(variables, tokens, jnp.ones_like(tokens), positions, *flags)
    assert len(result) == 3 and close(result[0], output[0], 0)
    pictures = FlaxCLIPVisionModel(models.clip_vision_model_config(num_hidden_layers=1))
    pixels = models.images()
    expected = pictures(pixels).pooler_output
    last = pixels.transpose(0, 2, 3, 1)
    result = pictures.module.apply({"params": pictures.params}, last)
    assert close(result.pooler_output, expected, 0)
    result = pictures.module.apply({"params": pictures.params}, pixel_values=last)
    assert close(result.pooler_output, expected, 0)


def test_the_shapes_of_examples_are_those_of_version_4():
    options = {"_do_init": False}
    both = FlaxCLIPModel(models.clip_config(), **options)
    assert both.input_shape == ((1, 1), (1, 12, 12, 3))
    vision = FlaxCLIPVisionModel(models.clip_vision_model_config(), **options)
    assert vision.input_shape == (1, 12, 12, 3) and vision.main_input_name == "pixel_values"
    fresh = both.init_weights(jax.random.key(0), both.input_shape)
    assert trees.flatten(fresh).keys() == both.required_params
    model = FlaxCLIPTextModel(models.clip_text_model_config(), input_shape=(2, 7), **options)
    assert model.input_shape == (2, 7)


# -- bad input
# ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_model():
    return FlaxCLIPModel(models.clip_config(num_hidden_layers=1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 12, 12, 3), r"\(batch, 3, 12, 12\).*transpose\(0, 3, 1, 2"),
        ((2, 3, 16, 16), r"\(batch, 3, 12, 12\).*12 x 12"),
        ((2, 1, 12, 12), r"\(2, 1, 12, 12\).* 3 channels"),
        ((3, 12, 12), r"shape \(3, 12, 12\).*pixel_values\[None\]"),
    ],
)
def test_image_shape_error_names_the_expected_shape(clip_model, shape, message):
    tokens = models.ids() % 24
    with pytest.raises(UsageError, match=message):
        clip_model(tokens, np.zeros(shape, np.float32))
    with pytest.raises(UsageError, match=message):
        jax.eval_shape(clip_model.get_image_features, jnp.zeros(shape))


@pytest.mark.slow
def test_images_may_be_bytes_or_lists(clip_model):
    pixels = np.arange(2 * 3 * 144).reshape(2, 3, 12, 12) % 256
    expected = clip_model.get_image_features(pixels.astype(np.float32))
    assert close(clip_model.get_image_features(pixels.astype(np.uint8)), expected, 0)
    assert close(clip_model.get_image_features(pixels.tolist()), expected, 0)


def test_text_length_error_names_the_limit(clip_model):
    with pytest.raises(UsageError, match="25 tokens.*24 .max_position_embeddings=24"):
        clip_model.get_text_features(np.zeros((1, 25), np.int32))
    with pytest.raises(UsageError, match="input_ids.* 24.*vocabulary of 24"):
        clip_model(np.full((1, 3), 24), models.images(1))
    text = FlaxCLIPTextModel(models.clip_text_model_config(), _do_init=False)
    with pytest.raises(UsageError, match="25 tokens.*24"):
        text(np.zeros((1, 25), np.int32), params={})


def test_inspect_names_pytorchs_classes_of_a_part(tmp_path, capsys):
    from hfseq.cli import main

    model = FlaxCLIPTextModelWithProjection(models.clip_text_model_config(num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "AutoModel, CLIPTextModelWithProjection" in printed and "no problem found" in printed


def test_a_checkpoint_of_a_sibling_is_refused(tmp_path):
    model = FlaxCLIPVisionModel(models.clip_vision_model_config(num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="'clip_vision_model'.*FlaxCLIPTextModel.*'clip_tex"):
        FlaxCLIPTextModel.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="'clip_vision_model'.*FlaxCLIPModel.*'clip'"):
        FlaxCLIPModel.from_pretrained(tmp_path)


def test_absurd_sizes_in_a_part_of_a_configuration_are_refused(tmp_path, clip_model):
    clip_model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    for part, name, value, message in (
        ("text_config", "num_hidden_layers", 10**6, "text_config.num_hidden_layers"),
        ("text_config", "max_position_embeddings", 10**9, "1000000000.* 32 "),
        ("vision_config", "num_hidden_layers", 2000, "2000 layers"),
    ):
        changed = {**stored, part: {**stored[part], name: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            FlaxCLIPModel.from_pretrained(tmp_path)


def test_heads_of_a_part_are_not_cut(clip_model):
    from hfseq.nn.sharding import check_heads, make_mesh

    with pytest.raises(UsageError, match="4 attention heads"):
        check_heads(clip_model, make_mesh("tensor=8", jax.devices()[:8]))
