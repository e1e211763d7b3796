"""Checkpoints of the FP8 encoder: one directory for hfseq, PyTorch and the stock class."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

from hfseq import FlaxAutoModel, FlaxAutoModelForMaskedLM, FlaxAutoModelForSequenceClassification
from hfseq.checkpoints import config
from hfseq.errors import UsageError, WeightsError
from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig
from hfseq_plugins.fp8_encoder.modeling import (
    FlaxFp8EncoderForMaskedLM,
    FlaxFp8EncoderForSequenceClassification,
    FlaxFp8EncoderModel,
)
from hfseq_plugins.megatron_bert import modeling as megatron
from tests.support.models import close, fp8_encoder_config, ids, rewrite_tensors, trees_equal
from tests.support.tiers import first

TOKENS, MASK = ids(2, 7), np.array([[1] * 7, [1] * 4 + [0] * 3])
CLASSES = {
    FlaxFp8EncoderModel: (FlaxAutoModel, megatron.FlaxMegatronBertModel),
    FlaxFp8EncoderForMaskedLM: (FlaxAutoModelForMaskedLM, megatron.FlaxMegatronBertForMaskedLM),
    FlaxFp8EncoderForSequenceClassification: (
        FlaxAutoModelForSequenceClassification,
        megatron.FlaxMegatronBertForSequenceClassification,
    ),
}
BARE = {"positions": "none", "type_vocab_size": 0, "use_bias": False}
TWINS = [
    (FlaxFp8EncoderModel, {"hidden_act": "gelu_pytorch_tanh"}),
    (FlaxFp8EncoderModel, BARE),
    (FlaxFp8EncoderForMaskedLM, {}),
    (FlaxFp8EncoderForMaskedLM, {**BARE, "tie_word_embeddings": False}),
    (FlaxFp8EncoderForSequenceClassification, {"num_labels": 3, "layer_norm_eps": 1e-5}),
    (FlaxFp8EncoderForSequenceClassification, {**BARE, "type_vocab_size": 1}),
]


def random_model(cls=FlaxFp8EncoderForSequenceClassification, **changes):
    """Returns a model whose parameters are all random."""
    model = cls(fp8_encoder_config(num_hidden_layers=1, **changes))
    random = np.random.default_rng(0)
    model.params = jax.tree.map(
        lambda x: x + random.normal(size=x.shape).astype(np.float32) * 0.2, model.params
    )
    return model


def result(model, *args):
    return model(*args)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "changes"), TWINS)
def test_one_directory_for_everybody(cls, changes, tmp_path):
    model, (auto, stock) = random_model(cls, **changes), CLASSES[cls]
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "megatron-bert"
    assert stored["architectures"] == [stock.__name__.removeprefix("Flax")]
    assert stored["hfseq"]["model_type"] == "fp8_encoder"
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is cls and trees_equal(loaded.params, model.params)
    assert loaded.config.to_dict() == model.config.to_dict()
    assert close(result(stock.from_pretrained(tmp_path), TOKENS, MASK), result(model, TOKENS, MASK))


@pytest.mark.parametrize(("cls", "changes"), first(TWINS, TWINS[0], TWINS[3], TWINS[5]))
def test_pytorch_computes_the_same_and_saves_it_back(cls, changes, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    model = random_model(cls, **changes)
    model.save_pretrained(tmp_path)
    name = CLASSES[cls][0].__name__.removeprefix("Flax")
    theirs, loading_info = getattr(transformers, name).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == model.torch_class_name()
    assert not any(loading_info.values()), loading_info
    with torch.no_grad():
        inputs = (torch.tensor(value).long() for value in (TOKENS, MASK))
        expected = theirs.eval()(*inputs)[0].numpy()
    # the output at padding is unspecified
    output_mask = MASK[..., None] if expected.ndim == 3 else 1
    assert close(np.asarray(result(model, TOKENS, MASK)) * output_mask, expected * output_mask)
    theirs.save_pretrained(tmp_path / "again")
    again = CLASSES[cls][0].from_pretrained(tmp_path / "again")
    assert type(again) is cls
    assert trees_equal(again.params, jax.tree.map(np.asarray, model.params))


def test_auto_config_result_converts_to_native_configuration(tmp_path):
    from transformers import AutoConfig

    model = random_model(num_labels=3, **BARE)
    model.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.model_type == "megatron-bert" and read.type_vocab_size == 2
    native, model_options = config.native_config(read).to_dict(), model.config.to_dict()
    assert {**native, "_name_or_path": ""} == {**model_options, "_name_or_path": ""}


def test_options_can_be_changed_on_loading(tmp_path):
    random_model().save_pretrained(tmp_path)
    loaded = FlaxAutoModelForSequenceClassification.from_pretrained(
        tmp_path, hidden_dropout_prob=0.4
    )
    assert loaded.config.hidden_dropout_prob == 0.4
    assert type(loaded) is FlaxFp8EncoderForSequenceClassification


def test_other_families_reject_the_directory(tmp_path):
    from hfseq import FlaxBertModel

    random_model().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="type 'megatron-bert'.*FlaxBertModel.*'bert'"):
        FlaxBertModel.from_pretrained(tmp_path)


# -- options without a twin ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head": "te_flatten", "flatten_length": 8}, "head='te_flatten' uses all positions"),
        ({"hidden_act": "geglu"}, "gated_mlp=True .GEGLU. is not an option of MegatronBERT"),
        ({"final_norm": False}, "final_norm=False removes a norm"),
    ],
    ids=str,
)
def test_native_checkpoints_declare_their_type_and_load(changes, reason, tmp_path, messages):
    model = random_model(**changes)
    model.save_pretrained(tmp_path)
    assert re.search(rf"hfseq's own format.*PyTorch's AutoModel.*since {reason}", messages())
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "fp8_encoder"
    assert model.torch_class_name() == "Fp8EncoderForSequenceClassification"
    loaded = FlaxAutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert trees_equal(loaded.params, model.params)
    described = {**loaded.config.to_dict(), "_name_or_path": ""}
    assert described == {**model.config.to_dict(), "_name_or_path": ""}
    with pytest.raises(UsageError, match=f"no class of Transformers .*: {reason}"):
        model.config.twin()


def test_preset_of_the_reference_is_native_only():
    problems = Fp8EncoderConfig.preset("te", vocab_size=99).twin_problems()
    assert len(problems) == 2


# -- trained by PyTorch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tensor", "remedy"),
    [
        (
            {"use_bias": False},
            "bert.encoder.layer.0.attention.self.query.bias",
            {"use_bias": True},
        ),
        (
            {"positions": "none"},
            "bert.embeddings.position_embeddings.weight",
            {"positions": "learned"},
        ),
        (
            {"type_vocab_size": 0},
            "bert.embeddings.token_type_embeddings.weight",
            {"type_vocab_size": 2},
        ),
    ],
)
def test_values_that_options_rule_out_are_refused_with_the_remedy(
    changes, tensor, remedy, tmp_path
):
    random_model(**changes).save_pretrained(tmp_path)

    def train(tensors):
        tensors[tensor] = tensors[tensor] + np.float32(0.1)

    rewrite_tensors(tmp_path / "model.safetensors", train)
    ((option, value),) = remedy.items()
    auto = FlaxAutoModelForSequenceClassification
    with pytest.raises(
        WeightsError, match=rf"{re.escape(tensor)}: load it with {option}={value!r}"
    ):
        auto.from_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, **remedy)
    stock = megatron.FlaxMegatronBertForSequenceClassification.from_pretrained(tmp_path)
    assert close(jax.jit(loaded)(TOKENS, MASK).logits, stock(TOKENS, MASK).logits)
