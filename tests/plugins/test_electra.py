"""ELECTRA: the battery for every class, narrow embeddings, default token types."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.electra.modeling import FlaxElectraForPreTraining
from tests.support.models import close, fewest_layers, ids
from tests.support.models import electra_config as config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("electra", "ForMaskedLM"))
def test_battery(head, checks):
    layers = fewest_layers("electra") if checks else {}
    check_architecture("electra", config(num_labels=2, **layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {"embedding_size": 32, "tie_word_embeddings": False}),
        ("ForMaskedLM", {"hidden_act": "relu"}),
        ("ForPreTraining", {"hidden_act": "relu"}),
        ("ForSequenceClassification", {"classifier_dropout": 0.3, "hidden_act": "relu"}),
        ("ForMultipleChoice", {"summary_activation": "tanh", "summary_last_dropout": 0.0}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("electra", config(num_labels=2, **changes), heads=[head])


def test_token_types_default_to_zeros():
    """Transformers 4 used ones, which differed from PyTorch by 2.3."""
    model = FlaxElectraForPreTraining(config(), seed=1)
    plain, zeros, ones = (
        jax.jit(model)(ids(), token_type_ids=types).logits
        for types in (None, np.zeros_like(ids()), np.ones_like(ids()))
    )
    assert close(plain, zeros) and not close(plain, ones)
    assert plain.shape == ids().shape
