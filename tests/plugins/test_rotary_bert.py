"""NomicBERT, GTE and Jina embeddings v3: the battery, published configurations and files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import GteConfig, NomicBertConfig

import hfseq
from hfseq.errors import UsageError
from hfseq.nn.positions import Rotary
from hfseq.testing import check_architecture
from tests.support import models
from tests.support.models import close, ids, rewrite_tensors, trees_equal
from tests.support.tiers import batteries

FAMILIES = ("nomic_bert", "gte", "jina_embeddings_v3")


def config_of(name, **changes):
    return getattr(models, f"{name}_config")(**changes)


@pytest.mark.parametrize(
    ("name", "head", "checks"), batteries(dict.fromkeys(FAMILIES, "ForMaskedLM"))
)
def test_battery(name, head, checks):
    config = config_of(name, num_labels=2, num_hidden_layers=1 if checks else 2)
    check_architecture(name, config, heads=[head], checks=checks)


YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 20,
    }
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "changes"),
    [
        ("nomic_bert", "ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "gelu"}),
        ("nomic_bert", "Model", {"head_dim": 6, "attention_probs_dropout_prob": 0.1}),
        ("nomic_bert", "ForSequenceClassification", {"classifier_dropout": 0.3}),
        ("gte", "ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "relu"}),
        ("gte", "Model", {"type_vocab_size": 0, **YARN}),
        ("gte", "ForTokenClassification", {"classifier_dropout": 0.3}),
        ("jina_embeddings_v3", "ForMaskedLM", {"tie_word_embeddings": False}),
        ("jina_embeddings_v3", "Model", {"hidden_act": "relu", **YARN}),
    ],
    ids=str,
)
def test_battery_of_an_option(name, head, changes):
    check_architecture(name, config_of(name, **changes), heads=[head])


#: Options of nomic-embed-text-v1.5 before Transformers had the model, in other sizes.
OLD = {
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 40,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 500,
    "rotary_emb_fraction": 1.0,
    "activation_function": "swiglu",
    "prenorm": False,
    "vocab_size": 64,
}


def test_old_names_of_options_are_read(tmp_path):
    config = NomicBertConfig(**OLD)
    model = hfseq.FlaxNomicBertModel(config, seed=1)
    assert config.hidden_size == 768  # Transformers ignores the names
    saved = hfseq.FlaxNomicBertModel(
        NomicBertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=48,
            layer_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    )
    assert close(model(ids())[0], saved(ids(), params=model.params)[0], 0)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 32


@pytest.mark.parametrize(
    "changes",
    [{"moe_every_n_layers": 2}, {"prenorm": True}, {"rotary_emb_fraction": 0.5}],
    ids=str,
)
def test_other_architectures_with_old_names_are_refused(changes):
    (name,) = changes
    with pytest.raises(UsageError, match=f"{name}={changes[name]}"):
        hfseq.FlaxNomicBertModel(NomicBertConfig(**OLD | changes), _do_init=False)
    with pytest.raises(UsageError, match="activation_function='gelu'"):
        hfseq.FlaxNomicBertModel(
            NomicBertConfig(**OLD | {"activation_function": "gelu"}), _do_init=False
        )


#: Options of gte-multilingual-base before Transformers had the model.
NEW = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "rope_theta": 20000,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
    "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"},
}


@pytest.fixture
def published_gte(tmp_path):
    """Returns a model, and a directory with the files that were published for it."""
    model = hfseq.FlaxGteForMaskedLM(config_of("gte", num_hidden_layers=1), seed=1)
    model.save_pretrained(tmp_path)

    def rename(tensors):
        for name in [*tensors]:
            tensors[name.replace("gte.", "new.")] = tensors.pop(name)

    rewrite_tensors(tmp_path / "model.safetensors", rename)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    path.write_text(json.dumps(config | NEW))
    return model, tmp_path


@pytest.mark.filterwarnings("ignore:.*rope.*")
def test_first_files_of_gte_are_read_and_saved_for_transformers(published_gte, tmp_path):
    model, folder = published_gte
    loaded = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder)
    assert trees_equal(loaded.params, model.params)
    assert type(loaded.config) is GteConfig
    frequencies = (8 * 20000.0) ** -(np.arange(4) / 4) / 8 ** (2 / 8)
    assert close(Rotary(loaded.config, 8).frequencies, frequencies, 1e-6)
    loaded.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["model_type"] == "gte" and saved["architectures"] == ["GteForMaskedLM"]
    assert close(hfseq.FlaxGteModel.from_pretrained(folder)(ids())[0], loaded.nnx().gte(ids())[0])


def test_first_configurations_with_other_options_are_refused():
    for name, value in (("logn_attention_scale", True), ("layer_norm_type", "rms_norm")):
        config = models.new_config(**{name: value})
        with pytest.raises(UsageError, match=f"{name}={value!r}"):
            hfseq.FlaxGteModel(config, _do_init=False)


def test_rotary_xlm_roberta_is_refused():
    """The original repository of Jina embeddings v3 has this configuration."""
    config = models.xlm_roberta_config(position_embedding_type="rotary")
    with pytest.raises(UsageError, match="'rotary'.*jina-embeddings-v3-hf"):
        hfseq.FlaxXLMRobertaModel(config, _do_init=False)
