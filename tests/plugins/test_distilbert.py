"""DistilBERT: the battery for every class, computed and stored positions."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.distilbert.modeling import FlaxDistilBertModel, sinusoids
from tests.support.models import close, fewest_layers, ids, rewrite_tensors
from tests.support.models import distilbert_config as config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("distilbert", "ForMaskedLM"))
def test_battery(head, checks):
    layers = fewest_layers("distilbert") if checks else {}
    check_architecture("distilbert", config(num_labels=2, **layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {"sinusoidal_pos_embds": True}),
        ("ForMaskedLM", {"tie_word_embeddings": False, "activation": "relu"}),
        ("ForSequenceClassification", {"seq_classif_dropout": 0.3, "attention_dropout": 0.2}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("distilbert", config(num_labels=2, **changes), heads=[head])


def test_stored_non_sinusoidal_table_is_kept(tmp_path):
    """Transformers 4 computed sinusoids instead."""
    model_config = config(sinusoidal_pos_embds=True)
    FlaxDistilBertModel(model_config, seed=1).save_pretrained(tmp_path)
    plain = FlaxDistilBertModel.from_pretrained(tmp_path)
    assert "position_embeddings" not in plain.params["embeddings"]
    name = "embeddings.position_embeddings.weight"

    def train(tensors):
        assert np.allclose(tensors[name], sinusoids(40, 32), atol=1e-6)
        tensors[name] = tensors[name] * np.float32(0.5)

    rewrite_tensors(tmp_path / "model.safetensors", train)
    model = FlaxDistilBertModel.from_pretrained(tmp_path)
    table = np.asarray(model.params["embeddings"]["position_embeddings"]["embedding"])
    assert np.allclose(table, sinusoids(40, 32) * 0.5, atol=1e-6)
    assert not close(model(ids()).last_hidden_state, plain(ids()).last_hidden_state)
    again = tmp_path / "again"
    model.save_pretrained(again)
    assert close(
        FlaxDistilBertModel.from_pretrained(again)(ids()).last_hidden_state,
        model(ids()).last_hidden_state,
    )
