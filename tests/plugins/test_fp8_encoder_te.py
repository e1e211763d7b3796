"""Conversion of TransformerEngine's example weights, against a NumPy version of its model."""

from __future__ import annotations

import copy
import types

import jax
import numpy as np
import pytest

from hfseq.errors import WeightsError
from hfseq_plugins.fp8_encoder.modeling import (
    FlaxFp8EncoderForSequenceClassification,
    FlaxFp8EncoderModel,
)
from hfseq_plugins.fp8_encoder.transformer_engine import from_transformer_engine
from tests.support.models import close, fp8_encoder_config, ids

WIDTH, HEADS, WIDE, LENGTH, VOCABULARY = 32, 4, 48, 12, 64
OPTIONS = {
    "hidden_act": "gelu_pytorch_tanh",
    "positions": "none",
    "type_vocab_size": 0,
    "use_bias": False,
    "final_norm": False,
    "head": "te_flatten",
    "flatten_length": LENGTH,
    "num_labels": 2,
}


def draw(*shape, random=np.random.default_rng(0)):  # noqa: B008 - one stream for all weights
    return (random.normal(size=shape) * 0.3).astype(np.float32)


def norm():
    return {"scale": 1 + draw(WIDTH), "ln_bias": draw(WIDTH)}


def layer(activations=1):
    return {
        "attention": {
            "qkv": {**norm(), "kernel": draw(WIDTH, 3, WIDTH)},
            "out": {"kernel": draw(WIDTH, WIDTH)},
        },
        "mlp": {
            **norm(),
            "wi_kernel": draw(WIDTH, activations, WIDE),
            "wo_kernel": draw(WIDE, WIDTH),
        },
    }


def example(layers=1, activations=1):
    return {
        "Embed_0": {"embedding": draw(VOCABULARY, WIDTH)},
        **{f"TransformerLayer_{i}": layer(activations) for i in range(layers)},
        "DenseGeneral_0": {"kernel": draw(LENGTH * WIDTH, WIDTH)},
        "DenseGeneral_1": {"kernel": draw(WIDTH, WIDTH)},
        "Dense_0": {"kernel": draw(WIDTH, 2), "bias": draw(2)},
    }


# -- the reference model (spec, section 3.1): mask value 1 masks, scores are not scaled ------------


def layer_norm(x, weights):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * weights["scale"] + weights["ln_bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def self_attention(x, weights, hidden):
    fused = np.einsum("btd,dnf->btnf", layer_norm(x, weights["qkv"]), weights["qkv"]["kernel"])
    query, key, value = (
        fused[:, :, i].reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3) for i in range(3)
    )
    scores = np.where(hidden[:, None, None], -1e30, query @ key.swapaxes(-1, -2))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ weights["out"]["kernel"]


def feed_forward(x, weights):
    wide = np.einsum("btd,dnf->nbtf", layer_norm(x, weights), weights["wi_kernel"])
    wide = gelu(wide[0]) if len(wide) == 1 else gelu(wide[0]) * wide[1]
    return wide @ weights["wo_kernel"]


def states_of(params, tokens, mask, layers=1):
    x = params["Embed_0"]["embedding"][tokens].astype(np.float64)
    for number in range(layers):
        weights = params[f"TransformerLayer_{number}"]
        x = x + self_attention(x, weights["attention"], mask == 0)
        x = x + feed_forward(x, weights["mlp"])
    return x


def logits_of(params, tokens, mask, layers=1):
    # The vectors of padding are zeros here. The example uses the encoder's output instead.
    x = states_of(params, tokens, mask, layers) * mask[..., None]
    x = x.reshape(len(tokens), -1) @ params["DenseGeneral_0"]["kernel"]
    return (
        x @ params["DenseGeneral_1"]["kernel"] @ params["Dense_0"]["kernel"]
        + params["Dense_0"]["bias"]
    )


MASK = np.array([[1] * LENGTH, [1] * 7 + [0] * 5])


# -- conversion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "activations", "changes"),
    [
        (1, 1, {}),
        (2, 2, {"hidden_act": "geglu"}),
        (1, 1, {"positions": "learned", "type_vocab_size": 2, "use_bias": True}),
    ],
)
def test_weights_of_the_example_give_its_logits(layers, activations, changes):
    theirs = example(layers, activations)
    config = fp8_encoder_config(**{**OPTIONS, **changes}, num_hidden_layers=layers)
    params = from_transformer_engine(theirs, config)
    model = FlaxFp8EncoderForSequenceClassification(config, _do_init=False)
    tokens = ids(2, LENGTH)
    expected = logits_of(theirs, tokens, MASK, layers)
    assert close(jax.jit(model)(tokens, MASK, params=params).logits, expected)


def test_layers_that_end_in_a_norm_become_an_encoder_that_is_stored_as_stock(tmp_path):
    theirs = {"Embed_0": {"embedding": draw(VOCABULARY, WIDTH)}, "TransformerLayer_0": layer()}
    theirs["TransformerLayer_0"]["output_layernorm"] = norm()
    config = fp8_encoder_config(
        **{**OPTIONS, "head": "pooled", "final_norm": True}, num_hidden_layers=1
    )
    actual = from_transformer_engine(theirs, config)
    assert "pooler" not in actual and not config.twin_problems()
    model = FlaxFp8EncoderModel(config)
    model.params = {**model.params, **actual}
    expected = layer_norm(
        states_of(theirs, ids(2, LENGTH), MASK), theirs["TransformerLayer_0"]["output_layernorm"]
    )
    ours = np.asarray(model(ids(2, LENGTH), MASK).last_hidden_state)
    assert close(ours * MASK[..., None], expected * MASK[..., None])
    torch = pytest.importorskip("torch")
    from transformers import AutoModel

    model.save_pretrained(tmp_path)
    stock = AutoModel.from_pretrained(tmp_path).eval()
    states = stock(torch.tensor(ids(2, LENGTH)).long(), torch.tensor(MASK)).last_hidden_state
    assert close(states.detach().numpy() * MASK[..., None], expected * MASK[..., None])


def test_biases_and_boxed_values_are_converted():
    theirs, boxed = example(), None
    block = theirs["TransformerLayer_0"]
    block["attention"]["qkv"]["bias"] = draw(3, WIDTH)
    block["mlp"] |= {"wi_bias": draw(1, WIDE), "wo_bias": draw(WIDTH)}
    config = fp8_encoder_config(**{**OPTIONS, "use_bias": True}, num_hidden_layers=1)
    boxed = copy.deepcopy(theirs)
    qkv = boxed["TransformerLayer_0"]["attention"]["qkv"]
    qkv["kernel"] = types.SimpleNamespace(value=qkv["kernel"])
    layer = from_transformer_engine(boxed, config)["bert"]["encoder"]["layer"]["0"]
    attention = layer["attention"]["self"]
    bias = block["attention"]["qkv"]["bias"]
    assert close(attention["query"]["bias"], bias[0] * 8**0.5) and close(
        attention["value"]["bias"], bias[2]
    )
    assert close(attention["query"]["kernel"], qkv["kernel"].value[:, 0] * 8**0.5)
    assert close(layer["intermediate"]["dense"]["bias"], block["mlp"]["wi_bias"][0])
    assert not layer["attention"]["output"]["dense"]["bias"].any()


def test_all_mismatches_are_listed():
    theirs = example(layers=2, activations=2)
    del theirs["Dense_0"]["bias"], theirs["TransformerLayer_0"]["attention"]["out"]
    theirs["TransformerLayer_0"]["attention"]["qkv"]["bias"] = draw(3, WIDTH)
    config = fp8_encoder_config(**{**OPTIONS, "vocab_size": 65}, num_hidden_layers=1)
    with pytest.raises(WeightsError) as error:
        from_transformer_engine(theirs, config)
    for part in (
        "TransformerLayer_0/attention/out/kernel is missing",
        "TransformerLayer_1/mlp/wi_kernel is unexpected",
        "TransformerLayer_0/mlp/wi_kernel has the shape (32, 2, 48), expected (features, 1,",
        "attention/self/query/bias is not zero",
        "word_embeddings/embedding has the shape (64, 32), expected (65, 32)",
    ):
        assert part in str(error.value)


def test_missing_final_norm_is_reported():
    config = fp8_encoder_config(**{**OPTIONS, "final_norm": True}, num_hidden_layers=1)
    with pytest.raises(WeightsError, match="TransformerLayer_0/output_layernorm/scale is missing"):
        from_transformer_engine(example(), config)
