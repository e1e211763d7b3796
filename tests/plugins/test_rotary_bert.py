"""NomicBERT, GTE and Jina embeddings v3: the battery, published configurations and files."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from tests.support import models
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
