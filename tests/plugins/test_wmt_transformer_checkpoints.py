"""Checkpoints of the WMT Transformer: one directory for hfseq, PyTorch and stock classes."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

from hfseq import FlaxAutoModelForSeq2SeqLM
from hfseq.checkpoints import config
from hfseq.errors import UsageError, WeightsError
from hfseq_plugins.marian.modeling import FlaxMarianMTModel
from hfseq_plugins.pegasus.modeling import FlaxPegasusForConditionalGeneration
from hfseq_plugins.wmt_transformer.modeling import (
    FlaxWMTTransformerForConditionalGeneration,
    FlaxWMTTransformerModel,
)
from tests.support.models import close, ids, rewrite_tensors, trees_equal, wmt_transformer_config
from tests.support.parity import compare_tokens
from tests.support.tiers import first
from tests.support.torch_counterparts import torch_counterpart

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
STOCK = {"pegasus": FlaxPegasusForConditionalGeneration, "marian": FlaxMarianMTModel}
TOKENS, MASK = ids(2, 7), np.array([[1] * 7, [1] * 4 + [0] * 3])
TARGETS = ids(2, 5, 1)
TWINS = {
    "pre": {},
    "post without biases": {"norm": "post", "attention_bias": False},
    "learned, tables apart": {"positions": "learned", "share_embeddings": False},
    "own head": {"logits_via_embedding": False, "attention_bias": False},
    "nothing shared": {"share_embeddings": False, "logits_via_embedding": False},
    "post, tables apart": {"norm": "post", "share_embeddings": False},
    "post, own head": {"norm": "post", "logits_via_embedding": False},
    "post, nothing shared": {
        "norm": "post",
        "share_embeddings": False,
        "logits_via_embedding": False,
    },
}


def random_model(**changes):
    """Returns a model whose parameters are all random, except the bias of tied logits."""
    model = FlaxWMTTransformerForConditionalGeneration(wmt_transformer_config(**SHALLOW, **changes))
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + random.normal(size=x.shape).astype(np.float32) * 0.2, model.params
    )
    if model.config.logits_via_embedding:
        params["final_logits_bias"] = model.params["final_logits_bias"]
    model.params = params
    return model


@pytest.fixture(scope="module")
def plain():
    return random_model()


@pytest.mark.parametrize("name", first(TWINS, "post without biases"))
def test_one_directory_for_everybody(name, tmp_path):
    model = random_model(**TWINS[name])
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    variant = "marian" if model.config.norm == "post" else "pegasus"
    assert stored["model_type"] == variant and stored["architectures"] == [model.torch_class_name()]
    assert stored["hfseq"]["model_type"] == "wmt_transformer"
    expected = jax.jit(model)(TOKENS, MASK, TARGETS).logits
    loaded = FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is FlaxWMTTransformerForConditionalGeneration
    assert trees_equal(loaded.params, model.params)
    assert loaded.config.to_dict() == model.config.to_dict()
    assert trees_equal(type(loaded).from_pretrained(tmp_path).params, model.params)
    stock = STOCK[variant].from_pretrained(tmp_path)
    assert close(stock(TOKENS, MASK, TARGETS).logits, expected)


@pytest.mark.parametrize(
    "name",
    first(
        TWINS, "post without biases", "learned, tables apart", "own head", "post, nothing shared"
    ),
)
def test_pytorch_computes_the_same_and_saves_it_back(name, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    model = random_model(**TWINS[name])
    model.save_pretrained(tmp_path)
    theirs, loading_info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == model.torch_class_name()
    assert not any(loading_info.values()), loading_info
    with torch.no_grad():
        inputs = (torch.tensor(value).long() for value in (TOKENS, MASK, TARGETS))
        logits = theirs.eval()(*inputs).logits.numpy()
    assert close(jax.jit(model)(TOKENS, MASK, TARGETS).logits, logits)
    theirs.save_pretrained(tmp_path / "again")
    again = FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert trees_equal(again.params, jax.tree.map(np.asarray, model.params))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_greedy_and_beam_search_equal_pytorch(norm, tmp_path):
    model = random_model(norm=norm)
    theirs = torch_counterpart(model, tmp_path)
    for beams in (1, 3):
        compare_tokens(model, theirs, TOKENS, MASK, max_new_tokens=6, num_beams=beams)


def test_model_without_a_head_is_stored_as_one(tmp_path):
    model = FlaxWMTTransformerModel(
        wmt_transformer_config(**SHALLOW, attention_bias=False, share_embeddings=False)
    )
    model.save_pretrained(tmp_path)
    assert model.torch_class_name() == "PegasusModel"
    assert trees_equal(FlaxWMTTransformerModel.from_pretrained(tmp_path).params, model.params)
    torch = pytest.importorskip("torch")
    from transformers import AutoModel

    theirs, loading_info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    inputs = (torch.tensor(value).long() for value in (TOKENS, MASK, TARGETS))
    states = theirs.eval()(*inputs).last_hidden_state.detach().numpy()
    assert close(model(TOKENS, MASK, TARGETS).last_hidden_state, states)


# -- configurations --------------------------------------------------------------------------------


def test_auto_config_result_converts_to_native_configuration(plain, tmp_path):
    from transformers import AutoConfig

    plain.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.model_type == "pegasus"
    native, model_options = config.native_config(read).to_dict(), plain.config.to_dict()
    assert native.pop("_name_or_path", None) == str(tmp_path)
    model_options.pop("_name_or_path", None)
    assert native == model_options
    assert config.native_config(plain.config) is plain.config


def test_options_can_be_changed_on_loading(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    loaded = FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path, dropout=0.4)
    assert loaded.config.dropout == 0.4 and loaded.config.norm == "pre"


def test_other_families_reject_the_directory(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="type 'pegasus'.*FlaxMarianMTModel.*'marian'"):
        FlaxMarianMTModel.from_pretrained(tmp_path)


# -- options without a twin ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"attention": "differential"}, {"qkv_dim": 64}, {"norm": "post", "positions": "learned"}],
    ids=str,
)
def test_native_checkpoints_declare_their_type_and_load(changes, tmp_path, messages):
    model = random_model(**changes)
    model.save_pretrained(tmp_path)
    assert re.search(r"hfseq's own format.*PyTorch's AutoModel.*since ", messages())
    assert model.config.twin_problems()[0] in messages()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "wmt_transformer"
    assert model.torch_class_name() == "WMTTransformerForConditionalGeneration"
    loaded = FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert trees_equal(loaded.params, model.params)
    described = {**loaded.config.to_dict(), "_name_or_path": ""}
    assert described == model.config.to_dict()


# -- trained by PyTorch ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tensor", "remedy"),
    [
        pytest.param(
            {"attention_bias": False},
            "model.decoder.layers.0.encoder_attn.q_proj.bias",
            {"attention_bias": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"logits_via_embedding": False},
            "model.encoder.embed_tokens.weight",
            {"share_embeddings": False},
            marks=pytest.mark.slow,
        ),
        (
            {"share_embeddings": False},
            "lm_head.weight",
            {"logits_via_embedding": False},
        ),
        ({}, "model.encoder.embed_positions.weight", {"positions": "learned"}),
    ],
)
def test_values_that_options_rule_out_are_refused_with_the_remedy(
    changes, tensor, remedy, tmp_path
):
    model = random_model(**changes)
    model.save_pretrained(tmp_path)

    def train(tensors):
        tensors[tensor] = tensors[tensor] + np.float32(0.1)

    rewrite_tensors(tmp_path / "model.safetensors", train)
    ((option, value),) = remedy.items()
    with pytest.raises(
        WeightsError, match=rf"{re.escape(tensor)}: load it with {option}={value!r}"
    ):
        FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    loaded = FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path, **remedy)
    stock = FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path)
    assert close(jax.jit(loaded)(TOKENS, MASK, TARGETS).logits, stock(TOKENS, MASK, TARGETS).logits)


# -- tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_saved_tokenizer_is_unchanged(norm, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    names = ("<pad>", "<s>", "</s>", "<unk>")
    words = {token: number for number, token in enumerate((*names, "ein", "Haus"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    roles = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), names, strict=True))
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    saved.save_pretrained(tmp_path)
    wmt_transformer_config(norm=norm).twin().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(saved) and loaded("ein Haus").input_ids == [4, 5, 2]


@pytest.mark.slow
def test_half_precision_twins_have_one_type(plain, tmp_path):
    from safetensors.numpy import load_file

    model = random_model(attention_bias=False)
    model.save_pretrained(tmp_path, params=model.to_fp16(model.params))
    assert {str(t.dtype) for t in load_file(tmp_path / "model.safetensors").values()} == {"float16"}
    FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path)
