"""Conversion of parameters between a PyTorch model and a Flax model in memory."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.errors import WeightsError
from hfseq.nn import trees
from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM, FlaxBertModel
from tests.support.models import bert_config, close, ids

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def theirs():
    return transformers.BertForMaskedLM(bert_config()).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(ids()))[0].numpy()


def test_a_state_dict_is_converted_to_parameters(theirs):
    ours = FlaxBertForMaskedLM(bert_config(), _do_init=False)
    params = hfseq.convert_pytorch_state_dict_to_flax(theirs.state_dict(), ours)
    assert trees.flatten(params).keys() == ours.required_params
    assert close(jax.jit(ours)(ids(), params=params).logits, logits(theirs))


def test_parameters_are_loaded_into_a_model_with_tied_weights(theirs, caplog):
    ours = FlaxBertForMaskedLM(bert_config(), seed=3)
    other = transformers.BertForMaskedLM(bert_config()).eval()
    with caplog.at_level(logging.WARNING, "hfseq"):
        hfseq.load_flax_weights_in_pytorch_model(other, ours.params)
    assert not caplog.records
    assert close(jax.jit(ours)(ids()).logits, logits(other))


def test_parameters_with_a_head_fit_the_base_model_with_a_warning(caplog):
    ours = FlaxBertForMaskedLM(bert_config(), seed=4)
    base = transformers.BertModel(bert_config(), add_pooling_layer=False).eval()
    with caplog.at_level(logging.WARNING, "hfseq"):
        hfseq.load_flax_weights_in_pytorch_model(base, ours.params)
    assert "cls.predictions.bias" in caplog.text and "were not used" in caplog.text
    expected = FlaxBertModel(bert_config(), _do_init=False)
    params = {**ours.params["bert"], "pooler": {"dense": {"kernel": 0, "bias": 0}}}
    params["pooler"]["dense"] = {"kernel": jnp.zeros((32, 32)), "bias": jnp.zeros(32)}
    assert close(expected(ids(), params=params)[0], logits(base))


def test_half_precision_is_cast_to_the_dtype_of_the_model():
    ours = FlaxBertModel(bert_config(), seed=5)
    half = ours.to_bf16(ours.params)
    base = hfseq.load_flax_weights_in_pytorch_model(transformers.BertModel(bert_config()), half)
    assert base.embeddings.word_embeddings.weight.dtype == torch.float32
    table = half["embeddings"]["word_embeddings"]["embedding"]
    actual = base.embeddings.word_embeddings.weight.detach().numpy()
    assert np.array_equal(actual, np.asarray(table, np.float32))


def test_a_legacy_file_is_loaded_into_a_pytorch_model(tmp_path):
    ours = FlaxBertModel(bert_config(), seed=6)
    ours.save_pretrained(tmp_path, safe_serialization=False)
    base = transformers.BertModel(bert_config()).eval()
    hfseq.load_flax_checkpoint_in_pytorch_model(base, tmp_path / "flax_model.msgpack")
    assert close(ours(ids())[0], logits(base))


def test_a_missing_parameter_is_an_error(tmp_path, theirs):
    theirs.bert.save_pretrained(tmp_path)
    ours = FlaxBertForMaskedLM(bert_config(), _do_init=False)
    file = tmp_path / "model.safetensors"
    with pytest.raises(WeightsError, match="lacks.*cls/predictions/bias.*allow_missing_keys"):
        hfseq.load_pytorch_checkpoint_in_flax_state_dict(ours, file)
    params = hfseq.load_pytorch_checkpoint_in_flax_state_dict(ours, file, allow_missing_keys=True)
    assert "cls" not in params


@pytest.mark.parametrize("direction", ["to_flax", "to_torch"])
def test_tensors_of_another_shape_are_an_error(theirs, direction):
    ours = FlaxBertForMaskedLM(bert_config(vocab_size=48))
    with pytest.raises(WeightsError, match="word_embeddings"):
        if direction == "to_flax":
            hfseq.convert_pytorch_state_dict_to_flax(theirs.state_dict(), ours)
        else:
            hfseq.load_flax_weights_in_pytorch_model(theirs, ours.params)


def test_single_keys_are_renamed_by_the_parameter_tree():
    tree = trees.flatten(jax.tree.map(np.asarray, FlaxBertModel(bert_config()).params))
    rename = hfseq.rename_key_and_reshape_tensor
    tensor = np.zeros((3, 5))
    path = ("encoder", "layer", "0", "output", "dense")
    assert rename((*path, "weight"), tensor, tree, "bert")[1].shape == (5, 3)
    assert rename((*path, "weight"), tensor, tree, "bert")[0] == (*path, "kernel")
    norm = ("bert", "embeddings", "LayerNorm")
    assert rename((*norm, "gamma"), tensor[0], tree, "bert")[0] == (*norm, "scale")
    words = ("embeddings", "word_embeddings", "weight")
    assert rename(words, tensor, tree, "bert")[0] == (*words[:2], "embedding")
    assert rename(("foo", "bar"), tensor, tree, "bert")[0] == ("foo", "bar")


CLASSES = {
    "ResNetForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_labels": 3},
        (2, 3, 32, 32),
    ),
    "RegNetForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 4},
        (2, 3, 32, 32),
    ),
    "Wav2Vec2ForCTC": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}
        | {"intermediate_size": 32, "conv_dim": [16, 16], "conv_kernel": [3, 3]}
        | {"conv_stride": [2, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
        | {"num_conv_pos_embedding_groups": 2},
        (2, 400),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_batch_statistics_and_weight_norms_are_converted_in_memory(name, caplog):
    sizes, shape = CLASSES[name]
    config_class = getattr(transformers, name.partition("For")[0] + "Config")
    model_class, flax_class = getattr(transformers, name), getattr(hfseq, f"Flax{name}")
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def torch_logits(model):
        with torch.no_grad():
            return model.eval()(torch.tensor(inputs)).logits.numpy()

    torch.manual_seed(0)
    source = model_class(config_class(**sizes))
    for tensor in source.state_dict().values():
        if tensor.dtype.is_floating_point:
            tensor.add_(torch.rand_like(tensor) * 0.3)
    flax = flax_class(source.config)
    params = hfseq.convert_pytorch_state_dict_to_flax(source.state_dict(), flax)
    expected = torch_logits(source)
    assert close(jax.jit(flax)(inputs, params=params).logits, expected)
    target = model_class(source.config)
    with caplog.at_level(logging.WARNING, "hfseq"):
        hfseq.load_flax_weights_in_pytorch_model(target, params)
    assert not caplog.records
    assert close(torch_logits(target), expected)
