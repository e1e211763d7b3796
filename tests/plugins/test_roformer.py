"""RoFormer: the battery for every class, rotary values, narrow embeddings."""

from __future__ import annotations

import jax
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.roformer.modeling import FlaxRoFormerForMultipleChoice
from tests.support.models import close, fewest_layers, ids
from tests.support.models import roformer_config as config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("roformer", "ForMaskedLM"))
def test_battery(head, checks):
    changes, skip = fewest_layers("roformer") if checks else {}, {}
    if head == "ForMultipleChoice":  # PyTorch gives a last token that is padding no gradient
        changes, skip = {"pad_token_id": None}, {"padding": "the last token is scored, real or not"}
    check_architecture(
        "roformer", config(num_labels=2, **changes), heads=[head], checks=checks, skip=skip
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {"rotary_value": True}),
        ("ForMaskedLM", {"embedding_size": 20}),  # version 4 cannot
        ("ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "relu"}),
        ("ForSequenceClassification", {"hidden_act": "relu", "classifier_dropout": 0.3}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("roformer", config(num_labels=2, **changes), heads=[head])


def test_a_choice_is_scored_by_its_last_token():
    model = FlaxRoFormerForMultipleChoice(config(), seed=1)
    tokens = ids(2, 12).reshape(2, 2, 6)
    changed = tokens.copy()
    changed[..., -1] = (changed[..., -1] + 1) % 64
    assert not close(jax.jit(model)(tokens).logits, jax.jit(model)(changed).logits, 1e-3)
