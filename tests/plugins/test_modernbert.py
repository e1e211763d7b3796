"""ModernBERT: the battery for every head and option, and symmetric windows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import FlaxModernBertForMaskedLM
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from tests.support.models import close, fewest_layers, ids
from tests.support.models import modernbert_config as config
from tests.support.tiers import battery

BIASES = {
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "tie_word_embeddings": False,
}
DROPOUT = {
    "attention_dropout": 0.1,
    "mlp_dropout": 0.1,
    "embedding_dropout": 0.1,
    "classifier_dropout": 0.1,
}


@pytest.mark.parametrize(("head", "checks"), battery("modernbert", "ForMaskedLM"))
def test_battery(head, checks):
    layers = fewest_layers("modernbert") if checks else {}
    check_architecture("modernbert", config(num_labels=2, **layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", BIASES),
        ("ForMaskedLM", {"decoder_bias": False, "hidden_activation": "relu"}),
        (
            "ForMaskedLM",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
                }
            },
        ),
        ("ForSequenceClassification", {**DROPOUT, "classifier_pooling": "mean"}),
        ("ForMultipleChoice", {"classifier_pooling": "mean"}),
        ("ForTokenClassification", DROPOUT),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("modernbert", config(num_labels=2, **changes), heads=[head])


def test_a_window_is_half_of_it_to_each_side():
    model = FlaxModernBertForMaskedLM(config(), seed=1)
    attentions = model(ids(1, 12), output_attentions=True).attentions
    distance = np.abs(np.arange(12)[:, None] - np.arange(12))
    for number, weights in enumerate(attentions):
        side = 3 if number % 2 else 99
        assert ((np.asarray(weights[0, 0]) > 0) == (distance <= side)).all()


def test_a_document_of_a_packed_row_is_itself():
    model = FlaxModernBertForMaskedLM(config(**fewest_layers("modernbert")), seed=1)
    logits = jax.jit(lambda ids, **options: model(ids, **options).logits)
    tokens = ids(1, 12)
    packed = logits(tokens, segment_ids=np.array([[1] * 5 + [2] * 7]))
    assert close(packed[:, 5:], logits(tokens[:, 5:]))


def test_unsupported_layer_types_are_rejected():
    with pytest.raises(UsageError, match="'full_attention' or 'sliding_attention' .*layers"):
        FlaxModernBertForMaskedLM(
            config(layer_types=["full_attention"] * 4 + ["linear_attention"]), seed=1
        )
